"""Connections to a cluster with its credential: sent with each request, renewed when it expires, removed from each
answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Protocol

from runner.cluster.credential_plugin import Credential
from runner.core.redact import SHORTEST, forms_of
from runner.network.http import Headers
from runner.network.upstream import Upstream, UpstreamResponse

_PREFIX = 4  # bytes of a form that are looked for before it is compared


class CredentialSource(Protocol):
    """Returns the credential, and another one when the cluster has ``refused`` it, if there is one."""

    async def __call__(self, refused: Credential | None = None) -> Credential: ...


class AuthorizedUpstream:
    """An ``Upstream`` for the length of its block. ``open_with`` opens one with a client certificate, or without.

    A request that is refused (401) is sent once more when there is another credential by then.
    """

    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        ask: CredentialSource,
        open_with: Callable[[tuple[bytes, bytes] | None], AbstractAsyncContextManager[Upstream]],
    ) -> None:
        self._ask = ask
        self._open_with = open_with
        self._stack = AsyncExitStack()
        self._opened: tuple[tuple[bytes, bytes] | None, Upstream] | None = None
        self._hiding: tuple[bytes, frozenset[bytes]] = (b"", frozenset())

    async def __aenter__(self) -> AuthorizedUpstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ready(self) -> None:
        """Get the credential. Raises its errors."""
        await self._ask()

    @asynccontextmanager
    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        """See ``Upstream``; also raises the errors of the credential."""
        credential = await self._ask()
        for last in (False, True):
            own = [(b"authorization", credential.authorization)] if credential.authorization else []
            upstream = await self._upstream(credential.certificate)
            async with upstream.send(method, target, [*headers, *own], body) as answer:
                if answer.status == 401 and not last and (other := await self._ask(credential)) != credential:
                    credential = other
                    continue
                hiding = SecretFilter(self._forms(credential))
                hidden = [(name, hiding.within(value)) for name, value in answer.headers]
                async with aclosing(_filtered(answer.body, hiding)) as pieces:
                    yield UpstreamResponse(answer.status, hidden, pieces, answer.upgraded)
                return

    async def _upstream(self, certificate: tuple[bytes, bytes] | None) -> Upstream:
        """Return the upstream for a certificate; those for earlier ones stay open for what is under way there."""
        if self._opened is None or self._opened[0] != certificate:
            self._opened = certificate, await self._stack.enter_async_context(self._open_with(certificate))
        return self._opened[1]

    def _forms(self, credential: Credential) -> frozenset[bytes]:
        word = credential.authorization.partition(b" ")[2]
        if self._hiding[0] != word:
            self._hiding = word, forms_of(word) if len(word) >= SHORTEST else frozenset()
        return self._hiding[1]


async def _filtered(body: AsyncIterator[bytes], hiding: SecretFilter) -> AsyncGenerator[bytes]:
    async for chunk in body:
        if text := hiding.feed(chunk):
            yield text
    if hiding.held:
        yield hiding.held


class SecretFilter:
    """Removes secrets from a stream of bytes. ``held`` is what may be the beginning of one.

    It looks for the secrets as they are, among them in base64 and other forms, and not across white space: that would
    delay the end of many a line until the next one.
    """

    def __init__(self, words: frozenset[bytes]) -> None:
        self._words = sorted(words, key=len, reverse=True)
        self._longest = len(self._words[0]) if self._words else 0
        self.held = b""

    def within(self, text: bytes) -> bytes:
        for word in self._words:
            text = text.replace(word, b"[redacted]")
        return text

    def feed(self, chunk: bytes) -> bytes:
        text = self.within(self.held + chunk)
        at = self._begun(text)
        self.held = text[at:]
        return text[:at]

    def _begun(self, text: bytes) -> int:
        """Return the position of a secret that begins in the text and is cut off by its end; else the text's length."""
        first = len(text)
        for word in self._words:
            at = max(len(text) - len(word) + 1, 0)
            short = max(len(text) - _PREFIX, at)
            while (at := text.find(word[:_PREFIX], at, first + _PREFIX - 1)) >= 0 and at < first:
                if word.startswith(text[at:]):
                    first = at
                at += 1
            first = min([first, *(place for place in range(short, len(text)) if word.startswith(text[place:]))])
        return first
