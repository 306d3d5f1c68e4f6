"""Disk limits: each workspace has a file system of a fixed size in a sparse file.

Only for root. The image lies in ``RUNNER_HOME``, and takes as much of the host's disk as is written into it. It is
mounted where all processes of the runner see it, until the workspace is destroyed or the host restarts; ``mount`` then
mounts it again. An image has one loop device however often it is mounted, since two would destroy it; the device goes
with the last mount. There is no journal: after a crash of the host the file system is checked first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import trio
from msgspec import Struct

from runner.core.errors import ProviderFailed
from runner.safefs.linux import unmount
from runner.sandbox.mounts import can_stage, make_shared_directory, mount_shared, shared_directory

_MKFS = ("-q", "-F", "-b", "4096", "-i", "16384", "-m", "0", "-O", "^has_journal,^resize_inode")
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_CONTROL, _GET_FREE = "/dev/loop-control", 0x4C82
_CONFIGURE, _GET_STATUS = 0x4C0A, 0x4C05
_AUTOCLEAR = 4
_SHUT_DOWN, _WITHOUT_LOG = 0x8004587D, 2  # of ext4
_STATUS = struct.Struct("5Q4I64s64s32s2Q")  # ``struct loop_info64``
_ATTEMPTS = 50  # others take free devices at the same time
_STATE_AT, _CLEAN = 1024 + 58, 1  # of the superblock
_REPAIRED = 2  # the highest exit code of e2fsck for success


class Volume(Struct, frozen=True):
    """A mounted volume: its device as in ``/proc/*/mountinfo``, and its size."""

    device: str
    bytes: int


def why_no_volumes() -> str | None:
    """Return why this host cannot have volumes; ``None`` where it can."""
    if not can_stage():
        return "this root cannot mount"
    if shutil.which("mkfs.ext4", path=_PATH) is None:
        return "mkfs.ext4 is not installed"
    try:
        make_shared_directory()
        with open(_CONTROL, "rb") as control:
            os.close(os.open(f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"no loop device is available: {error}"
    return None


async def make_template(size: int) -> None:
    """Make the file system that images of a size are copied from, once. Raises ``ProviderFailed``."""
    if _template(size).exists():
        return
    await trio.to_thread.run_sync(make_shared_directory)
    directory = os.open(shared_directory(), os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600, dir_fd=directory)
    try:
        # Add the inode tables, 256 bytes for each 16 kB, which do not count towards the limit.
        os.ftruncate(file, (size + size // 64 + (1 << 16) + 4095) // 4096 * 4096)
        words = ["mkfs.ext4", *_MKFS, "-E", "lazy_itable_init=1,nodiscard", f"/proc/self/fd/{file}"]
        made = await trio.run_process(words, env={"PATH": _PATH}, pass_fds=[file], capture_stderr=True, check=False)
        if made.returncode != 0:
            raise ProviderFailed(
                f"a disk of {size} bytes cannot be made: {made.stderr.decode(errors='replace').strip()}"
            )
        with suppress(FileExistsError):
            os.link(f"/proc/self/fd/{file}", _template(size).name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(file)
        os.close(directory)


def _template(size: int) -> Path:
    return shared_directory() / f"template-{size}"


class Volumes:
    """The volumes of one ``RUNNER_HOME``. Blocking; call it in a worker thread of trio.

    A new volume needs ``floor`` bytes free on the host, or its own size if that is less: when the host's disk is full,
    writes inside a volume fail as on a broken disk.
    """

    def __init__(self, home: Path, *, floor: int = 1 << 28) -> None:
        self._floor = floor
        self._images = home / "volumes"
        self._mounted = shared_directory() / sha256(os.fsencode(home)).hexdigest()[:16]

    def place(self, id: str) -> Path:
        """Return the mount point of a workspace's volume, by which the other methods know it."""
        return self._mounted / id

    def make(self, place: Path, size: int) -> None:
        """Make an empty volume of a size that has a template. Raises ``OSError``, ``ProviderFailed``."""
        self._images.mkdir(mode=0o700, exist_ok=True)
        host = os.statvfs(self._images)
        free = host.f_bavail * host.f_frsize
        if free < min(size, self._floor):
            raise ProviderFailed(
                f"the disk of `{self._images}` has only {free >> 20} MiB free",
                hint="run `runner gc` to remove what is not needed any more",
            )
        part = self._part(place)
        _copy_sparse(_template(size), part)
        part.rename(self._image(place))
        self.mount(place)
        (place / "lost+found").rmdir()

    def mount(self, place: Path) -> None:
        """Mount a volume that is not mounted, as after a restart of the host.

        Raises ``FileNotFoundError`` when there is none, ``OSError``, and ``ProviderFailed`` if it cannot be repaired.
        """
        if place.is_mount():
            return
        with self._locked(place):
            if not place.is_mount():
                with _attached(self._image(place)) as device:
                    mount_shared(device, place, "ext4", "noinit_itable")

    def remove(self, place: Path) -> None:
        """Remove a volume with its content, also when half made.

        Processes that still use it cannot write any more, and keep its device until they end.
        """
        self._part(place).unlink(missing_ok=True)
        with suppress(FileNotFoundError), self._locked(place):
            self._image(place).unlink()  # first, so that nobody mounts it again
        if place.is_mount():
            _discard(place)
        with suppress(FileNotFoundError):
            place.rmdir()  # which unmounts it in any namespace that had a copy

    def find(self, place: Path) -> Volume | None:
        """Describe a mounted volume; ``None`` when it is not mounted."""
        if not place.is_mount():
            return None
        device, found = place.stat().st_dev, os.statvfs(place)
        return Volume(f"{os.major(device)}:{os.minor(device)}", found.f_blocks * found.f_frsize)

    def traces(self, place: Path) -> list[str]:
        """List image, loop device and mount of a volume, those that exist."""
        image = self._image(place)
        if not image.exists():
            return []
        device = _find(image, image.stat())
        name = None
        if device is not None:
            name = os.readlink(f"/proc/self/fd/{device}")
            os.close(device)
        return [
            str(image),
            *([f"loop device {name}"] if name else []),
            *([f"mount {place}"] if place.is_mount() else []),
        ]

    @contextmanager
    def _locked(self, place: Path) -> Iterator[None]:
        """Lock the image of a volume. Raises ``FileNotFoundError`` when there is none."""
        image = os.open(self._image(place), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(image, fcntl.LOCK_EX)
            yield
        finally:
            os.close(image)

    def _image(self, place: Path) -> Path:
        return self._images / f"{place.name}.ext4"

    def _part(self, place: Path) -> Path:
        return self._images / f".{place.name}.part"


def _discard(place: Path) -> None:
    """Unmount a file system and discard what is not on the disk yet, which can be all of it."""
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unmount(place)
        fcntl.ioctl(directory, _SHUT_DOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(directory)


def _copy_sparse(source: Path, to: Path) -> None:
    with open(source, "rb") as reading, open(to, "wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        writing.truncate(size)
        end = 0
        while (start := _data_after(reading.fileno(), end)) is not None:
            end = os.lseek(reading.fileno(), start, os.SEEK_HOLE)
            os.pwrite(writing.fileno(), os.pread(reading.fileno(), end - start, start), start)


def _data_after(file: int, at: int) -> int | None:
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError:  # only a hole follows
        return None


@contextmanager
def _attached(image: Path) -> Iterator[str]:
    """Attach an image to its loop device, which stays until the block ends and nothing of it is mounted."""
    with open(image, "rb+", buffering=0) as file:
        device = _find(image, os.fstat(file.fileno()))
        if device is None:
            _repair(file.fileno(), image)
            device = _attach(file.fileno(), image)
    try:
        yield os.readlink(f"/proc/self/fd/{device}")
    finally:
        os.close(device)


def _find(path: Path, image: os.stat_result) -> int | None:
    """Open the loop device that an image already has. Opens no other device, which would keep that from going."""
    for attached in Path("/sys/block").glob("loop*/loop"):
        try:
            if os.fsencode(path.name) not in (attached / "backing_file").read_bytes():
                continue
            device = os.open(f"/dev/{attached.parent.name}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = _STATUS.unpack(fcntl.ioctl(device, _GET_STATUS, bytes(_STATUS.size)))
        except OSError:  # detached meanwhile
            found = (0, 0)
        if found[:2] == (image.st_dev, image.st_ino):
            return device
        os.close(device)
    return None


def _attach(image: int, path: Path) -> int:
    """Open a free loop device for an image; it is detached when nothing has it open any more."""
    name = os.fsencode(path)[-63:]
    status = _STATUS.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, name, b"", b"", 0, 0)
    wanted = struct.pack("2I", image, 0) + status + bytes(64)
    for _ in range(_ATTEMPTS):
        with open(_CONTROL, "rb") as control:
            number = fcntl.ioctl(control, _GET_FREE)
        device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _CONFIGURE, wanted)
        except OSError as error:
            os.close(device)
            if error.errno != errno.EBUSY:
                raise
        else:
            return device
    raise ProviderFailed("no free loop device: others took each one first")


def _repair(image: int, path: Path) -> None:
    """Repair what a crash of the host has left."""
    (state,) = struct.unpack("<H", os.pread(image, 2, _STATE_AT))
    if state == _CLEAN:
        return
    words = ["e2fsck", "-fy", str(path)]
    done = trio.from_thread.run(partial(trio.run_process, words, env={"PATH": _PATH}, capture_stdout=True, check=False))
    if done.returncode > _REPAIRED:
        raise ProviderFailed(f"the disk `{path}` is damaged, and e2fsck cannot repair it")
