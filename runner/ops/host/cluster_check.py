"""Check of a cluster for workspaces in pods and for Jobs, by trying; and the objects that give accounts rights."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import trio
from msgspec import Struct

from runner.cluster import job
from runner.cluster.clusters import Clusters, workspace_place
from runner.core.errors import ProviderFailed, RunnerError
from runner.core.model import Feature, Handle, Limits
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider
from runner.ops.planning.job_fitness import settings_faults
from runner.ports.provider import Images, SandboxSpec, WorkspaceRequest

if TYPE_CHECKING:
    from runner.ops.runs.job_table import JobTable

PROVIDER = "kubernetes"
_LOOK = 0.2  # seconds between looks at what is known of a Job
_RUN = "cluster-check"
_DISK = 1 << 30  # bytes: what any class has a volume of
_JOB_SECONDS = 300.0  # for a Job to start, and to end
_PULL_SECONDS = 30.0  # for an image to come after a first refusal: nodes have tried again by then
# A worker that reaches the store, and whose account may make workspaces; the error is the last that it says.
_WORKER = "runner runs list --limit 1 && runner cluster check"
_NO_KUBECONFIG = "Secret $0 of RUNNER_WORKER_KUBECONFIG has no key config"
_READS_KUBECONFIG = f'if [ ! -f {job.KUBECONFIG} ]; then echo "{_NO_KUBECONFIG}" >&2; exit 1; fi'


class ClusterFinding(Struct, frozen=True):
    """One thing that was tried; ``found`` is what is there, or what is wrong, for which ``hint`` helps."""

    name: str
    ok: bool
    found: str
    hint: str | None = None


async def check_cluster(settings: Settings, image: str | None) -> list[ClusterFinding]:
    """Try a cluster step by step, up to the first thing that is missing.

    With an image a pod is made, and removed; where the settings name an image of workers, a Job.
    """
    findings: list[ClusterFinding] = []
    try:
        async for name, found in _tried(settings, image):
            findings.append(ClusterFinding(name, True, found))
        if settings.worker_image is not None:
            async for name, found in _tried_jobs(settings):
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
        is_limited = probe.enforces(Feature.DISK)
        disk = f"disk limited by volumes of {settings.kubernetes_storage_class}" if is_limited else "disk watched"
        yield name, f"Kubernetes {probe.versions['kubernetes']}, isolation {probe.isolation.value}, {disk}"
        name = "sandboxes"
        yield name, await _sandbox_words(settings, probe.makes)
        if image is None:
            return
        name = "image"
        assert isinstance(provider, Images)
        pinned = await provider.image(image)
        yield name, pinned
        name = "workspace"
        limits = Limits(disk_bytes=_DISK) if is_limited else Limits()
        id = f"check-{secrets.token_hex(6)}"
        request = WorkspaceRequest(id=id, run=_RUN, nonce=_RUN, image=pinned, limits=limits)
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


async def _sandbox_words(settings: Settings, makes: str) -> str:
    """Say what workspaces are, and what is there of agent-sandbox."""
    from runner.cluster import agent_sandbox
    from runner.cluster.objects import ClusterObjects

    place = workspace_place(settings)
    async with Clusters(settings).connect(place) as (target, upstream):
        objects = ClusterObjects(upstream, target.server, target.namespace)
        versions = ", ".join(await agent_sandbox.served_versions(objects))
        if not versions:
            return f"{makes}; agent-sandbox is not installed"
        controller = await agent_sandbox.controller_words(objects)
    used = "" if settings.kubernetes_sandboxes == agent_sandbox.KIND else ", used with RUNNER_KUBERNETES_SANDBOXES"
    return f"{makes}; agent-sandbox {versions} is installed{used}: {controller}"


async def _tried_jobs(settings: Settings) -> AsyncIterator[tuple[str, str]]:
    from runner.ops.runs.job_table import open_jobs

    name = "jobs"
    try:
        for fault in settings_faults(settings):
            raise fault
        async with open_jobs(settings) as table:
            await table.require_rights()
            yield name, "this account may make them, and the store and the place for files are others' as well"
            name = "job"
            seconds = await _try_job(table, settings)
            worker = f"as account `{job.ACCOUNT}`, with Secret `{settings.worker_secret}`"
            yield name, f"one ended after {seconds:.1f}s, {worker}: it reaches the store, and may make workspaces"
    except RunnerError as error:
        raise _Failed(name, error) from error


async def _try_job(table: JobTable, settings: Settings) -> float:
    """Make a Job, and return how long it took. Raises ``ProviderFailed`` with what kept it from ending well."""
    assert settings.worker_image is not None
    kubeconfig = settings.worker_kubeconfig
    words = (_WORKER,) if kubeconfig is None else (f"{_WORKER} && {_READS_KUBECONFIG}", kubeconfig)
    shape = job.JobShape(
        run=f"check-{secrets.token_hex(6)}",
        name=_RUN,
        submission=table.submission,
        image=settings.worker_image,
        secret=settings.worker_secret,
        seconds=_JOB_SECONDS,
        stop_seconds=0,
        environment={"RUNNER_KUBERNETES_NAMESPACE": table.namespace},
        command=("sh", "-c", *words),
        priority_class=settings.worker_priority,
        kubeconfig=kubeconfig,
    )
    began = trio.current_time()
    try:
        if (made := await table.make(shape)) is None:
            raise ProviderFailed("somebody deletes Jobs as soon as they are made")
        await table.give_plan(shape.run, "{}", made)
        state = await _settled(table, shape.run)
        if why := state.hopeless or state.why or ("" if state.over else state.waits or "it has not ended"):
            raise ProviderFailed(f"a Job did not succeed: {why}", hint=state.hint)
    finally:
        with trio.CancelScope(shield=True):
            await table.delete(shape.run)
    return trio.current_time() - began


async def _settled(table: JobTable, run: str) -> job.JobState:
    """Return the state of a Job once it has ended, or most likely never will."""
    late, failing = trio.current_time() + _JOB_SECONDS, inf
    while True:
        state, now = table.state(run), trio.current_time()
        failing = min(failing, now) if state.failing else inf
        if state.over or state.hopeless or now >= min(late, failing + _PULL_SECONDS):
            return state
        await trio.sleep(_LOOK)


def access_manifest(namespace: str, *, sandboxes: bool = False, runtime_class: str | None = None) -> str:
    """Return the objects that give accounts what the runner needs in a namespace, and no more; ``sandboxes``: also for
    those of agent-sandbox; ``runtime_class``: also to read this RuntimeClass, which no namespace has.
    """
    from runner.cluster import agent_sandbox
    from runner.cluster.pod_access import JOB_RIGHTS, RIGHTS, VOLUME_RIGHTS

    rights = (*RIGHTS, *VOLUME_RIGHTS, *(agent_sandbox.RIGHTS if sandboxes else ()))
    made = _MANIFEST.format(namespace=namespace, rules=_rules(rights), job_rules=_rules(JOB_RIGHTS))
    return made + ("" if runtime_class is None else _OF_CLASS.format(namespace=namespace, name=runtime_class))


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
_OF_CLASS = """\
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: runner-{namespace}}}
rules:
  - {{apiGroups: ['node.k8s.io'], resources: ['runtimeclasses'], resourceNames: ['{name}'], verbs: [get]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: runner-{namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: runner-{namespace}}}
subjects:
  - {{kind: ServiceAccount, name: runner, namespace: {namespace}}}
  - {{kind: ServiceAccount, name: runner-submitter, namespace: {namespace}}}
"""
