"""Host files for containers: opened without following a link, then mounted where only root can change a path.

The docker daemon looks sources up by their paths, in its own mount namespace, which need not be ours. So each source is
cloned as a mount from its descriptor and attached below one directory there. These mounts outlive this process: the
directory is named after the workspace, so that a later clean-up finds it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from runner.core.errors import ProviderFailed
from runner.safefs import linux
from runner.safefs.linux import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY
from runner.safefs.safe_open import open_linkless, open_path
from runner.sandbox.docker_api import Engine, unreachable
from runner.sandbox.idmapped_mounts import clone_idmapped, is_idmapped
from runner.sandbox.mounts import MountSource, make_target, mount_overlay, mount_tmpfs

_BASE = Path("/run/runner-docker")
_CONNECT_TIMEOUT = 5.0  # seconds for the daemon to accept a connection
_T = TypeVar("_T")


def peer_of(daemon: Path) -> tuple[int, int]:
    """Return the pid and the uid of the process that listens on a socket of this host. Raises ``OSError``."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        connection.connect(str(daemon))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


class Namespace:
    """The mount namespace of the process that listens on a socket of this host."""

    def __init__(self, daemon: Path) -> None:
        """Open it. Raises ``OSError``, also where that process runs on another machine or is invisible here."""
        pid, _ = peer_of(daemon)
        if pid == 0:
            raise OSError(errno.ESRCH, "the daemon's process is on another host")
        self._fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._is_ours = _is_same("/proc/self/ns/mnt", self._fd) and _is_same(f"/proc/{pid}/root", "/")

    def close(self) -> None:
        os.close(self._fd)

    def call(self, act: Callable[[], _T]) -> _T:
        """Call ``act`` in the namespace, in a thread of its own unless the namespace is ours.

        Blocks, but only for as long as a few mounts take.
        """
        if self._is_ours:
            return act()

        def enter() -> _T:
            linux.unshare(linux.CLONE_FS)
            linux.setns(self._fd, linux.CLONE_NEWNS)
            return act()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()


class Cover(Struct, frozen=True):
    """A mount over ``path`` of an open tree; ``source`` is an ``O_PATH`` descriptor."""

    path: str
    source: int
    writable: bool


@contextmanager
def open_daemon_stage(engine: Engine, workspace: str, uid: int, idmapped: Path | None = None) -> Iterator[DaemonStage]:
    """Stage the sources of one container; what an earlier one left behind is removed first.

    ``idmapped`` is a directory of another user that ``uid`` sees as its own. Raises ``ProviderFailed``.
    """
    namespace = _namespace_of(engine)
    try:
        stage = DaemonStage(namespace, _BASE / workspace, uid, idmapped)
    except OSError as error:
        raise ProviderFailed(f"the docker daemon cannot be shown directories of this host: {error}") from error
    with _closing(stage, namespace):
        yield stage


@contextmanager
def reopen_daemon_stage(engine: Engine, workspace: str, uid: int) -> Iterator[DaemonStage]:
    """Take over the stage that another process has detached. Raises ``ProviderFailed``."""
    namespace = _namespace_of(engine)
    stage = DaemonStage(namespace, _BASE / workspace, uid, None, reopen=True)
    with _closing(stage, namespace):
        yield stage


@contextmanager
def _closing(stage: DaemonStage, namespace: Namespace) -> Iterator[None]:
    try:
        yield
    finally:
        stage.close()
        namespace.close()


def _namespace_of(engine: Engine) -> Namespace:
    try:
        return Namespace(engine.socket)
    except OSError as error:
        raise unreachable(engine, error) from error


def traces_of(workspace: str) -> list[str]:
    """List the mounts of a workspace that are left in this host's own mount namespace."""
    root = _BASE / workspace
    return [f"mount {root}"] if root.exists() else []


def remove_stale_stage(workspace: str, daemon: Path) -> None:
    """Remove what a killed runner left in the daemon's namespace, or in ours if the daemon is gone."""
    root = _BASE / workspace
    try:
        namespace = Namespace(daemon)
    except OSError:
        _remove(root)
        return
    try:
        namespace.call(lambda: _remove(root))
    finally:
        namespace.close()


