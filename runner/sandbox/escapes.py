"""Ways out of a sandbox, as commands that try them. A provider declares those that it is known to have as ``GAPS``.

An escape is a command that prints ``! `` and what it could do for each thing that should be refused, and ``done`` when
it has tried all. One that prints neither could not be tried, for example without the program that it needs. The last
one attacks the guest, so that the only thing to do next in its sandbox is to check that the guest still works.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from msgspec import Struct

from runner.safefs import linux, trees

_BAIT = "runner-probe-"
_OLD = 3600.0  # seconds after which nobody uses it any more

_PRELUDE = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
arm = os.uname().machine == "aarch64"
buffer = ctypes.create_string_buffer(64)
def call(number, of_arm, *words): return libc.syscall(of_arm if arm else number, *words)
def look(what, act, *words):
    try: done = act(*words)
    except OSError: return
    if done != -1: print("!", what)
def connect(where):
    with socket.socket(socket.AF_UNIX) as end: end.connect(where)
"""


class Escape(Struct, frozen=True):
    """An attempt; ``about`` says what should be refused."""

    name: str
    about: str
    argv: tuple[str, ...]


def _shell(name: str, about: str, script: str) -> Escape:
    return Escape(name, about, ("sh", "-c", f"{script}\necho done"))


def _python(name: str, about: str, script: str) -> Escape:
    return Escape(name, about, ("python3", "-SIc", f"{_PRELUDE}{script}\nprint('done')"))


ESCAPES = (
    _shell(
        "host-files",
        "files of the host and of the runner",
        'for file in "$PROBE_FILE" "$PROBE_HOME/state.db"; do'
        ' if (: < "$file") 2>/dev/null; then echo "! reads $file"; fi; done',
    ),
    _shell(
        "environments",
        "the environment of the first process and of what runs the command",
        "for pid in 1 $PPID; do if (: < /proc/$pid/environ) 2>/dev/null;"
        ' then echo "! reads that of process $pid"; fi; done',
    ),
    _python(
        "sockets",
        "sockets of the host: docker, ssh agent, session bus",
        """
from glob import glob
well_known = ["/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket"]
for place in [os.environ["PROBE_SOCKET"], *well_known, *glob("/run/user/*/bus"), *glob("/tmp/ssh-*/agent.*")]:
    look(f"connects to {place}", connect, place)
""",
    ),
    _python(
        "abstract-sockets",
        "abstract sockets of the host and of other sandboxes",
        """look("connects to one of the host", connect, "\\0" + os.environ["PROBE_ABSTRACT"])""",
    ),
    _shell(
        "descriptors",
        "descriptors from 3 to 1023",
        'n=3; while [ $n -lt 1024 ]; do if [ -e /proc/self/fd/$n ]; then echo "! has $n"; fi; n=$((n + 1)); done',
    ),
    _shell(
        "environment",
        "variables that nobody has given to the command",
        "export -p | while read -r _ pair; do case ${pair%%=*} in"
        " PATH|HOME|LANG|TMPDIR|PWD|OLDPWD|SHLVL|_|RUNNER_*|PROBE_*) ;;"
        ' *) echo "! has ${pair%%=*}" ;; esac; done',
    ),
    _python(
        "terminal",
        "a controlling terminal, and typing into it",
        """
import fcntl
look("opens /dev/tty", os.open, "/dev/tty", os.O_RDWR)
for fd in range(3): look(f"types into descriptor {fd}", fcntl.ioctl, fd, 0x5412, b"x")
""",
    ),
    _python("user-namespace", "a user namespace of its own", """look("makes one", libc.unshare, 0x10000000)"""),
    _python(
        "namespaces",
        "other namespaces of its own",
        """
for name, flag in {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000,
                   "net": 0x40000000}.items():
    look(f"makes a {name} namespace", libc.unshare, flag)
""",
    ),
    _python(
        "mount",
        "mounting",
        """
look("mounts", libc.mount, b"none", b"/tmp", b"tmpfs", 0, None)
look("opens a file system", call, 430, 430, b"tmpfs", 0)
""",
    ),
    _python(
        "ptrace",
        "tracing the first process and what runs the command",
        """for pid in (1, os.getppid()): look(f"traces process {pid}", libc.ptrace, 0x4206, pid, 0, 0)""",
    ),
    _python(
        "bpf",
        "programs and maps in the kernel",
        """look("makes a map", call, 321, 280, 0, (ctypes.c_uint32 * 32)(2, 4, 4, 1), 128)""",
    ),
    _python(
        "keyctl",
        "keys that its user, or whoever started the runner, has in the kernel",
        """
look("has a user keyring", call, 250, 219, 0, -4, 1)
look("has a session keyring", call, 250, 219, 0, -3, 0)
look("adds a key", call, 248, 217, b"user", b"probe", b"x", 1, -2)
""",
    ),
    _python(
        "userfaultfd",
        "handling page faults by itself",
        """for flag in (0, 1): look(f"gets a descriptor, flag {flag}", call, 323, 282, flag)""",
    ),
    _python(
        "perf",
        "counters of the processor and of the kernel",
        """
event = ctypes.create_string_buffer(128)
event[0], event[4], event[40] = 1, 128, 0x61  # what it ran for, in user mode
look("counts", call, 298, 241, event, 0, -1, -1, 0)
""",
    ),
    _python("io-uring", "io_uring", """look("sets up a ring", call, 425, 425, 1, ctypes.create_string_buffer(120))"""),
    _python("kernel-log", "the log of the kernel", """look("reads it", call, 103, 116, 3, buffer, 64)"""),
    _python(
        "socket-families",
        "sockets to elsewhere than its own network namespace and file system",
        """
def make(act, family, protocol=0):
    for kind in (1, 2, 3, 5, 10):
        try: return act(family, kind, protocol)
        except OSError: pass
    return -1
for family in {*range(1, 64)} - {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}:
    look(f"makes one of family {family}", make, socket.socket, family)
    look(f"makes a pair of family {family}", make, socket.socketpair, family)
for protocol in range(1, 32):
    look(f"makes one of netlink, protocol {protocol}", make, socket.socket, socket.AF_NETLINK, protocol)
look("makes one of packets by their old name", socket.socket, socket.AF_INET, 10)
""",
    ),
    _python(
        "foreign-calls",
        "system calls by the numbers of another architecture",
        """
import mmap
def by_32_bits():  # socket(40, 1, 0); who is killed for trying has made none
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("53 b867010000 bb28000000 b901000000 31d2 cd80 5b c3"))
    act = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    child = os.fork()
    if not child: os._exit(0 if act() >= 0 else 1)
    return 0 if os.waitpid(child, 0)[1] == 0 else -1
if not arm:
    look("makes a socket as a program of 32 bits", by_32_bits)
    look("makes a socket by its number of x32", call, 0x40000029, 0, 40, 1, 0)
""",
    ),
    _python(
        "shared-memory",
        "memory that is shared by its number",
        """look("attaches that of the host", libc.shmat, int(os.environ["PROBE_MEMORY"]), None, 0o10000)""",
    ),
    _python(
        "privileges",
        "another user, capabilities, and programs that give them",
        """
for what in ("setuid", "setgid"): look(f"becomes root by {what}", getattr(os, what), 0)
look("makes a device", os.mknod, "/tmp/probe-device", 0o020600, os.makedev(1, 3))
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name.startswith("Cap") and name != "CapBnd" and int(value, 16): print("!", line.strip())
    if name == "NoNewPrivs" and value.strip() != "1": print("!", line.strip())
""",
    ),
    _shell(
        "network",
        "network interfaces but its own loopback",
        'while IFS=": " read -r name _; do case $name in Inter*|face|lo|"") ;; *) echo "! sees $name" ;; esac;'
        " done < /proc/net/dev",
    ),
    _shell(
        "read-only",
        "writing to the system and to the kernel's settings",
        "for place in / /etc /usr /usr/bin /sys/fs/cgroup; do if (: > $place/runner-probe) 2>/dev/null;"
        ' then echo "! writes to $place"; rm -f $place/runner-probe; fi; done\n'
        "for file in /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /proc/sysrq-trigger; do"
        ' if (: >> $file) 2>/dev/null; then echo "! opens $file"; fi; done',
    ),
    _shell(
        "memory-killer",
        "being spared when memory runs out",
        'if (echo -1000 > /proc/self/oom_score_adj) 2>/dev/null; then echo "! is never killed"; fi',
    ),
    _shell("guest", "ending what runs the commands", "kill -9 1 2>/dev/null; kill -9 $PPID 2>/dev/null"),
)

