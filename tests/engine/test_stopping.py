"""Every stage of ending a command is an event with the true reason, at the exact time. On the fake and its clock."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core.errors import OutOfMemory, WorkspaceLost
from runner.core.model import Exit, Fence, Handle, Outcome, Reason, Status, StopReason, StopStage
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.events.record import RunRecord
from runner.ports.provider import SandboxSpec
from runner.safefs import trees
from runner.store.memory import MemoryStore
from tests.support.fake_provider import FakeProcess, FakeProvider, FakeWorkspace, Scripted
from tests.support.situations import Project
from tests.support.state_machine import Machine

TERM, KILL, SANDBOX = StopStage
STEP, RUN = StopReason.STEP_DEADLINE, StopReason.RUN_DEADLINE
SIGNAL, SECOND = StopReason.SIGNAL, StopReason.SECOND_SIGNAL

FOREVER = 1e6
OBEDIENT = Scripted(seconds=FOREVER)
STUBBORN = Scripted(seconds=FOREVER, yields_to=KILL)
STUCK = Scripted(seconds=FOREVER, yields_to=SANDBOX)
IMMORTAL = Scripted(seconds=FOREVER, yields_to=None)
LOST = Scripted(seconds=50, fault=WorkspaceLost("the guest has ended"))

LATE: dict[str, Any] = {"workspace": "setup_commands: [wait]", "others": {"wait": Scripted(seconds=5)}}

Reached = tuple[str, StopStage, StopReason, float, float]


class Clock:
    """Time jumps while a command runs or the journal writes, and stands still for the threads in between."""

    def __init__(self, clock: MockClock) -> None:
        self._clock = clock
        self._users = 0

    @contextmanager
    def jumping(self) -> Iterator[None]:
        self._users += 1
        self._clock.autojump_threshold = 0
        try:
            yield
        finally:
            self._users -= 1
            self._clock.autojump_threshold = 0 if self._users else math.inf


class Timed(FakeProvider):
    """A fake that notes when its stop stages begin, and how often it was opened. A command goes by its last word."""

    def __init__(self, home: Path, clock: Clock, agent: Scripted, others: Mapping[str, Scripted]) -> None:
        super().__init__(home, lambda argv: others.get(argv[-1], agent))
        self.clock = clock
        self.begun: list[tuple[StopStage, float]] = []
        self.openings = 0

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Any]:
        self.openings += 1
        async with super().open(handle, spec) as stage:
            yield TimedWorkspace(stage, self)


class TimedWorkspace:
    def __init__(self, stage: FakeWorkspace, provider: Timed) -> None:
        self._stage, self._provider = stage, provider
        self.paths, self.tree = stage.paths, stage.tree
        self.effective, self.terminated = stage.effective, stage.terminated

    @asynccontextmanager
    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], on_stop: Callable[[StopStage], None]
    ) -> AsyncIterator[FakeProcess]:
        def noted(stage: StopStage) -> None:
            self._provider.begun.append((stage, trio.current_time()))
            on_stop(stage)

        with self._provider.clock.jumping():
            async with self._stage.exec(argv, on_stop=noted) as process:
                yield process


class SlowJournal(MemoryStore):
    """It takes half a minute to write a stage down."""

    def __init__(self, now: Callable[[], int], clock: Clock) -> None:
        super().__init__(now)
        self._clock = clock

    async def append(self, run: str, events: Sequence[ev.Event], *, fence: Fence | None = None) -> list[ev.Recorded]:
        if isinstance(events[0], ev.StopStageReached):
            with self._clock.jumping():
                await trio.sleep(30)
        return await super().append(run, events, fence=fence)


@dataclass
class Ended:
    """``stop_stages`` of all steps: the step, stage, reason, how long after the start, and the grace it left."""

    record: RunRecord
    stop_stages: list[Reached]
    begun: list[tuple[StopStage, float]]  # as the provider did them, in seconds after the agent's start
    events: list[ev.Event]
    openings: int
    history: list[ev.Recorded]

    def outcome(self, step: str) -> Outcome | None:
        return self.record.steps[step].outcome


class Stopping:
    """Runs of an agent and other scripted commands that are stopped in some way."""

    def __init__(self, project: Project, clock: MockClock) -> None:
        self.project = project
        self.clock = Clock(clock)
        self.machine = Machine(project, now)

    async def run(
        self,
        agent: Scripted,
        *,
        type: str = "",
        workspace: str = "",
        run: str = "",
        signals: Sequence[float] = (),
        others: Mapping[str, Scripted] | None = None,
        disk_full: bool = False,
    ) -> Ended:
        """``signals`` are seconds after the agent's start; ``disk_full`` is so for what the agent prints."""
        self.project.script("", workspace=workspace, agent=type, run=run)
        fake = Timed(self.machine.settings.home, self.clock, agent, others or {})
        self.machine.deps = replace(self.machine.deps, provider=lambda name: fake)
        start = 0.0

        async def send(control: RunCancellation) -> None:
            for at in signals:
                await trio.sleep_until(start + at)
                control.stop()

        def watch(recorded: ev.Recorded, control: RunCancellation) -> None:
            nonlocal start
            if recorded.event == ev.StepStarted("agent"):
                start = recorded.at / 1e6
                nursery.start_soon(send, control)
                if disk_full:
                    logs = self.machine.settings.home / "runs" / recorded.run / "logs"
                    (logs / "agent.stdout").symlink_to("/dev/full")

        async with trio.open_nursery() as nursery:
            record = await self.machine.run(watch)
            nursery.cancel_scope.cancel()
        history = await self.machine.store.events(record.id)
        stop_stages = [(r.event, r.at / 1e6 - start) for r in history if isinstance(r.event, ev.StopStageReached)]
        return Ended(
            record,
            [(event.step, event.stage, event.reason, at, event.grace_seconds) for event, at in stop_stages],
            [(stage, at - start) for stage, at in fake.begun],
            [recorded.event for recorded in history],
            fake.openings,
            list(history),
        )


