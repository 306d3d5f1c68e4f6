"""The network that a run would have needed, as a manifest has it."""

from __future__ import annotations

from collections.abc import Iterator

from runner.core.hosts import parse_rule
from runner.core.model import NetworkRefusal
from runner.core.plural import plural
from runner.events.record import HostUse, RunRecord

_WANTED = (None, NetworkRefusal.NOT_ALLOWED, NetworkRefusal.PRIVATE, NetworkRefusal.UNREACHABLE)


def learned_network(record: RunRecord) -> Iterator[str]:
    """Yield the lines of ``network`` with every host that commands asked for, by step, refused ones too."""
    uses = [use for use in record.network.values() if use.refusal in _WANTED]
    known = [use for use in uses if _can_be_named(use.place)]
    if not known:
        yield "network: none"
    else:
        yield "network:  # all that commands asked for: leave in what they should have"
    for step in dict.fromkeys(step for step in record.steps for use in known if step in use.steps):
        yield f"  {step}:"
        yield "    allow:"
        found: dict[str, list[HostUse]] = {}
        for use in sorted(known, key=lambda use: use.place):
            if step in use.steps:
                found.setdefault(use.place, []).append(use)
        yield from (f"      - {_item(place, same)}" for place, same in found.items())
    if more := sum(use.connections for use in uses if use not in known):
        yield f"# and {plural(more, 'connection')} whose host has no name here"


def _item(place: str, uses: list[HostUse]) -> str:
    refused = next((f"  # refused: {use.refusal}" for use in uses if use.refusal), "")
    private = any(use.private or use.refusal is NetworkRefusal.PRIVATE for use in uses)
    return (f'{{host: "{place}", private: true}}' if private else f'"{place}"') + refused


def _can_be_named(place: str) -> bool:
    try:
        parse_rule(place)
    except ValueError:
        return False
    return True
