"""Run the agent's CLI on the prompt, as its sub-runner says."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from runner.core.codec import digest
from runner.core.hosts import NetworkSpec
from runner.core.model import Feature
from runner.core.sanitize import excerpt
from runner.plan.model import PlannedServer, Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import CliVersion, ClusterSpec, Facts, McpServer, ModelSpec, RunSpec

NEEDS = (("preload", "setup", "clone", "provision"),)
TAKES_SECRETS = True


class AgentBody(Struct, frozen=True, kw_only=True):
    """Templates are filled when the step starts. ``must`` is compared with what is read back from inside.

    ``incident`` is the directory for the prompt and the log, ``member`` as in ``RunSpec``. ``cli`` describes the
    agent's program, if it was found.
    """

    agent: str
    system: str
    user: str
    prompt: str
    env: Mapping[str, str]
    must: tuple[Feature, ...]
    mount_plan: MountPlan
    model: ModelSpec | None = None
    incident: Path | None = None
    cluster: ClusterSpec | None = None
    member: str = ""
    cli: CliVersion | None = None
    network: NetworkSpec = NetworkSpec()
    mcp_servers: tuple[McpServer, ...] = ()


BODY = AgentBody


def inputs(body: AgentBody) -> dict[str, object]:
    prompt = {"system": body.system, "user": body.user, "run": body.prompt}
    seen = {
        "cluster": pinned(body.cluster),
        "mounts": body.mount_plan,
        "hosts": body.network.pinned(),
    }
    servers = {"mcp_servers": [one.pinned() for one in body.mcp_servers]} if body.mcp_servers else {}
    return {"agent": body.agent, "model": body.model, "prompt": prompt, "env": body.env, **seen, **servers}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    must = tuple(d.feature for d in spec.demands if d.written and not spec.best_effort)
    mount_plan = mount_plan_of(spec, facts)
    return Step(
        id="agent",
        kind="agent",
        fills_disk=True,
        what=_what(spec),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["agent"],
        origin=spec.origins["agent"],
        repeated_on_fallback=True,
        body=AgentBody(
            agent=spec.agent,
            system=spec.system,
            user=spec.user,
            prompt=spec.prompt,
            env=spec.env,
            must=must,
            mount_plan=mount_plan,
            model=spec.model,
            incident=spec.incident,
            cluster=spec.cluster,
            member=spec.member,
            cli=facts.of(spec.name).cli,
            network=spec.networks["agent"],
            mcp_servers=spec.mcp_servers,
        ),
        network=_network(spec),
        mcp_servers=tuple(map(planned_server, spec.mcp_servers)),
        mounts=planned_mounts(mount_plan, spec),
    )


def pinned(cluster: ClusterSpec | None) -> dict[str, str] | None:
    """Return the fields of a cluster that decide what its readers see; no path of this host."""
    if cluster is None:
        return None
    return {"context": cluster.context, "server": cluster.server, "namespace": cluster.namespace}


def _network(spec: RunSpec) -> str:
    ways = ["model gateway"] if spec.model is not None and not spec.model.key_inside else []
    ways += [f"mcp {' '.join(one.name for one in spec.mcp_servers)}"] if spec.mcp_servers else []
    ways += ["cluster, read only"] if spec.cluster is not None else []
    ways += [str(spec.networks["agent"])] if spec.networks["agent"] else []
    return " and ".join(ways) or "none"


def _what(spec: RunSpec) -> str:
    model = spec.model
    if model is None:
        return f"{spec.agent}: {spec.script.name}"
    budget = {
        "{:,} tokens": model.budget.tokens,
        "${:,.2f}": model.budget.cost_usd,
        "{:,} turns": model.budget.turns,
    }
    words = [form.format(value) for form, value in budget.items() if value is not None]
    parts = [f"{spec.agent} {model.name}", *([f"at most {', '.join(words)}"] if words else [])]
    parts += [f"tools {', '.join(model.tools) or 'none'}"] if model.tools is not None else []
    parts += ["HAS THE KEY of its model"] if model.key_inside else []
    return "; ".join(parts)


_LONGEST = 80  # characters of a command that are shown


def planned_server(server: McpServer) -> PlannedServer:
    """Return a server as the plan shows it."""
    parts, hosted = [_allowed(server)], server.hosted
    lines = [(str(rule), rule.origin) for rule in server.network.rules] if hosted is not None else []
    lines += [("every public host", server.network.origin)] if server.network.open else []
    reached = [(f"{server.name} reaches {host}{' (private too)' * _private(server, host)}", at) for host, at in lines]
    given = hosted.secrets if hosted is not None else ()
    reached += [(f"{server.name} has secret {one.name.partition('.')[2]}", one.origin) for one in given]
    reached += [(f"adds {one}, outside", one.origin) for one in server.injected]
    command = hosted.command if hosted is not None else server.inside
    started = excerpt(shlex.join(command), _LONGEST) + f", {digest(command)[:19]}.."
    if hosted is not None:
        parts.insert(0, " ".join(filter(None, [hosted.provider, _image(hosted.base_image, hosted.image)])))
        started = started if command else "what its image starts"
        reached.insert(0, (f"{server.name} runs {started}", hosted.manifest))
    elif server.inside:
        parts.insert(0, "INSIDE the agent's workspace")
        reached.insert(0, (f"{server.name} runs {started}", server.origin))
    elif server.remote is not None:
        parts.insert(0, f"at {server.remote.url}")
    return PlannedServer(
        name=server.name,
        what=f"mcp {server.name}: {', '.join(filter(None, parts))}",
        origin=server.origin,
        tools=server.tools,
        max_calls=server.max_calls,
        hosted=hosted is not None,
        command=digest(command) if server.remote is None else "",
        image=hosted.image if hosted is not None else None,
        limits=hosted.limits if hosted is not None and hosted.provider else None,  # known with its place
        limits_origin=hosted.limits_origin if hosted is not None else "",
        ends_whole=hosted is not None and hosted.ends_whole,
        lines=tuple(reached),
        secret_names=tuple(server.secret_names),
    )


def _private(server: McpServer, host: str) -> bool:
    return any(rule.private for rule in server.network.rules if str(rule) == host)


def _allowed(server: McpServer) -> str:
    calls = "" if server.max_calls is None else f", at most {server.max_calls:,} calls"
    return ("all tools" if server.tools is None else f"tools {', '.join(server.tools) or 'none'}") + calls


def _image(name: str | None, pinned: str | None) -> str:
    if name is None:
        return ""
    _, at, found = (pinned or "").partition("@")
    return f"image {name.partition('@')[0]}{at}{found}" if at else f"image {name}{f' at {pinned}' if pinned else ''}"
