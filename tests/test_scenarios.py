"""The check that keeps claims honest is itself checked, and so is that no test hides from it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.claims import FOLDER, Claims, Mark, claimed, listed, part_of, unproved, wrong_claims, wrong_marks
from tests.support.params import nightly

TITLES = {"WSM-15": "paths", "LIF-25": "conformance", "BEY-13": "network"}
ROOT = FOLDER.parent
MACHINE = {"geteuid", "getuid", "uname", "which", "environ", "getenv"}


def mark(scenario: str, part: str = "", test: str = "tests/cli/test_apply.py::test_it") -> Mark:
    return Mark(scenario, part, test)


@pytest.mark.parametrize(
    ("claims", "marks", "shown", "missing"),
    [
        pytest.param({"WSM-15": "all"}, [mark("WSM-15")], {"WSM-15": {""}}, [], id="proved"),
        pytest.param({"WSM-15": "all"}, [mark("WSM-15")], {}, ["WSM-15"], id="no test passed"),
        pytest.param({"WSM-15": "all"}, [], {}, ["WSM-15"], id="no test"),
        pytest.param(
            {"WSM-15": "all"},
            [mark("WSM-15", "local"), mark("WSM-15", "docker")],
            {"WSM-15": {"local"}},
            ["WSM-15 (docker)"],
            id="a part is not all",
        ),
        pytest.param(
            {"WSM-15": "all"},
            [mark("WSM-15"), mark("WSM-15", "docker")],
            {"WSM-15": {"docker"}},
            ["WSM-15"],
            id="a part is not the whole",
        ),
        pytest.param({"LIF-25": ["local", "docker"]}, [], {"LIF-25": {"local"}}, ["LIF-25 (docker)"], id="a part only"),
        pytest.param({"LIF-25": ["local"]}, [], {"LIF-25": {""}}, ["LIF-25 (local)"], id="a whole test proves no part"),
    ],
)
def test_a_claim_needs_a_passing_test_for_each_part(
    claims: Claims, marks: list[Mark], shown: dict[str, set[str]], missing: list[str]
) -> None:
    assert unproved(claims, marks, shown) == missing


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"WSM-99": "all"}, "WSM-99: claimed, but no scenario of the list"),
        ({"WSM-15": []}, "WSM-15: claimed without a part, and not as `all`"),
        ({"WSM-15": "most"}, "WSM-15: claimed without a part, and not as `all`"),
    ],
)
def test_a_claim_is_of_the_list(claims: Claims, problem: str) -> None:
    assert wrong_claims(TITLES, claims) == [problem]
    assert wrong_claims(listed(), claimed()) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (mark("WSM-99"), "`WSM-99` is no scenario of the list"),
        (mark("BEY-13"), "BEY-13 is not claimed"),
        (mark("LIF-25"), "LIF-25 is claimed for local, not for the whole"),
        (mark("LIF-25", "gvisor"), "LIF-25 is claimed for local, not for gvisor"),
        (mark("WSM-15", test="tests/policy/test_paths.py::test_it"), "WSM-15 is marked on a test of a pure room"),
    ],
)
def test_a_mark_is_claimed_and_on_a_real_component(found: Mark, problem: str) -> None:
    claims: Claims = {"WSM-15": "all", "LIF-25": ["local"]}
    assert wrong_marks(TITLES, claims, [mark("WSM-15"), mark("LIF-25", "local")]) == []
    assert wrong_marks(TITLES, claims, [found]) == [f"{found.test}: {problem}"]


@pytest.mark.parametrize(
    ("mark", "params", "part"),
    [
        (pytest.mark.scenario("X"), {}, ""),
        (pytest.mark.scenario("X", only="a part"), {"number": 1}, "a part"),
        (pytest.mark.scenario("X", only="provider"), {"provider": "docker"}, "docker"),
        (pytest.mark.scenario("X", only="provider"), {"provider": "local as an ordinary user"}, None),
        (pytest.mark.scenario("X", only="provider"), {"provider": "fake"}, None),
        (pytest.mark.scenario("X"), {"crashing": "fake"}, None),
        (pytest.mark.scenario("X"), {"store": "memory"}, None),
    ],
)
def test_a_stand_in_and_a_variation_show_no_part(mark: pytest.MarkDecorator, params: dict[str, Any], part: str) -> None:
    assert part_of(mark.mark, params) == part


SUITE = """
import os, pytest
from pathlib import Path
from tests.support.fake_provider import FakeProvider
from tests.support.needs import Component

@pytest.mark.scenario("WSM-15")
def test_real(): pass

@pytest.mark.scenario("WSM-16")
def test_fake(tmp_path): FakeProvider(tmp_path)

@pytest.mark.scenario("WSM-17")
def test_skipped(): Component("x", lambda: "away").require()

@pytest.mark.scenario("WSM-19")
def test_failed(): assert False

@pytest.mark.nightly
@pytest.mark.scenario("WSM-21")
def test_by_night(): pass

@pytest.mark.parametrize("provider", ["local", "fake"])
@pytest.mark.scenario("LIF-25", only="provider")
def test_provider(provider): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "ci"), [("0", ""), nightly("2", "1")])
def test_a_session_says_what_it_did_not_show(tmp_path: Path, workers: str, ci: str) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(
        "from tests.support import claims\n"
        "claims.claimed = lambda: {**dict.fromkeys(('WSM-15', 'WSM-16', 'WSM-17', 'WSM-19', 'WSM-21'), 'all'),"
        " 'LIF-25': ['local', 'docker']}\n"
    )
    plugins = "-p runner.testing.plugin -p tests.support.claims -p no:cacheprovider"
    options = f"-q {plugins} -n {workers} -c {ROOT}/pyproject.toml".split()
    command = [sys.executable, "-m", "pytest", *options, "-m", "not nightly", "--check-scenarios=claims", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CI": ci}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    said = {line for line in done.stdout.splitlines() if "not shown" in line or "runs on a" in line}
    assert done.returncode == 1
    assert {line.partition(": ")[2] for line in said if "not shown" in line} == {
        *("WSM-16", "WSM-19", "WSM-21", "LIF-25 (docker)"),
        *(["WSM-17"] if ci else []),
    }
    assert [
        line for line in said if "runs on a" in line and line.endswith("is marked WSM-16/ and runs on a FakeProvider")
    ]


def test_no_test_vanishes() -> None:
    """Where it cannot run it is skipped, which is counted: it is not left out, nor over before it looked."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(FOLDER.rglob("test_*.py"))
        for node in _of_tests(ast.parse(path.read_bytes()))
        if isinstance(node, ast.If | ast.IfExp) and _looks_at_the_machine(node.test) and _leaves_out(node)
    ]
    assert found == []


def _of_tests(module: ast.Module) -> Iterator[ast.AST]:
    """The branches of tests, and all that runs at import. A helper or an expectation may look at the machine."""
    for statement in module.body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ast.walk(statement)
        elif statement.name.startswith("test_"):
            yield from (node for node in ast.walk(statement) if isinstance(node, ast.If))
            yield from (node for decorator in statement.decorator_list for node in ast.walk(decorator))


def _looks_at_the_machine(condition: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in MACHINE for node in ast.walk(condition))


def _leaves_out(node: ast.If | ast.IfExp) -> bool:
    """A shorter table of parameters, a test in a block, or an early end."""
    if isinstance(node, ast.IfExp):
        return bool(getattr(node.body, "elts", None) or getattr(node.body, "keys", None))
    return any(isinstance(n, ast.Return) or getattr(n, "name", "").startswith("test_") for n in ast.walk(node))
