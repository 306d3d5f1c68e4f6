"""The context of a run: its paths, its dependencies, and the results that its steps hand to each other.

Everything here can be rebuilt from the journal; no decision rests on it that an event does not show.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar

import trio
from msgspec import Struct, field
from msgspec.structs import replace

from runner.core.errors import InputChanged, PlatformError
from runner.core.home import SCRATCH, private_repository, run_directory, workspace_directory
from runner.core.model import Feature, Handle, Lease, Mount, PoolMissReason, SavedWork, SlotKey, StopStage
from runner.core.redact import Redactor, Secret
from runner.events import events as ev
from runner.lifecycle.backoff import SLOW, pauses
from runner.plan.model import RunPlan
from runner.ports.git import Author, Git, Snapshot
from runner.ports.mcp import Lists
from runner.ports.provider import Paths, Probe, Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.runtime.agent_dependencies import AgentDependencies
from runner.runtime.lease_holder import Emit, LeaseHolder
from runner.runtime.mount_plan import MountPlan, add_layers
from runner.runtime.path_digests import digests
from runner.runtime.run_workspace import RunWorkspace
from runner.runtime.sandbox_session import SandboxSession
from runner.runtime.tree_scan import ScanResult
from runner.safefs import trees
from runner.spec import template
from runner.spec.model import ContextFile
from runner.triage.prompt import PreviousAttempt

if TYPE_CHECKING:
    from runner.runtime.dependency_layers import LayerRecord

_T = TypeVar("_T")

StopEvent = Callable[[StopStage, float], ev.StopStageReached]


class RunPaths(Struct, frozen=True):
    """The directories of a run on the host, decided by ``RUNNER_HOME`` and the run's id."""

    home: Path
    run: str

    @property
    def directory(self) -> Path:
        return run_directory(self.home, self.run)

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def repository(self) -> Path:
        return private_repository(self.home, self.run)

    @property
    def checkout(self) -> Path:
        return self.home / SCRATCH / f"{self.run}-verify"

    @property
    def installation(self) -> Path:
        """Return the directory in which commands make dependencies."""
        return self.home / SCRATCH / f"{self.run}-dependencies"

    @property
    def quarantine(self) -> Path:
        return self.home / SCRATCH / f"{self.run}-commits"

    def name_of(self, handle: Handle) -> Path:
        """Return the path by which people find a workspace's tree, which may lie elsewhere."""
        name = workspace_directory(self.home, handle.project, handle.id)
        return name if name.is_symlink() else handle.tree


async def no_pool(provider: Provider, key: SlotKey, request: WorkspaceRequest) -> Handle | PoolMissReason | None:
    await trio.lowlevel.checkpoint()
    return None


async def boundless(workspace: str) -> None:
    """Allow any number of workspaces."""
    await trio.lowlevel.checkpoint()


async def everything(key: str, found: Lists) -> Lists:
    """Approve all that a server lists."""
    await trio.lowlevel.checkpoint()
    return found


def never(provider: str) -> None:
    """Remember no probe."""


class RunDependencies(AgentDependencies, frozen=True, kw_only=True):
    """All adapters of a run; made by the composition root.

    ``warm`` claims a warm workspace, or returns why there is none; ``None`` if there is no pool. ``room`` raises
    ``WorkspaceLimit`` for a workspace beyond the limit. ``evict_layers`` removes dependencies that nobody has used for
    longest, beyond their limit. ``seen`` returns a recent probe of a provider, so that it is
    not probed twice.
    """

    provider: Callable[[str], Provider]
    git: Git
    sub_runner: Callable[[str, Mapping[str, str]], Awaitable[list[str]]]
    lease: Callable[[str], Awaitable[Lease]]  # of a workspace, by the store
    nonce: str
    now: Callable[[], int]  # microseconds since the epoch
    chance: Callable[[], float]  # between 0 and 1
    redact: Redactor = field(default_factory=Redactor)  # of all that is shown or kept
    warm: Callable[[Provider, SlotKey, WorkspaceRequest], Awaitable[Handle | PoolMissReason | None]] = no_pool
    room: Callable[[str], Awaitable[None]] = boundless
    evict_layers: Callable[[], None] = lambda: None
    seen: Callable[[str], Probe | None] = never
    approve_mcp: Callable[[str, Lists], Awaitable[Lists]] = everything  # what was approved of a server, by its key
    random_hex: Callable[[int], str] = token_hex  # of so many bytes; nobody can guess it