def now() -> int:
    return round(trio.current_time() * 1e6)


@pytest.fixture
def stopping(project: Project, mock_clock: MockClock) -> Stopping:
    return Stopping(project, mock_clock)


def ladder(reason: StopReason, at: float, *, grace: float = 10, killed_for: StopReason | None = None) -> list[Reached]:
    """What a command that ignores TERM is sent, from ``at`` seconds on."""
    return [("agent", TERM, reason, at, grace), ("agent", KILL, killed_for or reason, at + grace, 0)]


LIMITED = {"type": "timeouts: {agent: 100s}"}
WHOLE = [*ladder(STEP, 100), ("agent", SANDBOX, STEP, 115, 0)]
BUDGET = StopReason.STOP_BUDGET


@pytest.mark.parametrize(
    ("agent", "settings", "stop_stages", "code"),
    [
        pytest.param(OBEDIENT, LIMITED, ladder(STEP, 100)[:1], 124, id="step deadline"),
        pytest.param(STUBBORN, LIMITED, ladder(STEP, 100), 124, id="step deadline, ignoring TERM"),
        pytest.param(STUBBORN, {"run": "timeout: 60s", **LATE}, ladder(RUN, 55), 124, id="run deadline"),
        pytest.param(STUBBORN, {"signals": [20]}, ladder(SIGNAL, 20), 130, id="signal"),
        pytest.param(
            STUBBORN,
            {"signals": [20], "type": "stop_budget: 8s"},
            ladder(SIGNAL, 20, grace=4, killed_for=BUDGET),
            130,
            id="signal and a small stop budget",
        ),
        pytest.param(
            STUBBORN, {"signals": [104], **LIMITED}, ladder(STEP, 100), 130, id="signal after the step deadline"
        ),
        pytest.param(
            STUBBORN,
            {"run": "timeout: 104s", "type": "timeouts: {agent: 100s}\nstop_budget: 8s"},
            ladder(STEP, 100, grace=8, killed_for=BUDGET),
            124,
            id="run deadline after the step deadline, and a small stop budget",
        ),
        pytest.param(STUCK, LIMITED, WHOLE, 124, id="step deadline, ignoring KILL"),
        pytest.param(IMMORTAL, LIMITED, WHOLE, 4, id="step deadline, ignoring everything"),
        pytest.param(Scripted(leaves=True), {}, [("agent", KILL, StopReason.LEFT_RUNNING, 0, 0)], 0, id="left running"),
        pytest.param(Scripted(seconds=5), {}, [], 0, id="ended by itself"),
        pytest.param(LOST, {}, [], 4, id="lost"),
    ],
)
async def test_each_stop_stage_has_its_time_and_its_reason(
    stopping: Stopping,
    mock_clock: MockClock,
    agent: Scripted,
    settings: dict[str, Any],
    stop_stages: list[Reached],
    code: int,
) -> None:
    ended = await stopping.run(agent, **settings)

    assert ended.stop_stages == stop_stages
    assert ended.record.exit_code == code
    kinds = [type(event) for event in ended.events]
    last = max((i for i, kind in enumerate(kinds) if kind is ev.StopStageReached), default=0)
    assert last < ended.events.index(ev.StepEnded("agent", ended.outcome("agent") or Outcome(status=Status.UNKNOWN)))
    assert ended.record.saved_work is not None
    assert kinds.count(ev.RunEnded) == 1


