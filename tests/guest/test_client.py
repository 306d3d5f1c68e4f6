"""The client against a guest whose commands are scripts, and against guests that break each rule of the protocol."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from runner.core.errors import Escaped, ProviderFailed, WorkspaceLost
from runner.core.model import Exit, StopStage
from runner.guest import framing
from runner.guest.client import Command, Guest, Relayed, open_guest
from runner.guest.framing import (
    MAX_CHUNK,
    MAX_RELAYED,
    RELAY,
    STDERR,
    STDOUT,
    WINDOW,
    Frame,
    Mark,
    Parser,
    Phase,
    Request,
    Shield,
    Stage,
    State,
    Type,
)
from runner.ports.provider import KILL_GRACE, Reader
from tests.support.fake_guest import PIPE, FakeGuest, Played, Refused, Script, hello, opened, ready, state

GRACE = 10.0
CONTENT = os.urandom(1 << 20)
REQUEST = Request(argv=["command"], env={})


def pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


Wiring = Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]]


class Place:
    """A guest, its client, and the connections between them: the last of ``wirings`` is the last there is."""

    guest: FakeGuest
    client: Guest

    def __init__(self, wirings: Sequence[Wiring]) -> None:
        self.wirings = list(wirings)
        self.stop_stages: list[tuple[StopStage, float]] = []
        self.kills = 0
        self.link: trio.abc.Stream

    @asynccontextmanager
    async def exec(self, *, grace: float = GRACE) -> AsyncIterator[Command]:
        """A command that the guest has taken up."""
        start = trio.current_time()

        def on_stop(stage: StopStage) -> None:
            self.stop_stages.append((stage, trio.current_time() - start))

        async with self.client.exec(REQUEST, grace=grace, on_stop=on_stop) as command:
            await command.started()
            yield command

    def kill(self) -> None:
        self.kills += 1
        self.lose()

    def lose(self) -> None:
        self.wirings.clear()
        self.hang_up()

    def hang_up(self) -> None:
        assert isinstance(self.link, trio.SocketStream)
        self.link.socket.shutdown(trio.socket.SHUT_RDWR)


@asynccontextmanager
async def opened_place(
    play: Script, *, wirings: Sequence[Wiring] = (pair,), kill: Callable[[], None] | None = None
) -> AsyncIterator[Place]:
    place = Place(wirings)
    async with trio.open_nursery() as nursery:
        place.guest = FakeGuest(nursery, play)

        async def connect() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            if not place.wirings:
                raise WorkspaceLost("the guest of workspace `w` has ended")
            ours, place.link = place.wirings.pop(0)()
            nursery.start_soon(place.guest.serve, place.link)
            return ours

        async with open_guest(connect, what="workspace `w`", kill_sandbox=kill or place.kill) as place.client:
            yield place
        nursery.cancel_scope.cancel()


async def read_all(stream: Reader, size: int = 1 << 18) -> bytes:
    read = b""
    while chunk := await stream.receive_some(size):
        assert len(chunk) <= size
        read += chunk
    return read


async def ends(command: Played) -> int:
    return 0


async def obeys(command: Played) -> int:
    await trio.sleep_forever()
    return 0


async def ignores_term(command: Played) -> int:
    command.deaf = {signal.SIGTERM}
    return await obeys(command)


async def cannot_be_killed(command: Played) -> int:
    command.deaf = {signal.SIGTERM, signal.SIGKILL}
    return await obeys(command)


async def leaves_a_daemon(command: Played) -> int:
    command.leaves = True
    return 0


async def obeys_but_leaves_a_daemon(command: Played) -> int:
    command.leaves = True
    return await obeys(command)


async def prints(command: Played) -> int:
    await command.write(CONTENT[: WINDOW + PIPE])
    return await obeys(command)


# --- commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "exit"),
    [(0, Exit(code=0)), (7 << 8, Exit(code=7)), (9, Exit(signal=9)), (0x80 | 11, Exit(signal=11))],
    ids=["0", "7", "killed", "core dumped"],
)
async def test_a_command_ends_with_its_own_status(status: int, exit: Exit) -> None:
    async def play(command: Played) -> int:
        return status

    async with opened_place(play) as place:
        async with place.exec() as command:
            assert await command.wait() == exit
        assert await command.wait() == exit


async def test_several_tasks_may_wait() -> None:
    ended = []

    async def play(command: Played) -> int:
        await command.read()
        return 0

    async with opened_place(play) as place, place.exec() as command, trio.open_nursery() as nursery:

        async def wait() -> None:
            ended.append(await command.wait())

        for _ in range(3):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        await command.stdin.aclose()

    assert ended == [Exit(code=0)] * 3


async def test_a_request_arrives_and_the_shield_is_known() -> None:
    async with opened_place(ends) as place:
        async with place.client.exec(Request(argv=["a", "b c"], env={"N": "v=w"}, cwd="/there"), grace=0) as command:
            await command.wait()
        played = place.guest.played[0]

        assert (played.argv, played.env, played.cwd) == (["a", "b c"], {"N": "v=w"}, "/there")
        assert place.client.shield is Shield.INIT


async def test_a_thousand_commands_at_once_end_and_are_forgotten() -> None:
    async def play(command: Played) -> int:
        await command.write(b"x")
        return 0

    async with opened_place(play) as place:
        printed = []

        async def one() -> None:
            async with place.exec() as command:
                await command.wait()
            printed.append(await read_all(command.stdout))

        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(one)
        await place.client.ping()

        assert (printed, place.guest.commands) == ([b"x"] * 1000, {})


async def test_streams_are_apart_and_can_be_read_after_the_block() -> None:
    async def play(command: Played) -> int:
        await command.write(b"out")
        await command.write(b"err", STDERR)
        return 0

    async with opened_place(play) as place, place.exec() as command:
        assert await command.wait() == Exit(code=0)

    assert (await read_all(command.stdout), await read_all(command.stderr)) == (b"out", b"err")
    assert await command.stdout.receive_some(1) == b""


async def test_what_a_stopped_command_printed_can_be_read_after_the_block() -> None:
    """Though nobody read, and a pipe was full as well as the window."""
    async with opened_place(prints) as place, place.exec() as command:
        await wait_all_tasks_blocked()

    assert await read_all(command.stdout) == CONTENT[: WINDOW + PIPE]


async def test_output_without_end_is_given_up_when_its_writers_are_gone(autojump_clock: MockClock) -> None:
    """A hostile guest that goes on costs a bounded buffer, and a bounded wait."""

    async def play(command: Played) -> int:
        await command.write(CONTENT * 4)
        return 0

    async with opened_place(play) as place, place.exec() as command:
        place.guest.commands[1].become(Phase.GONE)
        await command.wait()

    assert WINDOW < len(await read_all(command.stdout)) < 2 * len(CONTENT)
    assert trio.current_time() - autojump_clock.current_time() <= KILL_GRACE


async def test_a_slow_reader_slows_its_own_command_only() -> None:
    async def play(command: Played) -> int:
        if command.id == 1:
            await command.write(CONTENT)
        return 0

    async with opened_place(play) as place, place.exec() as talkative:
        async with place.exec() as other:
            assert await other.wait() == Exit(code=0)
        await wait_all_tasks_blocked()
        assert place.guest.commands[1].outs[STDOUT].sent == WINDOW

        assert await read_all(talkative.stdout, 1000) == CONTENT
        assert await talkative.wait() == Exit(code=0)


async def test_a_slow_command_slows_its_own_writer_only(autojump_clock: MockClock) -> None:
    got = []

    async def play(command: Played) -> int:
        if command.id == 1:
            await trio.sleep(100)
            while chunk := await command.read(1000):
                got.append(chunk)
        return 0

    async with opened_place(play) as place, place.exec() as slow, trio.open_nursery() as nursery:
        nursery.start_soon(slow.stdin.send_all, CONTENT)
        async with place.exec() as other:
            assert await other.wait() == Exit(code=0)
        await trio.sleep(99)
        assert place.guest.commands[1].stdin.got == WINDOW
        await trio.sleep(2)
        await slow.stdin.aclose()
        assert await slow.wait() == Exit(code=0)

    assert b"".join(got) == CONTENT


async def test_input_that_nobody_reads_any_more_is_broken() -> None:
    async def play(command: Played) -> int:
        command.close_stdin()
        return await obeys(command)

    async with opened_place(play) as place, place.exec() as command:
        with pytest.raises(trio.BrokenResourceError):
            await command.stdin.send_all(CONTENT)
        await command.stdin.aclose()


async def test_input_of_a_command_that_is_gone_is_broken() -> None:
    async with opened_place(ends) as place, place.exec() as command:
        await command.wait()
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError):
            await command.stdin.send_all(b"x")


async def test_input_after_its_end_is_an_error_of_the_caller() -> None:
    async with opened_place(obeys) as place, place.exec() as command:
        await command.stdin.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await command.stdin.send_all(b"x")


async def test_a_read_that_was_cancelled_loses_nothing() -> None:
    async def play(command: Played) -> int:
        await command.read()
        await command.write(b"late")
        return 0

    async with opened_place(play) as place, place.exec() as command:
        with trio.move_on_after(0):
            await command.stdout.receive_some(10)
        await command.stdin.aclose()
        assert await read_all(command.stdout) == b"late"


# --- commands that do not start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "exit", "line"),
    [
        (errno.ENOENT, Exit(code=127), b"command: No such file or directory\n"),
        (errno.EACCES, Exit(code=126), b"command: Permission denied\n"),
    ],
    ids=["not there", "not for us"],
)
async def test_a_program_that_cannot_be_run_ends_as_a_shell_would(number: int, exit: Exit, line: bytes) -> None:
    async def play(command: Played) -> int:
        raise Refused(Stage.EXEC, number)

    async with opened_place(play) as place:
        async with place.exec() as command:
            assert await command.wait() == exit
            with pytest.raises(trio.BrokenResourceError):
                await command.stdin.send_all(b"x")

        assert (await read_all(command.stdout), await read_all(command.stderr)) == (b"", line)
        await place.client.ping()
        assert (place.stop_stages, place.guest.commands) == ([], {})


@pytest.mark.parametrize(
    ("stage", "number", "words"),
    [
        (Stage.REQUEST, errno.EAGAIN, "the guest refused the request: Resource temporarily unavailable"),
        (Stage.FORK, errno.ENOMEM, "no process could be made: Cannot allocate memory"),
        (Stage.LIMITS, errno.EPERM, "its limits or its user could not be set: Operation not permitted"),
        (Stage.DIRECTORY, errno.ENOENT, "its directory cannot be entered: No such file or directory"),
    ],
)
async def test_a_command_that_is_not_started_is_a_failure_of_the_provider(
    stage: Stage, number: int, words: str
) -> None:
    async def play(command: Played) -> int:
        raise Refused(stage, number)

    async with opened_place(play) as place:
        with pytest.raises(ProviderFailed, match=f"^`command` in `/` of workspace `w` cannot be started: {words}$"):
            async with place.exec() as command:
                await command.wait()
        await place.client.ping()
        assert (place.stop_stages, place.guest.commands) == ([], {})


async def test_a_request_that_cannot_be_sent_is_a_failure_of_the_provider() -> None:
    async with opened_place(ends) as place:
        with pytest.raises(ProviderFailed, match="a word of the command or of its environment holds a NUL"):
            async with place.client.exec(Request(argv=["a", "\0"], env={}), grace=0):
                pass
        assert place.guest.played == []


# --- the ladder -------------------------------------------------------------------------------------

LADDER = [
    pytest.param(obeys, [(StopStage.TERM, 0)], 0, Exit(signal=15), id="obeys"),
    pytest.param(
        ignores_term, [(StopStage.TERM, 0), (StopStage.KILL, GRACE)], GRACE, Exit(signal=9), id="ignores TERM"
    ),
    pytest.param(
        obeys_but_leaves_a_daemon,
        [(StopStage.TERM, 0), (StopStage.KILL, 1)],
        1,
        Exit(signal=15),
        id="obeys but leaves a daemon",
    ),
    pytest.param(leaves_a_daemon, [(StopStage.KILL, 0)], 0, Exit(code=0), id="leaves a daemon"),
    pytest.param(ends, [], 0, Exit(code=0), id="has ended"),
]


@pytest.mark.parametrize("how", ["left", "cancelled"])
@pytest.mark.parametrize(("play", "stop_stages", "seconds", "exit"), LADDER)
async def test_the_end_of_the_block_ends_the_tree(
    autojump_clock: MockClock,
    how: str,
    play: Script,
    stop_stages: list[tuple[StopStage, float]],
    seconds: float,
    exit: Exit,
) -> None:
    async with opened_place(play) as place:
        start = trio.current_time()
        with trio.CancelScope() as scope:
            async with place.exec() as command:
                await wait_all_tasks_blocked()
                if how == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()

        assert (place.stop_stages, trio.current_time() - start) == (stop_stages, seconds)
        assert await command.wait() == exit
        await place.client.ping()
        assert (place.guest.commands, place.kills) == ({}, 0)


async def test_what_cannot_be_killed_costs_the_sandbox(autojump_clock: MockClock) -> None:
    async with opened_place(cannot_be_killed) as place:
        async with place.exec() as command:
            pass

        assert place.stop_stages == [
            (StopStage.TERM, 0),
            (StopStage.KILL, GRACE),
            (StopStage.SANDBOX, GRACE + KILL_GRACE),
        ]
        assert (trio.current_time(), place.kills) == (GRACE + KILL_GRACE, 1)
        with pytest.raises(WorkspaceLost, match="the guest of workspace `w` has ended"):
            await command.wait()


async def test_what_outlives_the_sandbox_has_escaped(autojump_clock: MockClock) -> None:
    async with opened_place(cannot_be_killed, kill=lambda: None) as place:
        with pytest.raises(Escaped, match=r"^`command` in `/` of workspace `w` \(process 1001 there\) still lives"):
            async with place.exec():
                pass

        assert trio.current_time() == GRACE + 2 * KILL_GRACE


@pytest.mark.parametrize("at", [0.0, 3.0])
async def test_hurry_ends_the_grace(autojump_clock: MockClock, at: float) -> None:
    async with opened_place(ignores_term) as place, trio.open_nursery() as nursery:

        async def hurry() -> None:
            await trio.sleep(at)
            place.client.hurry()

        nursery.start_soon(hurry)
        await wait_all_tasks_blocked()
        async with place.exec():
            pass

        assert place.stop_stages == [(StopStage.TERM, 0), (StopStage.KILL, at)]


async def test_nothing_waits_for_the_start() -> None:
    """So that a short command is one write there, and one back."""
    async with raw_place() as (client, raw), client.exec(REQUEST, grace=GRACE) as command:
        await command.stdin.aclose()
        heard = [frame.type for frame in await raw.hear(Type.EOF)]
        await raw.say(state(1, State(phase=Phase.GONE)), eof(0), eof(0, stream=STDERR))

        assert heard[-2:] == [Type.EXEC, Type.EOF]
        assert (await command.wait()).ok


async def test_a_command_that_was_cancelled_before_it_started_is_ended_too(autojump_clock: MockClock) -> None:
    async with raw_place() as (client, raw), trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            gone = state(1, State(phase=Phase.GONE, serial=1, marks=Mark.UNKNOWN))
            nursery.start_soon(raw.answer, Type.SIGNAL, gone, eof(0), eof(0, stream=STDERR))
            async with client.exec(REQUEST, grace=GRACE) as command:
                await command.started()
                raise AssertionError("the guest has not said so")
        await raw.hear(Type.FORGET)

        assert trio.current_time() == 1


# --- a lost guest -----------------------------------------------------------------------------------


async def in_wait(place: Place, command: Command) -> None:
    await command.wait()


async def in_send_all(place: Place, command: Command) -> None:
    await command.stdin.send_all(CONTENT)


async def in_ping(place: Place, command: Command) -> None:
    place.guest.serve = None  # type: ignore[assignment,method-assign]
    while True:
        await place.client.ping()


async def in_entry(place: Place, command: Command) -> None:
    while True:
        async with place.exec() as other:
            await other.wait()


async def in_listen(place: Place, command: Command) -> None:
    while True:
        async with place.client.listen(0, serve_nothing):
            pass


async def serve_nothing(relayed: Relayed) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("waiting", [in_wait, in_send_all, in_ping, in_entry, in_listen])
async def test_a_lost_guest_is_raised_where_somebody_waits(waiting: Callable[..., object]) -> None:
    async def play(command: Played) -> int:
        if command.id == 1:
            await command.write(b"before")
            await trio.sleep_forever()
        return 0

    async with opened_place(play) as place:
        async with place.exec() as command, trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(WorkspaceLost, match="the guest of workspace `w` has ended"):
                    await waiting(place, command)  # type: ignore[misc]

            nursery.start_soon(wait)
            for _ in range(20):
                await trio.sleep(0)
            place.lose()
        assert await read_all(command.stdout) == b"before"
        assert place.stop_stages == []
        with pytest.raises(WorkspaceLost):
            async with place.exec():
                pass


async def test_a_status_that_is_known_outlives_the_guest() -> None:
    async with opened_place(ends) as place, place.exec() as command:
        await wait_all_tasks_blocked()
        place.lose()
        await wait_all_tasks_blocked()
        assert await command.wait() == Exit(code=0)


async def test_a_command_that_is_being_stopped_ends_with_the_guest(autojump_clock: MockClock) -> None:
    async with opened_place(ignores_term) as place, trio.open_nursery() as nursery:

        async def lose() -> None:
            await trio.sleep(4)
            place.lose()

        nursery.start_soon(lose)
        async with place.exec():
            pass

        assert (place.stop_stages, trio.current_time()) == ([(StopStage.TERM, 0)], 4)


async def test_closing_ends_what_is_awaited_elsewhere() -> None:
    async with trio.open_nursery() as nursery, opened_place(obeys) as place:

        async def wait() -> None:
            with pytest.raises(WorkspaceLost, match="workspace `w` is closed"):
                async with place.exec() as command:
                    await command.wait()

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with raw_place():
            raise KeyError


@pytest.mark.parametrize("says", [b"", hello(), hello() + state(1, State(phase=Phase.RUNNING))[:20]], ids=len)
async def test_a_guest_that_does_not_finish_its_greeting_is_lost_after_ten_seconds(
    autojump_clock: MockClock, says: bytes
) -> None:
    with pytest.raises(WorkspaceLost, match="the guest of workspace `w` did not answer within 10s"):
        async with raw_place(says):
            pass

    assert trio.current_time() == 10


async def test_a_guest_that_is_not_there_is_lost() -> None:
    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise WorkspaceLost("nobody is there")

    with pytest.raises(WorkspaceLost, match="nobody is there"):
        async with open_guest(connect, what="workspace `w`", kill_sandbox=lambda: None):
            pass


# --- guests that break the rules --------------------------------------------------------------------


class Raw:
    """A guest of bytes. ``kills`` counts what the client did about it."""

    def __init__(self, streams: list[trio.SocketStream]) -> None:
        self._streams = streams
        self._frames: list[Frame] = []
        self._parser = Parser()
        self.kills = 0

    @property
    def stream(self) -> trio.SocketStream:
        return self._streams[0]

    def next_connection(self) -> None:
        self._streams.pop(0).socket.shutdown(trio.socket.SHUT_RDWR)
        self._parser = Parser()
        self._frames = []

    async def say(self, *frames: bytes) -> None:
        await self.stream.send_all(b"".join(frames))

    async def hear(self, kind: Type) -> list[Frame]:
        """What the client says, up to the first of this kind that was not heard yet."""
        while not any(frame.type is kind for frame in self._frames):
            self._frames += self._parser.feed(bytes(await self.stream.receive_some(1 << 18)))
        end = next(at for at, frame in enumerate(self._frames, 1) if frame.type is kind)
        heard, self._frames = self._frames[:end], self._frames[end:]
        return heard

    async def answer(self, kind: Type, *frames: bytes) -> None:
        await self.hear(kind)
        await self.say(*frames)

    def kill(self) -> None:
        self.kills += 1
        self.next_connection()


@asynccontextmanager
async def raw_place(greeting: bytes = hello() + ready(), connections: int = 1) -> AsyncIterator[tuple[Guest, Raw]]:
    pairs = [pair() for _ in range(connections)]
    ours = [stream for stream, _ in pairs]
    raw = Raw([stream for _, stream in pairs])

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not ours:
            raise WorkspaceLost("there is no other connection")
        return ours.pop(0)

    try:
        await raw.say(greeting)
        async with open_guest(connect, what="workspace `w`", kill_sandbox=raw.kill) as client:
            yield client, raw
    finally:
        for stream in itertools.chain(*pairs):
            stream.socket.close()


@asynccontextmanager
async def raw_command(connections: int = 1) -> AsyncIterator[tuple[Command, Raw, Guest]]:
    """Command 1 runs, listener 2 listens."""
    async with raw_place(connections=connections) as (client, raw), trio.open_nursery() as nursery:
        nursery.start_soon(raw.answer, Type.EXEC, state(1, State(phase=Phase.RUNNING, pid=7)))
        async with client.exec(REQUEST, grace=0) as command:
            await command.started()
            nursery.start_soon(raw.answer, Type.LISTEN, state(2, State(phase=Phase.RUNNING, pid=80)))
            async with client.listen(0, serve_nothing):
                yield command, raw, client


def exited(status: int = 0, **more: int) -> bytes:
    return state(1, State(phase=Phase.EXITED, pid=7, status=status, **more))


def data(offset: int, size: int = 1, id: int = 1, stream: int = STDOUT) -> bytes:
    return framing.data(id, stream, offset, bytes(size))


def ack(value: int, id: int = 1, stream: int = 0) -> bytes:
    return framing.offset(Type.ACK, id, stream, value)


def eof(value: int, id: int = 1, stream: int = STDOUT) -> bytes:
    return framing.offset(Type.EOF, id, stream, value)


def only(kind: Type, id: int = 0, stream: int = 0, payload: bytes = b"") -> list[bytes]:
    return [framing.frame(kind, id, payload, stream=stream)]


RUNNING = state(1, State(phase=Phase.RUNNING, pid=7))
GONE = state(1, State(phase=Phase.GONE, pid=7))
FAILED = state(1, State(phase=Phase.FAILED, status=2, stage=Stage.EXEC))
GREETINGS = {
    "READY first": (only(Type.READY), "a READY came out of place"),
    "STATE first": ([RUNNING], "a STATE came out of place"),
    "HELLO twice": ([hello(), hello()], "a HELLO came out of place"),
    "another version": ([hello(version=2)], "the other side speaks version 2, not 1"),
    "DATA in the list": ([hello(), data(0)], "a DATA came out of place"),
    "PONG in the list": ([hello(), *only(Type.PONG, payload=bytes(8))], "a PONG came out of place"),
    "a command of nobody": ([hello(), GONE], "a frame is about what was never opened"),
    "a connection of nobody": ([hello(), opened(RELAY + 1, 1)], "a connection has no listener"),
    "no frames": ([b"\xff" * 100], "a frame has an unknown type or stream"),
}
BREACHES = {
    "READY twice": (only(Type.READY), "a READY came out of place"),
    "HELLO again": ([hello()], "a HELLO came out of place"),
    "EXEC": (only(Type.EXEC, 1, 1, b"x"), "a EXEC came out of place"),
    "PING": (only(Type.PING, payload=bytes(8)), "a PING came out of place"),
    "PONG without PING": (only(Type.PONG, payload=bytes(8)), "a PONG without a PING"),
    "a stream of RESET": (only(Type.RESET, 1, 1), "a RESET names a stream"),
    "STATE of an unknown id": ([state(3, State(phase=Phase.RUNNING))], "a frame is about what was never opened"),
    "STATE of id 0": ([state(0, State(phase=Phase.RUNNING))], "a frame is about what was never opened"),
    "STATE of a connection": ([opened(RELAY + 1, 2), state(RELAY + 1, State(phase=Phase.GONE))], "what has none"),
    "DATA of an unknown id": ([data(0, id=3)], "a frame is about what was never opened"),
    "DATA of an unknown connection": ([data(0, id=RELAY + 1)], "a frame is about what was never opened"),
    "a phase goes down": ([exited(), RUNNING], "a state goes back, or comes twice"),
    "a phase comes twice": ([RUNNING], "a state goes back, or comes twice"),
    "FAILED after EXITED": ([exited(), FAILED], "has failed to start and has run"),
    "GONE after FAILED": ([FAILED, GONE], "has failed to start and has run"),
    "a signal of nobody": ([exited(serial=1)], "a state of what was not asked for"),
    "a status of a stopped process": ([exited(0x137F)], "a state has no wait status"),
    "a negative status": ([exited(-1)], "a state has no wait status"),
    "a large status": ([exited(1 << 16)], "a state has no wait status"),
    "a status with code and signal": ([exited(0x109)], "a state has no wait status"),
    "an ACK of what was not sent": ([ack(1)], "goes back, or beyond what was sent"),
    "an ACK twice": ([ack(0), ack(0)], "goes back, or beyond what was sent"),
    "an ACK of stream 1": ([ack(0, stream=STDOUT)], "a channel has no such stream"),
    "an ACK of a listener": ([ack(0, id=2)], "a channel has no such stream"),
    "DATA of stream 0": ([data(0, stream=0)], "a channel has no such stream"),
    "DATA of a listener": ([data(0, id=2)], "a channel has no such stream"),
    "RESET of a listener": (only(Type.RESET, 2), "a listener has no stream"),
    "DATA with a gap": ([data(1)], "bytes of a stream are missing, or come twice"),
    "DATA twice": ([data(0), data(0)], "bytes of a stream are missing, or come twice"),
    "DATA over the window": ([data(at * MAX_CHUNK, MAX_CHUNK) for at in range(5)], "more bytes than it may"),
    "DATA after EOF": ([eof(0), data(0)], "bytes of a stream are missing, or come twice"),
    "EOF of more than came": ([eof(1)], "does not end where its bytes do"),
    "EOF of less than came": ([data(0, 2), eof(1)], "does not end where its bytes do"),
    "EOF twice": ([eof(0), eof(0)], "does not end where its bytes do"),
    "OPEN without a listener": ([opened(RELAY + 1, 3)], "a connection has no listener"),
    "OPEN of a command": ([opened(RELAY + 1, 1)], "a connection has no listener"),
    "OPEN of a low id": ([opened(3, 2)], "a connection has no listener"),
    "OPEN twice": ([opened(RELAY + 1, 2)] * 2, "a connection is opened twice"),
    "OPEN going back": ([opened(RELAY + 2, 2), opened(RELAY + 1, 2)], "a connection is opened twice"),
    "stderr of a connection": ([opened(RELAY + 1, 2), data(0, id=RELAY + 1, stream=STDERR)], "no such stream"),
    "an OPEN flood": ([opened(RELAY + at, 2) for at in range(1, MAX_RELAYED + 2)], "too many connections"),
    "no frames": ([b"\xff" * 100], "a frame has an unknown type or stream"),
}


@pytest.mark.parametrize(("says", "words"), GREETINGS.values(), ids=GREETINGS)
async def test_a_greeting_against_the_rules_costs_the_sandbox(says: list[bytes], words: str) -> None:
    kills = []
    ours, theirs = pair()

    async def connect() -> trio.abc.Stream:
        await theirs.send_all(b"".join(says))
        return ours

    with pytest.raises(WorkspaceLost, match=f"^the guest of workspace `w` broke the protocol: .*{words}$"):
        async with open_guest(connect, what="workspace `w`", kill_sandbox=lambda: kills.append(1)):
            pass
    await theirs.aclose()

    assert kills == [1]


@pytest.mark.parametrize(("says", "words"), BREACHES.values(), ids=BREACHES)
async def test_a_breach_costs_the_sandbox(says: list[bytes], words: str) -> None:
    async with raw_command() as (_, raw, client):
        await raw.say(*says)
        with pytest.raises(WorkspaceLost, match=f"^the guest of workspace `w` broke the protocol: .*{words}$"):
            await client.ping()
        assert raw.kills == 1


def list_of(*frames: bytes, nonce: bytes = b"the fake guest's") -> list[bytes]:
    return [hello(nonce), *frames, ready()]


LISTENING = state(2, State(phase=Phase.RUNNING, pid=80))
RESUMPTIONS = {
    "another guest": (list_of(nonce=bytes(16)), "another guest answers"),
    "a command is missing": (list_of(LISTENING), "the guest has forgotten a channel that it should keep"),
    "a phase goes down": (list_of(LISTENING, RUNNING), "a state goes back, or comes twice"),
    "a command twice": (list_of(LISTENING, exited(), exited()), "a state goes back, or comes twice"),
    "an ACK goes back": (list_of(LISTENING, exited(), ack(1)), "goes back, or beyond what was sent"),
    "an ACK of too much": (list_of(LISTENING, exited(), ack(6)), "goes back, or beyond what was sent"),
    "bytes are left out": ([*list_of(LISTENING, exited()), data(5)], "are missing, or come twice"),
    "bytes before what was passed on": ([*list_of(LISTENING, exited()), data(0)], "are missing, or come twice"),
}


@pytest.mark.parametrize(("says", "words"), RESUMPTIONS.values(), ids=RESUMPTIONS)
async def test_a_return_against_the_rules_costs_the_sandbox(says: list[bytes], words: str) -> None:
    async with raw_command(connections=2) as (command, raw, client):
        await command.stdin.send_all(b"12345")
        await raw.hear(Type.DATA)
        await raw.say(ack(2), data(0, 4), exited())
        assert len(await command.stdout.receive_some(3)) == 3
        raw.next_connection()
        await raw.say(*says)
        with pytest.raises(WorkspaceLost, match=f"^the guest of workspace `w` broke the protocol: .*{words}$"):
            await client.ping()
        assert raw.kills == 1


async def test_a_status_that_the_guest_does_not_know_is_unknown() -> None:
    async with raw_command() as (command, raw, _):
        await raw.say(exited(marks=Mark.UNKNOWN | Mark.TAMPERED), GONE, eof(0), eof(0, stream=STDERR))
        assert await command.wait() == Exit()
        raw.next_connection()


async def test_a_flood_of_small_frames_leaves_others_their_turns() -> None:
    turns = 0
    flood = only(Type.RESET, 1) * 20_000

    async with raw_command() as (_, raw, client), trio.open_nursery() as nursery:
        nursery.start_soon(raw.say, *flood, *only(Type.PONG, payload=framing.OFFSET.pack(1)))
        nursery.start_soon(client.ping)
        while nursery.child_tasks:
            await trio.lowlevel.checkpoint()
            turns += 1
        raw.next_connection()

    assert turns > len(flood) / 256


async def test_a_guest_that_does_not_read_the_answers_that_it_causes_is_not_read(autojump_clock: MockClock) -> None:
    async with raw_place() as (client, raw):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.answer, Type.LISTEN, state(1, State(phase=Phase.RUNNING)))
            async with client.listen(0, serve_nothing):
                nursery.start_soon(raw.answer, Type.SIGNAL, state(1, State(phase=Phase.GONE, serial=1)))
        with trio.move_on_after(1) as patience:
            for at in range(1, 1_000_000):
                await raw.say(opened(RELAY + at, 1))

    assert patience.cancelled_caught
    assert at < 200_000


# --- how much is said -------------------------------------------------------------------------------


async def test_small_reads_are_not_acknowledged_one_by_one() -> None:
    async with raw_command() as (command, raw, client), trio.open_nursery() as nursery:
        await raw.say(data(0, WINDOW // 8), data(WINDOW // 8, WINDOW // 8), data(WINDOW // 4, WINDOW // 8))
        for _ in range(3 * WINDOW // 8 // 64):
            await command.stdout.receive_some(64)
        nursery.start_soon(client.ping)
        said = [framing.read_offset(frame.payload) for frame in await raw.hear(Type.PING) if frame.type is Type.ACK]
        assert len(said) == 1
        assert WINDOW // 4 <= said[0] < WINDOW // 3
        nursery.cancel_scope.cancel()
        raw.next_connection()


async def test_small_frames_overtake_streams_and_streams_take_turns() -> None:
    async with raw_place() as (client, raw), AsyncExitStack() as commands:
        stdins = []
        async with trio.open_nursery() as nursery:
            for id in (1, 2, 3):
                nursery.start_soon(raw.answer, Type.EXEC, state(id, State(phase=Phase.RUNNING)))
                command = await commands.enter_async_context(client.exec(REQUEST, grace=0))
                await command.started()
                stdins.append(command.stdin)
            for stdin in stdins:
                await stdin.send_all(bytes(WINDOW))
                await wait_all_tasks_blocked()
            nursery.start_soon(client.ping)
            await wait_all_tasks_blocked()
            heard = [frame.id for frame in await raw.hear(Type.PING) if frame.type is Type.DATA]
            after = [frame.id for frame in await raw.hear(Type.DATA)]
            await raw.say(*only(Type.PONG, payload=framing.OFFSET.pack(1)))
        while len(heard) + len(after) < 3 * (WINDOW // MAX_CHUNK + 1):
            after += [frame.id for frame in await raw.hear(Type.DATA)]
        raw.next_connection()

    assert set(heard) == {1}
    assert after[-8:] == [2, 3] * 4


async def test_a_hundred_idle_guests_are_cheap() -> None:
    tracemalloc.start()
    try:
        async with trio.open_nursery() as nursery:

            async def idle(task_status: trio.TaskStatus[None]) -> None:
                async with raw_place():
                    task_status.started()
                    await trio.sleep_forever()

            before, _ = tracemalloc.get_traced_memory()
            for _ in range(100):
                await nursery.start(idle)
            await wait_all_tasks_blocked()
            after, _ = tracemalloc.get_traced_memory()
            nursery.cancel_scope.cancel()
    finally:
        tracemalloc.stop()

    assert (after - before) / 100 < 200 << 10


# --- the relay --------------------------------------------------------------------------------------


async def shouts(relayed: Relayed) -> None:
    while chunk := await relayed.receive_some(1000):
        await relayed.send_all(chunk.upper())
    await relayed.send_all(b"!")
    await relayed.aclose()


async def test_a_connection_inside_is_served_here_and_forgotten() -> None:
    async with opened_place(obeys) as place:
        async with place.client.listen(0, shouts) as listener:
            assert listener.port == 8080
            made = [place.guest.connect(listener.id) for _ in range(3)]
            for inside in made:
                inside.send(b"hello", end=True)
            assert [await inside.receive() for inside in made] == [b"HELLO!"] * 3
        await place.client.ping()

        assert (place.guest.relayed, place.guest.ports) == ({}, {})
        assert [inside.reset for inside in made] == [False] * 3


async def test_a_connection_that_is_not_read_to_its_end_is_reset_after_its_answer() -> None:
    async def answers(relayed: Relayed) -> None:
        await relayed.send_all(b"no")

    async with opened_place(obeys) as place, place.client.listen(0, answers) as listener:
        inside = place.guest.connect(listener.id)
        assert await inside.receive() == b"no"
        await wait_all_tasks_blocked()
        assert inside.reset


async def test_a_connection_that_is_reset_inside_ends_quietly() -> None:
    seen: list[Relayed] = []

    async def waits(relayed: Relayed) -> None:
        seen.append(relayed)
        await relayed.receive_some(1)

    async with raw_place() as (client, raw), trio.open_nursery() as nursery:
        nursery.start_soon(raw.answer, Type.LISTEN, state(1, State(phase=Phase.RUNNING)))
        async with client.listen(0, waits):
            await raw.say(opened(RELAY + 1, 1))
            await wait_all_tasks_blocked()
            await raw.say(*only(Type.RESET, RELAY + 1))
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BrokenResourceError):
                await seen[0].receive_some(1)
            with pytest.raises(trio.BrokenResourceError):
                await seen[0].send_all(b"x")
            raw.next_connection()


async def test_connections_end_with_their_listener() -> None:
    async with opened_place(obeys) as place:
        async with place.client.listen(0, serve_nothing) as listener:
            served = place.guest.connect(listener.id)
            await wait_all_tasks_blocked()
            waiting = place.guest.connect(listener.id)
        await wait_all_tasks_blocked()

        assert (served.reset, waiting.reset, place.guest.relayed) == (True, True, {})


async def test_a_port_that_cannot_be_had_is_a_failure_of_the_provider() -> None:
    async with raw_place() as (client, raw), trio.open_nursery() as nursery:
        failed = state(1, State(phase=Phase.FAILED, status=errno.EADDRINUSE, stage=Stage.LISTEN))
        nursery.start_soon(raw.answer, Type.LISTEN, failed)
        with pytest.raises(ProviderFailed, match="the port cannot be listened on: Address already in use"):
            async with client.listen(80, serve_nothing):
                pass
        await raw.hear(Type.FORGET)


# --- connections that are lost ----------------------------------------------------------------------


class Cut(trio.abc.Stream):
    """A connection that is lost, in both directions, once so many bytes were sent from this side."""

    def __init__(self, stream: trio.SocketStream, after: int) -> None:
        self._stream = stream
        self.after = after
        self.sent = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        allowed = self.after - self.sent
        self.sent += len(data)
        await self._stream.send_all(data[:allowed])
        if len(data) >= allowed:
            self._stream.socket.shutdown(trio.socket.SHUT_RDWR)
            raise trio.BrokenResourceError("cut")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


class Wires:
    """A first connection that is cut, and a whole one after it."""

    def __init__(self, side: int = 0, after: int = 1 << 60) -> None:
        self._side = side
        self._after = after
        self.ends: list[Cut] = []

    def __call__(self) -> tuple[trio.abc.Stream, trio.abc.Stream]:
        self.ends = [Cut(end, 1 << 60) for end in pair()]
        self.ends[self._side].after = self._after
        return self.ends[0], self.ends[1]


async def shouts_until_term(command: Played) -> int:
    command.deaf = {signal.SIGTERM}
    while chunk := await command.read():
        await command.write(chunk.upper())
    await command.write(b"done", STDERR)
    await command.signalled(signal.SIGTERM)
    await command.write(b"bye")
    return 7 << 8


async def one_command(first: Wires, *, late: bool) -> None:
    """``late``: nothing is read before the block has ended, so that what comes twice is still held."""
    async with opened_place(shouts_until_term, wirings=[first, pair]) as place:
        async with place.exec() as command:
            for part in (b"abc", b"defg"):
                await command.stdin.send_all(part)
                await trio.sleep(0)
            await command.stdin.aclose()
            if not late:
                assert await command.stdout.receive_some(1) == b"A"
                assert await command.stderr.receive_some(4) != b""
            while not place.guest.played[0].outs[STDERR].got:
                await place.guest.changed()
        await place.client.ping()
        played = place.guest.played

        assert await read_all(command.stdout) == (b"ABCDEFGbye" if late else b"BCDEFGbye")
        assert await command.wait() == Exit(code=7)
        assert [stage for stage, _ in place.stop_stages] == [StopStage.TERM]
        assert ([command.signals for command in played], place.guest.commands) == ([[signal.SIGTERM]], {})


async def one_connection(first: Wires, *, late: bool) -> None:
    async def serve(relayed: Relayed) -> None:
        if late:
            await wait_all_tasks_blocked()
        await shouts(relayed)

    async with opened_place(obeys, wirings=[first, pair]) as place:
        async with place.client.listen(0, serve) as listener:
            inside = place.guest.connect(listener.id)
            inside.send(b"hello", end=True)
            assert await inside.receive() == b"HELLO!"
            await place.client.ping()
            await wait_all_tasks_blocked()
        await place.client.ping()
        assert (inside.reset, place.guest.relayed, place.guest.ports) == (False, {}, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.nightly, id="read at once"), pytest.param(True, id="read late")]
)
@pytest.mark.parametrize("side", [0, 1], ids=["from the host", "from the guest"])
@pytest.mark.parametrize("scenario", [one_command, one_connection])
async def test_a_connection_may_be_lost_at_every_byte(scenario: Callable[..., object], side: int, late: bool) -> None:
    whole = Wires()
    await scenario(whole, late=late)  # type: ignore[misc]
    for after in range(whole.ends[side].sent + 1):
        with trio.fail_after(5):
            await scenario(Wires(side, after), late=late)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1], ids=["from the host", "from the guest"])
async def test_large_streams_survive_many_losses(side: int) -> None:
    async def play(command: Played) -> int:
        while chunk := await command.read():
            await command.write(chunk)
        return 0

    wires = [Wires(side, 200_000 + 7919 * number) for number in range(8)]
    async with opened_place(play, wirings=[*wires, pair]) as place, place.exec() as command:
        async with trio.open_nursery() as nursery:

            async def feed() -> None:
                await command.stdin.send_all(CONTENT * 2)
                await command.stdin.aclose()

            nursery.start_soon(feed)
            assert await read_all(command.stdout, 10_000) == CONTENT * 2
        assert await command.wait() == Exit(code=0)
        assert place.wirings in ([], [pair])


async def test_a_command_that_is_asked_for_between_connections_starts_with_the_next() -> None:
    async with opened_place(ends, wirings=[pair, pair]) as place:
        place.hang_up()
        async with place.exec() as command:
            assert await command.wait() == Exit(code=0)
        assert len(place.guest.played) == 1


async def test_a_command_that_no_connection_has_carried_ends_at_once(autojump_clock: MockClock) -> None:
    async with raw_place(connections=2) as (client, raw):
        raw.next_connection()
        await wait_all_tasks_blocked()
        assert len(await raw.hear(Type.HELLO)) == 1
        with trio.move_on_after(1):
            async with client.exec(REQUEST, grace=GRACE) as command:
                await command.started()
                raise AssertionError("there is no guest")
        assert trio.current_time() == 1

        await raw.say(hello(), ready())
        assert [frame.type for frame in await raw.hear(Type.READY)] == [Type.READY]


async def test_what_was_let_go_meanwhile_is_forgotten_on_return() -> None:
    """A command whose ``FORGET`` was lost, and a connection that nobody serves any more."""
    async with raw_place(connections=2) as (client, raw):
        async with trio.open_nursery() as nursery:
            gone = state(1, State(phase=Phase.GONE))
            nursery.start_soon(raw.answer, Type.EXEC, gone, eof(0), eof(0, stream=STDERR))
            async with client.exec(REQUEST, grace=GRACE) as command:
                await command.wait()
        raw.next_connection()
        await raw.say(hello(), gone, ack(0), opened(RELAY + 1, 1), ready())

        heard = await raw.hear(Type.READY)
        assert sorted((frame.type, frame.id) for frame in heard if frame.id) == [
            (Type.FORGET, 1),
            (Type.RESET, RELAY + 1),
        ]
