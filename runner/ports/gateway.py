"""What a model gateway owes the agent step: a model behind a relayed connection, under a grant, with its bill.

The agent's CLI talks to a port of its workspace's own loopback; each connection there is given to ``Session.serve``.
The key of the model's provider stays on this side. Order of calls: ``check`` before anything is provisioned; ``open``
around the agent's command; ``serve`` for each connection, any number at once; ``usage`` and ``verdict`` at any time,
final when the block of ``open`` has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from runner.core.model import Budget, Outcome, Usage
from runner.ports.provider import Connection


class Api(StrEnum):
    """Whose protocol the CLI speaks. ``OPENAI`` is both of its forms, Responses and Chat Completions.

    The base URL at a port of a workspace is ``http://127.0.0.1:PORT`` and ``below``.
    """

    ANTHROPIC = "anthropic"
    OPENAI = "openai"
    GEMINI = "gemini"

    @property
    def below(self) -> str:
        """The path that its base URL ends with."""
        return "/v1" if self is Api.OPENAI else ""


class Refusal(StrEnum):
    """Why a request was answered here and not by the provider."""

    PATH = "path"  # no such call in this API, or none that is let through
    REQUEST = "request"  # malformed, too large, or asking for what would reach the network from the provider's side
    MODEL = "model"
    BUDGET = "budget"
    GATEWAY = "gateway"  # the provider could not be reached, or did not go on


@dataclass(frozen=True)
class Grant:
    """What one agent may use. ``models`` are names as manifests write them; see ``egress.apis.admits``."""

    api: Api
    models: tuple[str, ...]
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class Exchange:
    """One request and its answer, without their contents.

    ``call`` is the API's name of the call, or the path when it has none; ``model`` is empty where none was named.
    ``status`` is what the CLI was told, 0 when it was gone before; of a request that is made again, an exchange of its
    own, it is the provider's, 0 when that was not reached. Times are seconds from the request's first byte.
    ``usage`` counts what the provider's own fields say; ``estimated`` when the answer was cut off before them.
    ``again_seconds`` is after how long a request is made again, and ``why`` what was wrong with its answer.
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
    refusal: Refusal | None = None
    again_seconds: float | None = None
    why: str = ""


class Session(Protocol):
    """One grant in use."""

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; fit for ``Workspace.listen``.

        Raises only what the connection raises (``trio.BrokenResourceError``, ``WorkspaceLost``). Cancelling breaks the
        connection off, the request to the provider too, and records what was used.
        """

    @property
    def usage(self) -> Usage:
        """Of all models together, of requests that have ended."""

    @property
    def by_model(self) -> Mapping[str, Usage]: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should be known of a session that has ended, such as turns of a rehearsal that nobody asked for."""

    @property
    def verdict(self) -> Outcome | None:
        """What the gateway knows of why the agent cannot have succeeded, as the step's outcome; ``None`` if nothing.

        From the first request that the budget refused its reason is ``TURNS`` or ``BUDGET``; else, while the latest
        request for an answer has failed, ``AUTH``, ``QUOTA``, ``MODEL`` (not granted, or unknown to the provider),
        ``PLATFORM`` (the provider cannot be reached from here), ``CUT_OFF`` (its answer was stopped) or ``GATEWAY``.
        A refused model counts only when no request has succeeded; a request without tools, which is a helper's, only
        before the first one with tools.
        """

    @property
    def awaited(self) -> str:
        """What the agent was waiting for when its latest request was broken off here, in words; empty for nothing."""

    @property
    def silent_seconds(self) -> float:
        """For how long nothing has come, by now, of the answer that is waited for longest; 0 when none is."""


class Gateway(Protocol):
    """The way to the models. ``rehearsal`` names the file whose scripted turns stand for them, or is ``None``."""

    rehearsal: str | None

    def check(self, grant: Grant) -> None:
        """Whether a session could be opened. Raises ``KeyMissing`` and ``Unpriced``, which name what to do."""

    def open(self, grant: Grant, on_exchange: Callable[[Exchange], None]) -> AbstractAsyncContextManager[Session]:
        """Serve a grant for the length of the block; what is still under way at its end is broken off and recorded.

        ``on_exchange`` is told of every request when it has ended, synchronously, but of no more than a thousand that
        took no tokens; it must not raise. Raises what ``check`` raises.
        """