class ResumeSource(Struct, frozen=True, kw_only=True):
    """The work of an earlier run that this one continues: a commit on ``base``, and the ``directory`` of that run.

    ``snapshot`` is its published snapshot, if that is reused; ``commits`` are its agent's own.
    """

    repository: Path
    commit: str
    base: str | None
    directory: Path
    snapshot: ev.SnapshotPublished | None
    commits: ev.AgentCommitsImported | None


class ResumeState(Struct, frozen=True):
    """The run that this one continues. ``reused`` maps reused steps to the run that performed them and their content
    keys; without any, there is no ``kept`` work. ``attempt`` is for the agent, if it runs again."""

    run: str
    reused: Mapping[str, tuple[str, str]] = {}
    kept: ResumeSource | None = None
    attempt: PreviousAttempt | None = None


class CurrentStep(Struct):
    """The step that is being performed.

    ``explain`` builds the event of a stop stage, given the command's own deadline (trio time). ``end_unknown``: the
    sandbox was lost while a command ran, so its effect is unknown. ``awaited`` says in words what the step was waiting
    for when it was stopped, if known.
    """

    step: str
    explain: StopEvent
    end_unknown: bool = False
    awaited: str = ""


class EventBuffer(Struct):
    """Emits events of a run. ``pending`` ones are written with the next, since each write waits for the disk.

    Append to ``pending`` right before another event only: what happens next may rest on emitted ones alone.
    """

    write: Emit
    pending: list[ev.Event] = []

    async def emit(self, *events: ev.Event) -> None:
        pending, self.pending = self.pending, []
        await self.write(*pending, *events)


class StepResults(Struct, kw_only=True):
    """Findings of steps for those that follow, by the kind of step; all is in the journal as well."""

    kept_layers: dict[Path, LayerRecord] = {}  # dependencies: those that were found kept, which stay until the run ends
    layers: tuple[Mount, ...] = ()  # dependencies: what their commands have made, now or in an earlier run
    context: bytes = b""  # preload: of the incident, for the agent's prompt
    agent_started: bool = False  # the agent may have begun: no other provider is tried any more
    agent_succeeded: bool = False
    scan: ScanResult | None = None
    offending: frozenset[bytes] = frozenset()  # scan and snapshot: paths that break policy
    snapshot: Snapshot | None = None
    saved_work: SavedWork | None = None


