"""Agent types of a server: what the workspaces of each are like. A change is for those that are made from then on.

The fields are those of the requirement; what a provider cannot keep is refused when a workspace is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Literal

import trio
from msgspec import Meta, Struct, json

from runner.core.codec import encode
from runner.core.errors import (
    BadConfig,
    NoWorkspace,
    Rejected,
    RunnerError,
    SetupFailed,
    SetupIncomplete,
)
from runner.core.ids import BRANCH_HINT, IMAGE_HINT, is_branch, is_image
from runner.core.model import Handle, Limits
from runner.core.sanitize import excerpt
from runner.core.settings import limit, parse_cpus, parse_disk, parse_memory
from runner.events.events import WarningIssued
from runner.ops.planning.facts import unknown_provider
from runner.ops.tools import ToolName, unknown_tools
from runner.ops.tools._sandbox import Sandbox, run_command
from runner.ops.workspaces.exec import protected_paths
from runner.ops.workspaces.tools import outputs_of
from runner.ops.workspaces.workspace_lease import HeldWorkspace
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.provider import Provider, SandboxSpec
from runner.runtime.context import write_new
from runner.spec.checkout import RepoSource, TaskContext, judge_url, resolve_checkout

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


class Setup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup: the seconds of each command, and whether one that fails is a warning or ends the workspace."""

    timeout: Annotated[float, Meta(gt=0, le=86_400)] = SETUP_SECONDS
    on_failure: Literal["warn", "fail"] = "warn"


class WarmPool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sandboxes that run before a session needs them."""

    size: Annotated[int, Meta(ge=0, le=100)]


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
    setup: Setup = Setup()
    warm_pool: Annotated[WarmPool, Meta(description="Default: `WARM_POOL_SIZE`, without a `provider`.")] | None = None


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's repository, for `task_context`; the agent finds all of it in `/run/runner/task.json`."""

    repository_url: str | None = None
    branch: str | None = None
    base_branch: str | None = None
    pull_request_number: int | None = None


class AgentType(Struct, frozen=True, kw_only=True, dict=True):
    """An agent type by its name."""

    name: str
    workspace: WorkspaceConfig = WorkspaceConfig()

    @cached_property
    def text(self) -> bytes:
        """The configuration as it is sent."""
        return encode(self.workspace)

    @cached_property
    def version(self) -> str:
        """Text that differs when the configuration does."""
        return sha256(self.text).hexdigest()[:16]


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
        isolated=True,
        warm=True,
        url=None if checkout is None else checkout.url,
        branch=None if checkout is None else checkout.branch,
        provider=config.provider,
        image=config.base_image,
        tools=config.tools,
        limits=limits_in(config.resource_limits),
    )


async def set_up(config: WorkspaceConfig, task: Task, held: HeldWorkspace, provider: Provider, handle: Handle) -> None:
    """Tell the task, and run setup commands in order, up to the first that fails or takes too long.

    That is a warning, or ``SetupFailed``.
    """
    content = json.format(encode(task), indent=2)
    await trio.to_thread.run_sync(write_new, handle.private / "runner" / "task.json", content, 0o644)
    commands = config.setup_commands
    if not commands:
        return
    async with provider.open(handle, SandboxSpec(protected=await protected_paths(held.env, held.row))) as workspace:
        sandbox = Sandbox(workspace, outputs_of(held.env, held.row.id))
        for position, command in enumerate(commands, start=1):
            done = await run_command(sandbox, ["sh", "-c", command], config.setup.timeout)
            if done.exit_code != 0:
                how = f"timed out after {limit(config.setup.timeout)}" if done.timed_out else f"exited {done.exit_code}"
                rest = "; the rest were skipped" if position < len(commands) else ""
                message = f"setup command {position} of {len(commands)} {how}{rest}"
                if config.setup.on_failure == "fail":
                    raise SetupFailed(message, hint=f"repair `{excerpt(command)}`, or set `setup.on_failure` to `warn`")
                advice = SetupIncomplete(message)
                await held.write(WarningIssued(advice.code, advice.message))
                held.env.advise(advice)
                return


def check_config(config: WorkspaceConfig) -> None:
    """Raise what is wrong with a configuration; ``Rejected`` when it is more than one thing."""
    found = [error for _, error in config_faults(config)]
    if len(found) == 1:
        raise found[0]
    if found:
        raise Rejected(found)


def check_task(config: WorkspaceConfig, task: Task) -> None:
    """Raise ``BadUrl`` or ``BadConfig`` for a task whose repository cannot be the source of a workspace."""
    if not config.enabled or not config.checkout_on_start or config.repo_source.type != "task_context":
        return
    if task.repository_url is not None and (error := judge_url(task.repository_url)):
        raise error
    if task.branch is not None and not is_branch(task.branch):
        raise BadConfig(f"`{excerpt(task.branch)}` cannot name a branch", hint=BRANCH_HINT)


def config_faults(config: WorkspaceConfig) -> Iterator[tuple[tuple[str | int, ...], RunnerError]]:
    """Yield what is wrong with a configuration, each with the keys that lead to it."""
    source = config.repo_source
    if bad := unknown_tools(config.tools or ()):
        yield ("tools",), bad
    if config.provider is not None and (unknown := unknown_provider(config.provider)):
        yield ("provider",), unknown
    if source.type == "fixed" and source.url is None:
        yield ("repo_source",), BadConfig("a source of type `fixed` needs `url`", hint="add `url`")
    if source.type != "fixed" and source.url is not None:
        message = f"a source of type `{source.type}` has no `url`"
        yield ("repo_source", "url"), BadConfig(message, hint="remove it, or change `type`")
    if source.url is not None and (error := judge_url(source.url)):
        yield ("repo_source", "url"), error
    if source.branch is not None and not is_branch(source.branch):
        message = f"`{excerpt(source.branch)}` cannot name a branch"
        yield ("repo_source", "branch"), BadConfig(message, hint=BRANCH_HINT)
    if config.base_image is not None and not is_image(config.base_image):
        message = f"`{excerpt(config.base_image)}` is not the name of an image"
        yield ("base_image",), BadConfig(message, hint=f"write {IMAGE_HINT}")
    for name, parse in (("cpu", parse_cpus), ("memory", parse_memory), ("disk", parse_disk)):
        value = getattr(config.resource_limits, name)
        try:
            _ = None if value is None else parse(_text(value))
        except ValueError as error:
            message = f"`{excerpt(str(value))}` of `resource_limits.{name}` is not {error}"
            yield ("resource_limits", name), BadConfig(message)
    for position, command in enumerate(config.setup_commands, start=1):
        if not command.strip() or "\0" in command:
            message = f"setup command {position} is empty"
            yield ("setup_commands", position - 1), BadConfig(message, hint="remove it")


def limits_in(resources: Resources) -> Limits:
    return Limits(
        None if resources.cpu is None else parse_cpus(_text(resources.cpu)),
        None if resources.memory is None else parse_memory(_text(resources.memory)),
        None if resources.disk is None else parse_disk(_text(resources.disk)),
    )


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")
