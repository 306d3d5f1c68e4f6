"""Agent types of a server: what the workspaces of each are like. A change is for those that are made from then on.

A file of the home holds each. The fields are those of the requirement; what a provider cannot keep is refused when a
workspace is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from runner.core.codec import decode, encode
from runner.core.errors import (
    AgentTypeChanged,
    AgentTypeExists,
    BadConfig,
    NoWorkspace,
    Rejected,
    RunnerError,
    SetupIncomplete,
    StoreDamaged,
    UnknownAgentType,
)
from runner.core.ids import BRANCH_HINT, IMAGE_HINT, is_branch, is_image, is_name
from runner.core.model import Handle, Limits
from runner.core.sanitize import excerpt
from runner.core.settings import Settings, limit, parse_cpus, parse_disk, parse_memory
from runner.events.events import WarningIssued
from runner.ops.host.state import make_home
from runner.ops.planning.facts import unknown_provider
from runner.ops.tools import ToolName, unknown_tools
from runner.ops.tools._sandbox import run_command
from runner.ops.workspaces.exec import protected_paths
from runner.ops.workspaces.workspace_lease import HeldWorkspace
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.provider import Provider, SandboxSpec
from runner.spec.checkout import RepoSource, TaskContext, judge_url, resolve_checkout

AGENT_TYPES = "agent-types"  # in the home
SETUP_SECONDS = 300.0  # for each setup command


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of the code: the task's repository, a fixed one, or none."""

    type: Literal["task_context", "fixed", "none"] = "task_context"
    url: Annotated[str, Meta(description="The repository, with `fixed`.")] | None = None
    branch: Annotated[str, Meta(description="With `task_context`, if the task has none.")] | None = None


class Resources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits such as `"2"`, `"4G"` and `"10G"`; a missing one takes the server's default."""

    cpu: str | float | None = None
    memory: str | int | None = None
    disk: str | int | None = None


class WorkspaceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workspaces of an agent type. Without `provider` the server's are tried in turn."""

    enabled: Annotated[bool, Meta(description="Gives agents of this type a workspace.")] = False
    provider: Annotated[str, Meta(description="Exactly this one, with no fallback.")] | None = None
    repo_source: Source = Source()
    checkout_on_start: Annotated[bool, Meta(description="`false` starts with an empty workspace.")] = True
    base_image: Annotated[str, Meta(description="The system that commands see.")] | None = None
    tools: tuple[ToolName, ...] | None = None
    resource_limits: Resources = Resources()
    setup_commands: Annotated[
        tuple[str, ...],
        Meta(max_length=100, description="Run after the checkout, in order, up to the first that fails."),
    ] = ()


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's repository, for `task_context`."""

    repository_url: str | None = None
    branch: str | None = None


class AgentType(Struct, frozen=True, kw_only=True):
    """An agent type as it is stored."""

    name: str
    workspace: WorkspaceConfig = WorkspaceConfig()

    @property
    def version(self) -> str:
        """Text that differs when the configuration does."""
        return sha256(encode(self.workspace)).hexdigest()[:16]


def create_agent_type(settings: Settings, name: str, workspace: WorkspaceConfig) -> AgentType:
    """Make an agent type. Raises ``Rejected`` for what is wrong with it, and ``AgentTypeExists``."""
    if not is_name(name):
        raise BadConfig(f"`{excerpt(name)}` cannot name an agent type", hint="use small letters, digits and `-`")
    check_config(workspace)
    make_home(settings)
    made = AgentType(name=name, workspace=workspace)
    path = settings.home / AGENT_TYPES / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.exists():
        raise AgentTypeExists(f"there is an agent type `{name}` already", hint="change its workspace-config")
    _write(path, made)
    return made


def list_agent_types(settings: Settings) -> list[AgentType]:
    """List every agent type, by name."""
    folder = settings.home / AGENT_TYPES
    return [_read(path) for path in sorted(folder.glob("*")) if is_name(path.name)]


def get_agent_type(settings: Settings, name: str) -> AgentType:
    """Return one agent type. Raises ``UnknownAgentType``."""
    try:
        if is_name(name):
            return _read(settings.home / AGENT_TYPES / name)
    except FileNotFoundError:
        pass
    raise UnknownAgentType(f"there is no agent type `{excerpt(name)}`")


def put_config(settings: Settings, name: str, workspace: WorkspaceConfig, *, version: str) -> AgentType:
    """Change the workspaces that are made from now on for an agent type, if it still is of that ``version``.

    Raises ``UnknownAgentType``, ``AgentTypeChanged``, and ``Rejected`` for what is wrong.
    """
    before = get_agent_type(settings, name)
    if before.version != version:
        raise AgentTypeChanged(f"agent type `{name}` has been changed since you read it", hint="read it again")
    check_config(workspace)
    after = replace(before, workspace=workspace)
    _write(settings.home / AGENT_TYPES / name, after)
    return after


