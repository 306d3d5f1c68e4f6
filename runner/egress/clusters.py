"""The way to the clusters of this host's kubeconfigs. What it takes to go it is imported with the first one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from runner.errors import ClusterDenied, ClusterUnreachable, InputChanged
from runner.ports.cluster import ClusterGrant, ClusterRequest, ClusterSession
from runner.settings import Settings

if TYPE_CHECKING:
    from runner.egress.kubeconfig import Target
    from runner.egress.upstream import Upstream


class Clusters:
    """The way to clusters themselves, with the kubeconfigs of this host."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def reach(self, grant: ClusterGrant) -> None:
        from runner.egress.cluster import ask

        target = self._target(grant)
        async with self._remote(target) as upstream:
            status, words = await ask(upstream, target, "GET", "/version")
        if status == 401:
            hint = f"get a new one; `kubectl --context {target.context} get namespaces` should answer"
            message = f"cluster {target.server} does not accept the credential of context `{target.context}`"
            raise ClusterDenied(message, hint=hint)
        if status is None or status >= 500:
            hint = f"`kubectl --context {target.context} version` should answer; VPN?"
            raise ClusterUnreachable(f"cluster {target.server} cannot be reached: {words}", hint=hint)

    @asynccontextmanager
    async def open(
        self, grant: ClusterGrant, on_request: Callable[[ClusterRequest], None]
    ) -> AsyncIterator[ClusterSession]:
        from runner.egress.cluster import ReadSession

        target = self._target(grant)
        async with self._remote(target) as upstream:
            session = ReadSession(target, upstream, on_request)
            try:
                yield session
            finally:
                session.close()

    def _target(self, grant: ClusterGrant) -> Target:
        from runner.egress.kubeconfig import read_target

        target = read_target(grant.kubeconfig, grant.context, grant.namespace, self._settings.reach)
        if target.server != grant.server:
            message = f"context `{grant.context}` leads to {target.server} by now, and {grant.server} was planned"
            raise InputChanged(message, hint="plan again")
        return target

    @asynccontextmanager
    async def _remote(self, target: Target) -> AsyncIterator[Upstream]:
        from runner.egress.upstream import open_remote

        async with open_remote(
            target.server,
            self._settings.reach,
            certificates=target.certificates(),
            server_name=target.server_name,
            read_seconds=None,
        ) as upstream:
            yield upstream
