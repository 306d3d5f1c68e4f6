"""Health of the providers of this host, as a server tells it."""

from __future__ import annotations

import trio
from msgspec import Struct

from runner.core.errors import RunnerError
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider, usable_providers

PROBE_SECONDS = 5.0  # for each provider
EVERY_SECONDS = 30.0


class Provider(Struct, kw_only=True):
    """A provider and its health. ``missing`` maps each feature that it cannot enforce here to the reason."""

    name: str
    available: bool
    isolation: str
    needs_image: bool
    missing: dict[str, str]
    reason: str | None
    hint: str | None


class Providers(Struct):
    providers: list[Provider]


class ProviderHealth:
    """The health of all providers, looked at twice a minute while ``run`` runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, Provider] = {}
        self._has_looked = trio.Event()

    async def run(self) -> None:
        while True:
            found: dict[str, Provider] = {}
            async with trio.open_nursery() as nursery:
                for name in usable_providers():
                    nursery.start_soon(self._probe, name, found)
            self._found = found
            self._has_looked.set()
            await trio.sleep(EVERY_SECONDS)

    async def latest(self) -> Providers:
        """Return what the last look has found; the first one is waited for, at most ``PROBE_SECONDS``."""
        await self._has_looked.wait()
        return Providers([self._found[name] for name in sorted(self._found)])

    async def _probe(self, name: str, found: dict[str, Provider]) -> None:
        why = f"it did not answer within {PROBE_SECONDS:g} s"
        try:
            with trio.move_on_after(PROBE_SECONDS):
                probe = await open_provider(name, self._settings).probe()
                found[name] = Provider(
                    name=name,
                    available=probe.available,
                    isolation=probe.isolation.value,
                    needs_image=probe.needs_image,
                    missing={feature.value: words for feature, words in probe.missing.items()},
                    reason=probe.reason,
                    hint=probe.hint,
                )
                return
        except RunnerError as error:
            why = error.message
        found[name] = Provider(
            name=name, available=False, isolation="none", needs_image=False, missing={}, reason=why, hint=None
        )