class DaemonStage:
    """A ``MountStage`` for a docker daemon. ``uid`` is the user that commands run as.

    With ``detached`` set its mounts stay when it is closed; ``reopen`` continues with those mounts.
    """

    def __init__(
        self, namespace: Namespace, root: Path, uid: int, idmapped: Path | None, *, reopen: bool = False
    ) -> None:
        self._namespace = namespace
        self._root = root
        self._uid = uid
        self._idmapped = idmapped
        self._count = 0
        self._channel = root / "channel"
        self.detached = False
        if not reopen:
            namespace.call(self._prepare)

    def _prepare(self) -> None:
        _remove(self._root)
        self._root.mkdir(mode=0o700, parents=True)
        mount_tmpfs(self._root, "mode=0700")
        linux.mount(self._root, linux.MS_PRIVATE)
        self._channel.mkdir(mode=0o700)
        os.chown(self._channel, self._uid, self._uid)

    def add(self, source: int) -> MountSource:
        try:
            directory = stat.S_ISDIR(os.fstat(source).st_mode)
            idmapped = is_idmapped(source, self._idmapped, self._uid)
            mount = clone_idmapped(source, self._uid) if idmapped else self._clone(source)
        finally:
            os.close(source)
        try:
            linux.set_mount_attributes(mount, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
            target = self._namespace.call(lambda: self._attach(mount, directory=directory))
        finally:
            os.close(mount)
        return MountSource(str(target))

    def _clone(self, source: int) -> int:
        try:
            return linux.clone_mount(source, recursive=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A descriptor from the daemon's namespace cannot be cloned from ours.
            return self._namespace.call(lambda: linux.clone_mount(source, recursive=True))

    def overlay(self, lower: MountSource, layer: MountSource) -> MountSource:
        return self._make(lambda target: mount_overlay(lower, layer, target))

    def overlay_inside(self, lower: MountSource, layer: MountSource) -> MountSource:
        return self.overlay(lower, layer)

    def add_tmpfs(self, size_bytes: int, uid: int) -> MountSource:
        """Add an empty directory of a user for files in memory, which is charged to whoever writes them."""
        return self._make(lambda target: mount_tmpfs(target, f"mode=0755,uid={uid},gid={uid},size={size_bytes}"))

    def _make(self, mount: Callable[[Path], None]) -> MountSource:
        def make() -> Path:
            target = self._target(directory=True)
            mount(target)
            return target

        return MountSource(str(self._namespace.call(make)))

    def open(self, source: MountSource) -> int:
        return self._namespace.call(lambda: open_linkless(Path(source.path)))

    def share(self, source: MountSource) -> None:
        """Propagate later mounts below a source to containers that have it."""
        self._namespace.call(lambda: linux.mount(Path(source.path), linux.MS_SHARED))

    def cover(self, tree: int, covers: Sequence[Cover]) -> None:
        """Mount over paths of an open tree, outermost first; the paths lead through no link.

        Each mount has its flags before anybody can see it. Takes the sources over. Raises ``OSError``.
        """

        def clone(cover: Cover) -> int:
            mount = self._clone(cover.source)
            attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if cover.writable else MOUNT_ATTR_RDONLY)
            linux.set_mount_attributes(mount, attributes)
            return mount

        def attach() -> None:
            for cover, mount in zip(covers, mounts, strict=True):
                target = open_path(tree, *cover.path.split("/"))
                try:
                    linux.move_mount(mount, target)
                finally:
                    os.close(target)

        mounts: list[int] = []
        try:
            mounts += map(clone, covers)
            self._namespace.call(attach)
        finally:
            for fd in (*mounts, *(cover.source for cover in covers)):
                os.close(fd)

    def seal(self, sources: Sequence[MountSource]) -> None:
        """Make sources read-only with all mounts below them; docker itself does so only for the topmost mount."""

        def make_read_only() -> None:
            for source in sources:
                fd = open_linkless(Path(source.path))
                try:
                    linux.set_mount_attributes(fd, MOUNT_ATTR_RDONLY)
                finally:
                    os.close(fd)

        self._namespace.call(make_read_only)

    def listen(self, name: str) -> tuple[socket.socket, MountSource]:
        """Open a listening socket in a directory that only the workspace's user can enter; return both."""
        listener = socket.socket(socket.AF_UNIX)
        path = self._channel / name

        def bind() -> None:
            listener.bind(str(path))
            os.chown(path, self._uid, self._uid)

        self._namespace.call(bind)
        listener.listen()
        return listener, MountSource(str(self._channel))

    def _attach(self, mount: int, *, directory: bool) -> Path:
        target = self._target(directory=directory)
        linux.move_mount(mount, target)
        return target

    def _target(self, *, directory: bool) -> Path:
        self._count += 1
        return make_target(self._root / str(self._count), directory=directory)

    def close(self) -> None:
        if not self.detached:
            self._namespace.call(lambda: _remove(self._root))


def _is_same(one: str, other: str | int) -> bool:
    return os.path.samestat(os.stat(one), os.stat(other))


def _remove(root: Path) -> None:
    linux.unmount(root)
    with suppress(FileNotFoundError):
        root.rmdir()
