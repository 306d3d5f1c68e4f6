"""What a hostile command can do to the guest, its supervisor or another command, on every provider with a guest."""

from __future__ import annotations

import secrets

import trio

from runner.core.model import Exit
from runner.ports.provider import Workspace
from runner.testing.place import Place, read_until
from tests.support.providers import GUESTS, GVISOR, PROCESS, scopes_signals

KINDS = GUESTS

SIGNALLED = "commands of one user can signal each other"  # and the guest, where that is of their user
KILLABLE = "the guest can be killed from outside its workspace, which ends every command in it"

# Prints what works, of what should not, on the first process and on its own supervisor.
LOOK = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
here, there = Vector(ctypes.addressof(buffer), 8), Vector(0x400000, 8)
def attempt(name, act, *words):
    try:
        if act(*words) != -1: print(name, words)
    except OSError: pass
def look(path):  # whoever opens the null device there has got nothing
    return -1 if os.fstat(os.open(path, os.O_RDONLY)).st_rdev == os.makedev(1, 3) else 0
for pid in (1, os.getppid()):
    attempt("attach", libc.ptrace, 16, pid, 0, 0)
    attempt("read", libc.process_vm_readv, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    attempt("limit", resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))
    for name in ("mem", "environ", *(f"fd/{fd}" for fd in range(130))):
        attempt("open", look, f"/proc/{pid}/{name}")
for fd in range(3, 101): attempt("write", os.write, fd, b"x")
os._exit(11)
"""


async def test_the_notes_say_what_does_not_stand_between(place: Place) -> None:
    async with place.open() as workspace:
        notes = (await workspace.effective()).notes

    signalled = [note for note in notes if note.startswith(SIGNALLED)]
    assert bool(signalled) == (place.kind == GVISOR or not scopes_signals())
    assert not any("and the guest" in note for note in signalled if place.kind == GVISOR)
    assert (KILLABLE in notes) == (place.kind == PROCESS)


async def test_nobody_looks_into_the_guest_or_writes_to_what_is_its_own(place: Place) -> None:
    async with place.open() as workspace:
        done = await workspace.run(["python3", "-uSIc", LOOK])
        assert (await workspace.run(["true"])).exit.ok

    opened = done.stdout.decode().splitlines()
    if place.kind == GVISOR:  # shows everybody with what a program was started: what `env` prints, of the guest
        opened = [line for line in opened if "environ" not in line]
    assert (done.exit, opened, done.stderr) == (Exit(code=11), [], b"")


async def test_no_signal_of_a_command_reaches_the_guest_or_another_command(place: Place) -> None:
    async with place.open() as workspace:
        alone = any(note.startswith(SIGNALLED) for note in (await workspace.effective()).notes)
        for attack in ("-9 $PPID", "-STOP $PPID", "-9 1", "-STOP 1", "-9 -$PPID", "-9 -1"):
            await (_attack_without_scope if alone else _attack)(place, workspace, attack)


async def _attack(place: Place, workspace: Workspace, attack: str) -> None:
    async with workspace.exec(["sh", "-c", "echo ready; read x; exit 3"]) as other:
        await read_until(other, b"ready")
        attacker = await workspace.run(["sh", "-c", f"kill {attack}; exit 11"])
        await other.stdin.send_all(b"go on\n")
        with trio.fail_after(30):
            assert await other.wait() == Exit(code=3), attack
    assert (await workspace.run(["true"])).exit.ok
    assert attacker.exit == Exit(code=11), attack


async def _attack_without_scope(place: Place, workspace: Workspace, attack: str) -> None:
    """Of the attacker's and other commands' ends nothing is promised then, and on ``process`` nothing at all."""
    if place.kind != PROCESS:
        async with workspace.exec(["sh", "-c", f"kill {attack}; exit 11"]) as attacker:
            with trio.fail_after(30):
                await attacker.wait()
        assert (await workspace.run(["true"])).exit.ok


# Memory, semaphores and a queue by one key, and a queue by a name: makes them, looks for them or removes them.
SHARED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
open_queue, unlink_queue = (180, 181) if os.uname().machine == "aarch64" else (240, 241)
act, key, name = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
mode = 0o1666 if act == "make" else 0
found = [libc.shmget(key, 1, mode), libc.semget(key, 1, mode), libc.msgget(key, mode)]
print([number >= 0 for number in found], libc.syscall(open_queue, name, 0o102 if mode else 0, 0o666, None) >= 0)
if act == "remove":
    libc.shmctl(found[0], 0, None), libc.semctl(found[1], 0, 0), libc.msgctl(found[2], 0, None)
    libc.syscall(unlink_queue, name)
"""


async def test_what_has_a_key_or_a_name_is_found_by_commands_of_its_workspace_only(place: Place) -> None:
    key, name = str(secrets.randbelow(1 << 30) + 1), f"runner-check-{secrets.token_hex(8)}"
    python = ["python3", "-SIc", SHARED]
    async with place.open() as workspace:
        made = await workspace.run([*python, "make", key, name])
        outside = await trio.run_process([*python, "look", key, name], capture_stdout=True)
        found = await workspace.run([*python, "remove", key, name])

    everything = b"[True, True, True] True\n"
    assert (made.stdout, found.stdout) == (everything, everything)
    assert outside.stdout == (everything if place.kind == PROCESS else b"[False, False, False] False\n")


ORDINARY_SOCKETS = """
import asyncio, multiprocessing, socket
async def talk():
    async def answer(reader, writer): writer.write(await reader.readexactly(5)); writer.close()
    for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
        server = await asyncio.start_server(answer, host, 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        server.close()
asyncio.run(talk())
assert "lo" in dict(map(reversed, socket.if_nameindex()))
assert socket.getaddrinfo("127.0.0.1", 80, flags=socket.AI_ADDRCONFIG)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for end in socket.socketpair(type=kind): end.close()
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE).close()
print("done")
"""


async def test_sockets_of_a_workspace_s_own_can_be_made(place: Place) -> None:
    async with place.open() as workspace:
        done = await workspace.run(["python3", "-SIc", ORDINARY_SOCKETS])

    assert (done.exit, done.stdout, done.stderr) == (Exit(code=0), b"done\n", b"")