class RunContext(Struct, frozen=True, kw_only=True):
    """The context that the steps of one run share; each step gets one of its own, with ``step`` set.

    Steps of a run follow each other: ``workspace``, ``sandboxes`` and ``results`` belong to one task at a time.
    """

    id: str
    plan: RunPlan
    digest: str  # of the plan that this run is of
    paths: RunPaths
    deps: RunDependencies
    events: EventBuffer
    lease_holder: LeaseHolder
    sandboxes: SandboxSession
    workspace: RunWorkspace
    results: StepResults = field(default_factory=StepResults)
    rehearsal: str | None = None
    resume_source: ResumeSource | None = None
    attempt: PreviousAttempt | None = None
    secrets: Mapping[str, Secret] = {}
    unchecked: tuple[str, ...] = ()  # secrets whose values are not known here any more, to look for them
    current_step: CurrentStep | None = None

    async def emit(self, *events: ev.Event) -> None:
        await self.events.emit(*events)

    @property
    def workspace_id(self) -> str:
        return self.lease_holder.workspace

    @property
    def step(self) -> CurrentStep:
        assert self.current_step is not None  # the engine performs steps only
        return self.current_step

    async def retry(self, what: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of ``act``, repeated after a platform error that may pass: a few times, with growing pauses
        and an event of each failure. Repeating ``act`` must do no harm.

        Raises the last error, and at once one that does not pass or took long. The deadline is the caller's.
        """
        for pause in pauses(self.deps.chance):
            began = trio.current_time()
            try:
                return await act()
            except PlatformError as error:
                if not error.passes or trio.current_time() - began > SLOW:
                    raise
                await self.emit(
                    ev.RetryScheduled(
                        step=self.step.step, operation=what, code=error.code, reason=error.message, pause_seconds=pause
                    )
                )
            await trio.sleep(pause)
        return await act()

    async def repository(self) -> Path:
        """Return the run's private repository, created anew unless a clone into it is complete.

        A new one holds the work of the resumed run, or is empty.
        """
        if not self.workspace.has_repository:
            git, kept = self.deps.git, self.resume_source
            await trio.to_thread.run_sync(trees.remove, self.paths.repository)
            if kept is not None:
                await git.fetch(kept.repository, kept.commit, into=self.paths.repository, depth=None)
            else:
                await git.create_empty(self.paths.repository)
            self.workspace.has_repository = True
        return self.paths.repository

    def author(self) -> Author:
        return Author("runner", "runner@localhost", self.deps.now() // 1_000_000)

    async def open(self, mount_plan: MountPlan) -> Workspace:
        """Return the sandbox for ordinary steps: the open one if it has this mount plan, else a new one."""
        if (workspace := self.sandboxes.opened(mount_plan)) is not None:
            return workspace
        _, handle = self.workspace.require()
        probe = self.workspace.probe
        protects = probe is not None and probe.enforces(Feature.PROTECTED_PATHS)
        inputs = mount_plan.inputs if protects else ()  # copies anyway, so a provider that cannot is no danger to them
        if mount_plan.protected and not self.workspace.protected:
            look = partial(digests, handle.tree, mount_plan.protected, checkpoint=trio.from_thread.check_cancelled)
            self.workspace.protected = await trio.to_thread.run_sync(look)
            await self.emit(ev.ProtectedPathsHashed(self.workspace.protected))
        for shown, name in ((mount_plan.incident, "incident"), (mount_plan.cluster, "kube")):
            if shown:  # an incident may have no files, and a kubeconfig comes later
                (handle.private / name).mkdir(mode=0o755, exist_ok=True)
        mounts = mount_plan.mounts(handle.private)
        spec = replace(self.with_layers(mount_plan), mounts=mounts, protected=(*mount_plan.protected, *inputs))
        return await self.open_as(spec, mount_plan)

    def with_layers(self, mount_plan: MountPlan) -> SandboxSpec:
        """Return the sandbox spec of a mount plan, with the dependencies that commands have made."""
        return add_layers(mount_plan.sandbox_spec, self.results.layers)

    async def open_as(self, spec: SandboxSpec, mount_plan: MountPlan | None = None) -> Workspace:
        """Close what is open and start a sandbox on the run's workspace, for ordinary steps if with a mount plan."""
        await self.sandboxes.close()
        self.lease_holder.require()
        opening = partial(self.sandboxes.start, *self.workspace.require(), spec, mount_plan)
        return await self.retry("starting the sandbox", opening)

    def values(self, **run: object) -> dict[str, object]:
        return {**self.plan.values, "run": {"id": self.id, "name": self.plan.name, **run}}

    def fill(self, text: str) -> str:
        return template.render(text, self.values())

    def fill_all(self, texts: Mapping[str, str]) -> dict[str, str]:
        return {name: self.fill(text) for name, text in texts.items()}

    def variables(self, paths: Paths) -> dict[str, str]:
        """Return the standard variables of every command of a run."""
        task = self.plan.values.get("task")
        pairs = task.items() if isinstance(task, Mapping) else ()
        variables = {
            "RUNNER_RUN_ID": self.id,
            "RUNNER_RUN_NAME": self.plan.name,
            "RUNNER_WORKSPACE": paths.workspace,
            "RUNNER_OUTPUT": paths.output,
            **{f"RUNNER_TASK_{key.upper()}": str(value) for key, value in pairs},
        }
        if "incident" in self.plan.values:
            variables["RUNNER_INCIDENT"] = paths.incident
        mount_plan = self.sandboxes.mount_plan
        if mount_plan is not None and mount_plan.cluster:
            variables["KUBECONFIG"] = f"{paths.kube}/config"
        return variables


def read_input(wanted: ContextFile) -> bytes:
    """Read an input, as much of it as was planned: a log may have grown. Raises ``InputChanged``."""
    if wanted.text is not None:
        return wanted.text.encode()
    try:
        with wanted.path.open("rb") as file:
            content = file.read(wanted.size)
    except OSError as error:
        raise InputChanged(f"`{wanted.path}` can no longer be read: {error.strerror}") from error
    if sha256(content).hexdigest() != wanted.sha256:
        raise InputChanged(f"`{wanted.path}` has changed since it was planned", hint="plan again")
    return content


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that must not exist yet, through no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
