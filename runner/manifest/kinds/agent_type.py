"""An agent and the workspace that it works in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticKnownError

from runner.core import plugins
from runner.core.errors import nearest
from runner.manifest.kinds._fields import (
    FORM,
    IMAGE_SCHEMA,
    Body,
    Command,
    Cpus,
    Disk,
    Distinct,
    Duration,
    Environment,
    Fault,
    Faults,
    ImageName,
    Isolation,
    KeptPath,
    Memory,
    ModelName,
    RelativePath,
    RelativePaths,
    Shape,
    SkillNames,
    Text,
    Toolchain,
    ToolName,
    VariableName,
    image_name,
    listing,
    no_repeats,
    one_of,
)
from runner.manifest.network import Network
from runner.manifest.secret_source import SecretSource
from runner.manifest.used_mcp import UsedServers

KIND = "AgentType"

_NULL: JsonDict = {"type": "null"}
_WRITTEN: JsonDict = {"not": _NULL}


def _agents() -> Sequence[str]:
    return plugins.names("runner.agents")


def _steps_with_secrets() -> list[str]:
    kinds = plugins.names("runner.steps")
    return [kind for kind in kinds if plugins.fact("runner.steps", f"{kind}.plan", "TAKES_SECRETS", False)]


def _all_agents() -> Sequence[str]:
    return plugins.known("runner.agents")


AgentName = Annotated[str, one_of(_agents, _all_agents), Field(json_schema_extra=listing(_agents))]
SecretStep = Annotated[str, one_of(_steps_with_secrets), Field(json_schema_extra=listing(_steps_with_secrets))]

_OF_MODELS = ("model", "budget", "credentials", "cli_tools", "mcp_servers")  # what an agent may use, and how


def _tools_of(agent: str, names: Sequence[str]) -> JsonDict:
    """A rule of a JSON schema for the tools of one CLI; the model's validator says the same."""
    tools: JsonDict = {"anyOf": [_NULL, {"type": "array", "items": {"enum": [*names]}}]}
    condition: JsonDict = {"properties": {"agent": {"const": agent}}, "required": ["agent"]}
    return {"if": condition, "then": {"properties": {"cli_tools": tools}}}


def _of_type(name: str, then: JsonDict, otherwise: JsonDict) -> JsonDict:
    """A rule of a JSON schema for one type of source; the model's validator says the same."""
    condition: JsonDict = {"properties": {"type": {"const": name}}, "required": ["type"]}
    return {"if": condition, "then": then, "else": otherwise}


class ScriptFile(Shape):
    """A file that the script agent writes."""

    path: RelativePath = Field(description="Path of the file, relative to the workspace.")
    content: str = Field(description="Content of the file.")
    executable: bool = Field(False, description="Makes the file executable.")


