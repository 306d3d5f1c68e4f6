"""Read the name that a TLS client asks for from its first message: RFC 8446 section 4.1.2, RFC 6066 section 3."""

from __future__ import annotations

MOST = 64 << 10  # bytes of a first message
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME = 22, 1, 0


class Incomplete(Exception):
    """More bytes are needed. Never leaves the proxy."""


def server_name(data: bytes) -> str | None:
    """Return the name in a ClientHello; ``None`` for a client that asks for none, or does not speak TLS.

    Raises ``Incomplete``, and ``ValueError`` for what begins like TLS and is not.
    """
    if data[:1] != bytes([_HANDSHAKE]):
        return None
    hello = _Bytes(_first_message(data))
    hello.take(2 + 32)  # version, random
    hello.take(hello.number(1))  # session
    hello.take(hello.number(2))  # ciphers
    hello.take(hello.number(1))  # compression
    if not hello.left:
        return None
    extensions = _Bytes(hello.take(hello.number(2)))
    while extensions.left:
        kind, body = extensions.number(2), _Bytes(extensions.take(extensions.number(2)))
        if kind == _SERVER_NAME:
            names = _Bytes(body.take(body.number(2)))
            if names.number(1) != 0:
                raise ValueError("a name that is no host")
            return names.take(names.number(2)).decode("ascii")
    return None


def _first_message(data: bytes) -> bytes:
    """Join the records of the first message, which may be cut anywhere."""
    message, at = b"", 0
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4]):
        record = data[at : at + 5]
        if len(record) < 5:
            raise Incomplete
        if record[0] != _HANDSHAKE or record[1] != 3:
            raise ValueError("not a record of a handshake")
        length = int.from_bytes(record[3:5])
        if len(data) < at + 5 + length:
            raise Incomplete
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
    if message[0] != _CLIENT_HELLO:
        raise ValueError("not the message of a client")
    return message[4 : 4 + int.from_bytes(message[1:4])]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError("it ends too early")
        self._at += count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))
