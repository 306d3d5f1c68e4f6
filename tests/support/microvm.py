"""A virtual machine with a kernel of another host: cgroup version 2 alone, a fresh boot, nothing of this host's state.

It is emulated (QEMU without KVM) and needs a kernel that was unpacked from a package. Its root file system is made of
this host's programs, the interpreter that runs the tests, the packages that it sees, and this repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import components, dockerd
from tests.support.needs import Component

ROOT = Path(__file__).parents[2]
PACKAGE = "linux-image-cloud-amd64"  # Debian's smallest kernel
_MODULES = ("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "overlay", "loop")
_HEAVY = ("ziglang*", "mypy*", "*mypyc*", "hypothesis*", "virtualenv*", "pip*", "ruff*", "setuptools*", "__pycache__")
_REPOSITORY = ("runner", "tests", "manifests", "runners", "schemas", "skills", "pyproject.toml", "README.md")
_ENDED = "the tests have ended with"
_POWER_OFF = 0x4321FEDC  # LINUX_REBOOT_CMD_POWER_OFF, of linux/reboot.h
_BOOT = "console=ttyS0 quiet panic=-1 tsc_early_khz=2000000 no_timer_check"  # it cannot calibrate its clock otherwise

_FIRST = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox insmod /$module.ko; done
/bin/busybox mount -t ext4 /dev/vda /root
exec /bin/busybox switch_root /root /init
"""

_INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts
export PATH={path} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/repository:/packages
cd /repository
run() {{ {python} -m pytest -p no:cacheprovider -o addopts= --color=no --basetemp=/tmp/pt "$@"; }}
run {arguments}
topmost=$?
mkdir /sys/fs/cgroup/session
echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
echo $$ > /sys/fs/cgroup/session/cgroup.procs
run {arguments}
echo "{ended} $(($? + topmost))"
exec {python} -c 'import ctypes, os; os.sync(); ctypes.CDLL(None).reboot({power_off})'
"""


@dataclass(frozen=True)
class Ran:
    """The status of the tests in the topmost group plus that of those in a session's own, and all that was printed.

    The status is ``None`` when the machine ended before them.
    """

    status: int | None
    console: str


def missing() -> str | None:
    """Why there can be no such machine here; ``None`` when there can."""
    programs = ("qemu-system-x86_64", "mkfs.ext4", "dpkg-deb", "apt-get", "busybox")
    absent = [program for program in programs if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


MACHINE = Component("virtual machine", missing, f"sudo {components.COMMAND} --nightly")


def run_tests(arguments: Sequence[str], *, below: Path, seconds: float) -> Ran:
    """Boot a machine and run pytest in it with these arguments, twice, for as long as ``seconds``."""
    kernel, modules = _unpack_kernel(below / "kernel")
    initial, disk = below / "initial", below / "disk"
    _make_initial(initial, modules)
    _make_disk(disk, below / "root", arguments)
    words = [
        *("qemu-system-x86_64", "-M", "microvm,pit=on,pic=on,rtc=on", "-cpu", "max", "-m", "1536", "-smp", "2"),
        *("-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(initial), "-append", _BOOT),
        *("-drive", f"id=root,file={disk},format=raw,if=none", "-device", "virtio-blk-device,drive=root"),
    ]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, errors="replace", timeout=seconds)
    console = ended.stdout + ended.stderr
    _, _, last = console.rpartition(_ENDED)
    status = last.split()[0] if _ENDED in console else ""
    return Ran(int(status) if status.isdigit() else None, console)


def _unpack_kernel(directory: Path) -> tuple[Path, dict[str, Path]]:
    """The kernel's image, and the modules that there are, by name."""
    directory.mkdir()
    shown = subprocess.run(["apt-cache", "depends", PACKAGE], check=True, capture_output=True, text=True).stdout
    package = next(line.split()[-1] for line in shown.splitlines() if "Depends: linux-image-" in line)
    subprocess.run(["apt-get", "download", "-qq", package], check=True, cwd=directory, stderr=subprocess.DEVNULL)
    (archive,) = directory.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(directory)], check=True)
    (image,) = directory.glob("boot/vmlinuz-*")
    return image, {file.stem: file for file in directory.rglob("*.ko")}


def _make_initial(archive: Path, modules: dict[str, Path]) -> None:
    root = archive.with_suffix(".d")
    (root / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin" / "busybox")
    found = [name for name in _MODULES if name in modules]  # some kernels have a part built in
    for name in found:
        shutil.copy(modules[name], root / f"{name}.ko")
    (root / "init").write_text(_FIRST.format(modules=" ".join(found)))
    (root / "init").chmod(0o755)
    pack = "find . | busybox cpio -o -H newc 2>/dev/null"
    with archive.open("wb") as file:
        subprocess.run(["sh", "-c", pack], check=True, cwd=root, stdout=file)


def _make_disk(disk: Path, root: Path, arguments: Sequence[str]) -> None:
    root.mkdir()
    dockerd.unpack_root_file_system(root)
    _copy(_interpreter(), root)
    for name in _REPOSITORY:
        source = ROOT / name
        target = root / "repository" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    packages = Path(sysconfig.get_path("purelib"))
    shutil.copytree(packages, root / "packages", symlinks=True, ignore=shutil.ignore_patterns(*_HEAVY))
    words = " ".join(f"'{argument}'" for argument in arguments)
    init = _INIT.format(path=dockerd.PATH, python=_python(), arguments=words, ended=_ENDED, power_off=_POWER_OFF)
    (root / "init").write_text(init)
    (root / "init").chmod(0o755)
    size = subprocess.run(["du", "-sm", str(root)], check=True, capture_output=True, text=True).stdout.split()[0]
    with disk.open("wb") as file:
        file.truncate((int(size) + 512) << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", str(root), str(disk)], check=True)


def _python() -> str:
    return os.path.realpath(sys.executable)


def _interpreter() -> Iterator[Path]:
    """What runs these tests: the program, its libraries and its modules."""
    library = Path(sysconfig.get_path("stdlib"))
    yield Path(_python())
    yield library
    programs = [_python(), *map(str, (library / "lib-dynload").glob("*.so"))]
    programs += map(str, Path(sysconfig.get_path("purelib")).rglob("*.so"))
    yield from map(Path, sorted(set(dockerd.libraries(programs))))


def _copy(paths: Iterator[Path], root: Path) -> None:
    for path in paths:
        target = root / dockerd.resolved(str(path))
        if path.is_dir():
            without = shutil.ignore_patterns("__pycache__", "site-packages", "test", "config-*", "idlelib", "ensurepip")
            shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True, ignore=without)
        elif not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
