"""Limits of the server's defaults in whole runs: in the plan, in the record, and felt by the commands."""

from __future__ import annotations

import re

import pytest

from runner.core.errors import UsageError
from runner.core.settings import Settings
from tests.support.needs import USERS
from tests.support.situations import Project, document

pytestmark = USERS.mark

MIB = 1 << 20
SCRIPT = """
head -c 100M /dev/zero > big || echo refused
rm big
echo work > made
for place in /workspace /output $HOME; do
    python3 -SIc 'import os, sys; f = os.statvfs(sys.argv[1]); print("size", f.f_blocks * f.f_frsize)' $place
done
"""


@pytest.mark.scenario("CFG-06", only="provider")
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_limits_that_are_not_written_are_the_defaults_and_hold(project: Project, provider: str) -> None:
    defaults = {"CPU": "1.5", "MEMORY": "768M", "DISK": "64M"}
    project.env |= {f"WORKSPACE_DEFAULT_{name}": value for name, value in defaults.items()}
    project.script(SCRIPT, provider=provider)

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert "not enforced" not in done.out + done.err
    seen = record["observed"]["limits"]
    assert seen == {"cpus": 1.5, "memory_bytes": 768 * MIB, "disk_bytes": 64 * MIB, "pids": 512}
    assert "refused" in project.logs("agent")
    sizes = [int(size) for size in re.findall(r"^size (\d+)$", project.logs("agent"), re.MULTILINE)]
    assert sizes == pytest.approx([64 * MIB] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("written", "code", "words"),
    [
        ("", 0, "disk 10G: not enforced by local"),
        ("resource_limits: {disk: 64M}", 2, "`local` cannot enforce disk 64M: others write to the same disk"),
    ],
    ids=["default", "written"],
)
def test_the_disk_of_a_project_that_is_seen_whole_has_no_limit(
    project: Project, written: str, code: int, words: str
) -> None:
    project.script("true", workspace=written, run="project: shop")
    project.add(document("Project", "shop", "workspace_isolation: false"))

    done = project.runner("plan", ".")

    assert done.code == code, done.out + done.err
    assert words in done.out + done.err


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("WORKSPACE_DEFAULT_CPU", "1m", "from 10m on"),
        ("WORKSPACE_DEFAULT_MEMORY", "1K", "at least 16M"),
        ("WORKSPACE_DEFAULT_DISK", "1K", "from 8M to 2T"),
    ],
    ids=["cpu", "memory", "disk"],
)
def test_a_default_has_the_bounds_of_a_written_limit(name: str, value: str, takes: str) -> None:
    """Else each workspace is made, and no command in it starts."""
    with pytest.raises(UsageError, match=name) as caught:
        Settings.from_env({name: value})
    assert takes in str(caught.value.hint)
