"""What the README and the Makefile say is so. What is true of every page is in tests/docs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.page import read_page

ROOT = Path(__file__).parents[1]
README = read_page(ROOT / "README.md")


def test_the_readme_is_one_page() -> None:
    assert len(README.text.splitlines()) <= 150


def test_a_version_of_the_changelog_is_a_list_of_short_bullets() -> None:
    _, *versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")

    for version in versions:
        bullets = version.split("\n- ")[1:]
        subjects = [bullet[2 : bullet.index("**", 2)] for bullet in bullets]
        assert 1 <= len(bullets) <= 40
        assert len(subjects) == len(set(subjects))
        assert [bullet for bullet in bullets if len(bullet.split("\n\n")[0].splitlines()) > 4] == []


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_make_knows_the_targets_of_the_first_screen(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)

    assert f"make {target}" in README.text
    assert (done.returncode, done.stderr) == (0, "")


def test_the_workflow_gives_the_action_what_it_takes() -> None:
    (workflow,) = (fence.text for fence in README.fences if fence.language == "yaml")
    yaml = YAML(typ="safe")
    (job,) = yaml.load(workflow)["jobs"].values()
    action: dict[str, Any] = yaml.load(ROOT / "action.yml")
    (step,) = (step for step in job["steps"] if step.get("uses", "").startswith("OWNER/runner@v"))

    assert step["with"].keys() <= action["inputs"].keys()
    assert step["with"]["command"] == action["inputs"]["command"]["default"]
    assert step["uses"].rpartition("@v")[2] == action["inputs"]["version"]["default"]
