"""How two steps differ is said in words a person can check."""

from __future__ import annotations

import pytest

from runner.core.sanitize import excerpt
from runner.plan.keys import differences, digests, parts
from runner.plan.model import Step

OLD, NEW = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        pytest.param({"x": 1}, {"x": 1}, [], id="same"),
        pytest.param({"x": None}, {}, [], id="nothing said"),
        pytest.param({"branch": "main"}, {"branch": "dev"}, ["branch changed from main to dev"], id="short"),
        pytest.param({"base": OLD}, {"base": NEW}, [f"base changed from {OLD[:12]} to {NEW[:12]}"], id="commit"),
        pytest.param({"prompt": {"run": "a"}}, {"prompt": {"run": "b"}}, ["prompt changed"], id="structure"),
        pytest.param({"x": "a" * 79}, {"x": "b"}, ["x changed"], id="long"),
        pytest.param({"x": "a" * 78}, {"x": "b"}, [f"x changed from {excerpt('a' * 78)} to b"], id="not too long"),
        pytest.param({"x": "sha256:1"}, {"x": "sha256:2"}, ["x changed from sha256:1 to sha256:2"], id="like a digest"),
        pytest.param({"x": True}, {"x": False}, ["x changed from true to false"], id="flag"),
        pytest.param({}, {"url": "u"}, ["url is new"], id="new"),
        pytest.param({"url": "u"}, {}, ["url is gone"], id="gone"),
        pytest.param({"x": "\x1b[2J"}, {"x": "y"}, [r"x changed from \x1b[2J to y"], id="what a terminal obeys"),
    ],
)
def test_what_differs_is_said(old: dict[str, object], new: dict[str, object], words: list[str]) -> None:
    assert list(differences(parts(old), parts(new))) == words


def test_a_key_rests_on_the_keys_of_what_a_step_needs() -> None:
    names = ("a", "b", "c", "d")
    steps = [
        Step(id=name, kind=name, what="", phase="work", needs=needs, deadline_seconds=1.0, origin="")
        for name, needs in zip(names, [(), ("a",), ("b",), ("a",)], strict=True)
    ]
    keys = {name: parts({"x": 1}) for name in names[:3]}
    before = digests(steps, keys)

    assert [name for name in names if before[name] != digests(steps, {**keys, "b": {}})[name]] == ["b", "c"]
    assert digests(steps, {**keys, "d": {}}) == before
