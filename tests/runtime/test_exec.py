"""Commands with their output in files: floods, odd bytes, closed and held pipes. On the real providers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from runner.core.model import Exit
from runner.ports.provider import Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.providers.process import ProcessProvider
from runner.runtime.exec import DRAIN, MAX_LOG, TAIL, LogFile, open_logs, run_logged

GRACE = 60.0
MIB = 1 << 20

FLOOD = """
import json, os, resource, sys, trio
from pathlib import Path
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.runtime.exec import open_logs, run_logged

async def main(home, script):
    provider = LocalProvider(home)
    handle = await provider.create(WorkspaceRequest(id=f"flood-{os.getpid()}", run="run", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace:
        await workspace.run(["true"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_logs(home, "flood") as logs:
            exit = await run_logged(workspace, ["sh", "-c", script], logs)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await provider.destroy(handle)
    print(json.dumps({"code": exit.code, "grown": (after - before) << 10}))

trio.run(main, Path(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture(params=[LocalProvider, ProcessProvider], ids=["local", "process"])
async def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workspace]:
    provider: Provider = request.param(tmp_path, grace=GRACE)
    handle = await provider.create(WorkspaceRequest(id=f"commands-{os.getpid()}", run="run", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as opened:
        yield opened
    await provider.destroy(handle)


async def run(workspace: Workspace, folder: Path, script: str, stdin: bytes = b"") -> tuple[Exit, bytes, bytes]:
    """How a shell script ended, and its two logs."""
    with open_logs(folder, "step") as logs:
        exit = await run_logged(workspace, ["sh", "-c", script], logs, stdin=stdin)
    return exit, (folder / "step.stdout").read_bytes(), (folder / "step.stderr").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flood", "mebibytes"),
    [
        pytest.param("yes", 150, id="lines"),
        pytest.param("cat /dev/zero", 150, id="one line"),
        pytest.param("cat /dev/zero", 2 << 10, id="one line of 2 GiB", marks=pytest.mark.nightly),
        pytest.param("yes", 10 << 10, id="10 GiB", marks=pytest.mark.nightly),
    ],
)
def test_a_flood_costs_no_memory_and_keeps_its_beginning_its_end_and_its_status(
    tmp_path: Path, flood: str, mebibytes: int
) -> None:
    script = f"echo first; echo apart >&2; {flood} | head -c {mebibytes}M; echo last; exit 7"
    program = [sys.executable, "-c", FLOOD, str(tmp_path), script]
    seen = json.loads(subprocess.check_output(program, cwd=Path(__file__).parents[2]))

    assert seen["code"] == 7
    assert seen["grown"] < 64 * MIB
    out = (tmp_path / "flood.stdout").read_bytes()
    whole = mebibytes * MIB + len(b"first\nlast\n")
    marker = b"\n[runner: %d bytes cut here]\n" % (whole - MAX_LOG - TAIL)
    assert out.startswith(b"first\n")
    assert out[MAX_LOG : MAX_LOG + len(marker)] == marker
    assert out.endswith(b"last\n")
    assert len(out) == MAX_LOG + len(marker) + TAIL
    assert (tmp_path / "flood.stderr").read_bytes() == b"apart\n"


async def test_output_is_kept_byte_for_byte_and_streams_apart(workspace: Workspace, tmp_path: Path) -> None:
    exit, out, err = await run(workspace, tmp_path, r"printf '\377\0\303\n'; printf '\200' >&2; exit 3")

    assert (exit, out, err) == (Exit(code=3), b"\xff\0\xc3\n", b"\x80")


@pytest.mark.parametrize(
    "script",
    ["exec 0<&-; echo read; exit 5", "echo read; exit 5", "head -c 4 >/dev/null; echo read; exit 5"],
    ids=["closes it", "ignores it", "reads a little"],
)
async def test_input_that_is_not_read_is_no_error(workspace: Workspace, tmp_path: Path, script: str) -> None:
    exit, out, err = await run(workspace, tmp_path, script, stdin=b"x" * 8 * MIB)

    assert (exit, out, err) == (Exit(code=5), b"read\n", b"")


async def test_a_descendant_that_holds_the_pipes_does_not_hold_the_step(workspace: Workspace, tmp_path: Path) -> None:
    with trio.fail_after(DRAIN + 60):
        exit, out, _ = await run(workspace, tmp_path, "setsid sleep 1000 & echo done; exit 6")

    assert (exit, out) == (Exit(code=6), b"done\n")


async def test_what_a_descendant_prints_just_after_its_command_is_kept(tmp_path: Path) -> None:
    """As of ``tee`` in a process substitution. In a pid namespace of its own it dies with the command."""
    provider = ProcessProvider(tmp_path)
    handle = await provider.create(WorkspaceRequest(id=f"late-{os.getpid()}", run="run", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace:
        _, out, _ = await run(workspace, tmp_path, "(sleep 0.2; echo late) & echo done")
    await provider.destroy(handle)

    assert out == b"done\nlate\n"


async def test_what_a_command_prints_while_it_is_stopped_is_kept(workspace: Workspace, tmp_path: Path) -> None:
    """Even more than a pipe holds; a command that cannot get rid of its last words would not end by itself."""
    dying = f"trap 'echo bye; head -c {4 * MIB} /dev/zero; echo err >&2; exit 3' TERM"
    with open_logs(tmp_path, "step") as logs, trio.fail_after(GRACE), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            script = f"{dying}; echo ready; while :; do sleep 0.05; done"
            nursery.start_soon(run_logged, workspace, ["sh", "-c", script], logs)
            while not (tmp_path / "step.stdout").read_bytes():
                await trio.sleep(0.01)
            scope.cancel()

    assert scope.cancelled_caught
    assert (tmp_path / "step.stdout").read_bytes() == b"ready\nbye\n" + bytes(4 * MIB)
    assert (tmp_path / "step.stderr").read_bytes().endswith(b"err\n")


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([b"12345678"], b"12345678"),
        ([b"1234", b"5678", b""], b"12345678"),
        ([b"123456789"], b"123456789"),
        ([b"1234567", b"89", b"0"], b"1234567890"),
        ([b"x" * 8, b"y" * 10, b"z" * TAIL], b"x" * 8 + b"\n[runner: 10 bytes cut here]\n" + b"z" * TAIL),
        ([b"x" * 8 + b"y" * 10 + b"z" * TAIL], b"x" * 8 + b"\n[runner: 10 bytes cut here]\n" + b"z" * TAIL),
    ],
    ids=["fits", "fits in parts", "a little over", "a little over in parts", "cut in parts", "cut in one"],
)
def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path, chunks: list[bytes], kept: bytes) -> None:
    log = LogFile(tmp_path / "log", limit=8)
    for chunk in chunks:
        log.write(chunk)
    log.close()

    assert (tmp_path / "log").read_bytes() == kept
