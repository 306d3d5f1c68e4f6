"""The end of commands that do not end by themselves, on every provider: nothing of a tree outlives its block."""

from __future__ import annotations

import pytest
import trio

from runner.core.model import StopStage
from runner.ports.provider import Workspace
from runner.testing.outside import OURS, sleepers
from runner.testing.place import LEAVES, STUBBORN, Place, carrying, read_until, took_at_most


async def test_cancelling_lets_a_command_finish_in_its_own_words(place: Place) -> None:
    kept = b""
    with trio.CancelScope() as scope:
        async with place.open_patiently() as workspace:
            script = "trap 'echo bye > told; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
            async with workspace.exec(["sh", "-c", script]) as process:
                kept = await read_until(process, b"ready")
                scope.cancel()
                await trio.sleep_forever()

    assert scope.cancelled_caught
    assert kept == b"ready\n"
    assert (place.handle.tree / "told").read_text() == "bye\n"


@pytest.mark.parametrize(
    ("script", "stop_stages", "graces"),
    [("echo ready; exec sleep 60", [StopStage.TERM], 0), (STUBBORN, [StopStage.TERM, StopStage.KILL], 1)],
    ids=["obedient", "ignoring TERM"],
)
async def test_each_stop_stage_of_ending_a_command_is_told(
    place: Place, script: str, stop_stages: list[StopStage], graces: int
) -> None:
    told: list[StopStage] = []
    async with place.open() if StopStage.KILL in stop_stages else place.open_patiently() as workspace:
        start = trio.current_time()
        async with workspace.exec(["sh", "-c", script], on_stop=told.append) as process:
            await read_until(process, b"ready")
        assert (seconds := graces * place.candidate.grace) <= trio.current_time() - start < seconds + 30
        assert told == stop_stages
        async with workspace.exec(["true"], on_stop=told.append) as process:
            await process.wait()
        assert told == stop_stages


async def test_what_a_command_leaves_running_is_killed_and_told(place: Place) -> None:
    told: list[StopStage] = []
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", LEAVES], on_stop=told.append) as process:
            await process.wait()
        assert told == [StopStage.KILL]


async def test_a_command_that_is_being_stopped_is_killed_when_its_sandbox_closes(place: Place) -> None:
    script = STUBBORN
    stopping, over = trio.CancelScope(), trio.Event()
    told: list[StopStage] = []

    async def command(workspace: Workspace, task_status: trio.TaskStatus[None]) -> None:
        with stopping:
            async with workspace.exec(["sh", "-c", script], on_stop=told.append) as process:
                await read_until(process, b"ready")
                task_status.started()
                await trio.sleep_forever()
        over.set()

    async with trio.open_nursery() as nursery, took_at_most(30):
        async with place.open_patiently() as workspace:
            await nursery.start(command, workspace)
            stopping.cancel()
            await trio.sleep(0.2)
            assert not over.is_set()
        await over.wait()
    assert told == [StopStage.TERM, StopStage.KILL]


async def test_term_reaches_the_whole_tree(place: Place) -> None:
    listen = "trap 'echo $0 >> told; exit' TERM; echo up; while :; do sleep 0.05; done"
    script = """
        sh -c "$1" child &
        (sh -c "$1" grandchild; true) &
        setsid sh -c "$1" session &
        (setsid sh -c "$1" daemon &)
        trap '' TERM
        until [ "$(wc -l < told)" = 4 ]; do sleep 0.05; done
    """
    place.write("told", "").chmod(0o666)
    async with (
        place.open_patiently() as workspace,
        workspace.exec(["sh", "-c", script, "sh", listen]) as process,
    ):
        await read_until(process, b"up\nup\nup\nup\n")

    told = (place.handle.tree / "told").read_text().split()
    assert sorted(told) == ["child", "daemon", "grandchild", "session"]


RENAMED = "import os, time; open('/proc/self/comm', 'w').write(') S 1 ('); os.fork() and os._exit(0); time.sleep(1000)"
STOPPED = "import os, signal; os.setpgid(0, 0); os.kill(os.getpid(), signal.SIGSTOP)"  # in no group that is orphaned
TREES = {
    "children": "sleep 1000 & sleep 1000 &",
    "sessions that hold the pipes": "setsid sleep 1000 & setsid sleep 1000 &",
    "double-forked": "(setsid sleep 1000 > /dev/null 2>&1 &)",
    "daemons of daemons": "setsid sh -c '(setsid sh -c \"(setsid sleep 1000 &); sleep 1000\" &); sleep 1000' &",
    "renamed": f'python3 -SIc "{RENAMED}"',
    "stopped": f'python3 -SIc "{STOPPED}" & until grep -q "^State:.T" /proc/$!/status; do sleep 0.01; done',
    "forking for ever": "f() { sleep 0.01; f & sleep 0.01; }; f & sleep 1000 &",
}


async def test_no_kind_of_tree_outlives_its_block(place: Place) -> None:
    after = {}

    async def one(workspace: Workspace, number: int, name: str) -> None:
        mark = f"{place.mark}{number}."
        script = f"trap '' TERM; {TREES[name]}\necho ready; exec sleep 1000"
        async with workspace.exec(["sh", "-c", script], env={"MARK": mark}) as process:
            await read_until(process, b"ready")
            with trio.fail_after(20):
                while await carrying(place, workspace, mark) < 2:  # a shell that becomes another program has none
                    await trio.sleep(0.01)
        after[name] = await carrying(place, workspace, mark)

    async with place.open() as workspace, trio.open_nursery() as nursery:
        for number, name in enumerate(TREES):
            nursery.start_soon(one, workspace, number, name)

    assert after == dict.fromkeys(TREES, 0)


async def test_ending_one_command_leaves_the_daemons_of_another(place: Place) -> None:
    argv = ["sh", "-c", "(setsid sleep 1000 >/dev/null 2>&1 &); setsid sleep 1000 & echo ready; exec sleep 1000"]
    first, second = (f"{place.mark}{name}." for name in ("first", "second"))
    async with place.open() as workspace:
        async with workspace.exec(argv, env={"MARK": first}) as process:
            await read_until(process, b"ready")
            async with workspace.exec(argv, env={"MARK": second}) as other:
                await read_until(other, b"ready")
            assert await carrying(place, workspace, second) == 0
            assert await carrying(place, workspace, first) >= 3
        assert await carrying(place, workspace, first) == 0


async def test_ending_one_command_leaves_the_others(place: Place) -> None:
    async with place.open() as workspace, workspace.exec(["cat"]) as other:
        await workspace.run(["sh", "-c", f"setsid sleep 1236{OURS} >/dev/null 2>&1 &"])
        await other.stdin.send_all(b"still here")
        assert await read_until(other, b"here") == b"still here"


async def test_a_grandchild_that_holds_the_pipes_does_not_hold_the_end(place: Place) -> None:
    async with place.open() as workspace, took_at_most(60):
        result = await workspace.run(["sh", "-c", f"sleep 1237{OURS} & echo done"])

    assert result.stdout == b"done\n"


async def test_a_hostile_number_of_children_is_gone_after_the_block(place: Place) -> None:
    script = f"i=0; while [ $i -lt 200 ]; do setsid sleep 1238{OURS} & i=$((i+1)); done; echo ready; wait"
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", script]) as process:
            await read_until(process, b"ready")
        assert sleepers(1238) == []
