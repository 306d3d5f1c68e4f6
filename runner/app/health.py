"""What this host can do, as found: providers, git, settings."""

from __future__ import annotations

from dataclasses import dataclass

import runner.providers
from runner import plugins
from runner.app.facts import open_provider
from runner.git import open_git
from runner.ports.provider import Probe
from runner.settings import Settings


@dataclass(frozen=True)
class Health:
    probes: tuple[Probe, ...]
    git: str
    settings: tuple[tuple[str, str, str], ...]  # name, value, where it comes from

    @property
    def able(self) -> bool:
        """Whether anything that isolates is available."""
        return any(probe.available and probe.isolation for probe in self.probes)


async def examine(settings: Settings) -> Health:
    """Probe every provider but the fake, which is for tests."""
    names = [name for name in plugins.names(runner.providers) if name not in ("fake", "spawn")]
    probes = [await open_provider(name, settings).probe() for name in names]
    return Health(tuple(probes), open_git(settings).name, settings.rows())
