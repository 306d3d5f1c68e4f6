"""TLS over a stream, as many records at a time as there are: one at a time costs more than the ciphers do."""

from __future__ import annotations

import ssl
from contextlib import suppress

import trio

_CHUNK = 128 << 10
_RECORD = 16 << 10  # the most that one read returns; room for more is made and given back for each
_CLOSE_SECONDS = 2.0  # for the last record


class TlsStream(trio.abc.Stream):
    """One end of TLS. As in HTTPS an end without its last record is an end; what the other side breaks is broken."""

    def __init__(
        self,
        transport: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        server_side: bool = False,
    ) -> None:
        self._transport = transport
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side, server_hostname=server_hostname)
        self._sending = trio.Lock()  # records leave in the order in which they were made

    async def do_handshake(self) -> None:
        """Raises ``trio.BrokenResourceError``, with the reason as its cause."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed()
            except (ssl.SSLError, ssl.CertificateError) as error:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()  # says why
                raise trio.BrokenResourceError from error
            else:
                await self._flush()
                return

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive whatever has come; empty at its end."""
        pieces: list[bytes] = []
        while True:
            try:
                if not (piece := self._tls.read(_RECORD)):
                    break  # the last record
                pieces.append(piece)
            except ssl.SSLWantReadError:
                if pieces:
                    break
                await self._feed()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
        if self._out.pending:
            await self._flush()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self._tls.write(data)
            await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Send the last record, if the other side takes it, and close both directions."""
        try:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            with trio.move_on_after(_CLOSE_SECONDS), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._flush()
        finally:
            await self._transport.aclose()

    async def _feed(self) -> None:
        if data := await self._transport.receive_some(_CHUNK):
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            while self._out.pending:
                await self._transport.send_all(self._out.read())
