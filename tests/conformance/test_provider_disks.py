"""A limit on the disk: writes over it fail, and only they; everything that commands can write to counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from runner.core.model import Limits
from runner.ports.provider import SandboxSpec
from runner.testing.place import MIB, Place, shell
from tests.support.needs import USERS
from tests.support.providers import DOCKER, GVISOR, LOCAL

KINDS = (LOCAL, DOCKER, GVISOR)
BY_NIGHT = (GVISOR,)

pytestmark = USERS.mark

LIMIT = 16 * MIB
FULL = "No space left on device"
FILL = "cat /dev/zero > fill"


@pytest.mark.scenario("LIF-18", only="provider")
async def test_over_the_limit_writes_fail_wherever_and_reads_and_deletes_go_on(
    limited: Callable[[Limits], Awaitable[Place]],
) -> None:
    place = await limited(Limits(disk_bytes=LIMIT))
    async with place.open() as workspace:
        assert (await workspace.effective()).limits == Limits(disk_bytes=LIMIT)
        assert await shell(workspace, f"echo kept > kept; {FILL}; true") != ""
        for directory in (".", "/output", "$HOME"):
            assert FULL in await shell(workspace, f"cat kept kept kept kept > {directory}/more && cat /dev/zero > more")
        assert await shell(workspace, "cat kept") == "kept\n"
    assert 0.9 * LIMIT < place.handle.tree.joinpath("fill").stat().st_size <= LIMIT

    async with place.open() as workspace:
        assert await shell(workspace, "rm fill; echo again > again; cat again kept") == "again\nkept\n"
        assert FULL in await shell(workspace, "i=0; while true > $i; do i=$((i+1)); done; ls | wc -l")
        assert FULL in await shell(workspace, "mkdir $HOME/directory")
        assert await shell(workspace, "cat kept again") == "kept\nagain\n"
    async with place.open(SandboxSpec()) as workspace:
        assert await shell(workspace, "rm -rf [0-9]*; echo third > third; cat third") == "third\n"
