"""The health of providers, looked at on trio's clock for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import ProviderUnavailable
from runner.core.model import IsolationClass
from runner.core.settings import Settings
from runner.ports.provider import Probe
from runner.server import provider_health
from runner.server.provider_health import ProviderHealth


class Host:
    """A host whose only daemon comes and goes."""

    def __init__(self) -> None:
        self.state = "here"
        self.looks: list[float] = []

    async def probe(self) -> Probe:
        self.looks.append(trio.current_time())
        if self.state == "mute":
            await trio.sleep_forever()
        if self.state == "away":
            raise ProviderUnavailable("nobody listens")
        return Probe(provider="daemon", available=True, isolation=IsolationClass.KERNEL)


async def test_a_provider_is_looked_at_twice_a_minute_and_not_waited_for(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, found = Host(), []
    monkeypatch.setattr(provider_health, "usable_providers", lambda: ["daemon"])
    monkeypatch.setattr(provider_health, "open_provider", lambda name, settings: host)
    health = ProviderHealth(Settings.from_env({"RUNNER_HOME": str(tmp_path)}))
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(health.run)
        for host.state in ("here", "mute", "away", "here"):
            [one] = (await health.latest()).providers
            found.append((one.available, one.reason))
            await trio.sleep(36)
        nursery.cancel_scope.cancel()

    assert found == [
        (True, None),
        (True, None),
        (False, "it did not answer within 5 s"),
        (False, "nobody listens"),
    ]
    assert [round(at - begun) for at in host.looks] == [0, 30, 60, 95, 125]
