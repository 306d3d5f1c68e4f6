"""Run the agent's CLI on the prompt, as its sub-runner says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.core.model import Feature
from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import CliVersion, ClusterSpec, Facts, ModelSpec, RunSpec

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


BODY = AgentBody


def inputs(body: AgentBody) -> dict[str, object]:
    prompt = {"system": body.system, "user": body.user, "run": body.prompt}
    seen = {"cluster": pinned(body.cluster), "mounts": body.mount_plan, "hosts": body.network.pinned()}
    return {"agent": body.agent, "model": body.model, "prompt": prompt, "env": body.env, **seen}


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
        ),
        network=_network(spec),
        mounts=planned_mounts(mount_plan, spec),
    )


def pinned(cluster: ClusterSpec | None) -> dict[str, str] | None:
    """Return the fields of a cluster that decide what its readers see; no path of this host."""
    if cluster is None:
        return None
    return {"context": cluster.context, "server": cluster.server, "namespace": cluster.namespace}


def _network(spec: RunSpec) -> str:
    ways = ["model gateway"] if spec.model is not None and not spec.model.key_inside else []
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