# refused by the system call filter
FILTERED = ("bpf", "foreign-calls", "io-uring", "kernel-log", "keyctl", "perf", "socket-families", "userfaultfd")


def breaches(stdout: bytes) -> list[str] | None:
    """Return what an escape could do; ``None`` when it could not be tried to its end."""
    lines = stdout.decode(errors="replace").splitlines()
    found = [line.removeprefix("! ") for line in lines if line.startswith("! ")]
    return found if found or lines[-1:] == ["done"] else None


@contextmanager
def open_bait(home: Path) -> Iterator[dict[str, str]]:
    """Make things that no sandbox should reach, as variables for the escapes, and remove old ones of killed runs.

    A file and a socket that every user may open, an abstract socket, shared memory, and the runner's own ``home``.
    """
    for old in Path(gettempdir()).glob(f"{_BAIT}*"):
        if old.lstat().st_uid == os.geteuid() and time.time() - old.lstat().st_mtime > _OLD:
            trees.remove(old)
    with (
        TemporaryDirectory(prefix=_BAIT) as name,
        closing(socket.socket(socket.AF_UNIX)) as listener,
        closing(socket.socket(socket.AF_UNIX)) as abstract,
    ):
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "file").write_text("bait\n")
        listener.bind(str(directory / "socket"))
        for place in directory.iterdir():
            place.chmod(0o666)
        abstract.bind(f"\0{directory.name}")
        for end in (listener, abstract):
            end.listen()
        yield {
            "PROBE_MEMORY": str(linux.share_page()),
            "PROBE_FILE": str(directory / "file"),
            "PROBE_SOCKET": str(directory / "socket"),
            "PROBE_ABSTRACT": directory.name,
            "PROBE_HOME": os.path.abspath(home),
        }
