"""Host files shown to containers: opened without following a link, then mounted where only root can change a path.

The docker daemon looks sources up by their paths, in its own mount namespace, which need not be ours. So each source is
cloned as a mount from its descriptor and put below one directory there. These mounts outlive us: the directory is named
after the workspace, so that whoever cleans up finds it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from runner.core.errors import ProviderFailed
from runner.sandbox.docker_api import Engine, unreachable
from runner.sandbox.idmapped_mounts import is_lent, mapped
from runner.sandbox.mounts import Place, open_linkless, open_name

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _EMPTY_PATH, _RECURSIVE = 0x1, 0x1000, 0x8000
_FROM_EMPTY_PATH, _TO_EMPTY_PATH = 0x4, 0x40
_READ_ONLY, _NO_SUID, _NO_DEVICES = 0x1, 0x2, 0x4
_PRIVATE, _SHARED, _DETACH = 1 << 18, 1 << 20, 0x2
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_AT_FDCWD = -100
_BASE = Path("/run/runner-docker")
_PATIENCE = 5.0  # seconds for the daemon to take a connection

_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


class Namespace:
    """The mount namespace of the process that listens on a socket of this host."""

    def __init__(self, daemon: Path) -> None:
        """Raises ``OSError``, also where that process runs on another machine or is none that we see."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(str(daemon))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", credentials)
        if pid == 0:
            raise OSError(errno.ESRCH, "its process is not among those of this host")
        self._fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._is_ours = _is_same("/proc/self/ns/mnt", self._fd) and _is_same(f"/proc/{pid}/root", "/")

    def close(self) -> None:
        os.close(self._fd)

    def do(self, act: Callable[[], _T]) -> _T:
        """Do something there, in a thread that ends with it unless it is our own. Blocking, but for no longer than a
        few mounts take."""
        if self._is_ours:
            return act()

        def enter() -> _T:
            _check(_libc.unshare(_CLONE_FS), "unshare")
            _check(_libc.setns(self._fd, _CLONE_NEWNS), "setns")
            return act()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()


@dataclass(frozen=True)
class Cover:
    """What is to be mounted over ``path`` of a place; ``source`` is an ``O_PATH`` descriptor."""

    path: str
    source: int
    writable: bool


@contextmanager
def open_handed(engine: Engine, workspace: str, uid: int, lent: Path | None = None) -> Iterator[Handed]:
    """The sources of one opening, gone with the block; what an earlier opening left is removed first.

    ``lent`` is a directory of somebody else that ``uid`` sees as his own.
    Raises ``ProviderFailed``.
    """
    namespace = _namespace_of(engine)
    try:
        handed = Handed(namespace, _BASE / workspace, uid, lent)
    except OSError as error:
        raise ProviderFailed(f"the docker daemon cannot be shown directories of this host: {error}") from error
    try:
        yield handed
    finally:
        handed.close()
        namespace.close()


@contextmanager
def open_handed_again(engine: Engine, workspace: str, uid: int) -> Iterator[Handed]:
    """What another process has handed over and left, gone with the block. Raises ``ProviderFailed``."""
    namespace = _namespace_of(engine)
    handed = Handed(namespace, _BASE / workspace, uid, None, anew=False)
    try:
        yield handed
    finally:
        handed.close()
        namespace.close()


def _namespace_of(engine: Engine) -> Namespace:
    try:
        return Namespace(engine.socket)
    except OSError as error:
        raise unreachable(engine, error) from error


def traces_of(workspace: str) -> list[str]:
    """What this host's own mount namespace shows of what was handed over, and not taken back."""
    root = _BASE / workspace
    return [f"mount {root}"] if root.exists() else []


def remove_handed(workspace: str, daemon: Path) -> None:
    """What an opening whose runner was killed has left, where the daemon looks, or here if there is none any more."""
    root = _BASE / workspace
    try:
        namespace = Namespace(daemon)
    except OSError:
        _remove(root)
        return
    try:
        namespace.do(lambda: _remove(root))
    finally:
        namespace.close()


