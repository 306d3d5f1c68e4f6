"""The egress port: hosts behind a relayed connection, those that a plan names and no other.

Commands inside a workspace talk to a proxy on a port of their own loopback; ``EgressSession.serve`` serves each
connection there. Names are resolved and addresses judged on this side; there is no DNS inside. Order of calls:
``OpenEgress`` around a step's commands; ``serve`` for each connection, any number at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.core.injection import Injection
from runner.core.model import NetworkRefusal
from runner.core.redact import Secret
from runner.ports.provider import Connection

MAX_REPORTED = 1000  # connections of one session that are reported one by one: a program could make millions


class EgressConnection(Struct, frozen=True, kw_only=True):
    """A connection that has ended, or ``count`` similar ones, in which case ``host`` is empty.

    ``host`` is as the command wrote it unless it is canonical, ``address`` what was dialled, ``rule`` what allowed it,
    and ``origin`` the manifest line of that.
    ``sent_bytes`` went to the host. ``refusal`` says why there was none, or why it was cut. ``requests`` are those that
    got a ``credential``, by the name of the secret.
    """

    host: str
    port: int
    address: str = ""
    rule: str = ""
    origin: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    credential: str = ""
    seconds: float = 0.0
    refusal: NetworkRefusal | None = None
    count: int = 1


class Credential(Struct, frozen=True):
    """A secret that requests to a host get."""

    injection: Injection
    secret: Secret


class Trust(Struct, frozen=True):
    """Certificates that commands have to trust: as PEM, and as a store for Java with its usual password."""

    certificates: bytes
    java: bytes


class EgressSession(Protocol):
    @property
    def trust(self) -> Trust | None:
        """Return what commands have to trust: for hosts that get a credential, and what this host trusts if it was told
        so; ``None`` without either.
        """

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end, or until the session is closed. Raises what the connection raises."""


class OpenEgress(Protocol):
    def __call__(
        self,
        allowed: NetworkSpec,
        tell: Callable[[EgressConnection], None],
        credentials: Sequence[Credential] = (),
    ) -> AbstractAsyncContextManager[EgressSession]:
        """Open a session for the length of the block, whose end ends its connections.

        ``tell`` is called once for each connection when it has ended, or was refused. Requests to the hosts of
        ``credentials`` get them, and no others. Raises ``UsageError`` when the way from this host cannot be used.
        """
