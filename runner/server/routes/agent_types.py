"""Routes of agent types, and of the workspaces that theirs get. They take a token with ``admin``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from runner.core.errors import UnknownAgentType
from runner.core.sanitize import excerpt
from runner.ops.agent_types import AgentType, WorkspaceConfig, check_config
from runner.ops.pool.agent_type_pools import pool_of
from runner.server.route import BASE, Call, Reply, api


class NewAgentType(Struct, kw_only=True, forbid_unknown_fields=True):
    """An agent type to make; by default it has no workspace."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    workspace: WorkspaceConfig = WorkspaceConfig()


class AgentTypes(Struct):
    agent_types: list[AgentType]


class Version(Struct):
    """The version that is changed."""

    version: Annotated[str, Meta(min_length=1, description="The ETag that the configuration was read with.")] = field(
        name="if-match"
    )


async def _named(call: Call) -> AgentType:
    """Return the agent type of the path. Raises ``UnknownAgentType``, also when the token may not see it."""
    id = call.path["id"]
    if not call.token.admin:
        raise UnknownAgentType(f"there is no agent type `{excerpt(id)}`")
    return await call.server.agent_types.get(id)


async def _list(call: Call) -> AgentTypes:
    return AgentTypes(await call.server.agent_types.all() if call.token.admin else [])


async def _create(call: Call) -> Reply:
    call.require_change(None)
    check_config(call.body.workspace)
    await pool_of(call.server.env, call.body.workspace)
    made = await call.server.agent_types.create(call.body.name, call.body.workspace)
    await call.server.pools.refresh()
    return Reply(value=made, status=201, headers={"location": f"{BASE}/agent-types/{made.name}"})


async def _get(call: Call) -> AgentType:
    return await _named(call)


async def _delete(call: Call) -> None:
    named = await _named(call)
    call.require_change(None)
    await call.server.agent_types.delete(named.name)
    await call.server.pools.refresh()


async def _get_config(call: Call) -> Reply:
    named = await _named(call)
    return Reply(value=named.text, headers={"etag": f'"{named.version}"'})


async def _put_config(call: Call) -> Reply:
    named = await _named(call)
    call.require_change(None)
    version = call.headers["if-match"].strip('"')
    if version == named.version:  # else that is what is wrong
        check_config(call.body)
        await pool_of(call.server.env, call.body)
    changed = await call.server.agent_types.put_config(named.name, call.body, version=version)
    await call.server.pools.refresh()
    return Reply(value=changed.text, headers={"etag": f'"{changed.version}"'})


_CONFIG = "/agent-types/{id}/workspace-config"
ROUTES = (
    api("GET", "/agent-types", "List agent types", _list, answer=AgentTypes),
    api("POST", "/agent-types", "Make an agent type", _create, body=NewAgentType, answer=AgentType, status=201),
    api("GET", "/agent-types/{id}", "Show an agent type", _get, answer=AgentType),
    api("DELETE", "/agent-types/{id}", "Remove an agent type; its workspaces stay", _delete),
    api("GET", _CONFIG, "Show what workspaces an agent type gets", _get_config, answer=WorkspaceConfig),
    api(
        "PUT",
        _CONFIG,
        "Change what workspaces an agent type gets from now on; takes `If-Match`",
        _put_config,
        headers=Version,
        body=WorkspaceConfig,
        answer=WorkspaceConfig,
    ),
)
