"""What the guest program does with commands, streams, process trees, lost connections and relayed ones."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from runner.guest import framing
from runner.guest.framing import (
    MAX_COMMANDS,
    MAX_PAYLOAD,
    MAX_RELAYED,
    MAX_REQUEST,
    RELAY,
    STDOUT,
    WINDOW,
    Mark,
    Phase,
    Request,
    Stage,
    Type,
    frame,
)
from runner.sandbox import bwrap
from runner.testing.outside import alive, descendants, eventually, fields, marked
from tests.support.folder_contents import put
from tests.support.guest_driver import NONCE, PATH, Channel, Host, Lost, Pipes, Wire, dialling, inherited, once
from tests.support.needs import ROOT

STRANGER = 1_900_000_000  # a uid that nobody else has

# --- what a command gets ---


def test_a_command_gets_exactly_its_words(guest: Host) -> None:
    words = ["a", "b  c", "", "ü\n", "*"]

    ended = guest.run("sh", "-c", "cat /proc/$$/cmdline; true", *words)

    assert ended.out.decode().split("\0")[3:-1] == words


def test_a_command_gets_exactly_its_environment(guest: Host) -> None:
    env = {"PATH": PATH, "A": "", "B": "x=y", "C D": "two\nlines"}

    assert guest.run("cat", "/proc/self/environ", env=env).out.decode().split("\0")[:-1] == [
        f"{name}={value}" for name, value in env.items()
    ]


def test_a_command_runs_in_its_directory(guest: Host, tmp_path: Path) -> None:
    assert guest.run("readlink", "/proc/self/cwd", cwd=str(tmp_path)).out == f"{tmp_path}\n".encode()


def test_stdin_comes_through_in_pieces(guest: Host) -> None:
    command = guest.start("cat")
    for piece in (b"one\n", b"two\n", b"three"):
        before = len(command.out)
        command.write(piece)
        guest.until(lambda before=before: len(command.out) > before)
    assert not command.done
    command.end()

    assert command.wait() == (command.state, b"one\ntwo\nthree", b"")


def test_large_input_comes_back_whole(guest: Host) -> None:
    text = bytes(range(256)) * 8000

    assert guest.run("cat", stdin=text).out == text


def test_the_channel_may_be_two_pipes(program: Path) -> None:
    text = bytes(range(256)) * 8000
    with inherited(program, "-", pipes=True) as host:
        assert host.run("cat", stdin=text).out == text
        seen = host.run("sh", "-c", "cd /proc/self/fd; echo *").out

    assert seen.split() == [b"0", b"1", b"2", b"3"]  # 3 is the directory that the shell itself reads


def test_a_guest_whose_answers_nobody_reads_ends_with_all_that_it_runs(program: Path, mark: str) -> None:
    (stdin, says), (hears, stdout) = os.pipe(), os.pipe()
    with subprocess.Popen([program, "-"], stdin=stdin, stdout=stdout, env={}) as guest:
        for fd in (stdin, stdout):
            os.close(fd)
        host = Host(once(Wire(Pipes(hears, says))))
        host.mark = mark
        host.step(10)
        host.start("sleep", "1000")
        os.close(hears)
        assert guest.wait(30) == 0
        os.close(says)


def test_output_and_error_are_apart(guest: Host) -> None:
    ended = guest.run("sh", "-c", "echo out; echo err >&2; echo more")

    assert (ended.out, ended.err) == (b"out\nmore\n", b"err\n")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", -9),
        ("kill -TERM $$", -15),
        ("kill -SEGV $$", -11),
    ],
)
def test_a_status_is_the_command_s_own(guest: Host, script: str, code: int) -> None:
    assert guest.run("sh", "-c", script).code == code


@pytest.mark.parametrize(
    ("argv", "request_", "stage", "error"),
    [
        (["no-such-program"], {}, Stage.EXEC, errno.ENOENT),
        ([""], {}, Stage.EXEC, errno.ENOENT),
        (["/etc/passwd"], {}, Stage.EXEC, errno.EACCES),
        (["/"], {}, Stage.EXEC, errno.EACCES),
        (["true", "x" * (1 << 17)], {}, Stage.EXEC, errno.E2BIG),
        (["true"], {"cwd": "/nowhere"}, Stage.DIRECTORY, errno.ENOENT),
        (["true"], {"cwd": "/etc/passwd"}, Stage.DIRECTORY, errno.ENOTDIR),
        (["true"], {"cwd": ""}, Stage.DIRECTORY, errno.ENOENT),
        (["true"], {"limits": {99: (1, 1)}}, Stage.LIMITS, errno.EINVAL),
        (["true"], {"oom_score_adj": 1001}, Stage.LIMITS, errno.EINVAL),
        (["true"], {"oom_score_adj": -1}, Stage.REQUEST, errno.EINVAL),
        ([], {}, Stage.REQUEST, errno.EINVAL),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_command_that_cannot_start_says_where_and_why(
    guest: Host, argv: list[str], request_: dict[str, object], stage: Stage, error: int
) -> None:
    state = guest.run(*argv, **request_).state

    assert (state.phase, state.stage, state.status) == (Phase.FAILED, stage, error)


def test_a_command_that_failed_to_start_is_never_said_to_run_afterwards(guest: Host) -> None:
    commands = [guest.start("true", cwd="/nowhere") for _ in range(300)]
    for command in commands:
        command.wait()
    guest.idle(0.2)

    assert {command.phase for command in commands} == {Phase.FAILED}


def test_a_program_is_looked_for_in_the_command_s_own_path(guest: Host, tmp_path: Path) -> None:
    for name, mode in (("closed", 0o644), ("open", 0o755), ("later", 0o755)):
        put(tmp_path / name / "prog", f"#!/bin/sh\necho {name}\n", mode)
    entries = ["/nowhere", "/etc/passwd", "x" * 5000, tmp_path / "closed", tmp_path / "open", tmp_path / "later"]

    assert guest.run("prog", env={"PATH": ":".join(map(str, entries))}).out == b"open\n"
    assert guest.run("prog", env={"PATH": ""}, cwd=str(tmp_path / "later")).out == b"later\n"
    assert guest.run("./prog", env={}, cwd=str(tmp_path / "later")).out == b"later\n"
    assert guest.run("true", env={}).code == 0
    assert guest.run("prog", env={"PATH": f"{tmp_path / 'closed'}:/nowhere"}).state.status == errno.EACCES


def test_a_script_without_a_first_line_is_run_by_the_shell(guest: Host, tmp_path: Path) -> None:
    script = tmp_path / "script"
    put(script, 'echo "$0 $1 $#"\n', 0o755)

    assert guest.run(str(script), "a b", "c").out == f"{script} a b 2\n".encode()
    assert guest.run("script", "a b", env={"PATH": str(tmp_path)}).out == f"{script} a b 1\n".encode()


def test_limits_and_oom_score_are_those_that_were_asked_for(guest: Host) -> None:
    limits = {resource.RLIMIT_CPU: (70, 90), resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_NOFILE: (77, 88)}
    script = "ulimit -St; ulimit -Ht; ulimit -Hc; ulimit -Sn; ulimit -Hn; cat /proc/self/oom_score_adj"

    assert guest.run("sh", "-c", script, limits=limits, oom_score_adj=500).out.split() == b"70 90 0 77 88 500".split()


@pytest.mark.parametrize(("soft", "hard"), [(33, "unlimited"), (64, 64)], ids=["raised for itself", "hardly any"])
def test_the_limit_on_open_files_is_as_the_guest_found_it(program: Path, soft: int, hard: object) -> None:
    keep_hard = f"ulimit -Hn {hard};" if hard != "unlimited" else ""
    with inherited("sh", "-c", f'{keep_hard} ulimit -Sn {soft}; exec "$0"', program) as host:
        assert host.run("sh", "-c", "ulimit -Sn").out == f"{soft}\n".encode()


def test_nothing_of_the_guest_s_own_surroundings_reaches_a_command(program: Path) -> None:
    with inherited("sh", "-c", 'trap "" INT USR1; exec "$0" 7</dev/null 9</dev/null', program) as host:
        assert host.run("ls", "/proc/self/fd").out == b"0\n1\n2\n3\n"  # the last is what it lists them with
        status = host.run("cat", "/proc/self/status").out.decode()
        stat = host.run("cat", "/proc/self/stat")

    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    assert {int(masks[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")} == {0}
    assert stat.out.split()[5] == stat.out.split()[0]


def test_a_guest_without_a_channel_says_so(program: Path) -> None:
    assert subprocess.run(["sh", "-c", '"$0" <&-', program], check=False).returncode == 2
    assert subprocess.run([program, "x" * 108], check=False).returncode == 2


@ROOT.mark
def test_a_command_runs_as_another_user_without_any_capability(guest: Host) -> None:
    ended = guest.run("cat", "/proc/self/status", uid=STRANGER, gid=STRANGER + 1, oom_score_adj=7)

    status = dict(line.split(":\t", 1) for line in ended.out.decode().splitlines())
    assert status["Uid"].split() == [str(STRANGER)] * 4
    assert status["Gid"].split() == [str(STRANGER + 1)] * 4
    assert status["Groups"].strip() == ""
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"


@ROOT.mark
def test_other_ids_than_the_user_s_own_cannot_be_had_by_an_ordinary_user(program: Path) -> None:
    with inherited(program, user=STRANGER) as host:
        state = host.run("true", uid=STRANGER + 1).state

    assert (state.stage, state.status) == (Stage.LIMITS, errno.EPERM)


# --- requests ---


def test_a_request_may_be_as_large_as_the_kernel_takes(guest: Host) -> None:
    words = ["x" * 130_000] * 15

    assert guest.run("sh", "-c", 'echo $# ${#1} "${#15}"', "sh", *words).out == b"15 130000 130000\n"


def malformed() -> Iterator[tuple[str, bytes]]:
    def body(words: bytes, *, limits: int = 0, argv: int = 1, env: int = 0) -> bytes:
        return struct.pack("<IIiIII", framing.KEEP, framing.KEEP, 0, limits, argv, env) + words

    yield "one byte", b"x"
    yield "half a head", body(b"")[:20]
    yield "no words", body(b"")
    yield "no argv", body(b"/\0", argv=0)
    yield "too few words", body(b"/\0true\0", argv=2)
    yield "too many words", body(b"/\0true\0more\0")
    yield "too few variables", body(b"/\0true\0A=1\0", env=2)
    yield "no last NUL", body(b"/\0true")
    yield "limits that are not there", body(b"/\0true\0", limits=1)
    yield "most limits", body(b"/\0true\0", limits=0xFFFFFFFF)
    yield "most words", body(b"/\0true\0", argv=0xFFFFFFFF)
    yield "most variables", body(b"/\0true\0", env=0xFFFFFFFF)
    yield "most of all", body(b"/\0true\0", limits=0xFFFFFFFF, argv=0xFFFFFFFF, env=0xFFFFFFFF)
    yield "zeros", bytes(MAX_PAYLOAD)


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in malformed()])
def test_a_malformed_request_fails_and_harms_nothing(guest: Host, body: bytes) -> None:
    state = guest.ask(lambda id: frame(Type.EXEC, id, body, stream=1)).wait().state

    assert (state.phase, state.stage, state.status) == (Phase.FAILED, Stage.REQUEST, errno.EINVAL)
    assert guest.run("true").code == 0


def test_there_are_at_most_so_many_commands_and_listeners(guest: Host) -> None:
    """Those that have failed count until they are forgotten."""
    taken = guest.listen()
    port = taken.state.pid if taken.state else 0
    listeners = [guest.ask(lambda id: framing.listen(id, port), streams=()) for _ in range(MAX_COMMANDS - 1)]
    guest.until(lambda: all(listener.phase for listener in listeners))

    for refused in (guest.start("true"), guest.listen()):
        guest.until(lambda refused=refused: refused.done)
        state = refused.state
        assert (state.phase, state.stage, state.status) == (Phase.FAILED, Stage.REQUEST, errno.EAGAIN)
        refused.forget()
    listeners[0].forget()
    assert guest.run("true").code == 0


def test_a_thousand_commands_at_once_all_end_as_they_should(guest: Host) -> None:
    commands = [guest.start("sh", "-c", f"echo {n}; exit {n % 200}") for n in range(1000)]

    for n, command in enumerate(commands):
        ended = command.wait(30)
        assert (ended.code, ended.out) == (n % 200, f"{n}\n".encode())


def violations() -> Iterator[tuple[str, bytes]]:
    run = framing.execute(1, Request(argv=["sleep", "1000"], env={"PATH": PATH}))
    yield "unknown type", frame(15)  # type: ignore[arg-type]
    yield "type 0", frame(0)  # type: ignore[arg-type]
    yield "stream 3", frame(Type.PING, payload=bytes(8), stream=3)
    yield "not zero", framing.HEADER.pack(0, Type.READY, 0, 1, 0)
    yield "no data", frame(Type.DATA, 1, bytes(8))
    yield "an empty request", frame(Type.EXEC, 1)
    yield "a payload that is not expected", frame(Type.FORGET, 1, b"x")
    yield "too long a payload", framing.HEADER.pack(MAX_PAYLOAD + 1, Type.DATA, 0, 0, 1)
    yield "HELLO again", framing.hello(NONCE)
    yield "READY again", frame(Type.READY)
    yield "a guest's frame", frame(Type.PONG, payload=bytes(8))
    yield "an id of the guest", framing.execute(RELAY | 1, Request(argv=["true"], env={}))
    yield "an id that is taken", run + run
    yield "a port that is none", framing.listen(1, 65536)
    yield "two requests at once", frame(Type.EXEC, 1, b"x") + frame(Type.EXEC, 2, b"x")
    yield "an endless request", frame(Type.EXEC, 1, bytes(MAX_PAYLOAD)) * (MAX_REQUEST // MAX_PAYLOAD + 1)
    yield "data of nobody", framing.data(9, 0, 0, b"x")
    yield "data of an output", run + framing.data(1, 1, 0, b"x")
    yield "a gap", run + framing.data(1, 0, 1, b"x")
    yield "data at the end of the numbers", run + framing.data(1, 0, (1 << 64) - 1, b"xy")
    yield "data after the end", run + framing.offset(Type.EOF, 1, 0, 0) + framing.data(1, 0, 0, b"x")
    yield "an end before the end", run + framing.offset(Type.EOF, 1, 0, 5)
    yield "an end of an output", run + framing.offset(Type.EOF, 1, 1, 0)
    yield "an acknowledgement of what never was", run + framing.offset(Type.ACK, 1, 1, 5)
    yield "an acknowledgement of input", run + framing.offset(Type.ACK, 1, 0, 0)
    yield "no signal", run + framing.signal(1, 1, 65)
    yield "FORGET of what runs", run + frame(Type.FORGET, 1)
    yield "RESET of a command", run + frame(Type.RESET, 1)
    yield "RESET of a listener", framing.listen(1, 0) + frame(Type.RESET, 1)
    yield "data of a listener", framing.listen(1, 0) + framing.data(1, 0, 0, b"x")
    chunk = bytes(framing.MAX_CHUNK)
    pieces = [framing.data(1, 0, at, chunk) for at in range(0, 2 * WINDOW, len(chunk))]
    yield "more than the window", run + b"".join(pieces)


@pytest.mark.parametrize("bytes_", [pytest.param(bytes_, id=name) for name, bytes_ in violations()])
def test_a_host_that_breaks_the_rules_is_left(program: Path, mark: str, bytes_: bytes) -> None:
    assert ended_by(program, framing.hello(NONCE) + frame(Type.READY) + bytes_) == 0


@pytest.mark.parametrize(
    "bytes_",
    [
        frame(Type.READY),
        frame(Type.PING, payload=bytes(8)),
        frame(Type.HELLO, payload=b"\2\0\0\0" + NONCE),
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["READY", "PING", "version 2", "another protocol"],
)
def test_a_host_that_does_not_begin_with_hello_is_left(program: Path, bytes_: bytes) -> None:
    assert ended_by(program, bytes_) == 0


def ended_by(program: Path, bytes_: bytes) -> int:
    """The exit status of a guest that was sent these bytes, and left us."""
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([program], stdin=theirs) as process:
        theirs.close()
        wire = Wire(ours)
        with suppress(Lost):
            wire.send(bytes_)
        with pytest.raises(Lost):
            receive_all(lambda: wire.receive(30))
        return process.wait(30)


def receive_all(receive: Callable[[], bytes]) -> None:
    while receive():
        pass


# --- flow ---


def test_a_reader_that_acknowledges_nothing_stops_its_own_command_only(guest: Host) -> None:
    unread = guest.start("head", "-c", "1000000", "/dev/zero", reads=False)
    guest.until(lambda: len(unread.out) == WINDOW)
    ended = guest.run("head", "-c", "1000000", "/dev/zero")
    guest.idle(0.1)

    assert len(ended.out) == 1_000_000
    assert (len(unread.out), unread.phase) == (WINDOW, Phase.RUNNING)
    unread.read()
    assert unread.wait().out == bytes(1_000_000)


def test_input_that_is_not_read_stops_at_the_window_until_it_is_refused(guest: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    command = guest.start("sh", "-c", f"read x < {go}; exec <&-; sleep 1000")
    command.write(bytes(1_000_000))
    guest.until(lambda: command.acked)
    guest.idle(0.1)

    in_pipe = command.acked
    assert 0 < in_pipe <= 1 << 20
    assert command.sent == in_pipe + WINDOW
    go.write_text("\n")
    guest.until(lambda: command.broken)
    command.write(b"more")  # crosses the RESET, at worst
    assert command.phase == Phase.RUNNING


def test_a_command_ends_though_its_input_does_not(guest: Host) -> None:
    command = guest.start("sh", "-c", "read x; exit 4")
    command.write(b"line\n" + bytes(200_000))

    assert command.wait().code == 4
    guest.until(lambda: command.broken)


def test_what_is_in_the_pipe_at_the_end_is_all_that_counts(guest: Host) -> None:
    """More than one turn of a ring, held back until the tree is gone."""
    command = guest.start("sh", "-c", "head -c 300000 /dev/zero; echo end", reads=False)
    guest.until(lambda: command.phase == Phase.GONE or len(command.out) == WINDOW)
    command.read()

    assert command.wait().out == bytes(300_000) + b"end\n"


def test_pings_are_answered_behind_a_flood(guest: Host) -> None:
    guest.start("cat", "/dev/zero")
    for _ in range(5):
        guest.ping()


# --- trees ---

DAEMON = """setsid sh -c 'trap "" TERM; echo $$; exec sleep 1000'"""
PYTHON = ("python3", "-SIc")
STRANGE = {
    "double-forked": (
        "import os, signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "for _ in range(5):\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        print(os.getpid(), flush=True); time.sleep(1000)"
    ),
    "nothing open": (
        "import os, time\n"
        "if not os.fork():\n"
        "    print(os.getpid(), flush=True); os.closerange(0, 4096); os.chdir('/'); os.setsid(); time.sleep(1000)"
    ),
    "renamed": (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid(); open('/proc/self/comm', 'w').write(') S 1 (')\n"
        "    if not os.fork(): print(os.getpid(), flush=True)\n"
        "    time.sleep(1000)"
    ),
    "threads": (
        "import os, subprocess, threading, time\n"
        "def work(): subprocess.run(['sh', '-c', 'echo $$; exec sleep 1000'])\n"
        "for _ in range(3): threading.Thread(target=work).start()\n"
        "time.sleep(0.1); os._exit(0)"
    ),
    "stopped": (
        "import os, signal\nif not os.fork():\n    print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    "a subreaper of its own": (
        "import ctypes, os, time\n"
        "ctypes.CDLL(None).prctl(36, 1)\n"
        "if not os.fork():\n"
        "    if not os.fork():\n"
        "        os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(1000)"
    ),
}


def printed(command: Channel, count: int = 1) -> list[int]:
    """The pids that its processes have printed."""
    command.host.until(lambda: command.out.count(b"\n") >= count)
    return list(map(int, command.out.split()))


@pytest.mark.parametrize("script", STRANGE.values(), ids=STRANGE)
def test_kill_leaves_nothing(guest: Host, script: str) -> None:
    command = guest.start(*PYTHON, script)
    daemons = printed(command)
    assert all(map(alive, daemons))
    guest.idle(0.02)
    assert command.phase < Phase.GONE
    command.kill(9)
    command.wait()

    assert not any(map(alive, printed(command)))
    assert marked(guest.mark) == []


def test_a_command_is_exited_before_its_daemons_are_gone(guest: Host) -> None:
    command = guest.start("sh", "-c", f"{DAEMON} & exit 3")
    (daemon,) = printed(command)
    guest.until(lambda: command.phase == Phase.EXITED)
    guest.idle(0.05)

    assert (command.phase, alive(daemon)) == (Phase.EXITED, True)
    assert STDOUT not in command.ended
    command.kill(9)
    assert command.wait().code == 3
    assert not alive(daemon)


def test_terminate_reaches_whoever_is_in_the_tree(guest: Host) -> None:
    """Grandchildren in sessions of their own, behind a parent with an odd name, and those whose parent has gone."""
    odd = "open('/proc/self/comm', 'w').write(') 0 (')"
    leaf = "trap 'echo term; exit' TERM; echo ready; while :; do sleep 0.01; done"
    script = f"import subprocess; {odd}; subprocess.run(['setsid', 'sh', '-c', {leaf!r}])"
    command = guest.start("sh", "-c", '(setsid sh -c "$1" &); python3 -SIc "$2"; sleep 1000', "sh", leaf, script)
    guest.until(lambda: command.out.count(b"ready\n") == 2)
    command.kill(15)

    assert command.wait().out.count(b"term\n") == 2


def test_killing_one_command_leaves_another_s_tree_alone(guest: Host) -> None:
    one, other = (guest.start("sh", "-c", f"for i in 1 2 3; do {DAEMON} & done") for _ in range(2))
    dead, living = printed(one, 3), printed(other, 3)
    one.kill(9)
    one.wait()

    assert not any(map(alive, dead))
    assert all(map(alive, living))


def test_a_signal_may_follow_its_request_at_once(guest: Host) -> None:
    commands = [guest.start("sleep", "1000") for _ in range(50)]
    for command in commands:
        command.kill(15)
        command.kill(9)

    assert {command.wait().code for command in commands} <= {-15, -9}
    assert {command.state.serial for command in commands if command.state} == {2}


def test_kill_is_not_lost_behind_other_signals(guest: Host) -> None:
    command = guest.start("sh", "-c", f"{DAEMON} & {DAEMON} & sleep 1000")
    printed(command, 2)
    for _ in range(500):
        command.kill(signal.SIGCONT)
    command.kill(9)

    assert command.wait().code == -9


def test_a_signal_that_crosses_the_end_of_its_command_is_not_answered(guest: Host) -> None:
    """The host may have had it forgotten by then."""
    for _ in range(20):
        command = guest.start("true")
        guest.until(lambda command=command: command.phase >= Phase.EXITED)
        command.kill(9)
        command.wait()
        command.forget()
    guest.ping()


def test_a_listener_s_end_is_said_once(guest: Host) -> None:
    taken = guest.listen()
    port = taken.state.pid if taken.state else 0
    failed = guest.listen(port)
    for listener in (taken, failed):
        listener.kill(9)
        listener.kill(9)
    guest.idle(0.05)

    assert (taken.phase, failed.phase) == (Phase.GONE, Phase.FAILED)
    assert (failed.state.stage, failed.state.status) == (Stage.LISTEN, errno.EADDRINUSE)
    assert guest.listen(port).phase == Phase.RUNNING


def supervisor(command: Channel) -> int:
    return int(fields(command.state.pid)[1])


def test_who_kills_a_supervisor_does_not_save_its_tree(guest: Host) -> None:
    other = guest.start("sh", "-c", f"{DAEMON} & sleep 1000")
    command = guest.start("sh", "-c", f"{DAEMON} & {DAEMON} & sleep 1000")
    spared, daemons = printed(other), printed(command, 2)
    os.kill(supervisor(command), signal.SIGKILL)
    ended = command.wait()

    assert (ended.state.marks, ended.code) == (Mark.TAMPERED, -9)
    assert not any(map(alive, daemons))
    assert all(map(alive, spared))
    assert guest.run("true").code == 0


def test_a_status_that_was_said_outlives_the_supervisor(guest: Host) -> None:
    command = guest.start("sh", "-c", f"{DAEMON} & read x; exit 5")
    (daemon,) = printed(command)
    killed = supervisor(command)
    command.write(b"\n")
    guest.until(lambda: command.phase == Phase.EXITED)
    os.kill(killed, signal.SIGKILL)
    ended = command.wait()

    assert (ended.state.marks, ended.code) == (Mark.TAMPERED, 5)
    assert not alive(daemon)


def test_a_supervisor_that_is_killed_at_once_leaves_no_doubt(guest: Host) -> None:
    """Whether or not its command has run yet: the status is a true one, or said to be unknown."""
    for _ in range(20):
        command = guest.start("sh", "-c", "exit 6")
        while not command.done and not (found := descendants(guest.guest)):
            guest.step(0)
        if not command.done:
            with suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGKILL)
        state = command.wait().state
        assert state.marks & Mark.UNKNOWN or os.waitstatus_to_exitcode(state.status) in (6, -9)
        command.forget()


def test_a_stopped_supervisor_is_continued(guest: Host) -> None:
    command = guest.start("sh", "-c", "read x; exit 3")
    guest.until(lambda: command.phase == Phase.RUNNING)
    os.kill(supervisor(command), signal.SIGSTOP)
    command.write(b"\n")

    assert command.wait().code == 3


def ticks(pid: int) -> int:
    """Hundredths of a second that it has used."""
    return sum(map(int, fields(pid)[11:13]))


def test_a_guest_with_nothing_to_do_does_nothing(guest: Host) -> None:
    """Not even after a supervisor was killed, or while output is not read."""
    command = guest.start("sleep", "1000")
    guest.until(lambda: command.phase == Phase.RUNNING)
    os.kill(supervisor(command), signal.SIGKILL)
    command.wait()
    unread = guest.start("head", "-c", "1000000", "/dev/zero", reads=False)
    guest.until(lambda: len(unread.out) == WINDOW)
    before = ticks(guest.guest)
    guest.idle(0.3)

    assert ticks(guest.guest) - before <= 2, "it spins"


def test_when_the_guest_is_killed_everything_ends(guest: Host) -> None:
    commands = [guest.start("sh", "-c", f"{DAEMON} & {DAEMON} & sleep 1000") for _ in range(3)]
    daemons = [pid for command in commands for pid in printed(command, 2)]
    everyone = descendants(guest.guest)
    guest.kill_guest()

    assert len(everyone) >= 12
    eventually(lambda: not any(map(alive, [*everyone, *daemons])))


def test_when_the_channel_closes_everything_ends(program: Path, mark: str) -> None:
    """The orphans of a supervisor that has just been killed, too."""
    for _ in range(5):
        with inherited(program) as host:
            host.mark = mark
            command = host.start("sh", "-c", f"{DAEMON} & {DAEMON} & sleep 1000")
            tampered = host.start("sh", "-c", 'sh -c \'sh -c "$1" & sleep 1000\' sh "$1" & sleep 1000', "sh", DAEMON)
            daemons = printed(command, 2) + printed(tampered)
            os.kill(supervisor(tampered), signal.SIGKILL)

        assert not any(map(alive, daemons))


@ROOT.mark
@pytest.mark.parametrize("processes", [1, 2], ids=["supervisor", "command"])
def test_where_no_process_can_be_had_a_command_fails(program: Path, processes: int) -> None:
    with inherited("prlimit", f"--nproc={processes}", program, user=STRANGER + 10 + processes) as host:
        command = host.start("true")
        state = command.wait().state
        assert (state.phase, state.stage, state.status) == (Phase.FAILED, Stage.FORK, errno.EAGAIN)
        before = ticks(host.guest)
        host.idle(0.2)
        assert ticks(host.guest) - before <= 2, "it spins"


# The limit counts what this uid runs, and root has none: so never without one, and never as root.
BOMB = (
    "import os, resource, time\n"
    "assert os.getuid() and resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 100\n"
    "end = time.monotonic() + 20\n"
    "print('ready', flush=True)\n"
    "while time.monotonic() < end:\n"
    "    try:\n"
    "        os.fork(), os.fork()\n"
    "    except OSError: pass\n"
    "    if not os.fork(): os.setsid()\n"
    "    else: os._exit(0)\n"
)


@ROOT.mark
def test_a_fork_bomb_under_a_limit_is_ended(guest: Host) -> None:
    limits = {resource.RLIMIT_NPROC: (60, 60), resource.RLIMIT_CPU: (10, 10)}
    bomb = guest.start(*PYTHON, BOMB, uid=STRANGER, gid=STRANGER, limits=limits)
    guest.until(lambda: bomb.out)
    guest.idle(0.1)
    bomb.kill(9)
    bomb.wait(15)  # by itself it goes on for 20

    assert marked(guest.mark) == []


@ROOT.mark
def test_trees_end_where_nobody_sees_another_s_processes(program: Path, mark: str) -> None:
    """``hidepid``: not even the first process of the namespace can be looked at."""
    inner = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 1000 --regid 1000 --clear-groups "$0"'
    words = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", inner, str(program))
    with inherited(*words) as host:
        host.mark = mark
        command = host.start("sh", "-c", f"{DAEMON} & {DAEMON} & ls -d /proc/1; exit 0")
        term = host.start("sh", "-c", "sh -c 'trap \"echo term; exit\" TERM; echo up; while :; do sleep 0.01; done'")
        host.until(lambda: command.phase == Phase.EXITED and b"up" in term.out)
        assert len(marked(mark)) >= 4
        command.kill(9)
        term.kill(15)
        command.wait()
        assert term.wait().out == b"up\nterm\n"
        assert marked(mark) == []


# --- loss and return ---

# No shell: one that gets a signal as it begins to read may hear of it with the next line only.
SESSION = """
import signal as s, sys
s.pthread_sigmask(s.SIG_BLOCK, [s.SIGUSR1])
print("out", flush=True), print("err", file=sys.stderr)
s.sigwait([s.SIGUSR1])
print("caught", flush=True)
while line := sys.stdin.readline().strip():
    print("got", line, flush=True)
    line == "end" and sys.exit(7)
