"""The pictures of the documentation show what the command prints now; ``--update-cases`` draws them anew."""

from __future__ import annotations

import re

import pytest

from tests.support.needs import AGENTS, MEMORY
from tests.support.page import matches
from tests.support.params import nightly
from tests.support.pictures import PICTURES, PLACE, lines_of
from tests.support.situations import Project

# What else differs each time: who the sandbox's user is, and how much a CLI tells its model. What an ordinary user's
# sandbox cannot limit is a warning of the plan.
_OTHER = re.compile(
    r"uid \d+|[\d.]+k tokens +\$[\d.]+|[\w-]+\.jsonl|\d+ warnings?|^warning\[plan\.not-enforced\].*\n", re.M
)


def text_of(svg: str) -> str:
    return _OTHER.sub("", "\n".join(lines_of(svg)))


@pytest.mark.parametrize(
    "name",
    [
        "plan",
        nightly("steps"),
        pytest.param("triage", marks=[pytest.mark.slow, AGENTS.mark, MEMORY.mark]),
    ],
)
def test_a_picture_shows_what_the_command_prints(project: Project, name: str, request: pytest.FixtureRequest) -> None:
    path, svg = PLACE / f"{name}.svg", PICTURES[name](project)

    if request.config.option.update_cases:
        path.write_text(svg)
    else:
        assert matches(text_of(path.read_text()).splitlines(), text_of(svg)), text_of(svg)
