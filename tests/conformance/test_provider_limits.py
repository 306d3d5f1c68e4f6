"""A limit on processors slows commands down, and ends none."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio

from runner.core.model import Limits
from runner.sandbox.cgroup import locate
from runner.testing.outside import marked
from runner.testing.place import Place, read_until
from tests.support.providers import DOCKER, GUESTS, GVISOR, LOCAL, PODS, ROOT_PODMAN, VOLUMES, inhabitants

KINDS = tuple(k for k in (LOCAL, DOCKER, VOLUMES, ROOT_PODMAN, GVISOR, PODS) if k in GUESTS)


@pytest.mark.scenario("LIF-16", only="provider")
async def test_what_takes_more_processor_than_it_may_is_throttled_and_lives(
    limited: Callable[[Limits], Awaitable[Place]],
) -> None:
    place = await limited(Limits(cpus=0.1))
    async with place.open() as workspace:
        spin = ["sh", "-c", "echo ready; while :; do :; done"]
        async with workspace.exec(spin, env={"MARK": place.mark}) as process:
            await read_until(process, b"ready")
            found = inhabitants(place.handle) if place.kind == GVISOR else marked(place.mark)
            with trio.fail_after(60):
                before = _times_throttled(found[0])
                began, used = time.monotonic(), _seconds_used(found)
                while _times_throttled(found[0]) < before + 3 or time.monotonic() < began + 3:
                    await trio.sleep(0.05)
                assert _seconds_used(found) - used < 0.1 * 1.3 * (time.monotonic() - began) + 0.05
            assert place.kind == GVISOR or marked(place.mark) == found
        assert (await workspace.run(["true"])).exit.ok


def _seconds_used(pids: Sequence[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _times_throttled(pid: int) -> int:
    v1, v2 = locate(Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{pid}/cgroup").read_text())
    group = v1.get("cpu", v2)
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["nr_throttled"])