"""


def play(host: Host) -> None:
    """A command with output on both streams, a signal, input and a status; then one more."""
    command = host.start(*PYTHON, SESSION)
    host.until(lambda: b"out\n" in command.out)
    command.kill(signal.SIGUSR1)
    host.until(lambda: b"caught\n" in command.out)
    command.write(b"one\n")
    host.until(lambda: b"got one\n" in command.out)
    command.write(b"end\n")
    command.end()
    ended = command.wait()
    command.forget()

    assert (ended.out, ended.err) == (b"out\ncaught\ngot one\ngot end\n", b"err\n")
    assert (ended.code, ended.state.serial, ended.state.marks) == (7, 1, Mark.NONE)
    assert host.run("true").code == 0
    assert host.channels == {}


def sizes(program: Path, folder: Path) -> list[int]:
    """How many bytes a session takes either way."""
    with dialling(program, folder) as host:
        play(host)
        return host.wire.passed


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.nightly)], ids=["sample", "all"])
def test_a_connection_may_be_cut_at_any_byte(program: Path, tmp_path: Path, way: str, step: int) -> None:
    for cut in range(0, sizes(program, tmp_path)[way == "down"] + 1, step):
        with dialling(program, tmp_path, budgets=[{way: cut}]) as host:
            play(host)


@pytest.mark.parametrize("step", [61, pytest.param(7, marks=pytest.mark.nightly)], ids=["sample", "all"])
def test_a_connection_may_be_cut_again_while_it_is_resumed(program: Path, tmp_path: Path, step: int) -> None:
    up, down = sizes(program, tmp_path)
    for first in range(30, down, step):
        for second in range(0, 120, 2 * step):
            with dialling(program, tmp_path, budgets=[{"down": first}, {"down": second}, {"up": up // 2}]) as host:
                play(host)


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 60))])
def test_much_data_both_ways_survives_many_cuts(program: Path, tmp_path: Path, seed: int) -> None:
    text = bytes(range(251)) * 4000
    budgets = [
        {"up": 40_000 + 37_777 * (seed + n) % 200_000, "down": 50_000 + 54_321 * seed * n % 250_000} for n in range(6)
    ]
    with dialling(program, tmp_path, budgets=budgets) as host:
        ended = host.run("cat", stdin=text)

        assert (ended.code, ended.out) == (0, text)
        assert host.connections > 4


def test_input_that_was_passed_on_while_the_host_was_away_is_not_taken_twice(program: Path, tmp_path: Path) -> None:
    text = bytes(range(250)) * 1000
    with dialling(program, tmp_path) as host:
        command = host.start("sh", "-c", "sleep 0.1; cat")
        command.write(text)
        host.until(lambda: command.acked)
        host.hang_up()
        host.slowness = 0.3  # by then all of it has been read inside
        command.end()

        assert command.wait().out == text
        assert host.connections == 2


def test_a_command_that_has_just_been_started_is_known_after_a_loss(program: Path, tmp_path: Path) -> None:
    with dialling(program, tmp_path) as host:
        for _ in range(10):
            host.until(lambda: host.wire)
            commands = [host.start("sh", "-c", "exit 3") for _ in range(20)]
            host.hang_up()
            assert [command.wait().code for command in commands] == [3] * 20
            for command in commands:
                command.forget()


def test_commands_go_on_while_nobody_is_there(program: Path, tmp_path: Path) -> None:
    gone, done = tmp_path / "gone", tmp_path / "done"
    alone = f"until test -e {gone}; do sleep 0.01; done"
    with dialling(program, tmp_path) as host:
        host.step(5)
        large = host.start("sh", "-c", f"{alone}; head -c 1000000 /dev/zero; touch {done}")
        small = host.start("sh", "-c", f"{alone}; echo kept; exit 9")
        host.until(lambda: small.phase and large.phase)
        host.hang_up()
        gone.touch()
        time.sleep(0.3)

        assert not done.exists()
        assert descendants(host.guest)
        ended = small.wait()
        assert (ended.code, ended.out) == (9, b"kept\n")
        assert large.wait().out == bytes(1_000_000)
        assert host.connections == 2


def test_everything_ends_when_nobody_listens_any_more(program: Path, tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        guest = subprocess.Popen([program, str(place)], env={})
        host = Host(lambda: Wire(listener.accept()[0]))
        host.start("sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000", env={"MARK": str(tmp_path)})
        host.until(lambda: len(marked(str(tmp_path))) == 3)
    host.hang_up()

    assert guest.wait(30) == 0
    eventually(lambda: not marked(str(tmp_path)))


def test_another_host_is_refused(program: Path, tmp_path: Path) -> None:
    with dialling(program, tmp_path) as host:
        command = host.start("sh", "-c", "read x; exit 2")
        host.until(lambda: command.phase == Phase.RUNNING)
        host.hang_up()
        wire = host.connect()
        wire.send(framing.hello(b"another nonce...") + frame(Type.READY) + framing.signal(command.id, 1, 9))
        with pytest.raises(Lost):
            receive_all(lambda: wire.receive(30))
        wire.socket.close()
        command.write(b"\n")

        assert command.wait().code == 2


@ROOT.mark
def test_a_host_that_is_too_busy_to_accept_does_not_stop_the_guest(program: Path, tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as before:
        listener.bind(str(place))
        listener.listen(0)
        before.connect(str(place))
        with subprocess.Popen([program, place]) as guest:
            time.sleep(0.1)
            try:
                waits = Path(f"/proc/{guest.pid}/syscall").read_text().split()[0]
            finally:
                guest.kill()

    assert waits != "42", "it hangs in connect"


# --- the relay ---


def served_as_echo(connection: Channel) -> None:
    got = connection.output[STDOUT]
    connection.write(bytes(got[len(connection.stdin) :]))
    if STDOUT in connection.ended and not connection.closed:
        connection.end()


@contextmanager
def connected(listener: Channel) -> Iterator[tuple[socket.socket, Channel]]:
    """A connection to it, and the host's view of the same."""
    host = listener.host
    before = len(host.opened)
    with socket.create_connection(("127.0.0.1", listener.state.pid)) as client:
        client.settimeout(30)
        host.until(lambda: len(host.opened) > before)
        yield client, host.opened[-1]


