"""What a diff of two plan documents says, and what it keeps quiet about."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from runner.plan.diff import Change, changes_of, diff, differences
from tests.support.small_plans import small_run, small_step

STEP = {
    "id": "setup",
    "kind": "setup",
    "what": "npm ci",
    "needs": ["clone"],
    "deadline_seconds": 300.0,
    "origin": "a.yaml:9",
    "body": {
        "warm": {"size": 0, "policy": "sha256:1"},
        "commands": [["sh", "-c", "npm ci"]],
        "policies": [{"name": "house", "max": 1, "origin": "p.yaml:1"}],
    },
}
SAVE = {**STEP, "id": "save", "body": {"policies": deepcopy(STEP["body"]["policies"])}, "origin": "defaults"}  # type: ignore[index]
RUN = {"name": "fix", "origin": "a.yaml:1", "commit": "abc", "steps": [STEP, SAVE], "worst_seconds": 5.0}
PLAN: dict[str, Any] = {"format": "x", "digest": "sha256:1", "runs": [RUN]}


def changed(*edits: tuple[tuple[str | int, ...], object]) -> dict[str, Any]:
    plan = deepcopy(PLAN)
    for (*parents, last), value in edits:
        target: Any = plan
        for key in parents:
            target = target[key]
        target[last] = value
    return plan


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        pytest.param(changed(), [], id="equal"),
        pytest.param(
            changed((("runs", 0, "steps", 0, "body", "warm"), {"size": 0, "policy": "sha256:2"})),
            [],
            id="what is computed of policies",
        ),
        pytest.param(
            changed((("runs", 0, "steps", 0, "body", "commands", 0), ["sh", "-c", "npm install"])),
            [
                Change(
                    sign="~",
                    where="fix.setup.commands[0]",
                    old=["sh", "-c", "npm ci"],
                    new=["sh", "-c", "npm install"],
                    origin="a.yaml:9",
                )
            ],
            id="a command, whole",
        ),
        pytest.param(
            changed((("runs", 0, "steps", 0, "body", "commands"), [["make"], ["sh", "-c", "npm ci"]])),
            [Change(sign="+", where="fix.setup.commands[0]", old=None, new=["make"], origin="a.yaml:9")],
            id="one more in front",
        ),
        pytest.param(
            changed(
                (("runs", 0, "steps", 0, "body", "policies", 0, "max"), 2),
                (("runs", 0, "steps", 1, "body", "policies", 0, "max"), 2),
            ),
            [Change(sign="~", where="fix.setup.policies[0].max", old=1, new=2, origin="a.yaml:9")],
            id="the same change in several steps once",
        ),
        pytest.param(
            changed(
                (("runs", 0, "origin"), "a.yaml:2"),
                (("runs", 0, "steps", 0, "origin"), "a.yaml:10"),
                (("runs", 0, "steps", 0, "body", "policies", 0, "origin"), "p.yaml:3"),
                (("runs", 0, "steps", 0, "what"), "other words"),
                (("runs", 0, "worst_seconds"), 6.0),
                (("digest",), "sha256:2"),
            ),
            [],
            id="a comment, wording, what follows from the rest",
        ),
        pytest.param(
            changed((("runs", 0, "commit"), "def")),
            [Change(sign="~", where="fix.commit", old="abc", new="def", origin="a.yaml:1")],
            id="of a run",
        ),
        pytest.param(
            changed((("runs", 0, "steps"), [SAVE])),
            [Change(sign="-", where="fix.setup", old="npm ci", new=None, origin="a.yaml:9")],
            id="a step less",
        ),
        pytest.param(
            changed((("runs", 0, "steps"), [STEP, SAVE, {**STEP, "id": "more", "what": "it"}])),
            [Change(sign="+", where="fix.more", old=None, new="it", origin="a.yaml:9")],
            id="a step more",
        ),
        pytest.param(
            changed((("runs", 0, "steps", 0, "body", "commands"), [])),
            [Change(sign="-", where="fix.setup.commands[0]", old=["sh", "-c", "npm ci"], new=None, origin="a.yaml:9")],
            id="a command less",
        ),
        pytest.param(
            changed(
                (("runs", 0, "steps", 0, "body", "policies", 0, "max"), 2),
                (("runs", 0, "steps", 1, "body", "policies", 0, "max"), 3),
            ),
            [
                Change(sign="~", where="fix.setup.policies[0].max", old=1, new=2, origin="a.yaml:9"),
                Change(sign="~", where="fix.save.policies[0].max", old=1, new=3, origin="defaults"),
            ],
            id="another change in another step",
        ),
        pytest.param(
            changed((("runs",), [RUN, {**RUN, "name": "two", "origin": "a.yaml:30"}])),
            [Change(sign="+", where="two", old=None, new=None, origin="a.yaml:30")],
            id="a run more",
        ),
        pytest.param(
            changed((("runs",), [])),
            [Change(sign="-", where="fix", old=None, new=None, origin="a.yaml:1")],
            id="a run less",
        ),
    ],
)
def test_changes_lead_from_the_old_plan_to_the_new(new: dict[str, Any], changes: list[Change]) -> None:
    assert changes_of(PLAN["runs"], new["runs"]) == changes


def test_planned_runs_differ_as_their_documents_do() -> None:
    old, new = small_run("fix", small_step("setup")), small_run("fix", small_step("setup", deadline_seconds=2.0))

    assert diff([old], [old]) == []
    assert diff([old], [new]) == [Change(sign="~", where="fix.setup.deadline_seconds", old=1.0, new=2.0, origin="")]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("abc", "abd", [("[2]", "c", "d")]),
        ("abcd", "axyd", [("[1]", "b", "x"), ("[2]", "c", "y")]),
        ("abcde", "abxycde", [("[2]", None, "x"), ("[3]", None, "y")]),
        ("abxycde", "abcde", [("[2]", "x", None), ("[3]", "y", None)]),
        ("aa", "aaaa", [("[2]", None, "a"), ("[3]", None, "a")]),
        ("aab", "ab", [("[1]", "a", None)]),
        ("", "a", [("[0]", None, "a")]),
        ("abcd", "xbcy", [("[0]", "a", "x"), ("[3]", "d", "y")]),
    ],
)
def test_items_are_compared_without_those_that_are_equal_at_both_ends(
    old: str, new: str, found: list[tuple[str, str | None, str | None]]
) -> None:
    assert list(differences({"x": [*old]}, {"x": [*new]})) == [(f"x{place}", *pair) for place, *pair in found]


def file(content: str, *, at: str = "/a") -> dict[str, object]:
    return {"path": f"{at}/agent.sh", "sha256": content, "size": len(content), "whole": True}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        pytest.param({"script": file("x")}, {"script": file("x", at="/b")}, [], id="elsewhere"),
        pytest.param({"script": file("x")}, {"script": file("y")}, ["script"], id="another content, once"),
        pytest.param(
            {"incident": [["a", file("1")], ["c", file("3")]]},
            {"incident": [["a", file("1")], ["b", file("2")], ["c", file("4")]]},
            ["incident.b", "incident.c"],
            id="by name, whatever comes between",
        ),
        pytest.param({"skills": []}, {"skills": [["a", file("1")]]}, ["skills.a"], id="the first of its list"),
        pytest.param(
            {"files": [["a.sh", "one\n", False]]},
            {"files": [["b.sh", "two\n", True], ["a.sh", "one\n", True]]},
            ["files.b.sh", "files.a.sh.executable"],
            id="what a manifest holds itself",
        ),
        pytest.param(
            {"files": [["a.sh", "one\n", False]]},
            {"files": [["a.sh", "two\n", False]]},
            ["files.a.sh.content"],
            id="text",
        ),
        pytest.param({"file": []}, {"file": ["a"]}, ["file[0]"], id="no file"),
        pytest.param({"skills": [["a", file("1")]]}, {"skills": []}, ["skills.a"], id="the last of its list"),
        pytest.param({"script": file("x")}, {"script": {"path": "y"}}, ["script"], id="a file no more"),
        pytest.param({"script": {"path": "y"}}, {"script": file("x")}, ["script"], id="a file now"),
        pytest.param({"file": {}}, {"file": {"path": "", "sha256": "", "size": 0}}, ["file"], id="bare"),
    ],
)
def test_files_are_compared_by_name_and_content(old: object, new: object, found: list[str]) -> None:
    paths = [path for path, _, _ in differences(old, new)]

    assert paths == found
