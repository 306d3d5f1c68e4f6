"""The command in forks of one process that has imported it: one costs milliseconds, a new interpreter half a second.

Each is a process of its own in all else: session, environment, directory, signals, and what it does when it exits. For
what an interpreter reads when it starts (``PYTHON*``, the locale), ``Project.start`` has a new one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import IO

import runner
from runner.core import plugins
from runner.core.errors import RunnerError

_REQUEST = 1 << 20  # bytes
_FILES = 1 << 10
_LIBRARIES = ("docker", "dulwich.client", "h11", "jinja2.sandbox")
ROOT = Path(__file__).parents[2]
_CLONE_NEWNS, _PRIVATE, _BIND = 0x20000, 0x44000, 0x5000  # of linux/sched.h and linux/mount.h; with all that is below


class Forks:
    """The process; started with the first command, ended by ``close``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listening = Path()
        self._beginning = threading.Lock()
        self._namespace = ""

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        timeout: float,
        user: int | None = None,
        descriptors: int | None = None,
    ) -> tuple[int, str, str]:
        """The exit code, or the negative number of a signal, and what was printed.

        ``user`` is whose process it is, if another's; ``descriptors`` how many files it may have open.

        Raises ``TimeoutError`` when it has not ended after ``timeout`` seconds, and has been killed with its group.
        """
        with self._beginning:
            self._begin()
        wanted = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), "user": user, "descriptors": descriptors}
        request = json.dumps(wanted).encode()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _REQUEST)
            connection.connect(str(self._listening))
            socket.send_fds(connection, [request], [out.fileno(), err.fileno()])
            pid = int(connection.recv(100))
            connection.settimeout(timeout)
            try:
                code = int(connection.recv(100))
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                raise
            return code, _read(out), _read(err)

    def _begin(self) -> None:
        """Start it, anew where this process has got mounts of its own since, as providers give it on some hosts."""
        namespace = os.readlink("/proc/self/ns/mnt")
        if self._namespace != namespace:
            self.close()
        if self._process is None:
            self._namespace = namespace
            self._listening = Path(tempfile.mkdtemp(prefix="runner-forks-")) / "socket"
            words = [sys.executable, "-m", "tests.support.forked", str(self._listening)]
            env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
            process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            self._process = process

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._listening.unlink()
            self._listening.parent.rmdir()
            self._process = None


FORKS = Forks()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")


def load_everything() -> None:
    """All that a command imports at some time, once for all forks, and what no setting changes."""
    for found in walk_packages(runner.__path__, "runner."):
        if not found.name.startswith(("runner.__main__", "runner.guest.build", "runner.testing")):
            try:
                module = import_module(found.name)
            except (ModuleNotFoundError, RunnerError) as error:
                missing = error.__cause__ if isinstance(error, RunnerError) else error
                if not isinstance(missing, ModuleNotFoundError) or (missing.name or "").startswith("runner"):
                    raise
                continue  # of a library that is not installed: who needs it says so
            if found.ispkg:
                plugins.names(module)  # a fork as another user may not be able to look for them
    for name in _LIBRARIES:
        import_module(name)
    from runner.manifest.load import defaults

    defaults()
    os.sep.encode("unicode_escape")
    gc.collect()
    gc.freeze()


def main() -> None:
    """The process, which ends with its standard input. It has no thread: forks of one that has cannot be trusted."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    load_everything()
    ended, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(sys.argv[1])
        listening.listen(8)
        print("ready", flush=True)
        while sys.stdin not in (ready := select.select([listening, ended, sys.stdin], [], [])[0]):
            if listening in ready:
                connection, _ = listening.accept()
                running[_begin(connection)] = connection
            if ended in ready:
                os.read(ended, 1 << 10)
                _tell(running)


def _begin(connection: socket.socket) -> int:
    """Start a command, whose process id is told at once."""
    words, descriptors, _, _ = socket.recv_fds(connection, _REQUEST, 2)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _become(json.loads(words), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(OSError):  # who asked may be gone
        connection.send(str(pid).encode())
    return pid


def _tell(running: dict[int, socket.socket]) -> None:
    """Tell of each command that has ended how it did."""
    while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = found
        with running.pop(pid) as connection, suppress(OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _open_the_way(place: Path) -> None:
    """Let other users in to ``place``, in mounts of our own: a checkout may lie in a home that is closed to them."""
    libc = ctypes.CDLL(None, use_errno=True)
    closed = [folder for folder in reversed(place.parents) if not folder.stat().st_mode & stat.S_IXOTH]
    if closed and (libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _PRIVATE, None)):
        raise OSError(ctypes.get_errno(), "no mounts of our own")
    for folder in closed:
        behind = os.open(folder, os.O_PATH)
        inside = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"mode=755")
        for name in inside:
            (folder / name).mkdir()
            libc.mount(os.fsencode(f"/proc/self/fd/{behind}/{name}"), os.fsencode(folder / name), None, _BIND, None)
        os.close(behind)


def change_user(user: int) -> None:
    """Be another user, who can read this checkout and its interpreter."""
    for place in (ROOT, Path(sys.base_prefix)):
        _open_the_way(place)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def run_as(user: int) -> None:
    """Be the command, with this process's arguments, of another user; importing comes first."""
    load_everything()
    here = {"cwd": os.getcwd(), "env": dict(os.environ), "arguments": sys.argv[1:], "descriptors": None, "user": user}
    _become(here, [os.dup(1), os.dup(2)])


def _become(request: Mapping[str, object], descriptors: Sequence[int]) -> None:
    """What the interpreter does from the entry point on, to its end."""
    from runner.cli.main import entry

    os.setsid()
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    sys.argv[1:] = request["arguments"]  # type: ignore[call-overload]
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(descriptor, number)
    os.closerange(3, _FILES)  # ours, and those of commands that run beside it
    if isinstance(user := request["user"], int):
        change_user(user)
    if isinstance(files := request["descriptors"], int):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    code = 1
    try:
        code = entry()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
