"""Open sessions with the clusters of this host's kubeconfigs. The modules that this needs are imported with the first
one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from msgspec import Struct

from runner.core.errors import (
    BadKubeconfig,
    ClusterDenied,
    ClusterUnreachable,
    CredentialFailed,
    InputChanged,
    ProviderFailed,
    UnfitSecret,
)
from runner.core.redact import Redactor
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ports.cluster import ClusterGrant, ClusterRequest, ClusterSession

if TYPE_CHECKING:
    from runner.cluster.authorized import AuthorizedUpstream, CredentialSource
    from runner.cluster.credential_plugin import Credential, CredentialPlugin, Credentials
    from runner.cluster.kubeconfig import ClusterTarget
    from runner.network.upstream import Upstream


class ClusterPlace(Struct, frozen=True):
    """A namespace of a cluster; ``None`` stands for what the kubeconfig itself says, as ``kubeconfig`` for a pod's own
    cluster.
    """

    kubeconfig: str | None
    context: str | None
    namespace: str | None


def workspace_place(settings: Settings) -> ClusterPlace:
    """Return the place that workspaces are made in. Raises ``ProviderFailed`` when the user has named none.

    Its namespace is never taken from a kubeconfig, so that nobody's cluster is asked for anything by accident.
    """
    if settings.kubernetes_namespace is None:
        hint = "set RUNNER_KUBERNETES_NAMESPACE; `runner cluster manifest` makes one that is fit"
        raise ProviderFailed("no namespace of a cluster is named for workspaces", hint=hint)
    usual = Path(settings.reach.get("HOME", "/"), ".kube", "config")
    kubeconfig = settings.variables.get("KUBECONFIG") or (str(usual) if usual.exists() else None)
    if kubeconfig is None and not settings.variables.get("KUBERNETES_SERVICE_HOST"):
        raise ProviderFailed("no kubeconfig names a cluster", hint="set KUBECONFIG, or write ~/.kube/config")
    if kubeconfig is None and settings.kubernetes_context is not None:
        message = f"context `{excerpt(settings.kubernetes_context)}` is one of a kubeconfig, and none is here"
        raise ProviderFailed(message, hint="set KUBECONFIG, or name no context: then it is the cluster of this pod")
    return ClusterPlace(kubeconfig, settings.kubernetes_context, settings.kubernetes_namespace)


class Clusters:
    """The clusters themselves, by the kubeconfigs of this host."""

    def __init__(
        self, settings: Settings, redact: Redactor | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._redact = Redactor() if redact is None else redact
        self._now = now
        self._hidden: set[bytes] = set()
        self._credentials: dict[CredentialPlugin, Credentials] = {}

    async def check(self, grant: ClusterGrant) -> None:
        from runner.cluster.session import ask

        target = self._target(grant)
        async with self._way(target) as way:
            status, words = await ask(way, "GET", "/version")
        if status == 401:
            hint = f"get a new one; `kubectl --context {target.context} get namespaces` should answer"
            of = f"the credential of context `{target.context}`"
            by = f", which {target.plug_in} gave" if target.plug_in is not None else ""
            message = f"cluster {target.server} does not accept {of}{by}"
            raise ClusterDenied(message, hint=hint)
        if status is None or status >= 500:
            hint = f"`kubectl --context {target.context} version` should answer; VPN?"
            raise ClusterUnreachable(f"cluster {target.server} cannot be reached: {words}", hint=hint)

    @asynccontextmanager
    async def open(
        self, grant: ClusterGrant, on_request: Callable[[ClusterRequest], None]
    ) -> AsyncIterator[ClusterSession]:
        from runner.cluster.session import ReadOnlySession

        target = self._target(grant)
        async with self._way(target) as way:
            session = ReadOnlySession(target, way, on_request)
            try:
                yield session
            finally:
                session.close()

    @asynccontextmanager
    async def connect(self, place: ClusterPlace) -> AsyncIterator[tuple[ClusterTarget, AuthorizedUpstream]]:
        """Connect to a cluster of the user's own, for whatever its credential may do. Raises the errors of both."""
        from runner.cluster.kubeconfig import in_cluster_target, read_target

        if place.kubeconfig is None:
            target = in_cluster_target(self._settings.variables, place.namespace)
        else:
            target = read_target(place.kubeconfig, place.context, place.namespace, self._settings.reach)
        async with self._way(target) as way:
            yield target, way

    def _target(self, grant: ClusterGrant) -> ClusterTarget:
        from runner.cluster.kubeconfig import read_target

        target = read_target(grant.kubeconfig, grant.context, grant.namespace, self._settings.reach)
        if target.server != grant.server:
            message = f"context `{grant.context}` leads to {target.server} now, and the plan says {grant.server}"
            raise InputChanged(message, hint="plan again")
        if (target.plug_in.sha256 if target.plug_in else "") != grant.plug_in_sha256:
            now = str(target.plug_in) if target.plug_in else "the kubeconfig itself"
            message = f"context `{grant.context}` has its credential from {now} now, unlike in the plan"
            raise InputChanged(message, hint="plan again")
        return target

    @asynccontextmanager
    async def _way(self, target: ClusterTarget) -> AsyncIterator[AuthorizedUpstream]:
        """Connect to a cluster with a credential. Raises the errors of the credential."""
        from runner.cluster.authorized import AuthorizedUpstream
        from runner.cluster.credential_plugin import Credentials

        def open_with(certificate: tuple[bytes, bytes] | None) -> AbstractAsyncContextManager[Upstream]:
            from runner.network.upstream import open_remote

            return open_remote(
                target.server,
                self._settings.reach,
                certificates=target.certificates(certificate),
                server_name=target.server_name,
                read_seconds=None,
            )

        ask: CredentialSource = partial(self._own, target)
        if (plug_in := target.plug_in) is not None:
            if plug_in not in self._credentials:
                learn = partial(self._learn, target)
                self._credentials[plug_in] = Credentials(plug_in, self._settings.variables, learn, self._now)
            ask = self._credentials[plug_in].get
        async with AuthorizedUpstream(ask, open_with) as way:
            await way.ready()
            yield way

    async def _own(self, target: ClusterTarget, refused: Credential | None = None) -> Credential:
        """Return the credential of a kubeconfig itself, as of now: a token's file may be replaced at any time."""
        await trio.lowlevel.checkpoint()
        self._hide(target, found := target.credential())
        return found

    def _learn(self, target: ClusterTarget, credential: Credential) -> None:
        """Raise ``CredentialFailed`` for an invalid certificate; register the secrets with the redactor."""
        try:
            target.certificates(credential.certificate)
        except BadKubeconfig as error:
            hint = "run it yourself; another version of it may be needed"
            raise CredentialFailed(f"{target.plug_in}: {error.message}", hint=hint) from error
        self._hide(target, credential)

    def _hide(self, target: ClusterTarget, credential: Credential) -> None:
        for secret in {*credential.secrets} - self._hidden:
            self._hidden.add(secret)
            with suppress(UnfitSecret):
                self._redact.register(f"credential of {target.context}", secret, fresh=True)