def test_a_connection_inside_a_network_of_its_own_reaches_the_host(program: Path, mark: str) -> None:
    script = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "s.sendall(b'hello'); s.shutdown(1)\n"
        "got = b''\n"
        "while part := s.recv(100): got += part\n"
        "print(got.decode())"
    )
    folder, name = bwrap.binary()
    words = ("--unshare-user", "--unshare-net", "--dev-bind", "/", "/", "--die-with-parent")
    with inherited(folder / name, *words, program) as host:
        host.mark = mark
        host.served = served_as_echo
        listener = host.listen()

        assert host.run(*PYTHON, script, str(listener.state.pid)).out == b"hello\n"
        assert host.opened[0].listener == listener.id


def test_either_side_of_a_relayed_connection_may_end_first(guest: Host) -> None:
    listener = guest.listen()
    with connected(listener) as (client, connection):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        guest.until(lambda: STDOUT in connection.ended)
        connection.write(b"answer")
        connection.end()
        guest.until(lambda: connection.finished)
        assert (connection.out, client.recv(100), client.recv(100)) == (b"question", b"answer", b"")
    with connected(listener) as (client, connection):
        connection.write(b"banner")
        connection.end()
        guest.until(lambda: connection.acked == 7)
        assert (client.recv(100), client.recv(100)) == (b"banner", b"")
        client.sendall(b"late")
        client.close()
        guest.until(lambda: connection.finished)
        assert connection.out == b"late"


