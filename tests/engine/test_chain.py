"""The chain of providers: what is fallen back from, what is not, what is asked for again. On fakes, in hurried time."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core import errors
from runner.core.model import Exit, Fence, IsolationClass, Reason, Status
from runner.engine.recover import recover
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.events.record import RunRecord, replay
from runner.plan.model import RunPlan
from runner.ports.provider import Probe
from runner.runtime.context import RunPaths
from tests.support.fake_provider import FakeProvider, Scripted
from tests.support.params import nightly
from tests.support.situations import Project, leftovers
from tests.support.state_machine import Machine, Watch

SETUP = "setup_commands: [prepare]"
CLONE = "repo_source: {type: local, path: repo}"
ALWAYS = range(1, 1_000)
FOREVER = 1e6
FAILS = Scripted(Exit(code=3))
HANGS = Scripted(seconds=FOREVER)
ENDS = Scripted(fault=errors.WorkspaceLost("the guest has ended"))
BUSY = errors.ProviderBusy("docker refuses: try again")
BROKEN = errors.ProviderFailed("no sandbox can be made")
STUCK = errors.CleanUpIncomplete("a file cannot be removed")


class Named(FakeProvider):
    """A fake under a name of the chain. ``faults`` maps a method to which of its calls fail, and with what."""

    def __init__(
        self,
        home: Path,
        name: str,
        commands: Mapping[str, Scripted],
        faults: Mapping[str, tuple[Container[int], errors.RunnerError]],
        slowness: float,
    ) -> None:
        self.name = name
        super().__init__(home, lambda argv: commands.get(argv[-1], commands.get("agent", Scripted())))
        self._calls = faults
        self._slowness = slowness
        self.called: list[str] = []
        self.here = True

    async def probe(self) -> Probe:
        return replace(await super().probe(), available=self.here, reason=None if self.here else "not installed")

    async def _reach(self, method: str) -> None:
        await super()._reach(method)
        self.called.append(method)
        calls, fault = self._calls.get(method, ((), BROKEN))
        if self.called.count(method) in calls:
            await trio.sleep(self._slowness)
            raise fault


@dataclass
class Chain:
    """A run on ``local`` and then ``process``, both played."""

    machine: Machine
    project: Project
    providers: dict[str, Named] = field(default_factory=dict)
    events: list[ev.Event] = field(default_factory=list)

    def play(
        self,
        name: str,
        commands: Mapping[str, Scripted] | None = None,
        faults: Mapping[str, tuple[Container[int], errors.RunnerError]] | None = None,
        slowness: float = 0.0,
    ) -> Named:
        home = self.machine.settings.home
        self.providers[name] = Named(home, name, {"prepare": Scripted(), **(commands or {})}, faults or {}, slowness)
        return self.providers[name]

    async def run(
        self,
        workspace: str = SETUP,
        *,
        chain: str = "local, process",
        watch: Watch = lambda recorded, control: None,
        floor: IsolationClass = IsolationClass.NONE,
        **more: Any,
    ) -> RunRecord:
        self.project.script("", workspace=workspace, provider=chain, **more)
        self.machine.deps = replace(self.machine.deps, provider=lambda name: self.providers[name])
        record = await self.machine.run(watch, partial(with_floor, floor=floor))
        history = await self.machine.store.events(record.id)
        self.events = [recorded.event for recorded in history]
        assert replay(record.id, history) == record
        assert await self.machine.store.leases() == []
        return record

    @property
    def fallen(self) -> list[tuple[str, str]]:
        return [(event.step, event.reason) for event in self.events if isinstance(event, ev.FallbackStarted)]

    @property
    def retried(self) -> list[tuple[str, str, float]]:
        return [(e.step, e.operation, e.pause_seconds) for e in self.events if isinstance(e, ev.RetryScheduled)]


def with_floor(plan: RunPlan, floor: IsolationClass) -> RunPlan:
    steps = (
        replace(step, body=replace(step.body, isolation=floor)) if step.kind == "provision" else step  # type: ignore[type-var]
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))


@pytest.fixture
def hurry() -> MockClock:
    """Threads take real time, so that it cannot stand still for them; a second is a twelfth of one."""
    return MockClock(rate=12)


@pytest.fixture
def chain(project: Project) -> Chain:
    chain = Chain(Machine(project), project)
    chain.play("local")
    chain.play("process")
    return chain


async def test_a_provider_that_was_looked_at_a_moment_ago_is_not_asked_again(chain: Chain) -> None:
    found = await chain.providers["local"].probe()
    chain.machine.deps = replace(chain.machine.deps, seen={"local": found}.get)
    chain.providers["local"].here = False  # as it would say if it were asked

    record = await chain.run()

    assert (record.status, record.provider, record.rejected_providers) == (Status.SUCCEEDED, "local", [])


async def test_a_failed_setup_begins_again_in_a_fresh_workspace_of_the_next_provider(chain: Chain) -> None:
    chain.play("local", {"prepare": FAILS})
    record = await chain.run()

    assert record.status is Status.SUCCEEDED
    assert chain.fallen == [("setup", "setup command 1 of 1 exited 3")]
    assert record.rejected_providers == [("local", "setup: setup command 1 of 1 exited 3")]
    assert (record.provider, record.attempt, record.left_behind) == ("process", 2, ())
    intended = [(event.name, event.place) for event in chain.events if isinstance(event, ev.ResourceIntended)]
    assert intended == [(f"{record.id}-1", "local"), (f"{record.id}-2", "process")]
    gone = [event.name for event in chain.events if isinstance(event, ev.ResourceRemoved)]
    assert gone == [f"{record.id}-1", f"{record.id}-2"]
    assert leftovers(chain.project.home) == []


@pytest.mark.parametrize(
    ("commands", "faults", "workspace", "fallen"),
    [
        nightly({}, {"chown": (ALWAYS, BROKEN)}, SETUP, "provision", id="its files cannot be given to it"),
        pytest.param({}, {"chown": ({2}, BROKEN)}, CLONE, "clone", id="the clone"),
        nightly({}, {"open": (ALWAYS, BROKEN)}, SETUP, "setup", id="no sandbox for setup"),
        pytest.param({}, {"open": (ALWAYS, BROKEN)}, "", "agent", id="no sandbox for the agent"),
        nightly({}, {"open": (ALWAYS, BUSY)}, SETUP, "setup", id="a daemon that stays busy"),
        pytest.param({"prepare": HANGS}, {}, f"{SETUP}\nsetup: {{timeout: 5s}}", "setup", id="setup takes long"),
        nightly({"prepare": ENDS}, {}, SETUP, "setup", id="lost in setup"),
    ],
)
async def test_what_a_place_fails_at_is_done_again_in_another(
    chain: Chain, hurry: MockClock, repository: Path, commands: Any, faults: Any, workspace: str, fallen: str
) -> None:
    chain.play("local", commands, faults)
    record = await chain.run(workspace)

    assert [step for step, _ in chain.fallen] == [fallen]
    assert record.status is Status.SUCCEEDED
    assert record.provider == "process"
    started = [event.step for event in chain.events if isinstance(event, ev.StepStarted)]
    again = started[: started.index(fallen) + 1]
    assert started[len(again) :][: len(again) - 1] == again[1:]  # all but the lease
    assert chain.providers["process"].asked != []
    assert leftovers(chain.project.home) == []


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(BROKEN, id="broken"),
        nightly(errors.ImageMissing("there is no such image"), id="image missing"),
        nightly(BUSY, id="busy"),
    ],
)
async def test_a_workspace_that_cannot_be_made_is_made_by_the_next(
    chain: Chain, hurry: MockClock, fault: errors.RunnerError
) -> None:
    chain.play("local", faults={"create": (ALWAYS, fault)})
    record = await chain.run()

    assert (record.status, record.provider, record.attempt) == (Status.SUCCEEDED, "process", 1)
    assert record.rejected_providers == [("local", fault.message)]
    assert chain.fallen == []


@pytest.mark.nightly
async def test_a_provider_that_cannot_even_be_asked_is_refused(chain: Chain) -> None:
    chain.play("local", faults={"probe": (ALWAYS, BROKEN)})
    record = await chain.run()

    assert (record.status, record.provider) == (Status.SUCCEEDED, "process")
    assert record.rejected_providers == [("local", BROKEN.message)]


@pytest.mark.parametrize(
    ("commands", "settings", "code"),
    [
        pytest.param({"agent": Scripted(Exit(code=1))}, {}, 1, id="the agent failed"),
        nightly({"agent": ENDS}, {}, 4, id="lost with the agent"),
        nightly({"prepare": FAILS}, {"workspace": f"{SETUP}\nsetup: {{on_failure: warn}}"}, 0, id="setup may"),
        pytest.param({"prepare": FAILS}, {"chain": "local"}, 1, id="one provider is no chain"),
        nightly({"prepare": HANGS}, {"run": "timeout: 20s"}, 124, id="the run's deadline"),
        pytest.param({}, {"workspace": CLONE, "policy": 'forbidden_patterns: ["README"]'}, 3, id="policy"),
    ],
)
async def test_what_would_be_so_anywhere_or_has_begun_is_not_fallen_back_from(
    chain: Chain, hurry: MockClock, repository: Path, commands: Any, settings: Any, code: int
) -> None:
    chain.play("local", commands)
    record = await chain.run(**{"workspace": SETUP, **settings})

    assert chain.fallen == []
    assert (record.exit_code, record.provider, record.attempt) == (code, "local", 1)
    assert chain.providers["process"].asked == []


@pytest.mark.nightly
async def test_a_contract_that_a_sub_runner_breaks_is_no_fault_of_a_place(chain: Chain) -> None:
    async def broken(name: str, env: Mapping[str, str]) -> list[str]:
        raise errors.SubRunnerContract("it printed nothing")

    chain.machine.deps = replace(chain.machine.deps, sub_runner=broken)
    record = await chain.run()

    assert chain.fallen == []
    assert record.exit_code == 4


@pytest.mark.nightly
async def test_a_signal_during_setup_ends_the_run_and_not_the_place(chain: Chain) -> None:
    chain.play("local", {"prepare": HANGS})

    def stop(recorded: ev.Recorded, control: RunCancellation) -> None:
        if recorded.event == ev.StepStarted("setup"):
            control.stop()

    record = await chain.run(watch=stop)

    assert chain.fallen == []
    assert record.exit_code == 130


async def test_a_signal_while_a_workspace_is_left_ends_the_run_with_nothing_of_it(chain: Chain) -> None:
    chain.play("local", {"prepare": FAILS})
    for last in (ev.ResourceRemovalStarted, ev.ResourceRemoved, ev.FallbackStarted):

        def stop(recorded: ev.Recorded, control: RunCancellation, last: type[ev.Event] = last) -> None:
            if isinstance(recorded.event, last) and control.requested_at is None:
                control.stop()

        record = await chain.run(watch=stop)

        assert (record.exit_code, record.left_behind) == (130, ())
        assert leftovers(chain.project.home) == []


@pytest.mark.parametrize("floor", [IsolationClass.NAMESPACES, IsolationClass.NONE], ids=["too weak", "not there"])
async def test_when_no_other_place_is_fit_the_first_failure_is_the_runs(chain: Chain, floor: IsolationClass) -> None:
    chain.play("local", {"prepare": FAILS})
    chain.providers["process"].here = bool(floor)
    chain.providers["local"].probe = partial(strong, chain.providers["local"])  # type: ignore[method-assign]
    record = await chain.run(floor=floor)

    assert chain.fallen == []
    assert (record.exit_code, record.provider) == (1, "local")
    why = "isolation none is below namespaces" if floor else "not installed"
    assert record.rejected_providers == [("process", why)]


async def strong(provider: Named) -> Probe:
    return replace(await Named.probe(provider), isolation=IsolationClass.NAMESPACES)


@pytest.mark.nightly
async def test_a_setup_that_fails_everywhere_fails_the_run_as_a_setup(chain: Chain) -> None:
    chain.play("local", {"prepare": FAILS})
    chain.play("process", {"prepare": FAILS})
    record = await chain.run()

    assert (record.outcome.reason, record.exit_code) == (Reason.SETUP, 1)
    assert len(chain.fallen) == 1
    assert leftovers(chain.project.home) == []


@pytest.mark.nightly
async def test_a_place_that_cannot_be_made_after_a_hop_names_both_reasons(chain: Chain) -> None:
    chain.play("local", {"prepare": FAILS})
    chain.play("process", faults={"create": (ALWAYS, BROKEN)})
    record = await chain.run()

    assert record.exit_code == 4
    assert "`local`: setup: setup command 1 of 1 exited 3; `process`: no sandbox can be made" in record.outcome.message
    assert record.steps["setup"].status is Status.SKIPPED
    assert leftovers(chain.project.home) == []


# --- what is left behind ----------------------------------------------------------------------------


async def test_a_workspace_that_cannot_be_left_is_told_and_removed_by_recovery(chain: Chain, hurry: MockClock) -> None:
    chain.play("local", {"prepare": FAILS}, {"destroy": (ALWAYS, STUCK)})
    record = await chain.run()

    assert (record.status, record.provider) == (Status.SUCCEEDED, "process")
    assert record.left_behind == (f"workspace {record.id}-1 local",)
    assert record.warnings.count((STUCK.code, f"workspace {record.id}-1 remains: {STUCK.message}")) == 2

    await recover_whole(chain, record)


async def recover_whole(chain: Chain, record: RunRecord) -> None:
    """Now that the provider removes what it is asked to."""
    chain.play("local")
    store, paths = chain.machine.store, RunPaths(chain.machine.settings.home, record.id)

    async def append(run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
        return await store.append(run, events, fence=fence)

    recovered = await recover(record, "no plan", paths=paths, deps=chain.machine.deps, append=append)
    assert recovered.left == record.left_behind == ()
    assert leftovers(chain.project.home) == []


@pytest.mark.nightly
async def test_a_workspace_that_cannot_be_left_yet_is_removed_at_the_end(chain: Chain, hurry: MockClock) -> None:
    chain.play("local", {"prepare": FAILS}, {"destroy": (range(1, 6), STUCK)})
    record = await chain.run()

    assert (record.status, record.left_behind) == (Status.SUCCEEDED, ())
    assert leftovers(chain.project.home) == []


# --- asking again -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fault", "step", "what"),
    [
        nightly("create", BUSY, "provision", "making the workspace", id="making"),
        nightly("open", BUSY, "setup", "starting the sandbox", id="starting"),
        pytest.param("destroy", STUCK, "teardown", "removing the workspace", id="removing"),
    ],
)
async def test_what_may_pass_is_asked_again_and_each_failure_is_told(
    chain: Chain, hurry: MockClock, method: str, fault: errors.RunnerError, step: str, what: str
) -> None:
    chain.play("local", faults={method: (range(1, 4), fault)})
    record = await chain.run()

    assert (record.status, record.provider, record.left_behind) == (Status.SUCCEEDED, "local", ())
    assert chain.retried == [(step, what, pytest.approx(pause)) for pause in (0.4, 0.8, 1.6)]
    told = (fault.code, f"{step}: {what} failed and was tried again: {fault.message}")
    assert record.warnings.count(told) == 3


@pytest.mark.parametrize(
    ("fault", "slowness", "calls"),
    [
        pytest.param(BUSY, 0.0, 4, id="passing"),
        pytest.param(BROKEN, 0.0, 1, id="lasting"),
        nightly(BUSY, 9.0, 1, id="slow"),
    ],
)
async def test_asking_again_has_an_end(
    chain: Chain, hurry: MockClock, fault: errors.RunnerError, slowness: float, calls: int
) -> None:
    provider = chain.play("local", faults={"create": (ALWAYS, fault)}, slowness=slowness)
    record = await chain.run()

    assert provider.called.count("create") == calls
    assert record.provider == "process"


@pytest.mark.nightly
async def test_asking_again_ends_with_the_steps_deadline(chain: Chain, hurry: MockClock) -> None:
    chain.play("local", faults={"create": (ALWAYS, BUSY)}, slowness=4.0)
    record = await chain.run(agent="timeouts: {provision: 6s}", chain="local")

    assert record.exit_code == 124
    assert leftovers(chain.project.home) == []


async def test_a_workspace_that_cannot_be_removed_does_not_hide_how_the_run_ended(
    chain: Chain, hurry: MockClock
) -> None:
    chain.play("local", {"agent": Scripted(Exit(code=1))}, {"destroy": (ALWAYS, STUCK)})
    record = await chain.run(workspace="")

    assert (record.outcome.reason, record.exit_code) == (Reason.EXIT, 1)
    assert record.left_behind == (f"workspace {record.id}-1 local",)
    assert len(chain.retried) == 3
    await recover_whole(chain, record)
