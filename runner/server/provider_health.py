"""Health of the providers of this host, as a server tells it."""

from __future__ import annotations

import trio
from msgspec import Struct

from runner.core.errors import RunnerError
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider, usable_providers

PROBE_SECONDS = 5.0  # for each provider
FRESH_SECONDS = 30.0  # that an answer is given again


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
    """The health of all providers, looked at when somebody asks, at most twice a minute."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = trio.Lock()
        self._known: Providers | None = None
        self._at = 0.0

    async def look(self) -> Providers:
        async with self._turn:
            if self._known is None or trio.current_time() > self._at + FRESH_SECONDS:
                found: dict[str, Provider] = {}
                async with trio.open_nursery() as nursery:
                    for name in usable_providers():
                        nursery.start_soon(self._probe, name, found)
                self._known, self._at = Providers([found[name] for name in sorted(found)]), trio.current_time()
            return self._known

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
