"""The cluster port: a Kubernetes API behind a relayed connection, read-only.

``kubectl`` inside a workspace talks to a port of its own loopback; ``ClusterSession.serve`` serves each connection
there, forwards requests that read and refuses the rest. The credential stays on this side. Order of calls: ``check``
before anything is provisioned; ``open`` around a step's commands; ``serve`` for each connection, any number at once,
and ``permissions`` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from runner.core.model import ClusterRefusal
from runner.ports.provider import Connection

MAX_REPORTED = 1000  # requests of one session that are reported one by one: an agent could make millions


class ClusterGrant(Struct, frozen=True, kw_only=True):
    """The cluster of a run. ``kubeconfig`` is a path, or several with ``:`` between them; ``server`` and
    ``plug_in_sha256``, the digest of the credential plug-in if there is one, are as planned.
    """

    kubeconfig: str
    context: str
    server: str
    namespace: str
    plug_in_sha256: str = ""


class ClusterRequest(Struct, frozen=True, kw_only=True):
    """One request and its answer, or ``count`` similar ones, in which case ``resource`` is empty.

    ``verb`` and ``resource`` are the API's: ``get``, ``pods/log``, ``deployments.apps``; or a path that is not a
    resource's. ``refusal`` is the reason for which it was answered here and not by the cluster.
    """

    verb: str
    resource: str
    namespace: str
    status: int
    seconds: float
    refusal: ClusterRefusal | None = None
    count: int = 1


class ClusterPermissions(Struct, frozen=True, kw_only=True):
    """The kinds of resources that may be read in a namespace, as the cluster says; ``None`` is unknown, ``warnings``
    say why. Secrets may not be read, whatever the credential allows.
    """

    cluster: str
    namespace: str
    pods: bool | None = None
    logs: bool | None = None
    events: bool | None = None
    deployments: bool | None = None
    services: bool | None = None
    configmaps: bool | None = None
    nodes: bool | None = None
    warnings: tuple[str, ...] = ()

    def document(self, validated_at: str) -> dict[str, object]:
        """Return the content of ``incident_cluster_permissions.json``; an unknown permission is ``null``."""
        return {
            "cluster_name": self.cluster,
            "asked_as": "the runner's account: --token, --username, --client-certificate and --as do not change it",
            "validated_at": validated_at,
            "can_get_pods": self.pods,
            "can_get_logs": self.logs,
            "can_get_events": self.events,
            "can_get_deployments": self.deployments,
            "can_get_services": self.services,
            "secrets_access_allowed": False,
            "can_get_secrets": False,
            "can_get_configmaps": self.configmaps,
            "can_get_nodes": self.nodes,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }


class ClusterSession(Protocol):
    """A cluster in use. ``credential_errors`` maps messages about its credential to their error codes."""

    @property
    def credential_errors(self) -> Mapping[str, str]: ...

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; a handler for ``Workspace.listen``.

        Raises only what the connection raises (``trio.BrokenResourceError``, ``WorkspaceLost``). Cancelling ends the
        connection and the request to the cluster.
        """

    async def permissions(self) -> ClusterPermissions:
        """Ask the cluster what its credential may read, for at most five seconds; a missing answer is a warning."""


class ClusterGateway(Protocol):
    """Opens sessions with clusters."""

    async def check(self, grant: ClusterGrant) -> None:
        """Check within five seconds that the cluster answers.

        Raises ``ClusterUnreachable``, ``ClusterDenied``, and the errors of the kubeconfig.
        """

    def open(
        self, grant: ClusterGrant, on_request: Callable[[ClusterRequest], None]
    ) -> AbstractAsyncContextManager[ClusterSession]:
        """Serve a grant for the length of the block; requests still under way at its end are ended and reported.

        ``on_request`` is called for each of the first ``MAX_REPORTED`` requests when it has ended, synchronously, and
        at the end for the others together; it must not raise. Raises the errors of the kubeconfig as it is by then.
        """
