"""Provider ``kubernetes``: each sandbox is a pod of a cluster, which shares no file with this host.

A workspace's directories are here, as with volumes of a docker daemon far away. Opening sends them to a new pod; when
the sandbox has ended, what commands changed is fetched, also after the runner was killed, for the pod stays until then.
The network of a pod is closed by a policy, and a look from inside proves it before any command runs. Needs the extra
``kubernetes``.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import trio

from runner.cluster.clusters import Clusters, workspace_place
from runner.core.errors import CleanUpIncomplete, PlatformError, ProviderFailed, RunnerError, WorkspaceLost
from runner.core.model import Feature, Handle, IsolationClass, Limits, Pull
from runner.core.settings import Settings
from runner.guest import binary
from runner.ports.provider import (
    STOP_GRACE,
    ImageStart,
    Probe,
    PullReport,
    SandboxHandoff,
    SandboxSpec,
    Workspace,
    WorkspaceRequest,
)
from runner.providers._pod_disk import (
    as_here,
    fetched_at_most,
    note_of,
    pod_volumes,
    request_here,
    storage_class_of,
    with_disk,
)
from runner.safefs import trees
from runner.safefs.safe_open import open_directory
from runner.sandbox import pod
from runner.sandbox.daemon_container import DaemonLimits
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.docker_facts import read_image
from runner.sandbox.guest_files import GuestFiles
from runner.sandbox.guest_workspace import GuestWorkspace, SandboxContext, open_dialling_guest
from runner.sandbox.mirrored import MOST, Inputs, Mirror, Volume, prepare_scratch, stamps_of
from runner.sandbox.protected_paths import Guard, open_guards, remove_placeholders
from runner.sandbox.sandbox_layout import ENV, PATHS
from runner.sandbox.warm_containers import slot_mounts

if TYPE_CHECKING:
    from runner.cluster.objects import ClusterObjects
    from runner.providers._pod_opening import PodOpening
    from runner.providers._pod_sandbox import PodSandbox
    from runner.providers._warm_pod import HandedOffPod, WarmPod

USES_IMAGES = True  # workspaces are made of images
GAPS = {"network": "a pod has an interface, which a policy closes"}

_PROBE_SECONDS = 15.0
_INTERFACE = "eth0"  # as the runtimes of clusters call it
_WATCHED = "a node ends a pod whose files exceed their limit, some time afterwards"
_MAKES = {"pods": "plain pods", "agent-sandbox": "Sandboxes of agent-sandbox"}
_ALONE = "workspaces that share a project need its directory, and a pod sees nothing of this host"
_NOT_MADE = "what commands install is kept on this host, and a pod sees nothing of it"
_MISSING = {
    Feature.DISK: _WATCHED,
    Feature.SHARED_PROJECT: _ALONE,
    Feature.DEPENDENCY_COMMANDS: _NOT_MADE,
}


def provider(settings: Settings) -> KubernetesProvider:
    return KubernetesProvider(settings)


class KubernetesProvider:
    """``grace`` as for ``LocalProvider``."""

    name = "kubernetes"

    def __init__(self, settings: Settings, *, grace: float = STOP_GRACE) -> None:
        self._settings = settings
        self._clusters = Clusters(settings)
        self._directories = WorkspaceDirectories(settings.home, self.name, own_users=False)
        self._grace = grace
        self._prepared: set[tuple[str, str]] = set()  # clusters and namespaces that have what pods need
        self._handed_off: dict[str, HandedOffPod] = {}
        self._measures: dict[str, Callable[[], Awaitable[int]]] = {}  # of the sandboxes that are open, by workspace

    async def probe(self) -> Probe:
        reason, hint, settings = None, None, self._settings
        isolation, versions, place = IsolationClass.NAMESPACES, {}, ""
        try:
            workspace_place(settings)
            _require_extra()
            from runner.cluster import agent_sandbox
            from runner.cluster.objects import REACH_HINT
            from runner.cluster.pod_access import look_at_cluster, probe_pod

            guest = binary.find()
            versions = {"guest": guest.sha256[:12]}
            with trio.move_on_after(_PROBE_SECONDS) as patience:
                async with self._objects() as objects:
                    classes, kind = (
                        (settings.kubernetes_runtime_class, self._storage_class),
                        settings.kubernetes_sandboxes,
                    )
                    place = " ".join((objects.server, objects.namespace, *(name or "" for name in classes), kind))
                    isolation, found = await look_at_cluster(objects, *classes)
                    versions |= found | ({} if self._storage_class is None else {"volumes": self._storage_class})
                    if kind == agent_sandbox.KIND:
                        await agent_sandbox.require_sandboxes(objects, probe_pod(*classes))
                        versions[kind] = agent_sandbox.VERSION
            if patience.cancelled_caught:
                reason, hint = f"the cluster does not answer within {_PROBE_SECONDS:.0f}s", REACH_HINT
        except RunnerError as error:
            reason, hint = error.message, error.hint
        is_watched = self._storage_class is None
        return Probe(
            provider=self.name,
            available=reason is None,
            isolation=isolation,
            missing={what: why for what, why in _MISSING.items() if what is not Feature.DISK or is_watched},
            versions=versions,
            reason=reason,
            hint=hint,
            needs_image=True,
            watched=frozenset({Feature.DISK} if is_watched else ()),
            escapes=GAPS,
            protects_at_start=True,
            place=place,
            makes=_MAKES[settings.kubernetes_sandboxes],
        )

    @property
    def _storage_class(self) -> str | None:
        return self._settings.kubernetes_storage_class

    @property
    def _cache(self) -> str | None:
        return self._settings.kubernetes_cache

    @asynccontextmanager
    async def _objects(self) -> AsyncIterator[ClusterObjects]:
        """Connect to the cluster. Raises ``ProviderFailed``, and the errors of the kubeconfig."""
        place = workspace_place(self._settings)
        _require_extra()
        from runner.cluster.objects import ClusterObjects

        async with self._clusters.connect(place) as (target, upstream):
            yield ClusterObjects(upstream, target.server, target.namespace)

    # --- making ---

    async def image(self, name: str, when: Pull = "missing") -> str:
        if "@sha256:" in name or name.startswith("sha256:"):
            await trio.lowlevel.checkpoint()
            return name
        _require_extra()
        from runner.providers._pod_images import resolve

        async with self._objects() as objects:
            return await resolve(objects, name, when)

    async def pull(self, image: str, name: str, report: PullReport | None = None) -> None:
        """Do nothing: the node of a pod downloads its image."""
        await trio.lowlevel.checkpoint()

    async def labels(self, image: str) -> Mapping[str, str]:
        """Return nothing: only a node has the image, and does not tell."""
        await trio.lowlevel.checkpoint()
        return {}

    async def start_of(self, image: str) -> ImageStart:
        """Return nothing: only a node has the image, and does not tell."""
        await trio.lowlevel.checkpoint()
        return ImageStart()

    async def create(self, request: WorkspaceRequest) -> Handle:
        if request.image is None:
            raise ProviderFailed(f"`{self.name}` needs an image", hint="name one as `workspace.base_image`")
        if request.limits.disk_bytes is not None and self._storage_class is None:
            raise ProviderFailed(f"`{self.name}` cannot limit the disk of workspace `{request.id}`: {_WATCHED}")
        if request.tree is not None or request.shared:
            raise ProviderFailed(f"workspace `{request.id}` cannot be made: {_ALONE}", hint="use provider `local`")
        async with self._objects() as objects:
            await self._prepare(objects)
        note = note_of(request, self._storage_class, self._settings.kubernetes_sandboxes)
        return with_disk(await trio.to_thread.run_sync(self._directories.create, request_here(request), note))

    async def _prepare(self, objects: ClusterObjects) -> None:
        """Make what all pods of a namespace share, unless it is there. Raises ``ProviderFailed``."""
        place = (objects.server, objects.namespace)
        if place in self._prepared:
            return
        guest = binary.find()
        await objects.create(objects.path("configmaps"), pod.guest_map(_guest_name(), guest.path.read_bytes()))
        policies = {"group": "networking.k8s.io/v1"}
        wanted = pod.closed_network()
        made = await objects.create(objects.path("networkpolicies", **policies), wanted, again=True)
        if made is None or not pod.closes_all(made["spec"]):
            raise ProviderFailed(
                f"NetworkPolicy `{pod.POLICY}` of namespace `{objects.namespace}` was changed, and lets something pass",
                hint=f"kubectl --namespace {objects.namespace} delete networkpolicy {pod.POLICY}",
            )
        self._prepared.add(place)

    # --- opening ---

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Workspace]:
        _require_extra()
        from runner.cluster.pod_access import isolation_of
        from runner.providers._pod_opening import PodOpening

        self._directories.check(handle)
        await self.retrieve(handle)
        scratch = handle.private / "scratch"
        seen = scratch if spec.tree or not spec.tree_writable else handle.tree
        try:
            await trio.to_thread.run_sync(prepare_scratch, handle, spec, scratch)
            volumes = await trio.to_thread.run_sync(pod_volumes, handle, spec)
        except FileNotFoundError as error:
            raise WorkspaceLost(f"{_what(handle)} is gone: `{error.filename}`") from error
        try:
            async with AsyncExitStack() as stack:
                tree = stack.enter_context(open_directory(seen))
                guards = stack.enter_context(open_guards(tree, () if seen is scratch else spec.protected))
                objects = await stack.enter_async_context(self._objects())
                await self._prepare(objects)
                opening = PodOpening(
                    handle,
                    spec,
                    objects,
                    volumes=volumes,
                    guards=guards,
                    seen=seen,
                    tree=tree,
                    isolation=await isolation_of(objects, self._settings.kubernetes_runtime_class),
                )
                yield await self._open_warm_or_new(stack, opening)
        finally:
            self._measures.pop(handle.id, None)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(trees.remove, scratch)

    async def _open_warm_or_new(self, stack: AsyncExitStack, opening: PodOpening) -> GuestWorkspace:
        """Open the workspace in the pod that was handed over for it, if that fits, else in a new one."""
        handle = opening.handle
        if (handed_off := self._handed_off.pop(handle.id, None)) is not None:
            why = handed_off.why_unfit(handle, opening.spec, opening.guards)
            if why is None:
                try:
                    return await stack.enter_async_context(self._take_over(opening, handed_off))
                except (ProviderFailed, WorkspaceLost) as error:  # it has died meanwhile
                    why = error.message
            opening = replace(opening, notes=(f"not the pod that was kept warm: {why}",))
        if handle.slot is not None:
            await self._delete_pods(handle)
        return await stack.enter_async_context(self._open_new(opening))

    @asynccontextmanager
    async def _open_new(self, opening: PodOpening) -> AsyncIterator[GuestWorkspace]:
        from runner.providers._pod_opening import deleted, prove, send_all
        from runner.providers._pod_volume import watching_volume

        handle = opening.handle
        sandbox, body = self._new_pod(opening.objects, handle, opening.volumes, opening.guards)
        async with sandbox.watched(), deleted(sandbox):
            await sandbox.make(body)
            async with watching_volume(opening.objects, sandbox, handle):
                notes = await send_all(sandbox, uid_of(handle), handle.private, opening.volumes, cache=self._cache)
            await prove(sandbox)
            async with self._started(replace(opening, notes=(*opening.notes, *notes)), sandbox) as workspace:
                yield workspace

    @asynccontextmanager
    async def _take_over(self, opening: PodOpening, handed_off: HandedOffPod) -> AsyncIterator[GuestWorkspace]:
        """Open the workspace in a pod that runs, which ends with the block."""
        from runner.providers._pod_opening import deleted
        from runner.providers._pod_sandbox import PodSandbox

        opening = replace(opening, volumes=handed_off.in_place(opening.volumes))
        sandbox = PodSandbox(opening.objects, handed_off.name, _what(opening.handle), self._kind(opening.handle))
        async with sandbox.watched(), deleted(sandbox):
            sandbox.look(await opening.objects.get(opening.objects.path("pods", sandbox.name)))
            sandbox.started()
            await opening.put(sandbox, [volume for volume in opening.volumes if volume.kept or volume.passing])
            async with self._started(opening, sandbox, handed_off.nonce) as workspace:
                yield workspace

    @asynccontextmanager
    async def _started(
        self, opening: PodOpening, sandbox: PodSandbox, nonce: bytes | None = None
    ) -> AsyncIterator[GuestWorkspace]:
        """Open the workspace in a pod that has its files; fetch them when the block ends."""
        from runner.providers._pod_files import PodPacker
        from runner.providers._pod_volume import look_at_volume

        handle, mirror = opening.handle, Mirror(opening.handle)
        files = GuestFiles(opening.roots_by(lambda volume: volume.target), opening.skipped, opening.most)
        files.packer = PodPacker(sandbox, {volume.target: volume.name for volume in opening.volumes})
        fetched = False
        context = SandboxContext(
            provider=self.name,
            isolation=opening.isolation,
            uid=uid_of(handle),
            paths=PATHS,
            tree=opening.tree,
            env={**ENV, **opening.spec.environment},
            group=DaemonLimits(),
            grace=self._grace,
            command_limits=Limits(pids=handle.limits.pids),
            volume=await look_at_volume(sandbox, handle),
            closed_interface=_INTERFACE,
            notes=opening.notes,
            refresh=partial(opening.refresh, sandbox, files),
            before_exec=Inputs(opening.volumes, partial(opening.put, sandbox)).send_changed,
        )
        mirror.daemon_is_ahead(volume.name for volume in opening.kept)
        try:
            async with open_dialling_guest(
                sandbox.connect, context, what=sandbox.what, kill_sandbox=sandbox.kill, nonce=nonce
            ) as workspace:
                await files.begin(workspace.guest)
                self._measures[handle.id] = partial(opening.measure, files)
                try:
                    yield workspace
                finally:
                    with trio.CancelScope(shield=True):
                        await workspace.kill()
                        fetched = await files.fetch([volume.target for volume in opening.kept])
        finally:
            with trio.CancelScope(shield=True):
                await sandbox.end()
                if fetched or await opening.fetch(sandbox):
                    mirror.same(await trio.to_thread.run_sync(stamps_of, opening.kept))

    def _new_pod(
        self, objects: ClusterObjects, handle: Handle, volumes: Sequence[Volume], guards: Iterable[Guard]
    ) -> tuple[PodSandbox, dict[str, Any]]:
        """Return a pod that is not made yet, and what it is made of. Raises ``WorkspaceLost``."""
        from runner.providers._pod_sandbox import PodSandbox

        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"{_what(handle)} is gone")
        image, name = str(read_image(handle)["image"]), pod.name_of(handle.id, secrets.token_hex(4))
        shape = pod.PodShape(
            image=image,
            pull="Never" if image.startswith("sha256:") else "IfNotPresent",
            uid=uid_of(handle),
            limits=handle.limits,
            labels=self._labels(handle) | {"runner.run": pod.label(owner[0])},
            annotations={"runner.run": owner[0], "runner.workspace": handle.id},
            guest=_guest_name(),
            machine=platform.machine(),
            runtime_class=self._settings.kubernetes_runtime_class,
            storage_class=storage_class_of(handle),
            cache=self._cache,
            owner=self._settings.pod,
        )
        body = pod.pod(name, shape, volumes, guards, most=handle.limits.disk_bytes or MOST)
        return PodSandbox(objects, name, _what(handle), self._kind(handle)), body

    # --- warm pods ---

    @asynccontextmanager
    async def open_slot(
        self, handle: Handle, toolchains: Sequence[str], protected: Sequence[str]
    ) -> AsyncIterator[WarmPod]:
        _require_extra()
        from runner.providers._pod_opening import prove, send_all
        from runner.providers._pod_volume import watching_volume
        from runner.providers._warm_pod import open_warm_pod, pinned_by, stand_ins

        self._directories.check(handle)
        mounts, scratch = slot_mounts(handle), handle.private / "scratch"
        for mount in mounts:
            mount.source.mkdir(mode=0o700, exist_ok=True)
        spec = SandboxSpec(mounts=mounts, toolchains=tuple(toolchains))
        await trio.to_thread.run_sync(prepare_scratch, handle, spec, scratch)
        tree, *others = await trio.to_thread.run_sync(pod_volumes, handle, spec)
        volumes = [replace(tree, source=scratch), *others]
        async with self._objects() as objects:
            await self._prepare(objects)
            with stand_ins(scratch, protected) as guards:
                sandbox, body = self._new_pod(objects, handle, volumes, guards)
                pinned = pinned_by(guards)

                async def start() -> None:
                    await sandbox.make(body)
                    async with watching_volume(objects, sandbox, handle):
                        await send_all(sandbox, uid_of(handle), handle.private, volumes, cache=self._cache)
                    await prove(sandbox)

                async with open_warm_pod(sandbox, start, volumes, pinned=pinned, toolchains=toolchains) as slot:
                    yield slot

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        return with_disk(await trio.to_thread.run_sync(self._directories.assign, as_here(handle), request))

    def receive(self, handle: Handle, handoff: SandboxHandoff) -> None:
        from runner.providers._warm_pod import read_handoff

        self._handed_off[handle.id] = read_handoff(handoff)

    # --- files ---

    async def disk_bytes(self, handle: Handle, here: Callable[[], Awaitable[int]]) -> int:
        if measure := self._measures.get(handle.id):
            with suppress(ProviderFailed, WorkspaceLost):  # it ends just now
                return await measure()
        return await here()

    async def retrieve(self, handle: Handle) -> None:
        self._directories.check(handle)
        mirror = Mirror(handle)
        if not mirror.ahead:
            return
        from runner.providers._pod_files import PodFiles
        from runner.providers._pod_sandbox import PodSandbox

        volumes = await trio.to_thread.run_sync(pod_volumes, handle, SandboxSpec())
        kept = [volume for volume in volumes if volume.name in mirror.ahead]
        async with self._objects() as objects:
            pods = await self._pods(objects, handle)
            for name in pods:
                sandbox = PodSandbox(objects, name, _what(handle), self._kind(handle))
                async with sandbox.watched():
                    sandbox.look(await objects.get(objects.path("pods", name)))
                    await sandbox.end()
                    if sandbox.is_running(pod.FILES):
                        wanted = {volume.name: volume.source for volume in kept}
                        await PodFiles(sandbox, wanted, [], fetched_at_most(handle)).fetch_all()
                        mirror.same(await trio.to_thread.run_sync(stamps_of, kept))
                    await sandbox.delete()
        if mirror.ahead:
            mirror.lost()
            raise WorkspaceLost(f"the pod of {_what(handle)} was gone before what is in it was fetched")

    # --- the rest of the port ---

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # files here are the runner's own

    async def list_owned(self, nonce: str) -> list[Handle]:
        return list(map(with_disk, await trio.to_thread.run_sync(self._directories.list_owned, nonce)))

    async def evict(self, handle: Handle) -> None:
        self._directories.check(handle)
        try:
            await self.retrieve(handle)
            await self._delete_pods(handle)
        except ProviderFailed as error:
            raise CleanUpIncomplete(f"{_what(handle)} cannot be ended: {error.message}", hint=error.hint) from error
        await trio.to_thread.run_sync(remove_placeholders, handle.tree)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        self._handed_off.pop(handle.id, None)
        if self._directories.owner(handle) is not None:
            try:
                await self._delete_pods(handle)
            except ProviderFailed as error:
                raise CleanUpIncomplete(
                    f"pods of {_what(handle)} may remain: {error.message}", hint=error.hint
                ) from error
        await trio.to_thread.run_sync(self._directories.destroy, as_here(handle))

    async def _delete_pods(self, handle: Handle) -> None:
        from runner.providers._pod_sandbox import PodSandbox

        if self._directories.owner(handle) is None:
            return
        async with self._objects() as objects:
            for name in await self._pods(objects, handle):
                sandbox = PodSandbox(objects, name, _what(handle), self._kind(handle))
                async with sandbox.watched():
                    sandbox.look(await objects.get(objects.path("pods", name)))
                    try:
                        await sandbox.delete()
                    except PlatformError as error:
                        raise CleanUpIncomplete(error.message, hint=error.hint) from error

    async def _pods(self, objects: ClusterObjects, handle: Handle) -> list[str]:
        """Return the names of a workspace's pods, and of Sandboxes, which may have none yet."""
        from runner.cluster import agent_sandbox

        selector = ",".join(f"{key}={value}" for key, value in self._labels(handle).items())
        paths = [objects.path("pods")]
        if self._kind(handle) == agent_sandbox.KIND:
            paths.append(agent_sandbox.path_of(objects))
        lists = [await objects.get(path, labelSelector=selector) or {} for path in paths]
        return sorted({str(one["metadata"]["name"]) for found in lists for one in found.get("items") or ()})

    def _kind(self, handle: Handle) -> str:
        """Return what makes a workspace's pods: what did at first, whatever settings say by now."""
        with suppress(WorkspaceLost):
            return str(read_image(handle).get("sandboxes", "pods"))
        return self._settings.kubernetes_sandboxes

    def _labels(self, handle: Handle) -> dict[str, str]:
        """Return the labels of a workspace's pods. Raises ``WorkspaceLost`` when it is gone."""
        owner = self._directories.owner(handle)
        if owner is None:
            raise WorkspaceLost(f"{_what(handle)} is gone")
        words = {"nonce": owner[1], "workspace": handle.slot or handle.id}
        return {**pod.PRODUCT, **{f"runner.{key}": pod.label(word) for key, word in words.items()}}


def _require_extra() -> None:
    """Raise ``ProviderFailed`` when what speaks to pods is not installed."""
    if find_spec("wsproto") is None:
        raise ProviderFailed("the extra `kubernetes` is not installed", hint="pip install 'plan-runner[kubernetes]'")


def uid_of(handle: Handle) -> int:
    """Return the user of a workspace's commands: its own, so that none counts another's processes as its own."""
    return trees.FIRST_UID + int.from_bytes(sha256((handle.slot or handle.id).encode()).digest()[:3])


def _guest_name() -> str:
    return f"runner-guest-{binary.find().sha256[:16]}"


def _what(handle: Handle) -> str:
    return f"workspace `{handle.id}`"
