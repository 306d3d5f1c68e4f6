"""The guest program compiles for each machine, to the same bytes wherever, and only what was built is run."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from runner.core.errors import ProviderFailed
from runner.guest import binary, build, framing
from runner.guest.framing import Frame, Phase, Type
from tests.support import needs

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "runner" / "guest"

pytestmark = pytest.mark.slow
machines = pytest.mark.parametrize("machine", build.MACHINES)
programs = pytest.mark.parametrize("name", build.PROGRAMS)


def pinned(machine: str, cache: Path) -> build.Compiler:
    compiler = build.pinned_compiler(machine, cache)
    assert compiler is not None, "ziglang is in tests/requirements.lock"
    return compiler


def copied(folder: Path) -> Path:
    """The sources as another checkout has them."""
    folder.mkdir(parents=True)
    for file in SOURCE.glob("*.[ch]"):
        shutil.copy(file, folder)
    return folder


@contextmanager
def running(program: Path, machine: str) -> Iterator[socket.socket]:
    """A guest with this channel, emulated where it is another machine's; it ends with the channel."""
    words = [str(program)]
    if machine != platform.machine():
        emulator = f"qemu-{machine}"
        needs.program(emulator).require()
        needs.ROOT.require()  # the guest closes its /proc to its user, and the emulator reads there as well
        words = [emulator, *words]
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with subprocess.Popen(words, stdin=theirs) as process, ours:
        theirs.close()
        yield ours
    assert process.returncode == 0


def frames(channel: socket.socket) -> Iterator[Frame]:
    parser = framing.Parser()
    while received := channel.recv(1 << 16):
        yield from parser.feed(received)


def played(program: Path, machine: str, *argv: str) -> tuple[bytes, int]:
    """What a command behind the guest printed, and its wait status, once all of it has ended."""
    printed, ended = b"", 0
    request = framing.Request(argv=argv, env={})
    with running(program, machine) as channel:
        channel.sendall(framing.hello(bytes(range(16))) + framing.frame(Type.READY) + framing.execute(1, request))
        for frame in frames(channel):
            match frame.type:
                case Type.DATA:
                    printed += frame.payload[framing.OFFSET.size :]
                case Type.EOF:
                    ended += 1
                case Type.STATE:
                    state = framing.read_state(frame.payload)
                    ended += state.phase is Phase.GONE
            if ended == len((framing.STDOUT, framing.STDERR, Phase.GONE)):
                return printed, state.status
    raise AssertionError("the guest closed its channel")


@pytest.mark.parametrize("machine", ["x86_64", pytest.param("aarch64", marks=pytest.mark.nightly)])
@programs
def test_same_source_gives_the_same_bytes_wherever_it_lies(name: str, machine: str, tmp_path: Path) -> None:
    made = []
    for place in (tmp_path / "here", tmp_path / "a longer name" / "deep"):
        target = tmp_path / f"{place.name}.made"
        build.compile_program(pinned(machine, tmp_path / f"{place.name}.cache"), copied(place), name, target)
        made.append(target.read_bytes())

    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]


@pytest.mark.nightly
@needs.COMPILER.mark
@programs
def test_the_system_compiler_too_leaves_no_trace_of_the_place(name: str, tmp_path: Path) -> None:
    compiler = build.system_compiler()
    for place in ("here", "there"):
        build.compile_program(compiler, copied(tmp_path / place), name, tmp_path / f"{place}.made")

    assert (tmp_path / "here.made").read_bytes() == (tmp_path / "there.made").read_bytes()


@pytest.mark.nightly
@machines
@programs
def test_no_compiler_finds_fault_with_the_source(name: str, machine: str, tmp_path: Path) -> None:
    strict = [pinned(machine, tmp_path)]
    if machine == platform.machine() and (system := build.system_compiler()):
        strict.append(system)
    for compiler in strict:
        words = (*compiler.words, "-Werror")
        build.compile_program(compiler._replace(words=words), SOURCE, name, tmp_path / "made")


@machines
def test_a_command_runs_behind_the_program_of_each_machine(machine: str, tmp_path: Path) -> None:
    program = tmp_path / "guest"
    build.compile_program(pinned(machine, tmp_path / "cache"), SOURCE, "guest", program)

    assert played(program, machine, "/bin/sh", "-c", "echo here; exit 3") == (b"here\n", 3 << 8)


def test_an_editable_installation_replaces_this_machines_program(tmp_path: Path) -> None:
    root = copied(tmp_path / "runner" / "guest").parents[1]
    stale = root / "runner" / "guest" / "bin" / "stale"
    stale.parent.mkdir()
    stale.touch()

    hook(root).initialize("editable", {})

    found = binary.find(stale.parent)
    made = [f"{name}-{platform.machine()}" for name in build.PROGRAMS]
    assert sorted(p.name for p in stale.parent.iterdir()) == ["SHA256SUMS", *made]
    assert played(found.path, platform.machine(), "/bin/true") == (b"", 0)


def test_without_a_compiler_an_editable_installation_has_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(tmp_path / "runner" / "guest").parents[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])

    hook(root).initialize("editable", {})

    with pytest.raises(ProviderFailed, match="installed without a C compiler"):
        binary.find(root / "runner" / "guest" / "bin")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_compiler_that_fails_is_made_up_for_by_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_on(tmp_path, monkeypatch)

    assert build.make_native(SOURCE, tmp_path)
    assert binary.find(tmp_path).path.exists()


def test_what_no_compiler_takes_fails_the_installation_with_its_words(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    (source / "guest.c").write_text("#error told\n")

    with pytest.raises(RuntimeError, match="told"):
        build.make_native(source, tmp_path)


def broken_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``cc`` that can do nothing, and no other on the path."""
    (folder / "cc").write_text("#!/bin/sh\necho no headers >&2; exit 1\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def hook(root: Path) -> build.GuestHook:
    """The hook as hatchling makes it for a project that lies at ``root``."""
    builder = WheelBuilder(str(ROOT))
    return build.GuestHook(str(root), {}, builder.config, builder.metadata, str(root), "wheel")


def test_a_program_that_is_not_the_one_that_was_built_is_refused(tmp_path: Path) -> None:
    assert build.make_native(SOURCE, tmp_path)
    found = binary.find(tmp_path)
    with found.path.open("ab") as program:
        program.write(b"\0")

    with pytest.raises(ProviderFailed, match="not the one that was built") as refused:
        binary.find(tmp_path)

    assert "make -B .venv/product" in (refused.value.hint or "")


def test_a_program_without_a_record_is_refused(tmp_path: Path) -> None:
    assert build.make_native(SOURCE, tmp_path)
    (tmp_path / "SHA256SUMS").unlink()

    with pytest.raises(ProviderFailed):
        binary.find(tmp_path)


def test_the_compiler_of_the_wheel_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [wanted] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["dependencies"]

    assert wanted in project["dependency-groups"]["test"]
    assert f"\n{wanted} " in (ROOT / "tests" / "requirements.lock").read_text()
