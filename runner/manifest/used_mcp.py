"""The servers of the Model Context Protocol that an agent may use, as its manifest has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from runner.core.hosts import LONGEST, RULE
from runner.core.ids import NAME
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.manifest.injection import SentSecret
from runner.manifest.kinds._fields import FORM, Fault, Faults, Shape, Word, no_repeats

MOST = 20  # servers of an agent, each of which has a sandbox
_WORD, _BLOCK = FORM + "name", FORM + "server"
_HERE = r"http://(?:127\.0\.0\.1|localhost)(?::[1-9][0-9]{0,4})?"  # as for model providers: TLS, but for this host
_URL = pattern(rf"(?:https://(?!\*){RULE.pattern}|{_HERE})(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?")


def _server_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("the name of a server such as `docs`")
    return text


def _url(text: str) -> str:
    if len(text) > 8 * LONGEST or not _URL.fullmatch(text):
        raise ValueError("a URL such as `https://mcp.example.org/mcp`, without user, query and fragment")
    return text


ServerName = Annotated[
    str, AfterValidator(_server_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})
]
ServerUrl = Annotated[
    str,
    AfterValidator(_url),
    WithJsonSchema({"type": "string", "pattern": f"^(?:{_URL.pattern})$", "maxLength": 8 * LONGEST}),
]
_REMOTE = ("inject", "private")
_NOT_INSIDE = ("url", *_REMOTE, "tools", "max_calls")
_NULL: JsonDict = {"type": "null"}


def _without(field: str) -> JsonDict:
    return {"anyOf": [{"not": {"required": [field]}}, {"properties": {field: _NULL}}]}


class UsedServer(Shape):
    """A server that the agent may use: a hosted one, with `url` a remote one, with `command` one in its workspace."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"if": _without("url"), "then": {"properties": {"inject": _NULL, "private": _NULL}}},
                {"if": {"not": _without("command")}, "then": {"properties": dict.fromkeys(_NOT_INSIDE, _NULL)}},
            ]
        }
    )

    name: ServerName = Field(
        description="Name of the `McpServer` document, which is started for the run in a sandbox of its own; with `url`"
        " or `command` any name."
    )
    command: Annotated[list[Word], Field(min_length=1)] | None = Field(
        None,
        description="Program and arguments of a server that is started in the agent's own workspace, as the agent is:"
        " with its user, its files, its `env` and its network, and none of its secrets.",
    )
    url: ServerUrl | None = Field(
        None, description="URL of a remote server, which speaks streamable HTTP. The agent never learns it."
    )
    inject: SentSecret | None = Field(None, description="Credential of a remote server, added outside the workspace.")
    private: bool | None = Field(
        None, description="Lets a remote server be reached at addresses that are not public; with `url`."
    )
    tools: Annotated[list[Word], AfterValidator(no_repeats), Field(json_schema_extra={"uniqueItems": True})] | None = (
        Field(
            None,
            description="The only tools that the agent sees and may call; its prompts and resources are then left out.",
        )
    )
    max_calls: int | None = Field(None, ge=1, le=1_000_000, description="Calls of the run; further ones are refused.")

    @model_validator(mode="after")
    def _fields_of_a_server_inside(self) -> UsedServer:
        held = "is not held in the agent's own workspace, where it may start the program by itself"
        said = {"tools": held, "max_calls": held}
        hint = "remove it, or write a `McpServer` document, which has a sandbox of its own"
        faults = [
            Fault((name,), f"`{name}` {said.get(name, 'is for a remote server')}", hint)
            for name in _NOT_INSIDE
            if self.command is not None and getattr(self, name) is not None
        ]
        if faults:
            raise Faults(*faults)
        return self

    @model_validator(mode="after")
    def _fields_of_a_remote_server(self) -> UsedServer:
        if self.url is not None or self.command is not None:
            return self
        faults = [
            Fault((name,), f"`{name}` is for a remote server", "write its `url`, or remove it")
            for name in _REMOTE
            if getattr(self, name) is not None
        ]
        if faults:
            raise Faults(*faults)
        return self

    @property
    def is_hosted(self) -> bool:
        """Tell whether a document says what it is."""
        return self.url is None and self.command is None

    @property
    def place(self) -> tuple[str, int]:
        """Return the host and the port of a remote server."""
        parts = urlsplit(self.url or "")
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _form(value: Any) -> str:
    return _BLOCK if isinstance(value, Mapping | Shape) else _WORD


def _distinct(servers: list[str | UsedServer]) -> list[str | UsedServer]:
    names = [one if isinstance(one, str) else one.name for one in servers]
    faults = [
        Fault((at,) if isinstance(servers[at], str) else (at, "name"), f"`{excerpt(name)}` is in this list already",
              "remove it")
        for at, name in enumerate(names)
        if name in names[:at]
    ]  # fmt: skip
    if faults:
        raise Faults(*faults)
    return servers


UsedServers = Annotated[
    list[Annotated[Annotated[ServerName, Tag(_WORD)] | Annotated[UsedServer, Tag(_BLOCK)], Discriminator(_form)]],
    Field(max_length=MOST, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_distinct),
]


def used_servers(servers: list[str | UsedServer]) -> list[UsedServer]:
    """Return servers as blocks."""
    return [UsedServer(name=one) if isinstance(one, str) else one for one in servers]
