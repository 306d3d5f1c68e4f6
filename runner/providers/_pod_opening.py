"""One opening of a workspace in a pod: which directories are there, and how files go there and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from runner.cluster.objects import ClusterObjects
from runner.core.errors import ProviderFailed, VolumeFailed, WorkspaceLost
from runner.core.model import Handle, IsolationClass
from runner.core.nurseries import unwrapping_groups
from runner.ports.provider import SandboxSpec
from runner.providers._pod_cache import NOT_KEPT, take_or_send
from runner.providers._pod_disk import fetched_at_most, is_toolchain
from runner.providers._pod_files import PodFiles
from runner.providers._pod_sandbox import PodSandbox
from runner.sandbox import pod
from runner.sandbox.guest_files import GuestFiles
from runner.sandbox.mirrored import Volume, paths_of_dependencies
from runner.sandbox.protected_paths import Guard
from runner.sandbox.tar_trees import Source, pack_trees


@dataclass(frozen=True)
class PodOpening:
    """``seen`` is the directory here that shows the tree of the pod, ``tree`` its descriptor."""

    handle: Handle
    spec: SandboxSpec
    objects: ClusterObjects
    volumes: Sequence[Volume]
    guards: Sequence[Guard]
    seen: Path
    tree: int
    isolation: IsolationClass
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> list[Volume]:
        return [volume for volume in self.volumes if volume.kept]

    @property
    def skipped(self) -> list[str]:
        return paths_of_dependencies(self.spec)

    @property
    def most(self) -> int:
        return fetched_at_most(self.handle)

    def roots_by(self, key: Callable[[Volume], str]) -> dict[str, Path]:
        """Return the directories that are mirrored, that of the tree first."""
        return {key(self.volumes[0]): self.seen, **{key(volume): volume.source for volume in self.kept}}

    async def put(self, sandbox: PodSandbox, volumes: Sequence[Volume]) -> None:
        """Send volumes to a pod that runs."""
        if volumes:
            sources = [Source(volume.name, volume.source, 0) for volume in volumes]
            await unpack(sandbox, partial(sandbox.run, pod.FILES), sources)

    async def refresh(self, sandbox: PodSandbox, files: GuestFiles) -> None:
        """Fetch the tree, whether the guest answers or not."""
        tree = self.volumes[0]
        if not await files.fetch([tree.target]):
            await PodFiles(sandbox, {tree.name: self.seen}, self.skipped, self.most).fetch_all()

    async def fetch(self, sandbox: PodSandbox) -> bool:
        """Fetch the files of a pod whose guest has ended; tell whether they were still there."""
        if not sandbox.is_running(pod.FILES):
            return False
        wanted = {volume.name: volume.source for volume in self.kept}
        skipped = self.skipped if self.volumes[0].kept else []
        try:
            await PodFiles(sandbox, wanted, skipped, self.most).fetch_all()
        except WorkspaceLost:
            return False
        return True

    async def measure(self, files: GuestFiles) -> int:
        return await files.measure([volume.target for volume in self.volumes if volume.writable])


async def send_all(
    sandbox: PodSandbox, uid: int, private: Path, volumes: Sequence[Volume], *, cache: str | None
) -> tuple[str, ...]:
    """Send everything to a new pod, which then starts the container that shows it; return what is to be noted.

    Toolchains come from the ``cache``, a claim, if there is one.
    """
    system = [
        Source(f"{pod.SYSTEM}/{name}", private, 0, content=content) for name, content in pod.system_files(uid).items()
    ]
    notes = []
    cached = [volume for volume in volumes if cache is not None and is_toolchain(volume)]
    for volume in cached:
        code = await take_or_send(sandbox, volume)
        if code == NOT_KEPT:
            notes.append(f"claim `{cache}` could not keep toolchain `{volume.target}`")
        else:
            _check_unpacked(sandbox, code)
    sources = [*system, *(Source(volume.name, volume.source, 0) for volume in volumes if volume not in cached)]
    await unpack(sandbox, partial(sandbox.run_first, pod.FIRST), sources, "then")
    return tuple(notes)


async def unpack(
    sandbox: PodSandbox, run: Callable[..., Awaitable[int]], sources: Sequence[Source], *then: str
) -> None:
    _check_unpacked(sandbox, await run(["unpack", pod.FILES_PLACE, *then], partial(pack_trees, sources)))


def _check_unpacked(sandbox: PodSandbox, code: int) -> None:
    if code != 0:
        if code == 5 and sandbox.has_volume:
            message = f"the files of {sandbox.what} do not fit into its volume"
            raise VolumeFailed(message, hint="give it more `disk`")
        why = "its node's disk is full" if code == 5 else f"the pod's program ended with {code}"
        raise ProviderFailed(f"files cannot be sent to the pod of {sandbox.what}: {why}")


@asynccontextmanager
async def deleted(sandbox: PodSandbox) -> AsyncIterator[None]:
    """Delete a pod when the block ends."""
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await sandbox.delete(grace=1 if sandbox.has_started else 0)


async def prove(sandbox: PodSandbox) -> None:
    """Wait until a pod has started, and its network has been looked at. Raises ``ProviderFailed``."""
    with unwrapping_groups():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sandbox.check_closed)
            await sandbox.wait_dialled()
            sandbox.started()
