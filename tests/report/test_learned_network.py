"""The network that a run would have needed, which can be written into a manifest as it is."""

from __future__ import annotations

from ruamel.yaml import YAML

from runner.core.model import NetworkRefusal
from runner.events.record import HostUse, RunRecord, StepRecord
from runner.manifest.network import Networks
from runner.report.learned_network import learned_network


def learned(*uses: HostUse) -> list[str]:
    steps = {step: StepRecord(kind=step) for step in ("setup", "agent")}
    return [*learned_network(RunRecord(id="r", steps=steps, network={(use.place, use.refusal): use for use in uses}))]


def test_it_has_every_host_by_step_and_can_be_pasted() -> None:
    lines = learned(
        HostUse(place="a.test:443", refusal=None, steps=("agent", "setup")),
        HostUse(place="b.test:80", refusal=NetworkRefusal.NOT_ALLOWED, steps=("agent",)),
        HostUse(place="c.test:22", refusal=NetworkRefusal.PRIVATE, steps=("setup",)),
        HostUse(place="10.0.0.1:5432", refusal=None, steps=("setup",), private=True),
        HostUse(place="e.test:443", refusal=NetworkRefusal.MALFORMED, steps=("agent",)),
        HostUse(place='x"\n- "open:443', refusal=NetworkRefusal.NOT_ALLOWED, steps=("agent",), connections=2),
    )

    (written,) = YAML(typ="safe", pure=True).load("\n".join(lines)).values()
    assert written == {
        "setup": {
            "allow": [
                {"host": "10.0.0.1:5432", "private": True},
                "a.test:443",
                {"host": "c.test:22", "private": True},
            ]
        },
        "agent": {"allow": ["a.test:443", "b.test:80"]},
    }
    assert Networks.model_validate(written)
    assert '      - "b.test:80"  # refused: not-allowed' in lines
    assert lines[-1] == "# and 2 connections whose host has no name here"


def test_a_run_without_connections_needs_none() -> None:
    assert learned() == ["network: none"]