async def test_a_second_signal_takes_what_is_left_of_the_grace(stopping: Stopping, mock_clock: MockClock) -> None:
    ended = await stopping.run(STUBBORN, signals=[20, 23])

    assert ended.stop_stages == [("agent", TERM, SIGNAL, 20, 10), ("agent", KILL, SECOND, 23, 0)]
    assert ended.record.exit_code == 130
    assert [left.split()[0] for left in ended.record.left_behind] == ["lease", "workspace"]
    trees.remove(stopping.project.home / "state")


async def test_what_is_left_when_everything_was_tried_is_named(stopping: Stopping, mock_clock: MockClock) -> None:
    ended = await stopping.run(IMMORTAL, type="timeouts: {agent: 100s}")

    (overdue,) = [event for event in ended.events if isinstance(event, ev.ProcessEscaped)]
    assert overdue == ev.ProcessEscaped("agent", "killed processes of the command still live in cgroup `/fake`: 4711")
    assert ended.record.warnings == [("provider.escaped", f"agent: {overdue.detail}")]


async def test_a_command_s_own_deadline_is_told_from_its_step_s(stopping: Stopping, mock_clock: MockClock) -> None:
    ended = await stopping.run(
        Scripted(),
        workspace="setup_commands: [hang]\nsetup: {timeout: 5s, on_failure: warn}",
        others={"hang": STUBBORN},
    )

    reasons = [(step, stage, reason) for step, stage, reason, _, _ in ended.stop_stages]
    assert reasons == [("setup", TERM, StopReason.COMMAND_DEADLINE), ("setup", KILL, StopReason.COMMAND_DEADLINE)]
    assert ended.begun[1][1] - ended.begun[0][1] == 10
    assert ended.record.status is Status.SUCCEEDED


