"""Each write of the store and of run directories may fail, once or from then on: the exit code says so, and nothing is
lost that was said.
"""

from __future__ import annotations

import errno
import shutil

import pytest

from tests.engine.test_crash_points import Crashing, assert_whole, crashing, quick
from tests.engine.test_full_disks import journal
from tests.support import effects

__all__ = ["crashing", "quick"]

pytestmark = [
    pytest.mark.slow,
    effects.WATCHER.mark,
]

PLACES = {"store": "state/state.db", "runs": "state/runs/"}
FAULTS = [
    *((error, lasting) for error in ("ENOSPC", "EIO", "EMFILE") for lasting in (False, True)),
    ("EINTR", False),
]
BY_DAY = [("store", "EIO", False), ("store", "ENOSPC", True), ("runs", "ENOSPC", False), ("runs", "EMFILE", True)]


def fail(crashing: Crashing, place: str, error: str, number: int, *, lasting: bool) -> tuple[int, int]:
    """How a run ended of which such a write failed, and how many there were; then it is recovered, and nothing lost."""
    home = crashing.home()
    below = str(home / PLACES[place])
    write = {"error": getattr(errno, error), "number": number, "home": below, "lasting": lasting}
    code, _ = crashing.ask("apply", home, write=write)
    writes = len(crashing.calls)
    said = journal(home)
    if (home / "state" / "state.db").exists() and (home / "state" / "state.db").stat().st_size:
        assert_whole(home, crashing.ask("recover", home)[0])
        assert said == journal(home)[: len(said)]
    else:
        assert said == []
    shutil.rmtree(home)
    return code, writes


@pytest.mark.parametrize("crashing", ["fake"], indirect=True)
@pytest.mark.parametrize(("place", "error", "lasting"), BY_DAY)
def test_a_write_that_fails_is_said_and_loses_nothing(
    crashing: Crashing, place: str, error: str, lasting: bool
) -> None:
    _, total = fail(crashing, place, error, 0, lasting=False)

    assert fail(crashing, place, error, total // 2, lasting=lasting)[0] == 4


@pytest.mark.nightly
@pytest.mark.parametrize("crashing", ["fake"], indirect=True)
@pytest.mark.parametrize(("error", "lasting"), FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_any_write_that_fails_is_said_and_loses_nothing(
    crashing: Crashing, place: str, error: str, lasting: bool
) -> None:
    _, total = fail(crashing, place, error, 0, lasting=False)

    codes = {number: fail(crashing, place, error, number, lasting=lasting)[0] for number in range(1, total + 1)}

    assert set(codes.values()) <= ({0} if error == "EINTR" else {0, 1, 4}), codes
