"""A run that is stopped anywhere settles: work saved, everything removed, one terminal event. On the real sandbox."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from runner import events as ev
from runner.agents import command_of
from runner.agents.script import agent
from runner.app.facts import open_provider
from runner.app.planning import make_plan
from runner.engine.run import Control, carry_out
from runner.errors import Escaped
from runner.git import open_git
from runner.ids import run_id
from runner.model import Status
from runner.providers.fake import Fake, Scripted
from runner.record import RunRecord
from runner.settings import Settings, shipped
from runner.steps._run import Places, Ports
from runner.store.memory import MemoryStore
from tests.situations import Project, leftovers

COUNTER = itertools.count(1)


class Machine:
    """What runs of one test share: settings, ports, a store in memory."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.settings = Settings.from_env({"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin"})
        self.settings.home.mkdir(parents=True, exist_ok=True)
        self.store = MemoryStore(now=lambda: next(COUNTER))
        self.ports = Ports(
            provider=lambda name: open_provider(name, self.settings),
            git=open_git(self.settings),
            agent=lambda name: agent,
            sub_runner=lambda name, env: command_of(shipped("runners") / f"{name}.sh", env),
            nonce=self.store.nonce,
            now=lambda: 1_000_000,
        )

    async def run(self, stop_at: int | None = None) -> tuple[RunRecord, int]:
        """Carry the project's run out, stopping it as its ``stop_at``-th event is appended; and how many there were."""
        planned = await make_plan(self.project.folder, self.settings)
        control = Control(planned.plan.runs[0].stop_budget_seconds)
        seen = 0

        async def append(run: str, events: Sequence[ev.Event]) -> Sequence[ev.Recorded]:
            nonlocal seen
            recorded = await self.store.append(run, events)
            for _ in recorded:
                seen += 1
                if seen == stop_at:
                    control.stop()
            return recorded

        places = Places(self.settings.home, run_id(secrets.token_bytes(8)))
        (places.directory / "logs").mkdir(parents=True)
        record = await carry_out(
            planned.plan.runs[0],
            planned.plan.digest,
            id=places.run,
            places=places,
            ports=self.ports,
            append=append,
            control=control,
        )
        return record, seen


@pytest.fixture
def machine(project: Project, repository: Path) -> Machine:
    project.script(
        "echo made > made; (setsid sleep 1000 &) ; sleep 0.1",
        workspace="repo_source: {type: local, path: repo}\nsetup_commands: [echo ready]",
        agent="post_hooks: [echo hook]",
        run="verify: {files: {required: [made]}, commands: [{run: [cat, made]}]}",
    )
    return Machine(project)


@pytest.mark.scenario("BEY-06")
async def test_a_cancel_at_any_event_leaves_nothing_and_saves_the_work(machine: Machine) -> None:
    whole, count = await machine.run()
    assert whole.status is Status.SUCCEEDED

    for stop_at in range(1, count):
        record, _ = await machine.run(stop_at)

        assert leftovers(machine.project.home) == [], stop_at
        assert record.effects == {}, stop_at
        assert record.exit_code == 130, stop_at
        history = await machine.store.events(record.id)
        assert [type(r.event) for r in history].count(ev.RunEnded) == 1
        if record.steps["provision"].status is Status.SUCCEEDED:
            assert record.receipt is not None, stop_at


async def test_a_process_that_will_not_die_is_named_in_the_record(machine: Machine) -> None:
    def stuck(argv: Sequence[str]) -> Scripted:
        raise Escaped("process 4711 of the command does not end")

    fake = Fake(machine.settings.home, stuck)
    machine.ports = replace(machine.ports, provider=lambda name: fake)

    record, _ = await machine.run()

    assert record.exit_code == 4
    assert record.warnings == [("provider.escaped", "setup: process 4711 of the command does not end")]
    assert record.effects == {}


async def test_a_second_stop_gives_settling_up_and_says_what_is_left(machine: Machine) -> None:
    control_events = 0

    planned = await make_plan(machine.project.folder, machine.settings)
    control = Control(planned.plan.runs[0].stop_budget_seconds)

    async def append(run: str, events: Sequence[ev.Event]) -> Sequence[ev.Recorded]:
        nonlocal control_events
        recorded = await machine.store.append(run, events)
        for one in recorded:
            if isinstance(one.event, ev.StepStarted) and one.event.step in ("agent", "save"):
                control_events += 1
                control.stop()
        return recorded

    places = Places(machine.settings.home, run_id(secrets.token_bytes(8)))
    (places.directory / "logs").mkdir(parents=True)
    with trio.fail_after(30):
        record = await carry_out(
            planned.plan.runs[0],
            planned.plan.digest,
            id=places.run,
            places=places,
            ports=machine.ports,
            append=append,
            control=control,
        )

    assert control_events == 2
    assert record.exit_code == 130
    assert [left.split()[0] for left in record.left] == ["workspace"]
    provider = open_provider("local", machine.settings)
    for handle in await provider.list_owned(machine.ports.nonce):
        await provider.destroy(handle)
