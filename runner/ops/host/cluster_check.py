"""Check of a cluster for workspaces in pods, by trying; and the objects that give an account what it needs."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import trio
from msgspec import Struct

from runner.cluster.clusters import Clusters, workspace_place
from runner.core.errors import ProviderFailed, RunnerError
from runner.core.model import Handle
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider
from runner.ports.provider import Images, SandboxSpec, WorkspaceRequest

PROVIDER = "kubernetes"
_RUN = "cluster-check"


class ClusterFinding(Struct, frozen=True):
    """One thing that was tried; ``found`` is what is there, or what is wrong, for which ``hint`` helps."""

    name: str
    ok: bool
    found: str
    hint: str | None = None


async def check_cluster(settings: Settings, image: str | None) -> list[ClusterFinding]:
    """Try a cluster step by step, up to the first thing that is missing; with an image a pod is made, and removed."""
    findings: list[ClusterFinding] = []
    try:
        async for name, found in _tried(settings, image):
            findings.append(ClusterFinding(name, True, found))
    except _Failed as failed:
        findings.append(ClusterFinding(failed.name, False, failed.error.message, failed.error.hint))
    return findings


class _Failed(Exception):
    def __init__(self, name: str, error: RunnerError) -> None:
        self.name = name
        self.error = error


async def _tried(settings: Settings, image: str | None) -> AsyncIterator[tuple[str, str]]:
    name = "cluster"
    try:
        place = workspace_place(settings)
        async with Clusters(settings).connect(place) as (target, _):
            where = f"{target.server}, context {target.context}, namespace {target.namespace}"
        yield name, where
        name = "pods"
        provider = open_provider(PROVIDER, settings)
        probe = await provider.probe()
        if not probe.available:
            raise ProviderFailed(probe.reason or "it is unavailable", hint=probe.hint)
        yield name, f"Kubernetes {probe.versions['kubernetes']}, isolation {probe.isolation.value}"
        if image is None:
            return
        name = "image"
        assert isinstance(provider, Images)
        pinned = await provider.image(image)
        yield name, pinned
        name = "workspace"
        request = WorkspaceRequest(id=f"check-{secrets.token_hex(6)}", run=_RUN, nonce=_RUN, image=pinned)
        began = trio.current_time()
        handle: Handle = await provider.create(request)
        try:
            async with provider.open(handle, SandboxSpec()) as workspace:
                ready = trio.current_time() - began
                await workspace.run(["/bin/true"])
        except BaseException:  # which is told, whatever becomes of the pod
            with trio.CancelScope(shield=True), suppress(RunnerError):
                await provider.destroy(handle)
            raise
        await provider.destroy(handle)
        yield name, f"a command ran after {ready:.1f}s, in a pod whose network is closed"
    except RunnerError as error:
        raise _Failed(name, error) from error


def access_manifest(namespace: str) -> str:
    """Return the objects that give accounts what the runner needs in a namespace, and no more."""
    from runner.cluster.pod_access import JOB_RIGHTS, RIGHTS

    return _MANIFEST.format(namespace=namespace, rules=_rules(RIGHTS), job_rules=_rules(JOB_RIGHTS))


def _rules(rights: Sequence[tuple[str, str, str, str]]) -> str:
    rules: dict[tuple[str, str], list[str]] = {}
    for verb, group, resource, subresource in rights:
        rules.setdefault((group, f"{resource}/{subresource}" if subresource else resource), []).append(verb)
    return "\n".join(
        f"  - {{apiGroups: ['{group}'], resources: ['{resource}'], verbs: [{', '.join(verbs)}]}}"
        for (group, resource), verbs in rules.items()
    )


_MANIFEST = """\
# Workspaces of the runner in namespace {namespace}: pods that the restricted standard admits, the account `runner` that
# makes them, as the workers of Jobs do, and the account `runner-submitter` that makes these Jobs as well.
apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels: {{pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: runner, namespace: {namespace}}}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: runner, namespace: {namespace}}}
rules:
{rules}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: runner, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: runner}}
subjects:
  - {{kind: ServiceAccount, name: runner, namespace: {namespace}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: runner-submitter, namespace: {namespace}}}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: runner-submitter, namespace: {namespace}}}
rules:
{job_rules}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: runner-submitter-workspaces, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: runner}}
subjects:
  - {{kind: ServiceAccount, name: runner-submitter, namespace: {namespace}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: runner-submitter, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: runner-submitter}}
subjects:
  - {{kind: ServiceAccount, name: runner-submitter, namespace: {namespace}}}
"""
