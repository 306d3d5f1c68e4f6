"""A docker daemon of the tests' own, and a small image of this host's own programs.

One daemon serves all workers of a session: the first that asks starts it, below a directory that they share, and the
last that leaves ends it. It has a network namespace of its own: told to have no bridge, it would remove the host's.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from docker import APIClient
from docker.errors import DockerException
from requests.exceptions import RequestException

from tests.support.needs import Component

IMAGE = "runner-tests:1"
PATH = "/usr/local/bin:/usr/bin:/bin"

_PROGRAMS = (
    "awk bash cat chmod cp cut date dirname env find grep head hostname id ln ls mkdir mkfifo mktemp mount mv pwd "
    "python3 readlink rm sed setsid sh sha256sum sleep sort stat tail tee test timeout touch tr true truncate umount "
    "uniq wc xargs"
)
_WITHOUT = ("__pycache__", "config-", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test")
_READY, _STOPPED = 60.0, 20.0  # seconds

_T = TypeVar("_T")
_held = ExitStack()
_NAME = "RUNNER_TESTS_DOCKERD"  # for the processes that a test starts, too
os.environ.setdefault(_NAME, os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:12])


class Daemon:
    """A docker daemon below ``root``, with other directories than any that runs here; ``data`` outlives it."""

    apart: tuple[str, ...] = ("unshare", "--net")
    listening: tuple[str, ...] = ()

    def __init__(self, root: Path, data: Path | None = None) -> None:
        self.root = root
        self.data = data or root / "data"
        self.socket = root / "docker.sock"
        self.host = f"unix://{self.socket}"

    def start(self, bridge: str | None = None) -> None:
        """Start it and wait until it answers; it outlives us. With a ``bridge`` it has the host's network."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / "daemon.json").write_text(json.dumps({"runtimes": _runtimes()}))
        words = [
            *("setsid", "--fork", *(() if bridge else self.apart)),
            *("dockerd", "--config-file", str(self.root / "daemon.json"), "--host", f"unix://{self.socket}"),
            *self.listening,
            *("--data-root", str(self.data), "--exec-root", str(self.root / "exec")),
            *("--pidfile", str(self.root / "pid"), "--log-level=warn"),
            *(f"--bridge={bridge or 'none'}", "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
        ]
        with (self.root / "log").open("ab") as log:
            env = {"PATH": os.environ["PATH"]}  # not that of the test which happens to be the first
            subprocess.run(words, check=True, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _READY
        while not self.answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"dockerd does not start:\n{(self.root / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    @contextmanager
    def client(self) -> Iterator[APIClient]:
        with closing(APIClient(f"unix://{self.socket}", timeout=30)) as client:
            yield client

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.socket))
                with closing(APIClient(f"unix://{self.socket}", version="1.41", timeout=5)) as client:
                    return bool(client.ping())
            except (OSError, DockerException, RequestException):
                return False

    def pids(self) -> list[int]:
        """The daemon, and the one behind it that holds the containers."""
        return [int(file.read_text()) for file in self._pid_files() if file.exists()]

    def _pid_files(self) -> tuple[Path, Path]:
        return self.root / "pid", self.root / "exec" / "containerd" / "containerd.pid"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pids()[0], number)

    def kill(self) -> None:
        """The one behind it dies with it; containers live on."""
        pids = self.pids()
        self.signal(signal.SIGKILL)
        wait_until_gone(pids)
        for file in self._pid_files():
            file.unlink()  # they may be zombies yet, which the next one would take for living ones

    def make_image(self) -> None:
        with self.client() as client:
            repository, _, tag = IMAGE.partition(":")
            client.import_image_from_data(root_file_system(), repository=repository, tag=tag)

    def stop(self) -> None:
        """End it and remove what it has left."""
        pids = self.pids()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids[: 1 if number is signal.SIGTERM else None]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            wait_until_gone(pids)
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        ours = f"{self.root}/", f"{self.data}/"
        for point in sorted((point for point in mounts if point.startswith(ours)), reverse=True):
            subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def mortal(name: str) -> Iterator[Daemon]:
    """A daemon of its own that tests may stop and kill."""
    DOCKER.require()
    daemon = Daemon(Path("/tmp", f"runner-dockerd-{name}-{os.getpid()}"))
    daemon.start()
    try:
        daemon.make_image()
        yield daemon
    finally:
        if not daemon.answers():
            daemon.start()
        daemon.stop()


