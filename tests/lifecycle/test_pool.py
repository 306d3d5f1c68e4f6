"""Which slots there should be, and why there was none; told by tables and by seeded luck."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from msgspec.structs import replace

from runner.core.codec import plain
from runner.core.model import Limits, PoolMissReason, SlotKey, SlotState
from runner.lifecycle.pool import BACK_OFF, MAX_AGE, NEXT, Failures, decide, name_of, read_key, why_missed
from runner.ports.store import SlotRow

KEY = SlotKey(provider="docker", image="sha256:1", limits=Limits(2, 1 << 30, None, 512), policy="p")
NOW = round(20 * 86_400e6)
S = SlotState


def slot(id: str, state: SlotState = S.READY, *, pool: str = "a", age: float = 0.0) -> SlotRow:
    return SlotRow(id=id, pool=pool, state=state, keeper="keeper", created=NOW - round(age * 1e6))


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        pytest.param({}, PoolMissReason.EMPTY, id="none: nobody is in it"),
        pytest.param({"provider": "gvisor", "image": "sha256:2"}, PoolMissReason.PROVIDER, id="provider"),
        pytest.param({"image": "sha256:2", "limits": Limits()}, PoolMissReason.IMAGE, id="image"),
        pytest.param({"limits": Limits(2, 1 << 30, 1 << 30, 512)}, PoolMissReason.LIMITS, id="one of the limits"),
        pytest.param({"network": "open"}, PoolMissReason.NETWORK, id="network"),
        pytest.param({"shared": True}, PoolMissReason.SHAPE, id="the whole project is seen"),
        pytest.param({"toolchains": ("/opt/node",)}, PoolMissReason.SHAPE, id="toolchains"),
        pytest.param({"policy": "q"}, PoolMissReason.POLICY, id="policy"),
    ],
)
def test_a_miss_names_the_first_difference(difference: dict[str, object], reason: PoolMissReason) -> None:
    assert why_missed(replace(KEY, **difference), [KEY]) is reason  # type: ignore[arg-type]


def test_of_several_pools_the_nearest_one_decides() -> None:
    far, near = replace(KEY, image="sha256:2"), replace(KEY, policy="q")

    assert why_missed(KEY, [far, near]) is why_missed(KEY, [near, far]) is PoolMissReason.POLICY
    assert why_missed(KEY, []) is PoolMissReason.EMPTY


def test_two_keys_have_one_pool_only_when_they_are_equal() -> None:
    others = [replace(KEY, toolchains=("/opt",)), replace(KEY, limits=Limits()), replace(KEY, policy="")]

    assert len({name_of(key) for key in (KEY, *others)}) == 4
    assert name_of(replace(KEY)) == name_of(KEY)
    assert re.fullmatch("[0-9a-f]{12}", name_of(KEY))
    protected = replace(KEY, protected=("a/",))
    assert [read_key(plain(key)) for key in (KEY, protected)] == [KEY, protected]  # type: ignore[arg-type]


def test_what_is_lacking_is_made_and_what_is_too_much_ends_the_oldest_first() -> None:
    slots = [slot("old", age=60), slot("new", age=1), slot("made", S.WARMING, age=2)]

    assert decide(slots, {"a": 5}, {}, NOW).make == {"a": 2}
    assert decide(slots, {"a": 2}, {}, NOW).end == ("old",)
    assert set(decide(slots, {}, {}, NOW).end) == {"old", "new", "made"}


def test_claimed_and_ending_slots_are_no_part_of_a_pool() -> None:
    slots = [slot("given", S.CLAIMED), slot("ending", S.DRAINING)]

    change = decide(slots, {"a": 1}, {}, NOW)

    assert (change.end, change.make) == ((), {"a": 1})


def test_a_slot_that_is_too_old_is_replaced_and_the_next_end_is_known() -> None:
    change = decide([slot("old", age=MAX_AGE), slot("new", age=100)], {"a": 2}, {}, NOW)

    assert (change.end, change.make) == (("old",), {"a": 1})
    assert change.again == NOW + round((MAX_AGE - 100) * 1e6)


@pytest.mark.parametrize(("count", "pause"), [(1, BACK_OFF[0]), (2, BACK_OFF[1]), (99, BACK_OFF[-1])])
def test_after_failures_a_pool_is_filled_later_and_later(count: int, pause: float) -> None:
    failures = {"a": Failures(count, NOW)}
    over = NOW + round(pause * 1e6)

    assert decide([], {"a": 1, "b": 1}, failures, NOW).make == {"b": 1}
    assert decide([], {"a": 1}, failures, NOW).again == over
    assert decide([], {"a": 1}, failures, over).make == {"a": 1}


def test_doing_what_is_decided_leaves_nothing_to_do() -> None:
    for seed in range(300):
        luck = random.Random(seed)
        slots = [
            slot(str(n), luck.choice(list(S)), pool=luck.choice("abc"), age=luck.uniform(0, 1.5 * MAX_AGE))
            for n in range(luck.randrange(12))
        ]
        sizes = {pool: luck.randrange(5) for pool in "ab"}
        change = decide(slots, sizes, {}, NOW)
        after = [s for s in slots if s.id not in change.end]
        after += [slot(f"{pool}-{n}", S.WARMING, pool=pool) for pool, made in change.make.items() for n in range(made)]
        again = decide(after, sizes, {}, NOW)

        assert (again.end, again.make) == ((), {}), f"seed {seed}"
        kept = Counter(s.pool for s in after if s.state in (S.WARMING, S.READY))
        assert kept == {pool: size for pool, size in sizes.items() if size}
        assert not [s for s in slots if s.id in change.end and s.state in (S.CLAIMED, S.DRAINING)]


def test_a_slot_never_goes_back() -> None:
    order = list(S)

    assert all(order.index(after) > order.index(before) for before, afters in NEXT.items() for after in afters)


def test_without_a_failure_a_pool_may_be_filled_at_once() -> None:
    assert Failures(0, NOW).pause_until() == 0
