"""Watching the calls by which a process, and all that it starts, makes or removes something outside of itself.

A filter of the kernel stops each such call until a watcher has heard of it (``SECCOMP_RET_USER_NOTIF``), so a process
can be killed right before any of them, in whichever thread or child it comes; or a call can be answered with an error
instead. Only for root on x86-64.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.needs import Component


def _why_not() -> str | None:
    return None if os.geteuid() == 0 and platform.machine() == "x86_64" else "it is for root on x86-64"


WATCHER = Component("watcher of system calls", _why_not)

_CALLS = {
    "connect": 42,
    "bind": 49,
    "execve": 59,
    "rename": 82,
    "mkdir": 83,
    "rmdir": 84,
    "link": 86,
    "unlink": 87,
    "symlink": 88,
    "mknod": 133,
    "mount": 165,
    "umount2": 166,
    "mkdirat": 258,
    "mknodat": 259,
    "unlinkat": 263,
    "renameat": 264,
    "linkat": 265,
    "symlinkat": 266,
    "renameat2": 316,
    "open_tree": 428,
    "move_mount": 429,
    "mount_setattr": 442,
}
_OPEN, _OPENAT, _IOCTL = 2, 257, 16
_WRITES = {
    "write": 1,
    "pwrite64": 18,
    "writev": 20,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "pwritev": 296,
    **_CALLS,
}
_OF_DESCRIPTOR = ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "pwritev")
_NAMES = {number: name for name, number in _WRITES.items()} | {_OPEN: "create", _OPENAT: "create", _IOCTL: "loop"}
_CREATES, _LOOP_CONFIGURE = os.O_CREAT, 0x4C0A
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _EQUALS, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_SECCOMP, _SET_FILTER, _NEW_LISTENER = 317, 1, 1 << 3
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE = struct.Struct("QII iI Q 6Q")  # id, pid, flags, then the call: number, architecture, address, arguments
_ANSWER = struct.Struct("QqiI")
_PATIENCE = 10.0  # seconds for what a killed process has started to end

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Fault:
    """The ``number``-th write below ``home`` by the process itself fails, and with ``lasting`` all after it do."""

    error: int
    number: int
    home: str
    lasting: bool = False
    seen: int = 0

    def hits(self, pid: int, notice: Notice) -> bool:
        name = _NAMES[notice.call]
        if _process_of(notice.thread) != pid or not self._concerns(name, notice):
            return False
        self.seen += 1
        return self.seen == self.number or (self.lasting and self.seen > self.number > 0)

    def _concerns(self, name: str, notice: Notice) -> bool:
        """Only what makes a name can lack a descriptor, and only what goes on for long can be interrupted."""
        of_descriptor = name in _OF_DESCRIPTOR
        if self.error == errno.EMFILE:
            return name == "create" and self.home in _text(notice.thread, notice.arguments[1])
        if self.error == errno.EINTR:
            of_descriptor = name in ("write", "pwrite64", "writev")
            return of_descriptor and self.home in _place(notice)
        if of_descriptor:
            return self.home in _place(notice)
        place = {"create": 1, "mkdir": 0, "rename": 1, "link": 1, "symlink": 1}.get(name)
        path = "" if place is None else _text(notice.thread, notice.arguments[place])
        return self.home in path and not (name == "mkdir" and os.path.isdir(path))


class Notice(NamedTuple):
    """A call that waits: its arguments are the caller's, a thread."""

    id: int
    thread: int
    call: int
    arguments: tuple[int, ...]


def _process_of(thread: int) -> int:
    status = Path(f"/proc/{thread}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Tgid:")).split()[1])


def _place(notice: Notice) -> str:
    return os.readlink(f"/proc/{notice.thread}/fd/{notice.arguments[0]}")


def _text(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(4096).split(b"\0")[0].decode(errors="replace")


def _program(numbers: Iterable[int]) -> bytes:
    def words(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    lines = [words(_LOAD, 0, 0, 0)]
    for number in numbers:
        lines += [words(_EQUALS, 0, 1, number), words(_RETURN, 0, 0, _NOTIFY)]
    for number, argument, test, value in (
        (_OPENAT, 2, _ANY_BIT, _CREATES),
        (_OPEN, 1, _ANY_BIT, _CREATES),
        (_IOCTL, 1, _EQUALS, _LOOP_CONFIGURE),
    ):
        lines += [words(_EQUALS, 0, 4, number), words(_LOAD, 0, 0, 16 + 8 * argument)]
        lines += [words(test, 0, 1, value), words(_RETURN, 0, 0, _NOTIFY), words(_RETURN, 0, 0, _ALLOW)]
    return b"".join([*lines, words(_RETURN, 0, 0, _ALLOW)])


def submit(watcher: socket.socket, *, writes: bool = False) -> None:
    """Let each such call of this process from now on wait for who has the other end of ``watcher``; writes as well."""
    program = _program((_WRITES if writes else _CALLS).values())
    buffer = ctypes.create_string_buffer(program, len(program))
    count = len(program) // 8
    filter_ = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    listener = _libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, filter_)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(watcher, [b"."], [listener])
    os.close(listener)
    watcher.close()


def watch(pid: int, watcher: socket.socket, kill_at: int, fault: Fault | None = None) -> list[str]:
    """Let a process do what it does, and kill it right before its call number ``kill_at``, counted from 1; which calls
    there were. All that it has started has ended as well, or goes on unwatched after a while."""
    _, (listener, *_), _, _ = socket.recv_fds(watcher, 1, 1)
    process = os.pidfd_open(pid)
    calls: list[str] = []
    give_up = float("inf")
    try:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(process, select.POLLIN)
        while time.monotonic() < give_up:
            ready = dict(poll.poll(100))
            if process in ready:
                poll.unregister(process)
                give_up = time.monotonic() + _PATIENCE
            if ready.get(listener, 0) & select.POLLHUP:
                break
            if listener in ready:
                _answer(listener, lambda notice: _judge(notice, pid, process, calls, kill_at, fault))
    finally:
        os.close(listener)
        os.close(process)
    return calls


def _answer(listener: int, judge: Callable[[Notice], int]) -> None:
    """Let the call that waits longest go on, or fail if ``judge`` gives the number of an error."""
    buffer = bytearray(_NOTICE.size)
    with suppress(OSError):  # whoever called has ended meanwhile
        fcntl.ioctl(listener, _RECEIVE, buffer)
        id, thread, _, call, _, _, *arguments = _NOTICE.unpack(buffer)
        error = judge(Notice(id, thread, call, tuple(arguments)))
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(id, 0, -error, 0 if error else _CONTINUE))


def _judge(notice: Notice, pid: int, process: int, calls: list[str], kill_at: int, fault: Fault | None) -> int:
    calls.append(_NAMES[notice.call])
    if len(calls) == kill_at:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], _PATIENCE)  # only then may one of its children go on
    return fault.error if fault is not None and fault.hits(pid, notice) else 0
