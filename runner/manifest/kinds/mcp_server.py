"""A server of the Model Context Protocol, which `runner serve` hosts in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema

from runner.core import plugins
from runner.core.sanitize import excerpt
from runner.manifest.kinds._fields import (
    Body,
    Cpus,
    Disk,
    Duration,
    Environment,
    Fault,
    Faults,
    ImageName,
    Memory,
    Shape,
    Toolchain,
    VariableName,
    Word,
    listing,
    no_repeats,
    one_of,
)
from runner.manifest.network import StepNetwork
from runner.manifest.secret_source import SecretSource

KIND = "McpServer"


def _providers() -> Sequence[str]:
    return plugins.names("runner.providers")


def _all_providers() -> Sequence[str]:
    return plugins.known("runner.providers")


ProviderName = Annotated[str, one_of(_providers, _all_providers), Field(json_schema_extra=listing(_providers))]
Asked = Literal["refuse", "pass"]


class StdioBridge(Shape):
    """Rules of the bridge between the server's standard streams and its clients."""

    timeout: Duration = Field(60.0, description="Time limit of a call; the server is then told that it is cancelled.")
    sampling: Asked = Field(
        "refuse", description="`pass` lets the server ask a client's model, if one client alone has a call in progress."
    )
    elicitation: Asked = Field(
        "refuse", description="`pass` lets the server ask a client's user, if one client alone has a call in progress."
    )


def _true_or_block(value: Any, validate: ValidatorFunctionWrapHandler) -> StdioBridge:
    bridge: StdioBridge = StdioBridge() if value is True else validate(value)
    return bridge


class _TrueOrBlock:
    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"const": True}, handler(core)]}


class HostedSecret(Shape):
    """Secret value that the server gets; its log never shows it."""

    name: VariableName = Field(description="Its name: that of the variable, or of the file.")
    from_: SecretSource = Field(alias="from", description="Place of the value on the host of `runner serve`.")
    as_: Literal["env", "file"] = Field(
        "env",
        alias="as",
        description="`env`: a variable; `file`: a file in memory, whose path is in the variable `NAME_FILE`.",
    )


class ServerLimits(Shape):
    """Resource limits of the server and all that it starts; a missing one takes the default of workspaces."""

    cpu: Cpus | None = Field(None, description="Processors.")
    memory: Memory | None = Field(None, description="Memory, at least 16M.")
    disk: Disk | None = Field(None, description="Size of its files, from 8M to 2T.")
    pids: int | None = Field(None, ge=16, le=1 << 22, description="Processes and threads at a time.")


class Health(Shape):
    """Looks at whether the server answers; one that does not three times in turn is started anew."""

    interval: Duration = Field(description="Time between looks.")
    timeout: Duration = Field(description="Time that an answer may take.")


class Spec(Body):
    """A server of the Model Context Protocol, which `runner serve` hosts in a sandbox of its own."""

    command: list[Word] = Field(
        [], description="The program and its arguments; default: what the image starts, in the directory it names."
    )
    image: ImageName | None = Field(
        None,
        description="Image whose system and variables the server gets; without one, the system of the provider, as"
        " `local` has it.",
    )
    provider: ProviderName | None = Field(
        None, description="Provider of its sandbox; default: the first of the server's that fits, which isolates."
    )
    toolchains: list[Toolchain] = Field(
        description="Host directories that the server sees read-only, with programs in their `bin`. A name means a"
        " program on your own `PATH`, with everything that it links to."
    )
    stdio_bridge: Annotated[StdioBridge, WrapValidator(_true_or_block), _TrueOrBlock()] = Field(
        description="The bridge between the server's streams and its clients: `true`, or its rules."
    )
    env: Environment = Field(description="Environment variables of the server.")
    secrets: list[HostedSecret] = Field(description="Values that the server gets; nothing shows or keeps them.")
    network: StepNetwork = Field(
        description="Network that the server may reach, through a proxy outside its sandbox: `none`, hosts to `allow`,"
        " or every public one, which is `open`."
    )
    tools: Annotated[list[Word], AfterValidator(no_repeats), Field(json_schema_extra={"uniqueItems": True})] | None = (
        Field(None, description="The only tools that clients see and may call; default: all that were approved.")
    )
    restart: Literal["always", "on-failure", "never"] = Field(
        description="Starts the server anew when it has ended: `on-failure` not after exit code 0."
    )
    resource_limits: ServerLimits = Field(description="Resource limits of the server.")
    health: Health = Field(description="Looks at whether the server answers.")

    @model_validator(mode="after")
    def _something_to_start(self) -> Spec:
        if not self.command and self.image is None:
            raise Faults(Fault((), "a server has a `command`, an `image`, or both", "write one of them"))
        return self

    @model_validator(mode="after")
    def _each_variable_once(self) -> Spec:
        names = [f"{one.name}_FILE" if one.as_ == "file" else one.name for one in self.secrets]
        faults = [
            Fault(("secrets", at, "name"), f"`{excerpt(name)}` is in `env` or in this list already", "rename one")
            for at, name in enumerate(names)
            if name in self.env or name in names[:at]
        ]
        if faults:
            raise Faults(*faults)
        return self