async def test_a_setup_command_is_killed_after_five_minutes_when_no_time_is_written(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    ended = await stopping.run(
        Scripted(),
        workspace="setup_commands: [hang, never]\nsetup: {on_failure: warn}",
        others={"hang": OBEDIENT, "never": Scripted(fault=WorkspaceLost("it was run"))},
    )

    began = ended.record.steps["setup"].started
    (killed,) = [recorded.at for recorded in ended.history if isinstance(recorded.event, ev.StopStageReached)]
    assert (killed - began) / 1e6 == 300
    assert [event.reason for event in ended.events if isinstance(event, ev.StopStageReached)] == [
        StopReason.COMMAND_DEADLINE
    ]
    message = "setup: setup command 1 of 2 timed out after 5m; the rest were skipped"
    assert ended.record.warnings == [("step.warning", message)]
    assert ended.record.status is Status.SUCCEEDED


async def test_a_hook_that_settling_has_no_time_for_is_killed_for_the_stop_budget(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    ended = await stopping.run(
        OBEDIENT, type="post_hooks: [hang]\nstop_budget: 20s", signals=[20], others={"hang": STUBBORN}
    )

    (agent, *hook) = ended.stop_stages
    assert agent == ("agent", TERM, SIGNAL, 20, 10)
    # Its step and its sandbox end at one moment, so TERM is without grace, or not even sent.
    assert hook[-1] == ("post_hook", KILL, StopReason.STOP_BUDGET, 30, 0)
    assert hook[:-1] in ([], [("post_hook", TERM, StopReason.STOP_BUDGET, 30, 0)])
    assert ended.outcome("post_hook") == Outcome(
        status=Status.FAILED, reason=Reason.TIMEOUT, message="stopped when the stop budget was used up"
    )
    assert ended.record.saved_work is not None


async def test_a_log_that_can_not_be_written_stops_the_command_as_a_failure(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    ended = await stopping.run(replace(OBEDIENT, stdout=b"too much"), disk_full=True)

    outcome = ended.outcome("agent")
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.PLATFORM)
    assert re.fullmatch(r"host\.refused: No space left on device: `/.+/logs/agent\.stdout`", outcome.message)
    assert ended.stop_stages == [("agent", TERM, StopReason.FAILURE, 0, 10)]


async def test_a_slow_journal_delays_no_stop_stage_and_loses_none(stopping: Stopping, mock_clock: MockClock) -> None:
    stopping.machine.store = SlowJournal(now, stopping.clock)

    ended = await stopping.run(STUBBORN, type="timeouts: {agent: 100s}")

    assert ended.begun == [(TERM, 100), (KILL, 110)]
    assert ended.stop_stages == [("agent", TERM, STEP, 130, 10), ("agent", KILL, STEP, 160, 0)]
    assert ended.record.steps["agent"].ended == ended.record.steps["agent"].stop_stages[-1][0]


@pytest.mark.parametrize("lost", ["agent", "setup", "post_hook", "verify"])
async def test_a_sandbox_lost_under_a_command_leaves_its_outcome_unknown_and_its_work_saved(
    stopping: Stopping, mock_clock: MockClock, repository: Path, lost: str
) -> None:
    commands = {lost: LOST}
    ended = await stopping.run(
        commands.pop("agent", Scripted()),
        type="post_hooks: [post_hook]",
        workspace="repo_source: {type: local, path: repo}\nsetup_commands: [setup]",
        run="verify: {commands: [{run: verify}]}",
        others={"setup": Scripted(), "post_hook": Scripted(), "verify": Scripted()} | commands,
    )

    outcome = ended.outcome(lost)
    assert (outcome.status, outcome.reason) == (Status.UNKNOWN, Reason.UNKNOWN)
    assert outcome.message == "the sandbox was lost while a command ran in it: the guest has ended"
    assert (ended.record.status, ended.record.exit_code) == (Status.UNKNOWN, 4)
    assert ended.record.saved_work is not None
    assert ended.record.resources == {}


@pytest.mark.parametrize("killed", ["agent", "setup"])
async def test_a_sandbox_killed_for_its_memory_fails_the_step_and_not_the_platform(
    stopping: Stopping, mock_clock: MockClock, killed: str
) -> None:
    """What becomes of the command is known: it was ended. With ``docker`` the same is the command's own end."""
    starved = Scripted(seconds=50, fault=OutOfMemory("it was killed whole"))
    ended = await stopping.run(
        starved if killed == "agent" else Scripted(),
        workspace="setup_commands: [setup]",
        others={"setup": starved if killed == "setup" else Scripted()},
    )

    assert ended.outcome(killed) == Outcome(status=Status.FAILED, reason=Reason.OOM, message="it was killed whole")
    assert (ended.record.status, ended.record.exit_code) == (Status.FAILED, 1)


async def test_nothing_runs_in_a_sandbox_that_was_lost(stopping: Stopping, mock_clock: MockClock) -> None:
    """A hook follows its agent also then: in a new opening."""
    ended = await stopping.run(LOST, type="post_hooks: [hook]", others={"hook": Scripted()})

    assert ended.outcome("post_hook") == Outcome(status=Status.SUCCEEDED, message="1 hook")
    assert ended.openings == 2


async def test_nothing_runs_in_the_sandbox_of_an_agent_that_was_stopped(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    ended = await stopping.run(
        OBEDIENT, type="timeouts: {agent: 100s}\npost_hooks: [hook]", others={"hook": Scripted()}
    )

    assert ended.openings == 2


async def test_a_workspace_that_can_not_be_opened_is_the_platform_s_failure(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    """No command ran, so nothing about it is unknown."""
    fake = FakeProvider(stopping.machine.settings.home, faults={"open": WorkspaceLost("it is gone")})
    stopping.project.script("")
    stopping.machine.deps = replace(stopping.machine.deps, provider=lambda name: fake)

    record = await stopping.machine.run()

    assert record.outcome == Outcome(
        status=Status.FAILED, reason=Reason.PLATFORM, message="agent: provider.workspace-lost: it is gone"
    )
    assert record.saved_work is not None


async def test_a_kill_for_memory_is_an_event_whatever_the_exit_status_says(
    stopping: Stopping, mock_clock: MockClock
) -> None:
    ended = await stopping.run(Scripted(Exit(code=0), oom_kills=2))

    assert [event for event in ended.events if isinstance(event, ev.OomKilled)] == [ev.OomKilled("agent", 2)]
    assert ended.record.warnings == [("step.oom", "agent: out of memory, the kernel killed 2 processes")]
    assert ended.record.status is Status.SUCCEEDED
