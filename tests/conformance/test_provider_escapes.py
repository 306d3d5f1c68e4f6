"""Ways out of our own providers: the shipped suite."""

from types import ModuleType

import pytest

from runner.providers import gvisor, process
from runner.sandbox.escapes import ESCAPES, breaches
from runner.testing.conformance.test_provider_escapes import *
from tests.support.providers import ORDINARY, SLOW

BY_NIGHT = (*SLOW, ORDINARY)


@pytest.mark.parametrize(
    ("stdout", "told"),
    [(b"done\n", []), (b"! x\n! y\n", ["x", "y"]), (b"", None), (b"sh: not found\n", None), (b"done\nmore\n", None)],
)
def test_only_a_probe_that_came_to_its_end_says_that_all_was_refused(stdout: bytes, told: list[str] | None) -> None:
    assert breaches(stdout) == told


@pytest.mark.parametrize("module", [gvisor, process])
def test_only_probes_that_there_are_have_gaps(module: ModuleType) -> None:
    assert set(module.GAPS) <= {escape.name for escape in ESCAPES}
