"""Ways out of our own providers: the shipped suite."""

import pytest

from runner.sandbox.escapes import breaches
from runner.testing.conformance.test_provider_escapes import *
from tests.support.providers import ORDINARY, SLOW

BY_NIGHT = (*SLOW, ORDINARY)


@pytest.mark.parametrize(
    ("stdout", "told"),
    [(b"done\n", []), (b"! x\n! y\n", ["x", "y"]), (b"", None), (b"sh: not found\n", None), (b"done\nmore\n", None)],
)
def test_only_a_probe_that_came_to_its_end_says_that_all_was_refused(stdout: bytes, told: list[str] | None) -> None:
    assert breaches(stdout) == told
