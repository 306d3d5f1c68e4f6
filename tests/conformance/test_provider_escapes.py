"""The probes of ``runner doctor --probe``, on every provider: what its gaps do not name is refused."""

from __future__ import annotations

import os

import pytest

from runner.sandbox.escapes import ESCAPES, KNOWN_GAPS, breaches, open_bait
from tests.support.providers import GUESTS, ORDINARY, PROCESS, SLOW, Place

KINDS = GUESTS
BY_NIGHT = (*SLOW, ORDINARY)


async def test_no_probe_finds_a_way_out_that_is_not_declared(place: Place) -> None:
    """Nor is a probe blind: where nothing stands around commands, it sees what they reach."""
    found = {}
    with open_bait(place.home) as bait:
        async with place.open() as workspace:
            for escape in ESCAPES:
                found[escape.name] = breaches((await workspace.run(escape.argv, env=bait)).stdout)
            assert (await workspace.run(["true"])).exit.ok
    declared = set(KNOWN_GAPS.get(place.provider.name, ()))
    if place.kind == ORDINARY and os.geteuid() == 0:
        declared.add("read-only")  # an ordinary user is played by root, whose the kernel's settings are

    assert {name: told for name, told in found.items() if told != [] and name not in declared} == {}
    if place.kind == PROCESS:
        assert found["host-files"] == [f"reads {bait['PROBE_FILE']}"]
        assert found["sockets"] == [f"connects to {bait['PROBE_SOCKET']}"]
        assert found["abstract-sockets"] == ["connects to one of the host"]
        assert found["shared-memory"] == ["attaches that of the host"]


@pytest.mark.parametrize(
    ("stdout", "told"),
    [(b"done\n", []), (b"! x\n! y\n", ["x", "y"]), (b"", None), (b"sh: not found\n", None), (b"done\nmore\n", None)],
)
def test_only_a_probe_that_came_to_its_end_says_that_all_was_refused(stdout: bytes, told: list[str] | None) -> None:
    assert breaches(stdout) == told


def test_only_probes_that_there_are_have_gaps() -> None:
    assert {name for gaps in KNOWN_GAPS.values() for name in gaps} <= {escape.name for escape in ESCAPES}
