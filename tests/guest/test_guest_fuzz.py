"""Whatever a host sends, the guest goes on or ends by itself: under sanitizers, with nothing left behind.

Each case is a seed. Commands are harmless; when root runs this, they are another user's, with a limit on processes.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from runner.guest import framing
from runner.guest.framing import HEADER, MAX_PAYLOAD, RELAY, STDOUT, WINDOW, Request, Type, frame
from runner.testing.outside import alive, descendants, eventually
from tests.support.guest_driver import NONCE, Channel, Host, Lost, Wire

STRANGER = 1_900_000_002 if os.geteuid() == 0 else None
COMMANDS = (["true"], ["cat"], ["head", "-c", "300000", "/dev/zero"], ["sh", "-c", "sleep 0.05 & exit 3"], ["nowhere"])
HELLO = framing.hello(NONCE)
READY = frame(Type.READY)


@contextmanager
def guarded(program: Path, *words: str | Path, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """A guest under sanitizers, which have to be silent. It is ended, if it has not ended by itself."""
    with TemporaryDirectory(prefix="guest-log-") as folder:
        os.chmod(folder, 0o777)
        options = f"log_path={folder}/log:exitcode=99:detect_leaks=0:handle_abort=1"
        process = subprocess.Popen(
            [program, *words],
            stdin=stdin,
            env={"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options},
            user=STRANGER,
            group=STRANGER,
            extra_groups=None if STRANGER is None else [],
            preexec_fn=None if STRANGER is None else few_processes,
        )
        try:
            yield process
        finally:
            children = descendants(process.pid)
            process.kill()
            process.wait()
        eventually(lambda: not any(map(alive, children)))
        assert [path.read_text() for path in Path(folder).iterdir()] == []


def few_processes() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (300, 300))


def request(dice: random.Random) -> Request:
    return Request(argv=dice.choice(COMMANDS), env={"PATH": "/usr/bin:/bin"}, limits={resource.RLIMIT_CPU: (5, 5)})


def likely(dice: random.Random) -> bytes:
    """A frame as a host could send it, if not now: ids and offsets are those that sessions have."""
    id = dice.choice([1, 1, 1, 2, 2, 3, dice.randrange(1, 40), RELAY | dice.randrange(1, 6)])
    offset = dice.choice([0, 0, 1, 5, 100, WINDOW, WINDOW + 1, 300_000, 300_001, dice.randrange(1 << 64)])
    stream = dice.randrange(3)
    match dice.randrange(12):
        case 0 | 1 | 2:
            return framing.execute(id, request(dice))
        case 3:
            return framing.data(id, 0, dice.choice([0, 0, offset]), dice.randbytes(dice.choice([1, 5, 100, 60_000])))
        case 4:
            return framing.offset(Type.EOF, id, 0, offset)
        case 5 | 6:
            return framing.offset(Type.ACK, id, stream, offset)
        case 7:
            return framing.signal(id, dice.choice([1, 2, 3, 1 << 31]), dice.choice([0, 1, 9, 15, 18, 19, 64, 65]))
        case 8:
            return frame(Type.FORGET, id)
        case 9:
            return framing.listen(id, dice.choice([0, 0, 1, 65536]))
        case 10:
            return frame(Type.PING, payload=dice.randbytes(8))
        case _:
            return frame(Type.RESET, id)


def session(dice: random.Random) -> list[bytes]:
    """A valid one, as far as one can say without listening."""
    frames = [HELLO, READY]
    for id in range(1, dice.randrange(2, 6)):
        frames.append(framing.execute(id, request(dice)))
        frames += [framing.data(id, 0, 0, b"x" * 100), framing.offset(Type.EOF, id, 0, 100), framing.signal(id, 1, 15)]
    frames += [framing.listen(50, 0), frame(Type.PING, payload=bytes(8)), framing.signal(50, 1, 9)]
    return frames


def mutated(dice: random.Random, frames: list[bytes]) -> bytes:
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(frames))
        match dice.randrange(6):
            case 0:
                del frames[at : at + 1 if len(frames) > 1 else at]
            case 1:
                frames.insert(at, dice.choice(frames))
            case 2:
                frames.insert(at, likely(dice))
            case 3:
                frames[at] = frames[at][: dice.randrange(len(frames[at]) + 1)]
            case _:
                changed = bytearray(frames[at])
                for _ in range(dice.choice([1, 1, 2, 8]) if changed else 0):
                    changed[dice.randrange(len(changed))] = dice.choice([0, 1, 2, 127, 128, 255, dice.randrange(256)])
                frames[at] = bytes(changed)
    return b"".join(frames)


def noise(dice: random.Random) -> bytes:
    """Frames that are well formed, of anything."""
    frames = []
    for _ in range(dice.randrange(1, 30)):
        type = dice.randrange(1, 15)
        usual = framing._SIZES.get(Type(type), dice.choice([9, 40, 2000, MAX_PAYLOAD]))
        size = usual if dice.random() < 0.95 else dice.randrange(100)
        frames.append(HEADER.pack(size, type, dice.randrange(3), 0, dice.randrange(4)) + dice.randbytes(size))
    return HELLO + READY + b"".join(frames)


def send_in_pieces(wire: Wire, bytes_: bytes, dice: random.Random) -> None:
    with suppress(Lost):
        while bytes_:
            size = dice.choice([1, 12, 500, 1 << 20])
            wire.send(bytes_[:size])
            bytes_ = bytes_[size:]
            wire.receive(0)


def seeds(usual: int, nightly: int) -> list[object]:
    """Of a few cases each, so that one that fails is soon found."""
    return [*range(usual), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(usual, nightly))]


@pytest.mark.parametrize("seed", seeds(3, 300))
@pytest.mark.parametrize("kind", ["mutated", "noise"])
def test_a_guest_ends_by_itself_whatever_it_is_sent(sanitized: Path, kind: str, seed: int) -> None:
    dice = random.Random(f"{kind} {seed}")
    for _ in range(6):
        ours, theirs = socket.socketpair()
        with ours, guarded(sanitized, stdin=theirs.fileno()) as process:
            theirs.close()
            bytes_ = mutated(dice, session(dice)) if kind == "mutated" else noise(dice)
            send_in_pieces(Wire(ours), bytes_, dice)
            ours.close()
            assert process.wait(30) == 0


@contextmanager
def dialled(program: Path) -> Iterator[socket.socket]:
    """Where a guest dials, again and again. It is still there at the end."""
    with TemporaryDirectory(prefix="guest-") as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        listener.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        listener.listen(8)
        listener.settimeout(30)
        with guarded(program, f"{folder}/socket") as process:
            yield listener
            assert process.poll() is None


@pytest.mark.parametrize("seed", seeds(3, 120))
def test_a_guest_that_dials_again_is_none_the_worse_for_it(sanitized: Path, seed: int) -> None:
    dice = random.Random(f"dialled {seed}")
    with dialled(sanitized) as listener:
        for _ in range(30):
            with listener.accept()[0] as connection:
                wire = Wire(connection)
                wire.send(HELLO)
                frames = [READY, *(likely(dice) for _ in range(dice.randrange(1, 20)))]
                send_in_pieces(wire, b"".join(frames) if dice.random() < 0.7 else mutated(dice, frames), dice)
        with closing(Host(lambda: Wire(listener.accept()[0]), first_id=100)) as host:
            assert host.run("true").code == 0


class Restless:
    """A host that keeps to the rules and does things in any order, with clients of its relayed connections."""

    def __init__(self, listener: socket.socket, dice: random.Random) -> None:
        self.dice = dice
        self.host = Host(lambda: self.connect(listener))
        self.host.served = self.serve
        self.commands: list[Channel] = []
        self.clients: list[tuple[socket.socket, bytearray, bytearray]] = []
        self.port = 0

    def connect(self, listener: socket.socket) -> Wire:
        short = self.dice.random() < 0.3
        cut = {self.dice.choice(["up", "down"]): self.dice.randrange(400_000)} if short else {}
        return Wire(listener.accept()[0], **cut)

    def serve(self, connection: Channel) -> None:
        connection.write(bytes(connection.output[STDOUT][len(connection.stdin) :]))
        if STDOUT in connection.ended and not connection.closed:
            connection.end()

    def act(self) -> None:
        acts = (self.start, self.write, self.write, self.end, self.kill, self.rest, self.forget, self.call, self.talk)
        self.dice.choice((*acts, self.talk, self.leave, self.step, self.step, self.step))()
        self.step()

    def any(self) -> Channel | None:
        return self.dice.choice(self.commands) if self.commands else None

    def start(self) -> None:
        if len(self.commands) < 12:
            argv = self.dice.choice(COMMANDS)
            self.commands.append(self.host.start(*argv, reads=self.dice.random() < 0.8))

    def write(self) -> None:
        if (command := self.any()) and not command.closed:
            command.write(self.dice.randbytes(self.dice.choice([1, 1000, 100_000])))

    def end(self) -> None:
        if command := self.any():
            command.end()

    def kill(self) -> None:
        if (command := self.any()) and self.dice.random() < 0.3:
            command.kill(self.dice.choice([0, 9, 15, 18, 19]))

    def rest(self) -> None:
        if (command := self.any()) and not command.reads:
            command.read()

    def forget(self) -> None:
        for command in [command for command in self.commands if command.done]:
            self.check(command)
            command.forget()
            self.commands.remove(command)

    def check(self, command: Channel) -> None:
        assert not command.state.marks
        if b"cat\0" in command.request:
            assert command.stdin.startswith(command.out)
        else:
            assert not command.out.strip(b"\0")

    def call(self) -> None:
        if not self.port:
            state = self.host.listen().state
            self.port = state.pid if state else 0
        if len(self.clients) < 20:
            client = socket.create_connection(("127.0.0.1", self.port))
            client.setblocking(False)
            self.clients.append((client, bytearray(), bytearray()))

    def talk(self) -> None:
        if not self.clients:
            return
        client, said, heard = self.dice.choice(self.clients)
        with suppress(OSError):
            part = self.dice.randbytes(self.dice.choice([1, 5000, 200_000]))
            said += part[: client.send(part)]
        with suppress(OSError):
            heard += client.recv(self.dice.choice([10, 100_000]))
        assert said.startswith(heard)
        if self.dice.random() < 0.2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", self.dice.randrange(2), 0))
            client.close()
            self.clients.remove((client, said, heard))

    def leave(self) -> None:
        if self.dice.random() < 0.3:
            self.host.hang_up()

    def step(self) -> None:
        self.host.step(self.dice.choice([0, 0, 0.002]))

    def close(self) -> None:
        self.host.hang_up()
        for client, _, _ in self.clients:
            client.close()

    def finish(self) -> None:
        for client, _, _ in self.clients:
            client.close()
        for command in self.commands:
            command.read()
            command.kill(9)
        for command in self.commands:
            command.wait()
        self.forget()
        self.host.until(lambda: all(not channel.id & RELAY for channel in self.host.channels.values()))


@pytest.mark.parametrize("seed", seeds(4, 400))
def test_a_restless_host_and_its_guest_never_disagree(sanitized: Path, seed: int) -> None:
    with (
        dialled(sanitized) as listener,
        closing(Restless(listener, random.Random(f"restless {seed}"))) as restless,
    ):
        for _ in range(300):
            restless.act()
        restless.finish()
        assert restless.host.run("true").code == 0
