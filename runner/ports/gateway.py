"""The model gateway port: a model behind a relayed connection, under a grant, with its bill.

The agent's CLI talks to a port of its workspace's own loopback; ``ModelSession.serve`` serves each connection there.
The provider's key stays on this side. Order of calls: ``check`` before anything is provisioned; ``open`` around the
agent's command; ``serve`` for each connection, any number at once; ``usage`` and ``failure`` at any time, final when
the block of ``open`` has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from runner.core.model import Budget, ModelRefusal, Outcome, Usage
from runner.ports.provider import Connection


class Api(StrEnum):
    """The protocol that a CLI speaks. ``OPENAI`` has two forms, Responses and Chat Completions.

    The base URL at a port of a workspace is ``http://127.0.0.1:PORT`` and ``base_path``.
    """

    ANTHROPIC = "anthropic"
    OPENAI = "openai"
    GEMINI = "gemini"

    @property
    def base_path(self) -> str:
        """The path at the end of its base URL."""
        return "/v1" if self is Api.OPENAI else ""


class ModelGrant(Struct, frozen=True):
    """The models and the budget of one agent. ``models`` are names as in manifests; see ``model_matches``."""

    api: Api
    models: tuple[str, ...]
    budget: Budget = Budget()


class ModelRequest(Struct, frozen=True, kw_only=True):
    """One request and its answer, without their contents; each retry is one of its own.

    ``call`` is the API's name of the call, or the path when it has none; ``model`` is empty where none was named.
    ``status`` is the CLI's, 0 when it had hung up; of a request that is retried the provider's, 0 when that was not
    reached. Times are seconds from the request's first byte. ``usage`` is taken from the provider's own fields, and
    ``estimated`` when the answer was cut off before them. ``retry_seconds`` is the pause before the retry, and
    ``retry_reason`` the fault of the answer.
    """

    call: str
    model: str
    status: int
    sent_bytes: int
    received_bytes: int
    first_byte_seconds: float | None
    seconds: float
    usage: Usage
    estimated: bool = False
    refusal: ModelRefusal | None = None
    retry_seconds: float | None = None
    retry_reason: str = ""


class ModelSession(Protocol):
    """A grant in use."""

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; a handler for ``Workspace.listen``.

        Raises only what the connection raises (``trio.BrokenResourceError``, ``WorkspaceLost``). Cancelling ends the
        connection and the request to the provider, and records what was used.
        """

    @property
    def usage(self) -> Usage:
        """The usage of all models together, by requests that have ended."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about a session that has ended, such as unused turns of a rehearsal."""

    @property
    def failure(self) -> Outcome | None:
        """The outcome of a step whose agent cannot have succeeded, as far as the gateway knows; else ``None``.

        From the first request that the budget refused, its reason is ``TURNS`` or ``BUDGET``; else, while the latest
        request for an answer has failed, ``AUTH``, ``QUOTA``, ``MODEL`` (not granted, or unknown to the provider),
        ``PLATFORM`` (the provider cannot be reached from here), ``CUT_OFF`` (its answer was stopped) or ``GATEWAY``.
        A refused model counts only when no request has succeeded; a request without tools, which is a helper's, only
        before the first one with tools.
        """

    @property
    def waiting_for(self) -> str:
        """A description of what the agent's latest request, ended here, was waiting for; empty if for nothing."""

    @property
    def silent_seconds(self) -> float:
        """The longest time for which an answer under way has sent nothing; 0 when none is under way."""


class Gateway(Protocol):
    """Opens sessions with models. ``rehearsal`` names the file of scripted turns that replaces them, if any."""

    rehearsal: str | None

    def check(self, grant: ModelGrant) -> None:
        """Check that a session can be opened. Raises ``KeyMissing`` and ``Unpriced``, whose hints say what to do."""

    def open(
        self, grant: ModelGrant, on_request: Callable[[ModelRequest], None]
    ) -> AbstractAsyncContextManager[ModelSession]:
        """Serve a grant for the length of the block; requests still under way at its end are ended and recorded.

        ``on_request`` is called for every request when it has ended, synchronously, but for no more than a thousand
        that took no tokens; it must not raise. Raises what ``check`` raises.
        """
