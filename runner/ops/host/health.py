"""Health of this host: providers, git, settings, and keys of models, which are never shown."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import packages_distributions

from runner import DISTRIBUTION
from runner.core.settings import Settings
from runner.git import open_git
from runner.ops.host import image
from runner.ops.host.keys import AgentKey, agent_keys
from runner.ops.planning.agent_programs import has_cli
from runner.ops.planning.facts import open_provider, provider_names
from runner.ports.provider import Probe
from runner.sandbox import bwrap


@dataclass(frozen=True)
class Health:
    probes: tuple[Probe, ...]
    git: str
    agents: tuple[AgentKey, ...]
    settings: tuple[tuple[str, str, str], ...]  # name, value, where it comes from
    image: str | None  # the id of the agents' image, which the docker daemon has
    rivals: tuple[str, ...]  # what is installed beside us and has a package `runner` too: one overwrites the other
    clis: tuple[str, ...]  # the agents whose CLIs this user has
    proxies: tuple[str, ...]  # the variables that name a proxy
    remedy: str | None = None  # commands that let ``local`` make its sandboxes, when it is AppArmor that does not

    @property
    def able(self) -> bool:
        """Tell whether any provider that isolates is available."""
        return any(probe.available and probe.isolation for probe in self.probes)


async def examine(settings: Settings) -> Health:
    """Probe every provider."""
    probes = [await open_provider(name, settings).probe() for name in provider_names()]
    docker = any(probe.provider == "docker" and probe.available for probe in probes)
    built = await image.present(settings) if docker else None
    rivals = sorted({*packages_distributions().get("runner", ())} - {DISTRIBUTION})
    keys = agent_keys(settings)
    git = open_git(settings)
    return Health(
        tuple(probes),
        f"{git.name} {'.'.join(map(str, git.version))}",
        keys,
        settings.rows(),
        built,
        tuple(rivals),
        clis=tuple(key.agent for key in keys if has_cli(key.agent, settings)),
        proxies=tuple(sorted(name for name in settings.reach if name.lower().endswith("_proxy"))),
        remedy=bwrap.profile() if any(probe.hint == bwrap.APPARMOR for probe in probes) else None,
    )
