"""The probes of ``runner doctor --probe``, on every provider: what its gaps do not name is refused."""

from __future__ import annotations

from runner.sandbox.escapes import ESCAPES, breaches, open_bait
from runner.testing.place import Place


async def test_no_probe_finds_a_way_out_that_is_not_declared(place: Place) -> None:
    """Nor is a probe blind: where nothing stands around commands, it sees what they reach."""
    found = {}
    with open_bait(place.home) as bait:
        async with place.open() as workspace:
            for escape in ESCAPES:
                found[escape.name] = breaches((await workspace.run(escape.argv, env=bait)).stdout)
            assert (await workspace.run(["true"])).exit.ok

    assert {name: told for name, told in found.items() if told != [] and name not in place.candidate.escapes} == {}
    if not place.isolated:
        assert found["host-files"] == [f"reads {bait['PROBE_FILE']}"]
        assert found["sockets"] == [f"connects to {bait['PROBE_SOCKET']}"]
        assert found["abstract-sockets"] == ["connects to one of the host"]
        assert found["shared-memory"] == ["attaches that of the host"]
