"""Routes as data: the table that requests are dispatched by, and that the OpenAPI document is made from."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from msgspec import Struct
from msgspec.inspect import (
    DictType,
    EnumType,
    ListType,
    LiteralType,
    Metadata,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from runner.core.errors import BadRequest, OutOfScope, nearest
from runner.core.sanitize import excerpt
from runner.ops.agent_type_store import AgentTypes
from runner.ops.host.tokens import StoredToken
from runner.ops.mcp.hosting import Hosting
from runner.ops.pool.agent_type_pools import AgentTypePools
from runner.ops.sessions import Sessions
from runner.ops.workspaces.tools import KeptWorkspaces
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.server.metrics import Metrics
from runner.server.oidc import Issuer
from runner.server.provider_health import ProviderHealth
from runner.server.running import Running

if TYPE_CHECKING:
    from runner.server.page.oidc_login import OidcLogin
    from runner.server.webhooks import Webhooks

BASE = "/api/v1"
_REFUSED = re.compile(
    r"(?:Object contains unknown field `(?P<field>.*?)`|Invalid enum value '(?P<word>.*?)')(?: - at `\$(?P<path>.*)`)?",
    re.DOTALL,
)


class Server(Struct, eq=False, kw_only=True):
    """State of a running server. ``manifests`` are those of its runs; ``stopping`` is set when it takes no new work."""

    env: WorkspaceEnv
    kept: KeptWorkspaces
    running: Running
    sessions: Sessions
    pools: AgentTypePools
    health: ProviderHealth
    agent_types: AgentTypes
    manifests: Path | None
    metrics: Metrics
    hosts: frozenset[str]
    issuer: Issuer | None
    login: OidcLogin | None
    stopping: trio.Event
    webhooks: Webhooks
    hosting: Hosting | None = None


class Call(Struct, eq=False, kw_only=True):
    """A request that may be answered: who asks, and what. ``body`` and ``query`` are of the route's types."""

    server: Server
    token: StoredToken
    path: Mapping[str, str]
    query: Any = None
    body: Any = None
    headers: Mapping[str, str] = {}

    def require_change(self, project: str | None) -> None:
        """Raise ``OutOfScope`` unless the token may change a project, or what belongs to none."""
        if not self.token.may_change(project):
            wanted = "admin" if project is None else f"project:{project}"
            message = f"token `{self.token.name}` may not change this"
            raise OutOfScope(message, hint=f"use a token with the scope {wanted}")


class Reply(Struct, kw_only=True):
    """An answer with more than a value. Text and bytes are sent as they are."""

    value: object = None
    status: int = 200
    headers: Mapping[str, str] = {}
    media: str | None = None


class Route(Struct, frozen=True, kw_only=True):
    """One method of one path. ``answer`` is the type of what ``handle`` returns, ``None`` for no content.

    ``open`` routes need no token. ``media`` is what a route answers with that writes its response itself, ``forms``
    are further ones that a request may ask for. ``headers`` are those of a request. A body of up to ``raw_bytes`` is
    passed as it is.
    """

    method: str
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[Any]]
    answer: Any = None
    body: type[Struct] | None = None
    query: type[Struct] | None = None
    headers: type[Struct] | None = None
    status: int = 200
    open: bool = False
    media: str = "application/json"
    forms: tuple[str, ...] = ()
    raw_bytes: int = 0


def api(method: str, path: str, summary: str, handle: Callable[[Call], Awaitable[Any]], **more: Any) -> Route:
    """Return a route below ``BASE``; ``more`` are further fields of it."""
    return Route(method=method, path=f"{BASE}{path}", summary=summary, handle=handle, **more)


def read_body(raw: bytes, kind: type[Struct]) -> Struct:
    """Return the value that a body holds. Raises ``BadRequest``."""
    try:
        found = msgspec.json.decode(raw or b"{}", type=kind)
        json.loads(raw or b"{}", object_pairs_hook=_named_once)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body does not fit: {_lower(str(error))}", hint=_hint(str(error), kind)) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the body is not JSON", hint="send UTF-8") from error
    return found


def read_query(values: Mapping[str, str], kind: type[Struct], what: str = "query does") -> Struct:
    """Return the value that a query or headers hold. Raises ``BadRequest``."""
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the {what} not fit: {_lower(str(error))}", hint=_hint(str(error), kind)) from error


def _hint(message: str, kind: type[Struct]) -> str:
    """Return what would fit in the place of a field or a word that msgspec refuses; else where all is described."""
    choices: list[str] = []
    if found := _REFUSED.fullmatch(message):
        for one in _at(type_info(kind), re.findall(r"\w+", found["path"] or "")):
            if found["field"] is not None and isinstance(one, StructType):
                choices += [field.encode_name for field in one.fields]
            elif found["word"] is not None and isinstance(one, LiteralType):
                choices += map(str, one.values)
            elif found["word"] is not None and isinstance(one, EnumType):
                choices += [str(member.value) for member in one.cls]
        if choices:
            return nearest(found["field"] or found["word"] or "", choices)
    return f"see {BASE}/openapi.json"


def _at(kind: Type, path: Sequence[str]) -> Iterator[Type]:
    """Yield the types that a value may have at a place of a value of this type."""
    if isinstance(kind, Metadata):
        yield from _at(kind.type, path)
    elif isinstance(kind, UnionType):
        for one in kind.types:
            yield from _at(one, path)
    elif not path:
        yield kind
    elif isinstance(kind, StructType):
        for field in kind.fields:
            if field.encode_name == path[0]:
                yield from _at(field.type, path[1:])
    elif isinstance(kind, ListType | VarTupleType):
        yield from _at(kind.item_type, path[1:] if path[0].isdigit() else path)
    elif isinstance(kind, DictType):
        yield from _at(kind.value_type, path[1:])


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _named_once(pairs: list[tuple[str, object]]) -> None:
    """Refuse an object that names a field twice: of two readers each could take another one."""
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        twice = next(name for name in names if sum(name == other for other, _ in pairs) > 1)
        raise BadRequest(f"the body names `{excerpt(twice)}` twice", hint="leave one of them out")