class Script(Shape):
    """Shell script or list of files that the script agent plays."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["path"], "properties": {"path": _WRITTEN, "files": _NULL}},
                {"required": ["files"], "properties": {"files": _WRITTEN, "path": _NULL}},
            ]
        }
    )

    path: Text | None = Field(None, description="A shell script, relative to the manifest.")
    files: list[ScriptFile] | None = Field(None, description="Files to write, in order.")

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Script:
        if (self.path is None) == (self.files is None):
            raise Faults(Fault((), "a script has either `path` or `files`", "write exactly one of the two"))
        return self


class Prompt(Shape):
    """Prompts of the agent."""

    system: str = Field(description="Standing instructions, before the prompt; a template.")
    user: str = Field(description="The prompt; a template, in which `run.prompt` is the prompt of the run.")


class Timeouts(Shape):
    """Time limit of each step."""

    pull: Duration = Field(description="Time limit of pulling the image, which `provision` gets in addition.")
    provision: Duration = Field(description="Time limit of making the workspace.")
    clone: Duration = Field(description="Time limit of the clone.")
    dependencies: Duration = Field(description="All commands that install dependencies together.")
    setup: Duration = Field(description="All setup commands together.")
    preload: Duration = Field(description="Time limit of the preload.")
    agent: Duration = Field(description="Time limit of the agent.")
    post_hook: Duration = Field(description="All post-hooks together.")
    scan: Duration = Field(description="Time limit of the policy scan.")
    snapshot: Duration = Field(description="Time limit of the snapshot.")
    verify: Duration = Field(description="All checks together.")


def _not_both(one: str, other: str) -> JsonDict:
    return {"not": {"properties": {one: {"const": True}, other: {"const": True}}, "required": [one, other]}}


class RepoSource(Shape):
    """Source of the code in the workspace."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _of_type(
                    "fixed", {"required": ["url"], "properties": {"url": _WRITTEN}}, {"properties": {"url": _NULL}}
                ),
                _of_type(
                    "local",
                    {"required": ["path"], "properties": {"path": _WRITTEN}},
                    {"properties": {"path": _NULL, "include_dirty": False}},
                ),
                _of_type(
                    "none",
                    {"properties": {"branch": _NULL, "depth": _NULL, "submodules": False, "lfs": False}},
                    {},
                ),
                _not_both("include_dirty", "submodules"),
                _not_both("include_dirty", "lfs"),
            ]
        }
    )

    type: Literal["task_context", "fixed", "local", "none"] = Field(
        description="The task's repository, a fixed one, one on this machine, or an empty workspace."
    )
    url: Text | None = Field(None, description="The repository to clone, with `fixed`.")
    path: Text | None = Field(None, description="The repository's directory relative to the manifest, with `local`.")
    branch: Text | None = Field(None, description="The branch to check out; with `task_context`, if the task has none.")
    depth: int | None = Field(
        None,
        ge=1,
        le=(1 << 31) - 1,
        description="Number of commits of history; default: one for a URL, all for a directory.",
    )
    include_dirty: bool = Field(False, description="Copies uncommitted files too; with `local`.")
    submodules: bool = Field(False, description="Fetches submodules too; else they are empty directories.")
    lfs: bool = Field(False, description="Fetches the content of files in Git LFS too; else they are pointers.")

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> RepoSource:
        takes: dict[str, set[str]] = {
            "task_context": {"branch", "depth", "submodules", "lfs"},
            "fixed": {"url", "branch", "depth", "submodules", "lfs"},
            "local": {"path", "include_dirty", "branch", "depth", "submodules", "lfs"},
            "none": set(),
        }
        given = {name for name in self.model_fields_set - {"type"} if getattr(self, name) is not None}
        faults = [
            Fault((name,), f"a source of type `{self.type}` has no `{name}`", "remove it, or change `type`")
            for name in sorted(given - takes[self.type])
        ]
        needed = {"fixed": "url", "local": "path"}.get(self.type)
        if needed and needed not in given:
            faults.append(Fault((), f"a source of type `{self.type}` needs `{needed}`", f"add `{needed}`"))
        faults += [
            Fault((name,), f"`{name}` and `include_dirty` exclude each other", "commit, or remove one of them")
            for name in ("submodules", "lfs")
            if self.include_dirty and getattr(self, name)
        ]
        if faults:
            raise Faults(*faults)
        return self


class ResourceLimits(Shape):
    """Resource limits of the whole workspace; a missing one takes the server's default."""

    cpu: Cpus | None = Field(None, description="Processors.")
    memory: Memory | None = Field(None, description="Memory, at least 16M.")
    disk: Disk | None = Field(None, description="Size of the workspace on disk, from 8M to 2T.")
    pids: int = Field(ge=16, le=1 << 22, description="Processes and threads at a time.")
    enforcement: Literal["strict", "best_effort"] = Field(
        description="`strict`: a limit that the provider cannot enforce is an error; `best_effort`: it is a note."
    )


class Setup(Shape):
    """Time limit and failure rule of setup commands."""

    timeout: Duration = Field(description="Time limit of each command.")
    on_failure: Literal["fail", "warn"] = Field(
        description="`fail` ends the run at a failed command, `warn` goes on with a warning."
    )


class BaseImage(Shape):
    """Image whose system the commands see."""

    ref: ImageName = Field(description="Name or id of the image.")
    pull: Literal["missing", "always", "never"] = Field(
        "missing",
        description="Asks the registry when the provider does not have the image, each time that a plan is made, or"
        " never. A plan pins the digest and downloads nothing; the run that needs the image pulls it.",
    )


def _name_or_block(value: Any, validate: ValidatorFunctionWrapHandler) -> BaseImage:
    """Read the name of an image as a block; an error in it has the field's own place."""
    if isinstance(value, str):
        return BaseImage(ref=image_name(value))
    if not isinstance(value, dict):
        raise PydanticKnownError("string_type")
    block: BaseImage = validate(value)
    return block


class _NameOrBlock:
    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", **IMAGE_SCHEMA}, handler(core)]}


class DependencyCommand(Shape):
    """A command that installs dependencies, which are kept for the next runs.

    It runs before setup, in a workspace that has nothing but the files it is made from.
    """

    run: Command = Field(description="The command, with the network of `dependencies`; it gets no secret.")
    from_: Annotated[RelativePaths, Field(min_length=1)] = Field(
        alias="from", description="Files of the repository that it reads, such as a lock file; it sees no others."
    )
    keep: Annotated[list[KeptPath], AfterValidator(no_repeats)] = Field(
        min_length=1,
        json_schema_extra={"uniqueItems": True},
        description="Directories that it fills, which git ignores, or below `~/`. Runs that would make the same again"
        " get them as they are; writes to them are thrown away.",
    )


