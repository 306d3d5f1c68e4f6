"""Everything that keeps ``apply`` from starting on this host, all at once.

Nothing is started to find out: of a secret that a command prints only the command is looked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple

import runner.agents
from runner.cluster.clusters import Clusters
from runner.core import plugins
from runner.core.errors import CliMissing, Rejected, RunnerError, distinct
from runner.core.hosts import NetworkSpec
from runner.core.npm_package import find_program, installable
from runner.core.redact import Redactor
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.gateway.gateway import ModelGateway, usable_key
from runner.network.host_proxy import check_proxies
from runner.ops.planning.clusters import check_clusters
from runner.ops.planning.facts import cli_label, first_available, open_provider
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.models import check_models
from runner.ops.runs.secret_values import check_secrets
from runner.plan.model import RunPlan, network_of
from runner.ports.agent import Agent, ModelAgent
from runner.ports.gateway import Gateway
from runner.ports.mcp import Approve, McpCall, McpGrant, McpSession
from runner.ports.network import Credential, EgressConnection, EgressSession
from runner.ports.provider import PATH, Images, Reader, Writer, program_directory
from runner.runtime.agent_dependencies import AgentDependencies
from runner.spec.model import Facts
from runner.steps.agent.plan import AgentBody


def outside_of(settings: Settings, gateway: Gateway | None = None, redact: Redactor | None = None) -> AgentDependencies:
    """Build the adapters for agents, models and clusters, with another ``gateway`` if given."""

    def agent(name: str) -> Agent:
        found: Agent = plugins.load(runner.agents, name).agent
        return found

    return AgentDependencies(
        agent=agent,
        gateway=gateway or ModelGateway(settings),
        cluster=Clusters(settings, redact),
        open_egress=partial(_open_egress, settings.reach),
        mcp=_Mcp(settings.reach),
        model_key=lambda api: usable_key(settings.model_keys[api.value]),
        model_url=lambda api: settings.own_model_url(api.value),
    )


def _open_egress(
    reach: Mapping[str, str],
    allowed: NetworkSpec,
    tell: Callable[[EgressConnection], None],
    credentials: Sequence[Credential] = (),
) -> AbstractAsyncContextManager[EgressSession]:
    from runner.network.proxy import open_egress  # with all that HTTP takes, which most runs do without

    return open_egress(allowed, tell, credentials, reach=reach)


class _Mcp:
    """Opens bridges to MCP servers, with all that HTTP takes, which most runs do without."""

    def __init__(self, reach: Mapping[str, str]) -> None:
        self._reach = reach

    def bridge(
        self, grant: McpGrant, approve: Approve, tell: Callable[[str], None], on_call: Callable[[McpCall], None]
    ) -> AbstractAsyncContextManager[McpSession]:
        from runner.mcp.endpoint import open_bridge

        return open_bridge(grant, approve, tell, on_call)

    def reach(
        self,
        url: str,
        allowed: NetworkSpec,
        credential: Credential | None,
        tell: Callable[[EgressConnection], None],
    ) -> AbstractAsyncContextManager[tuple[Writer, Reader]]:
        from runner.mcp.remote import reach

        return reach(url, allowed, credential, tell, environment=self._reach)


async def refuse(
    planned: PlanResult,
    plans: Sequence[RunPlan],
    settings: Settings,
    outside: AgentDependencies,
    *,
    reused: Collection[str] = (),
) -> None:
    """Raise ``Rejected`` with everything that keeps these runs of a plan from starting here."""
    if found := await refusals(planned, plans, settings, outside, reused=reused):
        raise Rejected(found)


async def refusals(
    planned: PlanResult,
    plans: Sequence[RunPlan],
    settings: Settings,
    outside: AgentDependencies,
    *,
    reused: Collection[str] = (),
) -> list[RunnerError]:
    """List everything that keeps these runs of a plan from starting here; steps that are ``reused`` need nothing."""
    found: list[RunnerError] = [*planned.missing]

    async def models() -> None:
        check_models(plans, outside, reused=reused)

    async def programs() -> None:
        await _check_programs(planned, plans, settings, reused)

    async def secrets() -> None:
        check_secrets(planned.secrets, plans, settings, done=reused)

    async def clusters() -> None:
        await check_clusters(plans, outside, reused=reused)

    async def networks() -> None:
        if any(network_of(step) for plan in plans for step in plan.steps if step.id not in reused):
            check_proxies(settings.reach)

    for look in (programs, models, secrets, clusters, networks):
        found += await _found(look)
    return distinct(found)


async def _found(look: Callable[[], Awaitable[None]]) -> Sequence[RunnerError]:
    try:
        await look()
    except Rejected as rejected:
        return rejected.findings
    except RunnerError as error:
        return [error]
    return []


class _Sought(NamedTuple):
    """An agent's CLI and the place to look for it; ``called`` is the name of the image."""

    agent: str
    toolchains: tuple[str, ...]
    provider: str
    image: str | None
    called: str


async def _check_programs(
    planned: PlanResult, plans: Iterable[RunPlan], settings: Settings, reused: Collection[str]
) -> None:
    """Raise ``Rejected`` when an agent's CLI is known to be missing where it will run."""
    sought = dict.fromkeys(one for plan in plans for one in _sought(plan, planned.facts, reused))
    if found := [lack for one in sought for lack in await _lacks(one, settings)]:
        raise Rejected(found)


def _sought(plan: RunPlan, facts: Facts, reused: Collection[str]) -> Iterator[_Sought]:
    provider = first_available(plan.providers, facts)
    for step in plan.steps:
        body = step.body
        if provider is None or step.id in reused or not isinstance(body, AgentBody) or body.model is None:
            continue
        if "PATH" not in body.env:  # or nobody can tell
            yield _Sought(
                agent=body.agent,
                toolchains=body.mount_plan.toolchains,
                provider=provider,
                image=plan.image,
                called=plan.base_image or "",
            )


async def _lacks(one: _Sought, settings: Settings) -> list[CliMissing]:
    """Return the error of a missing CLI; nothing when it exists, or is unknown, as in an image that others built."""
    agent = plugins.load(runner.agents, one.agent).agent
    assert isinstance(agent, ModelAgent)  # as every one whose manifests may name a model
    folders = [*map(program_directory, one.toolchains)]
    if find_program(folders, agent.program) is not None:
        return []
    package = installable(agent.package)
    provider = open_provider(one.provider, settings)
    if isinstance(provider, Images):
        labels = await provider.labels(one.image) if one.image is not None else {}
        if cli_label(agent.program) in labels or not any(label.startswith(cli_label("")) for label in labels):
            return []
        message = f"`{agent.program}` is not in image `{excerpt(one.called)}`"
        return [CliMissing(message, hint=f"build one with {package}: runner image build")]
    if find_program(PATH.split(":"), agent.program) is not None:
        return []
    where = ", ".join(f"`{folder}`" for folder in (*folders, *PATH.split(":")))
    hint = f"install it with `npm install --prefix DIR -g {package}`, and name DIR in `workspace.toolchains`"
    return [CliMissing(f"`{agent.program}` is not on this host; looked in {where}", hint=hint)]
