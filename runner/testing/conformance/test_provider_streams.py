"""Standard input, output and error, on every provider: whole, apart, and each at the speed of its own reader."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from runner.core.model import Exit
from runner.ports.provider import Process, Reader, SandboxSpec, Workspace, WorkspaceRequest, Writer
from runner.testing.place import MIB, Place, read_until
from runner.testing.plugin import candidates


async def test_output_and_errors_are_separate(place: Place) -> None:
    async with place.open() as workspace:
        result = await workspace.run(["sh", "-c", "echo out; echo err >&2"])

    assert (result.stdout, result.stderr, result.cut) == (b"out\n", b"err\n", False)


async def test_output_over_the_bound_is_cut_and_says_so(place: Place) -> None:
    async with place.open() as workspace:
        result = await workspace.run(["sh", "-c", "echo out; echo err >&2"], keep_bytes=2)

    assert (result.stdout, result.stderr, result.cut) == (b"ou", b"er", True)


async def test_eight_mebibytes_pass_every_way_at_once_whatever_the_speed_of_each_reader(place: Place) -> None:
    body, read = os.urandom(8 * MIB), {"slowly": b"", "at once": b""}

    async def write(writer: Writer) -> None:
        await writer.send_all(body)
        await writer.aclose()

    async def read_all(how: str, reader: Reader, pause: float) -> None:
        chunks = []
        while chunk := await reader.receive_some(1 << 16):
            chunks.append(chunk)
            await trio.sleep(pause)
        read[how] = b"".join(chunks)

    script = f"head -c {8 * MIB} /dev/zero >&2 & exec cat"
    async with place.open() as workspace, workspace.exec(["sh", "-c", script]) as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, process.stdin)
            nursery.start_soon(read_all, "slowly", process.stdout, 0.002)
            nursery.start_soon(read_all, "at once", process.stderr, 0)
        assert await process.wait() == Exit(code=0)

    assert read["slowly"] == body
    assert read["at once"] == bytes(8 * MIB)


async def test_output_that_is_not_read_holds_up_its_own_command_only(place: Place) -> None:
    flood, ended, size = ["head", "-c", str(8 * MIB), "/dev/zero"], [], 0

    async def wait(process: Process) -> None:
        await process.wait()
        ended.append("held up")

    async with place.open() as workspace, workspace.exec(flood) as process, trio.open_nursery() as nursery:
        nursery.start_soon(wait, process)
        other = await workspace.run(flood, keep_bytes=8 * MIB)
        ended.append("other")
        while chunk := await process.stdout.receive_some(MIB):
            size += len(chunk)

    assert (len(other.stdout), size) == (8 * MIB, 8 * MIB)
    assert ended == ["other", "held up"]


async def test_a_stream_that_is_never_read_holds_up_neither_the_other_nor_the_status(place: Place) -> None:
    async with (
        place.open() as workspace,
        workspace.exec(["sh", "-c", "cat /dev/zero >&2 & echo done; exit 7"]) as process,
    ):
        assert await process.wait() == Exit(code=7)
        assert await read_until(process, b"done") == b"done\n"
        assert (await workspace.run(["true"])).exit.ok


async def test_a_command_that_does_not_read_its_input_is_no_error(place: Place) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(["true"], stdin=b"x" * 4 * MIB)).exit.ok


async def test_input_that_is_not_read_any_more_is_refused(place: Place) -> None:
    async with (
        place.open() as workspace,
        workspace.exec(["sh", "-c", "exec <&-; echo ready; exec sleep 60"]) as process,
    ):
        await read_until(process, b"ready")
        with trio.fail_after(30), pytest.raises(trio.BrokenResourceError):
            await process.stdin.send_all(bytes(8 * MIB))


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$"])
async def test_what_is_printed_just_before_the_end_is_kept(place: Place, end: str) -> None:
    script = f"head -c 100000 /dev/zero; echo last; echo words >&2; {end}"
    async with place.open() as workspace:
        for _ in range(5):
            result = await workspace.run(["sh", "-c", script])
            assert (len(result.stdout), result.stdout[-5:], result.stderr) == (100_005, b"last\n", b"words\n")


async def test_what_is_printed_before_the_kill_can_be_read_after_the_block(place: Place) -> None:
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", script]) as process:
            await read_until(process, b"ready\n")
        rest = await process.stdout.receive_some(100)
        assert (rest, await process.stdout.receive_some(100)) == (b"heard\n", b"")


async def test_a_hundred_commands_at_once_print_each_their_own(place: Place) -> None:
    script = 'for i in 1 2 3 4 5 6 7 8 9; do echo "$0 $i"; echo "error $0 $i" >&2; done'
    seen: dict[int, tuple[bytes, bytes]] = {}

    async def one(workspace: Workspace, number: int) -> None:
        result = await workspace.run(["sh", "-c", script, str(number)])
        seen[number] = result.stdout, result.stderr

    async with place.open() as workspace, trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(one, workspace, number)

    lines = {number: [f"{number} {i}\n" for i in range(1, 10)] for number in range(100)}
    assert seen == {
        number: ("".join(text).encode(), "".join(f"error {line}" for line in text).encode())
        for number, text in lines.items()
    }


@pytest.mark.nightly
async def test_an_idle_command_lives(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Trio ends worker threads that were idle for 10 s, and the kernel then kills what they have spawned.

    One of each provider, which wait together.
    """
    judged = [one for one in candidates(pytestconfig).values() if "test_an_idle_command_lives" not in one.gaps]
    providers = [one.make(tmp_path / one.name, one.grace) for one in judged]
    async with AsyncExitStack() as stack:
        idle: list[Process] = []
        for provider in [provider for provider in providers if (await provider.probe()).available]:
            handle = await provider.create(
                WorkspaceRequest(id=f"idle-{os.getpid()}-{len(idle)}", run="run-1", nonce="nonce")
            )
            stack.push_async_callback(provider.destroy, handle)
            workspace = await stack.enter_async_context(provider.open(handle, SandboxSpec()))
            idle.append(await stack.enter_async_context(workspace.exec(["cat"])))
        await trio.sleep(60)
        for process in idle:
            await process.stdin.send_all(b"still here")
            assert await read_until(process, b"here") == b"still here"


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [150, pytest.param(10240, marks=pytest.mark.nightly)])
async def test_output_of_any_size_costs_no_memory(place: Place, mebibytes: int) -> None:
    size = 0
    async with place.open() as workspace, workspace.exec(["head", "-c", f"{mebibytes}M", "/dev/zero"]) as process:
        before = _resident()
        while chunk := await process.stdout.receive_some(MIB):
            size += len(chunk)

    assert size == mebibytes * MIB
    assert _resident() - before < 64 * MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
