"""The adapters that exist before a run does, apart from a run's context: what only plans needs no more than these."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from runner.ports.agent import Agent
from runner.ports.cluster import ClusterGateway
from runner.ports.gateway import Api, Gateway
from runner.ports.mcp import OpenMcp
from runner.ports.network import OpenEgress


class AgentDependencies(Struct, frozen=True, kw_only=True):
    """The adapters for agents, their models and clusters, which exist before a run does."""

    agent: Callable[[str], Agent]
    gateway: Gateway
    cluster: ClusterGateway
    open_egress: OpenEgress
    mcp: OpenMcp
    model_key: Callable[[Api], str]  # for an agent that is to have it; raises ``KeyMissing``
    model_url: Callable[[Api], str | None]  # where it goes with it, ``None`` for the provider; raises ``UsageError``