def test_a_reset_is_a_reset_on_the_other_side_too(guest: Host) -> None:
    """Whoever reads must not take what came so far for all that there is."""
    listener = guest.listen()
    with connected(listener) as (client, connection):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        guest.until(lambda: connection.over)
    with connected(listener) as (client, connection):
        connection.write(b"half an ans")
        guest.until(lambda: connection.acked)
        guest.reset(connection)
        guest.ping()
        with pytest.raises(ConnectionResetError):
            receive_all(lambda: client.recv(100))


def test_what_was_sent_and_ended_arrives_though_the_host_reads_no_more(guest: Host) -> None:
    """As when a server closes the connection after its answer."""
    text = bytes(range(256)) * 1000
    listener = guest.listen()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that most of it waits on the guest's side
        client.settimeout(30)
        client.connect(("127.0.0.1", listener.state.pid))
        guest.until(lambda: guest.opened)
        connection = guest.opened[0]
        connection.write(text)
        connection.end()
        guest.until(lambda: connection.acked > len(text))
        guest.reset(connection)
        guest.ping()
        with client.makefile("rb") as incoming:
            assert incoming.read() == text


def test_five_hundred_connections_at_once_are_all_served(guest: Host) -> None:
    guest.served = served_as_echo
    listener = guest.listen()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(500)]
        for n, client in enumerate(clients):
            client.connect(("127.0.0.1", listener.state.pid))
            client.sendall(str(n).encode())
            client.shutdown(socket.SHUT_WR)
        guest.until(lambda: len(guest.opened) == 500 and list(guest.channels) == [listener.id])
        for n, client in enumerate(clients):
            assert client.recv(100) == str(n).encode()


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as may be had: an ordinary user begins with 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_connections_are_accepted_again_when_there_is_room(guest: Host) -> None:
    listener = guest.listen()
    with ExitStack() as stack:
        clients = []
        for _ in range(MAX_RELAYED + 2):
            clients.append(stack.enter_context(socket.socket()))
            clients[-1].connect(("127.0.0.1", listener.state.pid))
        guest.until(lambda: len(guest.opened) == MAX_RELAYED)
        guest.idle(0.05)
        assert len(guest.opened) == MAX_RELAYED
        guest.reset(guest.opened[0])
        guest.until(lambda: len(guest.opened) == MAX_RELAYED + 1)
        for client, connection in zip(clients[1:4], guest.opened[1:4], strict=True):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            guest.until(lambda connection=connection: connection.over)
        guest.until(lambda: len(guest.opened) == MAX_RELAYED + 2)