def _runtimes() -> dict[str, dict[str, object]]:
    """Besides the daemon's own: gVisor's, where it is installed, as the provider's hint says."""
    runsc = shutil.which("runsc")
    return {"runsc": {"path": runsc, "runtimeArgs": ["--network=none"]}} if runsc else {}


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _STOPPED
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def root_file_system(*more: str) -> bytes:
    """Programs of this host, and ``more``, with what they are linked to, and Python's library."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        found = {path for path in (shutil.which(program, path=PATH) for program in (*_PROGRAMS.split(), *more)) if path}
        library = _output(["python3", "-SIc", "import sysconfig; print(sysconfig.get_path('stdlib'))"]).strip()
        modules = [str(module) for module in Path(library, "lib-dynload").glob("*.so")]
        add_programs(tar, sorted(found | set(libraries([*found, *modules]))))
        tar.add(library, library.lstrip("/"), filter=_light)
    return buffer.getvalue()


def add_programs(tar: tarfile.TarFile, paths: list[str]) -> None:
    """Add files of this host to a root file system, with every directory: one that is left out may be closed."""
    names = {resolved(path): path for path in paths}
    parents = {str(parent) for name in names for parent in Path(name).parents} - {"."}
    for name in sorted({"dev", "etc", "proc", "run", "sys", "tmp", *parents}):
        directory = tarfile.TarInfo(name)
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(directory)
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            tar.add(f"/{name}", name)
    for name, path in names.items():
        tar.add(os.path.realpath(path), name)


def unpack_root_file_system(directory: Path) -> None:
    """What is in the image, as files."""
    with tarfile.open(fileobj=io.BytesIO(root_file_system())) as tar:
        tar.extractall(directory, filter="fully_trusted")


def _light(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = entry.name.rpartition("/")[2]
    return None if name.startswith(_WITHOUT) and entry.isdir() else entry


def resolved(path: str) -> str:
    """The name of a file in an image in which the directories are links as they are here."""
    return f"{os.path.realpath(os.path.dirname(path))}/{os.path.basename(path)}".lstrip("/")


def libraries(programs: list[str]) -> Iterator[str]:
    """What these are linked to."""
    for line in _output(["ldd", *programs]).splitlines():
        yield from (word for word in line.split() if word.startswith("/") and not word.endswith(":"))


def _output(words: list[str]) -> str:
    return subprocess.run(words, check=False, capture_output=True, text=True, env={"PATH": PATH}).stdout


def missing() -> str | None:
    """Why there can be no daemon here; ``None`` when there can."""
    if os.geteuid() != 0:
        return "only root can start a docker daemon"
    absent = [program for program in ("dockerd", "containerd", "runc") if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}; apt install docker.io" if absent else None


def no_gvisor() -> str | None:
    """Why there can be none here; ``None`` when there can."""
    return missing() or (None if shutil.which("runsc") else "not installed: runsc; apt install runsc")


DOCKER = Component("docker daemon", missing)
GVISOR = Component("gVisor", no_gvisor)


def host() -> str:
    """The address of the session's daemon, which is started for the first that asks; ``leave`` must follow."""
    return session().host


@cache
def session() -> Daemon:
    DOCKER.require()
    return hold(shared(os.environ[_NAME]))


@cache
def session_of(make: type[Daemon]) -> Daemon:
    """The session's daemon of another kind."""
    return hold(shared(f"{os.environ[_NAME]}-{make.__name__}", make=make))


def image_id() -> str:
    with session().client() as client:
        return str(client.inspect_image(IMAGE)["Id"])


def containers(workspace: str) -> list[str]:
    """The ids of a workspace's containers, those that have ended as well."""
    with session().client() as client:
        found = client.containers(all=True, filters={"label": f"runner.workspace={workspace}"})
    return [container["Id"] for container in found]


def kept_of(workspace: str) -> list[str]:
    """All that a daemon has of a workspace: containers, volumes, and images that were made of it."""
    ours = {"label": f"runner.workspace={workspace}"}
    with session().client() as client:
        kept = [*client.containers(all=True, filters=ours), *client.images(filters=ours)]
        return [str(one) for one in (*kept, *(client.volumes(filters=ours)["Volumes"] or ()))]


def volumes(client: APIClient) -> list[str]:
    """The volumes that nobody has labelled: what a container of the provider that mounts directories would leave."""
    found = client.volumes()["Volumes"] or ()
    return [volume["Name"] for volume in found if not (volume["Labels"] or {}).get("runner.product")]


def first(container: str) -> int:
    """The first process of a container, as this host sees it."""
    with session().client() as client:
        return int(client.inspect_container(container)["State"]["Pid"])


def hold(what: AbstractContextManager[_T]) -> _T:
    """Enter ``what`` until the session's end."""
    return _held.enter_context(what)


def leave() -> None:
    _held.close()


def root(name: str) -> Path:
    return Path("/tmp", f"runner-dockerd-{name}")


@contextmanager
def shared(
    name: str, data: Path | None = None, make: Callable[[Path, Path | None], Daemon] = Daemon
) -> Iterator[Daemon]:
    """The daemon of all processes that give this name, for as long as one of them is in the block.

    It has the image, or what is in ``data``.
    """
    daemon = make(root(name), data)
    with _opened(daemon.root.with_suffix(".users")) as users:
        with _changing(daemon):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not daemon.answers():
                daemon.start()
                if data is None:
                    daemon.make_image()
        try:
            yield daemon
        finally:
            with _changing(daemon), suppress(BlockingIOError):  # another is in the block
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                daemon.stop()
                for suffix in (".users", ".lock"):
                    daemon.root.with_suffix(suffix).unlink(missing_ok=True)  # by one that left at the same time


@contextmanager
def _changing(daemon: Daemon) -> Iterator[None]:
    """Alone among those that start and stop it."""
    with _opened(daemon.root.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
