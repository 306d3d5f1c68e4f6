"""Place where a triage's agent works: in a container of an image, or on this host with its own programs."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

import runner.agents
from runner.core import plugins
from runner.core.npm_package import find_program
from runner.core.settings import Settings, parse_size
from runner.ops.planning.agent_programs import docker_answers, find_agent, is_open, shows_host
from runner.ops.triage.options import VARIABLES, find_kubeconfig
from runner.ops.triage.request import MEMORY, NOWHERE, SECONDS, TriageRequest
from runner.plan.model import RunPlan
from runner.ports.agent import ModelAgent
from runner.ports.provider import PATH, program_directory
from runner.steps.agent.plan import AgentBody


async def choose_place(triage: TriageRequest, settings: Settings) -> TriageRequest:
    """Choose docker where this user can reach it, else this host with the directories of the agent's program.

    A named provider or image stays. Raises ``UsageError`` when the program lacks its interpreter.
    """
    here = replace(triage, providers=("local",), image=None)
    if not triage.place_named and not await docker_answers(settings):
        found = find_agent(triage.agent, settings, cluster=False)
        triage = here if os.geteuid() or (found is not None and is_open(found)) else triage
    if not shows_host(triage.providers[0]) or triage.toolchains:
        return triage
    found = find_agent(triage.agent, settings, cluster=triage.kubeconfig is not None)
    return replace(triage, toolchains=found or ())


def program_of(triage: TriageRequest) -> Path | None:
    """Find the agent's program on this host; ``None`` when it is missing."""
    agent = plugins.load(runner.agents, triage.agent).agent
    assert isinstance(agent, ModelAgent)  # options._agent has checked
    return find_program([*map(program_directory, triage.toolchains), *PATH.split(":")], agent.program)


def flags_of(run: RunPlan | None, settings: Settings) -> tuple[str, ...]:
    """Return the flags that give a triage the provider, limits and cluster of a run."""
    agent = run.body(AgentBody) if run is not None else None
    if run is None or agent is None:
        return ()
    limits, cluster, usual = run.limits, agent.cluster, TriageRequest(directory=NOWHERE)
    kubeconfig = cluster.kubeconfig if cluster is not None else None
    found: tuple[str, ...] = ()
    if agent.model is not None and shows_host(run.providers[0]):
        found = find_agent(agent.agent, settings, cluster=cluster is not None) or ()
    words = [
        ("--provider", run.providers[0], usual.providers[0]),
        ("--image", run.base_image, usual.image),
        *(("--toolchain", folder, None) for folder in agent.mount_plan.toolchains if folder not in found),
        ("--memory", f"{(limits.memory_bytes or 0) >> 20}M", f"{parse_size(MEMORY) >> 20}M"),
        ("--cpus", f"{limits.cpus or 0:g}", f"{settings.default_cpus:g}"),
        ("--timeout", f"{run.deadline_seconds:g}", SECONDS),
        ("--kubeconfig", kubeconfig if kubeconfig != find_kubeconfig(None, settings) else None, None),
        ("--context", cluster.context if cluster is not None else None, None),
        ("--namespace", cluster.namespace if cluster is not None else None, None),
    ]
    named = any(settings.variables.get(name) for name in VARIABLES["kubeconfig"]) or find_kubeconfig(None, settings)
    without = ("--files-only",) if named and cluster is None else ()
    return (*without, *(word for flag, value, known in words if value not in (None, known) for word in (flag, value)))
