"""What the way to a cluster owes the steps: a Kubernetes API behind a relayed connection, to be read and not changed.

``kubectl`` inside a workspace talks to a port of its own loopback; each connection there is given to
``ClusterSession.serve``, which lets reading through and refuses the rest. The credential stays on this side. Order of
calls: ``reach`` before anything is provisioned; ``open`` around a step's commands; ``serve`` for each connection, any
number at once, and ``rights`` whenever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from runner.ports.provider import Connection

MOST_TOLD = 1000  # requests of one session that are told of one by one: an agent could make millions


@dataclass(frozen=True)
class ClusterGrant:
    """Which cluster. ``kubeconfig`` is a path, or several with ``:`` between them; ``server`` is what was planned, and
    so is the program that gives the credential, if there is one.
    """

    kubeconfig: str
    context: str
    server: str
    namespace: str
    plug_in_sha256: str = ""


@dataclass(frozen=True)
class ClusterRequest:
    """One request and how it was answered, or ``count`` alike ones, in which case ``resource`` is empty.

    ``verb`` and ``resource`` are the API's: ``get``, ``pods/log``, ``deployments.apps``; or the path of what is none.
    ``refusal`` says why it was answered here and not by the cluster: ``secrets``, ``write``, ``request``,
    ``impersonation``, ``busy``, or ``cluster`` when that failed.
    """

    verb: str
    resource: str
    namespace: str
    status: int
    seconds: float
    refusal: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Rights:
    """What may be read in a namespace, as the cluster itself says; ``None`` is not known, and ``warnings`` say why.

    Secrets are not among it, whatever the credential may do.
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
        """The content of ``incident_cluster_permissions.json``; a right that is not known is ``null``."""
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
    """One cluster in use. ``complaints`` say what was wrong with its credential meanwhile, each with its code."""

    @property
    def complaints(self) -> Mapping[str, str]: ...

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; fit for ``Workspace.listen``.

        Raises only what the connection raises (``trio.BrokenResourceError``, ``WorkspaceLost``). Cancelling breaks the
        connection off, and the request to the cluster with it.
        """

    async def rights(self) -> Rights:
        """Ask the cluster what its credential may read; at most five seconds. What has no answer is a warning."""


class ClusterGateway(Protocol):
    """The way to the clusters."""

    async def reach(self, grant: ClusterGrant) -> None:
        """Whether the cluster answers; at most five seconds.

        Raises ``ClusterUnreachable``, ``ClusterDenied``, and what is wrong with the kubeconfig.
        """

    def open(
        self, grant: ClusterGrant, on_request: Callable[[ClusterRequest], None]
    ) -> AbstractAsyncContextManager[ClusterSession]:
        """Serve a grant for the length of the block; what is still under way at its end is broken off and told.

        ``on_request`` is told of each of the first ``MOST_TOLD`` requests when it has ended, synchronously, and at the
        end of the others together; it must not raise. Raises what is wrong with the kubeconfig by now.
        """
