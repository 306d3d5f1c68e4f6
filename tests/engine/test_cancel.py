"""A run that is stopped anywhere settles: work saved, everything removed, one terminal event. On the real sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core.errors import Escaped
from runner.core.model import Status
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.ops.planning.facts import open_provider
from tests.support.fake_provider import FakeProvider, Scripted
from tests.support.situations import Project, leftovers
from tests.support.state_machine import Machine


@pytest.fixture
def machine(project: Project, repository: Path) -> Machine:
    project.script(
        "echo made > made; (setsid sleep 1000 >/dev/null 2>&1 &) ; sleep 0.1",
        workspace="repo_source: {type: local, path: repo}\nsetup_commands: [echo ready]",
        agent="post_hooks: [echo hook]",
        run="verify: {files: {required: [made]}, commands: [{run: [cat, made]}]}",
    )
    return Machine(project)


@pytest.mark.scenario("BEY-06")
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_cancel_at_any_event_leaves_nothing_and_saves_the_work(machine: Machine, stride: int) -> None:
    whole = await machine.run()
    assert whole.status is Status.SUCCEEDED

    for stop_at in range(1, len(await machine.store.events(whole.id)), stride):

        def stop(recorded: ev.Recorded, control: RunCancellation, at: int = stop_at) -> None:
            if recorded.seq == at:
                control.stop()

        record = await machine.run(stop)

        assert leftovers(machine.project.home) == [], stop_at
        assert record.resources == {}, stop_at
        assert record.exit_code == 130, stop_at
        history = await machine.store.events(record.id)
        assert [type(r.event) for r in history].count(ev.RunEnded) == 1
        if record.steps["provision"].status is Status.SUCCEEDED:
            assert record.saved_work is not None, stop_at


async def test_a_process_that_will_not_die_is_named_in_the_record(machine: Machine) -> None:
    def stuck(argv: Sequence[str]) -> Scripted:
        raise Escaped("process 4711 of the command does not end")

    fake = FakeProvider(machine.settings.home, stuck)
    machine.deps = replace(machine.deps, provider=lambda name: fake)

    record = await machine.run()

    assert record.exit_code == 4
    assert record.warnings == [("provider.escaped", "setup: process 4711 of the command does not end")]
    assert record.resources == {}


async def test_a_second_stop_gives_settling_up_and_says_what_is_left(machine: Machine) -> None:
    def stop(recorded: ev.Recorded, control: RunCancellation) -> None:
        if isinstance(recorded.event, ev.StepStarted) and recorded.event.step in ("agent", "save"):
            control.stop()

    with trio.fail_after(30):
        record = await machine.run(stop)

    assert record.exit_code == 130
    assert [left.split()[0] for left in record.left_behind] == ["lease", "workspace"]
    provider = open_provider("local", machine.settings)
    for handle in await provider.list_owned(machine.deps.nonce):
        await provider.destroy(handle)


async def test_a_run_begins_though_its_stop_budget_is_longer_than_a_lease(project: Project) -> None:
    """Regression: its work was ended at once, so that finalize would be over before the lease."""
    project.script("true", agent="stop_budget: 2h")

    record = await Machine(project).run()

    assert record.status is Status.SUCCEEDED
