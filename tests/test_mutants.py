"""Every claim has a mutant that can be made, and the machinery tells a test that notices it from one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import Change, Mutant, Stale, Tree, judge, load
from tests.support.claims import claimed

SCENARIO = "TRI-24"  # whose tests take least
NOTICED = Change('/common.sh"', '/common.bash"', "runners/goose.sh")


def test_each_mutant_can_be_made_and_is_of_a_claim() -> None:
    mutants = load()
    other = [mutant.name for mutant in mutants if mutant.scenario not in claimed()]
    for mutant in mutants:
        for change in mutant.changes:
            path, text = change.applied(run.ROOT)
            assert text != path.read_text(), mutant.name

    assert other == [mutant.name for mutant in mutants if mutant.name.startswith("ALSO-") and mutant.noticed_by]


@pytest.mark.scenario("BEY-25")
def test_each_claim_has_a_mutant() -> None:
    assert sorted(set(claimed()) - {mutant.scenario for mutant in load()}) == []


def product(root: Path, text: str, *more: str) -> Path:
    (root / "runner").mkdir()
    for number, content in enumerate((text, *more)):
        (root / "runner" / f"{number}.py").write_text(content)
    return root


@pytest.mark.parametrize(
    ("text", "change", "result"),
    [
        pytest.param("a = 1\nb = 2\n", Change("b = 2", "b = 3"), "a = 1\nb = 3\n", id="a line"),
        pytest.param("if x and y:\n", Change("x and", ""), "if  y:\n", id="a part of a line"),
        pytest.param(
            "def f():\n    if x:\n        y()\n",
            Change("if x:\n    y()\n", "y()\n"),
            "def f():\n    y()\n",
            id="lines that stand deeper",
        ),
        pytest.param("a = '\\d'\n", Change("a = '\\d'", "a = '\\g'"), "a = '\\g'\n", id="no pattern"),
    ],
)
def test_a_change_is_made_in_its_place(tmp_path: Path, text: str, change: Change, result: str) -> None:
    assert change.applied(product(tmp_path, text))[1] == result


@pytest.mark.parametrize(
    ("texts", "within"),
    [(["a = 2"], None), (["a = 1\na = 1"], None), (["a = 1", "a = 1"], None), (["a = 1"], "runner/1.py")],
    ids=["nowhere", "twice in a file", "in two files", "not there"],
)
def test_a_change_without_one_place_is_stale(tmp_path: Path, texts: list[str], within: str | None) -> None:
    with pytest.raises(Stale, match="`a = 1` should be in one place"):
        Change("a = 1", "a = 3", within).applied(product(tmp_path, *texts))


@pytest.mark.slow
@pytest.mark.scenario("BEY-25")
def test_a_mutant_dies_by_a_test_of_its_scenario_or_is_told(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    noticed = Mutant(f"{SCENARIO}-noticed", "it breaks", (NOTICED,))
    unnoticed = Mutant(f"{SCENARIO}-unnoticed", "nothing", (Change("LARGE = 8_000", "LARGE = 9_000"),))
    before = {path: path.read_bytes() for path in sorted(tree.root.glob("r*/**/*.py"))}

    said = [judge(mutant, tree) for mutant in (noticed, unnoticed)]

    assert [died for died, _ in said] == [True, False]
    assert "killed    TRI-24-noticed: it breaks, by tests/runners/test_sub_runners.py::" in said[0][1]
    assert said[1][1] == "SURVIVED  TRI-24-unnoticed: nothing"
    assert {path: path.read_bytes() for path in before} == before