class Handed:
    """Places for a docker daemon. ``uid`` is the user that commands run as, ``lent`` as for ``open_handed``.

    Those that ``stay`` are not removed when it is closed. Unless it is made ``anew`` it has what is there already.
    """

    def __init__(self, namespace: Namespace, root: Path, uid: int, lent: Path | None, *, anew: bool = True) -> None:
        self._namespace = namespace
        self._root = root
        self._uid = uid
        self._lent = lent
        self._count = 0
        self._channel = root / "channel"
        self.stay = False
        if anew:
            namespace.do(self._prepare)

    def _prepare(self) -> None:
        _remove(self._root)
        self._root.mkdir(mode=0o700, parents=True)
        _mount("tmpfs", self._root, "tmpfs", "mode=0700")
        _check(_libc.mount(None, os.fsencode(self._root), None, ctypes.c_ulong(_PRIVATE), None), "mount")
        self._channel.mkdir(mode=0o700)
        os.chown(self._channel, self._uid, self._uid)

    def add(self, source: int) -> Place:
        try:
            directory = stat.S_ISDIR(os.fstat(source).st_mode)
            mount = mapped(source, self._uid) if is_lent(source, self._lent, self._uid) else self._clone(source)
        finally:
            os.close(source)
        try:
            _set_attributes(mount, _NO_SUID | _NO_DEVICES)
            target = self._namespace.do(lambda: self._put(mount, directory=directory))
        finally:
            os.close(mount)
        return Place(str(target), "bind", str(target))

    def _clone(self, source: int) -> int:
        flags = _CLONE | os.O_CLOEXEC | _EMPTY_PATH | _RECURSIVE

        def clone() -> int:
            return _check(_libc.syscall(_OPEN_TREE, source, b"", flags), "open_tree")

        try:
            return clone()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._namespace.do(clone)  # a descriptor from there cannot be cloned from here

    def layer(self, lower: Place, upper: Place) -> Place:
        options = f"lowerdir={lower.path},upperdir={upper.path}/files,workdir={upper.path}/work"

        def make() -> Path:
            target = self._target(directory=True)
            _mount("overlay", target, "overlay", options)
            return target

        target = self._namespace.do(make)
        return Place(str(target), "bind", str(target))

    def layer_inside(self, lower: Place, upper: Place) -> Place:
        return self.layer(lower, upper)

    def add_memory(self, size_bytes: int, uid: int) -> Place:
        """An empty directory of a user for files in memory, which count as that of whoever writes them."""

        def make() -> Path:
            target = self._target(directory=True)
            _mount("tmpfs", target, "tmpfs", f"mode=0755,uid={uid},gid={uid},size={size_bytes}")
            return target

        target = self._namespace.do(make)
        return Place(str(target), "bind", str(target))

    def open(self, place: Place) -> int:
        return self._namespace.do(lambda: open_linkless(Path(place.path)))

    def share(self, place: Place) -> None:
        """Let containers that follow a place see what is mounted below it after they were made."""
        flags = ctypes.c_ulong(_SHARED)
        self._namespace.do(lambda: _check(_libc.mount(None, os.fsencode(place.path), None, flags, None), "mount"))

    def cover(self, place: int, covers: Sequence[Cover]) -> None:
        """Mount over paths of an open place, which lead through no link, outermost first.

        Each mount has its flags before anybody can see it. Takes the sources over. Raises ``OSError``.
        """

        def clone(cover: Cover) -> int:
            mount = self._clone(cover.source)
            _set_attributes(mount, _NO_SUID | _NO_DEVICES | (0 if cover.writable else _READ_ONLY))
            return mount

        def put() -> None:
            for cover, mount in zip(covers, mounts, strict=True):
                target = _open_below(place, cover.path)
                try:
                    words = (mount, b"", target, b"", _FROM_EMPTY_PATH | _TO_EMPTY_PATH)
                    _check(_libc.syscall(_MOVE_MOUNT, *words), f"move_mount {cover.path}")
                finally:
                    os.close(target)

        mounts: list[int] = []
        try:
            mounts += map(clone, covers)
            self._namespace.do(put)
        finally:
            for fd in (*mounts, *(cover.source for cover in covers)):
                os.close(fd)

    def seal(self, places: Sequence[Place]) -> None:
        """Nothing below these can be written through them from now on; docker seals only the topmost mount."""

        def make_read_only() -> None:
            for place in places:
                fd = open_linkless(Path(place.path))
                try:
                    _set_attributes(fd, _READ_ONLY)
                finally:
                    os.close(fd)

        self._namespace.do(make_read_only)

    def listen(self, name: str) -> tuple[socket.socket, Place]:
        """A socket that listens in a directory for only the workspace's user, and that directory."""
        listener = socket.socket(socket.AF_UNIX)
        path = self._channel / name

        def bind() -> None:
            listener.bind(str(path))
            os.chown(path, self._uid, self._uid)

        self._namespace.do(bind)
        listener.listen()
        return listener, Place(str(self._channel), "bind", str(self._channel))

    def _put(self, mount: int, *, directory: bool) -> Path:
        target = self._target(directory=directory)
        path = os.fsencode(target)
        _check(_libc.syscall(_MOVE_MOUNT, mount, b"", _AT_FDCWD, path, _FROM_EMPTY_PATH), f"move_mount {target}")
        return target

    def _target(self, *, directory: bool) -> Path:
        target = self._root / str(self._count)
        self._count += 1
        if directory:
            target.mkdir()
        else:
            target.touch()
        return target

    def close(self) -> None:
        if not self.stay:
            self._namespace.do(lambda: _remove(self._root))


def _is_same(one: str, other: str | int) -> bool:
    return os.path.samestat(os.stat(one), os.stat(other))


def _open_below(directory: int, path: str) -> int:
    """An ``O_PATH`` descriptor; what is mounted on the way is entered, and no link followed."""
    fd = os.dup(directory)
    for name in path.split("/"):
        try:
            inner = open_name(fd, name)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _remove(root: Path) -> None:
    """Unmount all that is there, however often it was mounted, and remove the directory."""
    while _libc.umount2(os.fsencode(root), _DETACH) == 0:
        pass
    with suppress(FileNotFoundError):
        root.rmdir()


def _set_attributes(mount: int, attributes: int) -> None:
    wanted = struct.pack("4Q", attributes, 0, 0, 0)
    flags = _EMPTY_PATH | _RECURSIVE
    _check(_libc.syscall(_MOUNT_SETATTR, mount, b"", flags, wanted, len(wanted)), "mount_setattr")


def _mount(source: str, target: Path, kind: str, options: str) -> None:
    flags = ctypes.c_ulong(_NO_SUID | _NO_DEVICES)
    words = (os.fsencode(source), os.fsencode(target), os.fsencode(kind))
    _check(_libc.mount(*words, flags, os.fsencode(options)), f"mount {target}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
