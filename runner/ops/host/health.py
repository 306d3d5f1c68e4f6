"""Health of this host: providers, git, settings, and keys of models, which are never shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions

import trio

import runner.agents
import runner.providers
from runner import DISTRIBUTION
from runner.artifacts.stores import open_artifacts
from runner.core import plugins
from runner.core.errors import RunnerError
from runner.core.home import UNSENT
from runner.core.settings import Settings, without_secrets
from runner.git import open_git
from runner.ops.host import image
from runner.ops.host.keys import AgentKey, agent_keys
from runner.ops.planning.agent_programs import has_cli
from runner.ops.planning.facts import open_provider, usable_providers
from runner.ports.provider import Probe
from runner.sandbox import bwrap


@dataclass(frozen=True)
class OtherPlugin:
    """A plug-in of another distribution; ``problem`` says why it cannot be used."""

    room: str
    name: str
    distribution: str
    problem: str | None


@dataclass(frozen=True)
class ArtifactHealth:
    """Result of writing, reading, listing and removing an object; ``unsent`` counts runs of this home."""

    url: str
    problem: str | None
    hint: str | None
    unsent: int


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
    plugins: tuple[OtherPlugin, ...] = ()  # of other distributions
    artifacts: ArtifactHealth | None = None  # of the store that RUNNER_ARTIFACTS names
    remedy: str | None = None  # commands that let ``local`` make its sandboxes, when it is AppArmor that does not

    @property
    def able(self) -> bool:
        """Tell whether any provider that isolates is available."""
        return any(probe.available and probe.isolation for probe in self.probes)


def other_plugins() -> Iterator[OtherPlugin]:
    """Import every plug-in that another distribution has registered."""
    for room, word in ((runner.providers, "provider"), (runner.agents, "agent")):
        for one in plugins.registered(room).values():
            problem = one.problem or str(plugins.problem_of(room, one.name) or "")
            yield OtherPlugin(word, one.name, str(one), problem or None)


async def examine_artifacts(settings: Settings) -> ArtifactHealth | None:
    """Try the store of artifacts; ``None`` where there is none."""
    if settings.artifacts is None:
        return None
    unsent = len([*(settings.home / UNSENT).glob("*")])
    try:
        store = open_artifacts(settings.artifacts)
    except RunnerError as error:
        return ArtifactHealth(without_secrets(settings.artifacts), error.message, error.hint, unsent)
    try:
        await trio.to_thread.run_sync(store.check, abandon_on_cancel=True)
    except RunnerError as error:
        return ArtifactHealth(store.url, error.message, error.hint, unsent)
    return ArtifactHealth(store.url, None, None, unsent)


async def examine(settings: Settings) -> Health:
    """Probe every provider."""
    probes = [await open_provider(name, settings).probe() for name in usable_providers()]
    docker = any(probe.needs_image and probe.available for probe in probes)
    built = await image.present(settings) if docker else None
    rivals = sorted({*packages_distributions().get("runner", ())} - {DISTRIBUTION})
    keys = agent_keys(settings)
    git = open_git(settings)
    return Health(
        probes=tuple(probes),
        git=f"{git.name} {'.'.join(map(str, git.version))}",
        agents=keys,
        settings=settings.rows(),
        image=built,
        rivals=tuple(rivals),
        clis=tuple(key.agent for key in keys if has_cli(key.agent, settings)),
        proxies=tuple(sorted(name for name in settings.reach if name.lower().endswith("_proxy"))),
        plugins=tuple(other_plugins()),
        artifacts=await examine_artifacts(settings),
        remedy=bwrap.profile() if any(probe.hint == bwrap.APPARMOR for probe in probes) else None,
    )