def test_a_guest_out_of_descriptors_waits_for_one_to_come_back(program: Path) -> None:
    with inherited("sh", "-c", 'ulimit -n 24; exec "$0"', program) as host, ExitStack() as stack:
        listener = host.listen()
        for _ in range(30):
            stack.enter_context(socket.socket()).connect(("127.0.0.1", listener.state.pid))
        host.idle(0.1)
        served = len(host.opened)
        before = ticks(host.guest)
        host.idle(0.2)
        assert 0 < served < 24
        assert ticks(host.guest) - before <= 2, "it spins"
        assert host.run("true").state.phase in (Phase.FAILED, Phase.GONE)
        for connection in list(host.opened):
            host.reset(connection)
        host.until(lambda: len(host.opened) > served)


@pytest.mark.parametrize("slow", ["client", "host"])
def test_much_goes_through_the_relay_though_one_side_is_slow(guest: Host, slow: str) -> None:
    text = bytes(range(256)) * 8000
    listener = guest.listen()
    with connected(listener) as (client, connection):
        connection.reads = slow != "host"
        client.setblocking(False)
        connection.write(text)
        connection.end()
        sent, got = 0, bytearray()
        deadline = time.monotonic() + 60
        while len(got) < len(text) or len(connection.out) < len(text):
            assert time.monotonic() < deadline
            guest.step(0.001)
            if not connection.reads and len(connection.out) == WINDOW:
                connection.read()
            with suppress(BlockingIOError):
                sent += client.send(text[sent : sent + 100_000]) if sent < len(text) else 0
            with suppress(BlockingIOError):
                got += client.recv(5000 if slow == "client" else 1 << 20)
        assert (bytes(got), connection.out) == (text, text)


def test_connections_that_come_and_go_while_the_host_is_away_take_no_more_room(program: Path, tmp_path: Path) -> None:
    with dialling(program, tmp_path) as host:
        host.step(5)
        listener = host.listen()
        host.hang_up()
        time.sleep(0.02)
        for _ in range(MAX_RELAYED + 300):  # the last ones wait in the kernel
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.connect(("127.0.0.1", listener.state.pid))
        host.until(lambda: host.wire)
        with connected(listener) as (client, _):
            client.sendall(b"here")
            host.until(lambda: any(connection.out == b"here" for connection in host.opened))  # not always the last


def test_relayed_connections_survive_a_lost_one(program: Path, tmp_path: Path) -> None:
    with dialling(program, tmp_path) as host:
        host.step(5)
        listener = host.listen()
        with connected(listener) as (kept, connection), connected(listener) as (closed, over):
            kept.sendall(b"one ")
            host.until(lambda: connection.out)
            host.hang_up()
            kept.sendall(b"two")
            closed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            closed.close()
            time.sleep(0.05)
            host.until(lambda: connection.out == b"one two" and over.over)
            connection.write(b"answer")
            host.until(lambda: connection.acked == 6)
            assert kept.recv(100) == b"answer"
            assert host.connections == 2