_PATH, _COMMAND = FORM + "path", FORM + "command"
Dependency = Annotated[
    Annotated[RelativePath, Tag(_PATH)] | Annotated[DependencyCommand, Tag(_COMMAND)],
    Discriminator(lambda value: _COMMAND if isinstance(value, Mapping | Shape) else _PATH),
]


def _distinct_places(dependencies: list[str | DependencyCommand]) -> list[str | DependencyCommand]:
    """Refuse directories that are the same as another, or lie in it."""
    known: list[str] = []
    faults: list[Fault] = []
    for position, one in enumerate(dependencies):
        for index, path in enumerate([one] if isinstance(one, str) else one.keep):
            keys = (position,) if isinstance(one, str) else (position, "keep", index)
            name = path.rstrip("/")
            if any(f"{name}/".startswith(f"{other}/") or f"{other}/".startswith(f"{name}/") for other in known):
                faults.append(Fault(keys, f"`{path}` is in this list already, or overlaps with what is", "remove it"))
            known.append(name)
    if faults:
        raise Faults(*faults)
    return dependencies


class WarmPool(Shape):
    """Workspaces that run before a run needs them."""

    size: int = Field(ge=0, le=1_000, description="Number of warm workspaces that `runner pool warm` keeps.")


class Workspace(Shape):
    """The isolated place that the agent works in."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"enabled": {"const": True}}, "required": ["enabled"]},
            "else": {"propertyNames": {"const": "enabled"}},
            "not": {"required": ["provider", "providers"]},
        }
    )

    enabled: bool = Field(description="Gives the agent a workspace; with `false` no other field here is allowed.")
    providers: Distinct = Field(description="The providers to try in turn; one means no fallback.")
    isolation: Isolation = Field(description="The least isolation that is accepted.")
    network: Network = Field(
        description="Network that commands may reach, through a proxy outside the workspace: `none`, hosts to `allow`,"
        " or every public one, which is `open`; for setup, the agent and post-hooks, or for each step its own."
    )
    repo_source: RepoSource = Field(description="Source of the code.")
    checkout_on_start: bool = Field(description="Clones the code; `false` starts with an empty workspace.")
    base_image: Annotated[BaseImage, WrapValidator(_name_or_block), _NameOrBlock()] | None = Field(
        None, description="Image whose system the commands see: its name or id, or a block that says when it is pulled."
    )
    resource_limits: ResourceLimits = Field(description="Resource limits of the workspace.")
    setup_commands: list[Command] = Field(description="Commands that prepare the workspace, in order.")
    setup: Setup = Field(description="Time limit and failure rule of setup commands.")
    protected_paths: list[Text] = Field(description="Paths of the repository that the agent cannot change or create.")
    toolchains: list[Toolchain] = Field(
        description="Host directories that the workspace sees read-only, with programs in their `bin`. A name means a"
        " program on your own `PATH`, with everything that it links to."
    )
    dependencies: Annotated[list[Dependency], AfterValidator(_distinct_places)] = Field(
        json_schema_extra={"uniqueItems": True},
        description="Git-ignored directories of the repository on this host, such as `.venv` or `node_modules`, or"
        " commands that install them. Each workspace and clean checkout sees them at the same path; writes to them are"
        " thrown away.",
    )
    warm_pool: WarmPool | None = Field(
        None, description="Workspaces that are kept running; default: the server's, for its own providers."
    )


class GivenSecret(Shape):
    """Secret value that commands of some steps get; it is redacted everywhere."""

    name: VariableName = Field(description="Its name: that of the variable, or of the file.")
    from_: SecretSource = Field(alias="from", description="Place of the value on the host that runs `apply`.")
    steps: Annotated[list[SecretStep], AfterValidator(no_repeats)] = Field(
        min_length=1, description="The steps whose commands get it.", json_schema_extra={"uniqueItems": True}
    )
    as_: Literal["env", "file"] = Field(
        "env",
        alias="as",
        description="`env`: a variable; `file`: a file in memory, whose path is in the variable `NAME_FILE`.",
    )


def _distinct_names(secrets: list[GivenSecret]) -> list[GivenSecret]:
    names = [secret.name for secret in secrets]
    repeated = [position for position, name in enumerate(names) if name in names[:position]]
    if repeated:
        raise Faults(*(Fault((i, "name"), f"`{names[i]}` is in this list already", "remove it") for i in repeated))
    return secrets


class Budget(Shape):
    """Budget of an agent's model use; the gateway refuses the request that would exceed it."""

    tokens: int | None = Field(None, ge=1, description="Tokens in and out, all requests together.")
    cost_usd: float | None = Field(
        None, ge=0.01, le=1e6, description="Cost in US dollars, by the prices that this installation ships."
    )
    turns: int | None = Field(None, ge=1, description="Answers of the model.")


