"""Carrying out a plan: the store, the ports, the signals, and every run of the plan at once under a limit."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping, Sequence

import trio

from runner import events as ev
from runner import plugins
from runner.agents import command_of
from runner.app.facts import open_provider
from runner.app.planning import Planned
from runner.artifacts.layout import RunFiles
from runner.engine.run import Append, Control, carry_out
from runner.errors import StoreFailed
from runner.git import open_git
from runner.ids import run_id
from runner.plan.model import RunPlan
from runner.ports.agent import Agent
from runner.ports.sink import Sink
from runner.ports.store import Store
from runner.record import RunRecord
from runner.settings import Settings, shipped
from runner.steps._run import Places, Ports
from runner.store.sqlite import open_store

# What would end a program by default and can be caught; HUP ends nothing, since a lost terminal is no decision.
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)


def make_home(settings: Settings) -> None:
    """``RUNNER_HOME``, for its owner only. Raises ``StoreFailed`` when it cannot be made."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreFailed(f"`{settings.home}` can not be made: {error.strerror}", hint="set RUNNER_HOME") from error


def now_microseconds() -> int:
    return time.time_ns() // 1000


async def apply(planned: Planned, settings: Settings, sinks: Sequence[Sink]) -> list[RunRecord]:
    """Carry out every run of a plan, at most ``WORKSPACE_MAX`` at once, and return their records in plan order.

    The first signal ends the work of all runs, which then settle; a second ends settling.
    """
    import runner.agents

    def agent(name: str) -> Agent:
        found: Agent = plugins.load(runner.agents, name).agent
        return found

    async def sub_runner(name: str, env: Mapping[str, str]) -> list[str]:
        return await command_of(shipped("runners") / f"{name}.sh", env)

    make_home(settings)
    async with open_store(settings.home / "state.db", now=now_microseconds, entropy=secrets.token_bytes) as store:
        ports = Ports(
            provider=lambda name: open_provider(name, settings),
            git=open_git(settings),
            agent=agent,
            sub_runner=sub_runner,
            nonce=store.nonce,
            now=now_microseconds,
        )
        return await _apply_all(planned, settings, store, ports, sinks)


async def _apply_all(
    planned: Planned, settings: Settings, store: Store, ports: Ports, sinks: Sequence[Sink]
) -> list[RunRecord]:
    records: dict[str, RunRecord] = {}
    limit = trio.CapacityLimiter(settings.max_workspaces)
    controls = [Control() for _ in planned.plan.runs]

    async def one(plan: RunPlan, control: Control) -> None:
        async with limit:
            places = Places(settings.home, run_id(secrets.token_bytes(8)))
            files = RunFiles(places.directory)
            files.write_plan(plan, planned.plan.digest)
            appended = _appending(store, [files, *sinks])
            record = await carry_out(
                plan,
                planned.plan.digest,
                id=places.run,
                places=places,
                ports=ports,
                append=appended,
                control=control,
            )
            files.write_record(record)
            records[plan.name] = record

    async with trio.open_nursery() as signals:
        await signals.start(_watch_signals, controls)
        async with trio.open_nursery() as runs:
            for plan, control in zip(planned.plan.runs, controls, strict=True):
                runs.start_soon(one, plan, control)
        signals.cancel_scope.cancel()
    return [records[plan.name] for plan in planned.plan.runs]


def _appending(store: Store, sinks: Sequence[Sink]) -> Append:
    async def append(run: str, events: Sequence[ev.Event]) -> Sequence[ev.Recorded]:
        recorded = await store.append(run, events)
        for one in recorded:
            for sink in sinks:
                sink(one)
        return recorded

    return append


async def _watch_signals(controls: Sequence[Control], task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(*FATAL, signal.SIGHUP) as received:
        task_status.started()
        async for number in received:
            if number != signal.SIGHUP:
                for control in controls:
                    control.stop()
