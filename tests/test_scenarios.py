"""The check that keeps claims honest is itself checked."""

from __future__ import annotations

import pytest

from tests.conftest import unproved


@pytest.mark.parametrize(
    ("claims", "passed", "missing"),
    [
        pytest.param({"WSM-15": "all"}, {"WSM-15": {""}}, [], id="proved"),
        pytest.param({"WSM-15": "all"}, {}, ["WSM-15"], id="no test"),
        pytest.param({"LIF-25": ["local", "docker"]}, {"LIF-25": {"local"}}, ["LIF-25 (docker)"], id="a part only"),
        pytest.param({"LIF-25": ["local"]}, {"LIF-25": {""}}, ["LIF-25 (local)"], id="whole test proves no part"),
    ],
)
def test_a_claim_needs_a_passing_test(
    claims: dict[str, str | list[str]], passed: dict[str, set[str]], missing: list[str]
) -> None:
    assert unproved(claims, passed) == missing