def _tools(agent: str) -> tuple[str, ...]:
    return getattr(plugins.load("runner.agents", agent).agent, "tools", ())


def _say_what_each_agent_has(schema: JsonDict) -> None:
    """Add the rules of a JSON schema on fields that only some built-in agents have; validators say the same."""
    told = {agent: tools for agent in _agents() if (tools := _tools(agent))}
    no_model: JsonDict = {
        "script": _WRITTEN,
        "credentials": False,
        "mcp_servers": False,
        **dict.fromkeys(("model", "budget", "cli_tools"), _NULL),
    }
    schema |= {
        "if": {"properties": {"agent": {"const": "script"}}, "required": ["agent"]},
        "then": {"required": ["script"], "properties": no_model},
        "else": {
            "properties": {"script": _NULL},
            "allOf": [
                *(_tools_of(agent, names) for agent, names in told.items()),
                {
                    "if": {"not": {"properties": {"agent": {"enum": [*told]}}}},
                    "then": {"properties": {"cli_tools": _NULL}},
                },
            ],
        },
    }


class Spec(Body):
    """An agent and the workspace that it works in."""

    model_config = ConfigDict(json_schema_extra=_say_what_each_agent_has)

    singular: ClassVar[Mapping[tuple[str, ...], str]] = {("workspace", "provider"): "providers"}

    agent: AgentName = Field(description="Agent CLI, or `script`.")
    script: Script | None = Field(None, description="Script of the `script` agent.")
    model: ModelName | None = Field(None, description="The model that it works with, by a name that its service knows.")
    budget: Budget | None = Field(None, description="Budget of its model use.")
    credentials: Literal["gateway", "env"] = Field(
        description="`gateway` keeps the model's key out of the workspace, `env` puts it into the agent's environment."
    )
    cli_tools: list[ToolName] | None = Field(
        None,
        description="Built-in tools that the CLI may use, by the CLI's own names; with `claude` and `gemini`.",
    )
    prompt: Prompt = Field(description="Prompts of the agent.")
    skills: SkillNames = Field(
        description="Skills of this installation that the agent is shown, below `/skills` and where its CLI looks."
    )
    mcp_servers: UsedServers = Field(
        description="MCP servers that the agent may use, each by the name of its `McpServer`, or a block. It reaches"
        " them through the runner, which judges and records each call."
    )
    policy: str | None = Field(None, description="A policy by name; it adds to that of the run.")
    env: Environment = Field(description="Environment variables of the agent and its hooks; values are templates.")
    secrets: Annotated[list[GivenSecret], AfterValidator(_distinct_names)] = Field(
        description="Values that only commands of the named steps get; nothing shows or keeps them."
    )
    timeouts: Timeouts = Field(description="Time limit of each step.")
    stop_budget: Duration = Field(description="Time limit for saving and cleaning up after the work has ended.")
    post_hooks: list[Command] = Field(description="Commands after the agent, before those of the run.")
    workspace: Workspace = Field(description="The isolated place that the agent works in.")

    @classmethod
    def faults_as_written(cls, spec: Mapping[str, Any]) -> Iterator[Fault]:
        if spec.get("agent") == "script":
            for name in _OF_MODELS:
                if spec.get(name) is not None:
                    yield Fault((name,), f"the `script` agent uses no model, so `{name}` has no meaning", "remove it")
        workspace = spec.get("workspace")
        if isinstance(workspace, dict) and workspace.get("enabled", False) is False:
            hint = "write `enabled: true`, or remove the field"
            for name in workspace.keys() & Workspace.model_fields.keys() - {"enabled"}:
                yield Fault(("workspace", name), f"`{name}` has no meaning while the workspace is not enabled", hint)

    @model_validator(mode="after")
    def _a_script_for_the_script_agent_only(self) -> Spec:
        if (self.agent == "script") == (self.script is not None):
            return self
        if self.script is None:
            raise Faults(Fault(("script",), "`script` is missing", "add what the agent plays"))
        raise Faults(Fault(("script",), f"`{self.agent}` plays no script", "remove it, or write `agent: script`"))

    @model_validator(mode="after")
    def _tools_of_a_cli_that_can_be_told(self) -> Spec:
        if self.cli_tools is None or self.agent == "script":
            return self
        known = _tools(self.agent)
        if not known:
            raise Faults(Fault(("cli_tools",), f"`{self.agent}` cannot be told which tools it has", "remove it"))
        faults = [
            Fault(("cli_tools", position), f"`{tool}` is not a tool of `{self.agent}`", nearest(tool, known))
            for position, tool in enumerate(self.cli_tools)
            if tool not in known
        ]
        if faults:
            raise Faults(*faults)
        return self