def delete_agent_type(settings: Settings, name: str) -> None:
    """Remove an agent type; its workspaces stay. Raises ``UnknownAgentType``."""
    get_agent_type(settings, name)
    (settings.home / AGENT_TYPES / name).unlink()


def workspace_options(agent_type: AgentType, task: Task) -> WorkspaceOptions:
    """Return how to make a workspace of an agent type for a task. Raises ``NoWorkspace`` and ``BadConfig``."""
    config = agent_type.workspace
    if not config.enabled:
        message = f"agents of type `{agent_type.name}` have no workspace"
        raise NoWorkspace(message, hint="set `enabled` in its workspace-config")
    source = RepoSource(type=config.repo_source.type, url=config.repo_source.url, branch=config.repo_source.branch)
    checkout = None
    if config.checkout_on_start:
        context = TaskContext(repository_url=task.repository_url, branch=task.branch)
        checkout = resolve_checkout(source, context)
    return WorkspaceOptions(
        url=None if checkout is None else checkout.url,
        branch=None if checkout is None else checkout.branch,
        provider=config.provider,
        image=config.base_image,
        tools=config.tools,
        limits=_limits(config.resource_limits),
    )


async def set_up(commands: Sequence[str], held: HeldWorkspace, provider: Provider, handle: Handle) -> None:
    """Run setup commands in order, up to the first that fails or takes too long, which is a warning."""
    if not commands:
        return
    async with provider.open(handle, SandboxSpec(protected=await protected_paths(held.env, held.row))) as workspace:
        for position, command in enumerate(commands, start=1):
            done = await run_command(workspace, ["sh", "-c", command], SETUP_SECONDS)
            if done.exit_code != 0:
                how = f"timed out after {limit(SETUP_SECONDS)}" if done.timed_out else f"exited {done.exit_code}"
                rest = "; the rest were skipped" if position < len(commands) else ""
                advice = SetupIncomplete(f"setup command {position} of {len(commands)} {how}{rest}")
                await held.write(WarningIssued(advice.code, advice.message))
                held.env.advise(advice)
                return


def check_config(config: WorkspaceConfig) -> None:
    """Raise what is wrong with a configuration; ``Rejected`` when it is more than one thing."""
    found = list(_faults(config))
    if len(found) == 1:
        raise found[0]
    if found:
        raise Rejected(found)


def _faults(config: WorkspaceConfig) -> Iterator[RunnerError]:
    source = config.repo_source
    if bad := unknown_tools(config.tools or ()):
        yield bad
    if config.provider is not None and (unknown := unknown_provider(config.provider)):
        yield unknown
    if source.type == "fixed" and source.url is None:
        yield BadConfig("a source of type `fixed` needs `url`", hint="add `url`")
    if source.type != "fixed" and source.url is not None:
        yield BadConfig(f"a source of type `{source.type}` has no `url`", hint="remove it, or change `type`")
    if source.url is not None and (error := judge_url(source.url)):
        yield error
    if source.branch is not None and not is_branch(source.branch):
        yield BadConfig(f"`{excerpt(source.branch)}` cannot name a branch", hint=BRANCH_HINT)
    if config.base_image is not None and not is_image(config.base_image):
        yield BadConfig(f"`{excerpt(config.base_image)}` is not the name of an image", hint=f"write {IMAGE_HINT}")
    for name, parse in (("cpu", parse_cpus), ("memory", parse_memory), ("disk", parse_disk)):
        value = getattr(config.resource_limits, name)
        try:
            _ = None if value is None else parse(_text(value))
        except ValueError as error:
            yield BadConfig(f"`{excerpt(str(value))}` of `resource_limits.{name}` is not {error}")
    for position, command in enumerate(config.setup_commands, start=1):
        if not command.strip() or "\0" in command:
            yield BadConfig(f"setup command {position} is empty", hint="remove it")


def _limits(resources: Resources) -> Limits:
    return Limits(
        None if resources.cpu is None else parse_cpus(_text(resources.cpu)),
        None if resources.memory is None else parse_memory(_text(resources.memory)),
        None if resources.disk is None else parse_disk(_text(resources.disk)),
    )


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")


def _read(path: Path) -> AgentType:
    try:
        return decode(path.read_bytes(), AgentType)
    except ValueError as error:
        raise StoreDamaged(f"`{path}` is not an agent type", hint="remove the file, and make it again") from error


def _write(path: Path, value: AgentType) -> None:
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as out:
        out.write(encode(value))
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
