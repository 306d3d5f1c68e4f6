"""Dependencies of runs: adapters for agents, git, providers and leases, and the path of events to store and sinks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from msgspec.structs import asdict

from runner.core.clock import now_microseconds
from runner.core.errors import RunnerError
from runner.core.home import LAYERS
from runner.core.model import Fence
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.engine.run import Append, Uncopied
from runner.events import events as ev
from runner.git import mirror, open_git
from runner.ops.planning.facts import open_provider
from runner.ops.planning.refusals import outside_of
from runner.ops.pool.handoff import warm
from runner.ops.runs.secret_values import make_redactor
from runner.ops.workspaces.capacity import require_room
from runner.ports.mcp import Lists
from runner.ports.sink import Sink
from runner.ports.store import Store
from runner.runtime.agent_dependencies import AgentDependencies
from runner.runtime.context import RunDependencies
from runner.runtime.subrunner import read_command, script_of

Advise = Callable[[RunnerError], None]  # hears of findings that stop nothing


def ignore(advice: RunnerError) -> None:
    pass


def dependencies_of(
    settings: Settings, store: Store, outside: AgentDependencies | None = None, redactor: Redactor | None = None
) -> RunDependencies:
    """Build the adapters that runs of a store use; ``outside`` are those that were made before."""

    async def sub_runner(name: str, env: Mapping[str, str]) -> list[str]:
        return await read_command(script_of(name), env)

    async def room(workspace: str) -> None:
        await require_room(store, settings.max_workspaces, workspace)

    async def approve_mcp(key: str, found: Lists) -> Lists:
        from runner.ops.mcp.records import approve_first  # which most runs do without

        return await approve_first(store, key, found)

    redact = make_redactor(settings) if redactor is None else redactor
    return RunDependencies(
        **asdict(outside or outside_of(settings, redact=redact)),
        provider=lambda name: open_provider(name, settings),
        git=open_git(settings),
        sub_runner=sub_runner,
        lease=store.lease,
        nonce=store.nonce,
        now=now_microseconds,
        chance=random.random,
        warm=partial(warm, settings.home),
        room=room,
        evict_layers=partial(mirror.evict, settings.home / LAYERS, settings.dependencies_limit),
        redact=redact,
        approve_mcp=approve_mcp,
    )


def event_writer(store: Store, sinks: Sequence[Sink], redactor: Redactor) -> Append:
    """Return the function that appends events to the store, without secrets, and then passes them to the sinks.

    With the first events of a run come those that it had when it was pending.
    """
    begun: set[str] = set()

    async def append(run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
        if redactor:
            events = [ev.with_texts(event, redactor.text) for event in events]
        recorded: Sequence[ev.Recorded] = await store.append(run, events, fence=fence)
        if run not in begun and recorded[0].seq > 1:
            recorded = await store.events(run, limit=recorded[-1].seq)
        begun.add(run)
        refusal: OSError | None = None
        for one, sink in product(recorded, sinks):
            try:
                sink(one)
            except OSError as error:  # the others are told all the same, or a directory's events would have a gap
                refusal = refusal or error
        if isinstance(refusal, BrokenPipeError):
            raise refusal
        if refusal is not None:
            uncopied = Uncopied(refusal.errno, refusal.strerror, refusal.filename)
            uncopied.recorded = recorded
            raise uncopied from refusal
        return recorded

    return append
