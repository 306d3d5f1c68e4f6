import os
import subprocess
from pathlib import Path

import pytest

from runner.core import plugins
from tests.support.needs import SHELLCHECK

ROOT = Path(__file__).parents[2]
SHELL = [
    *sorted(ROOT.glob("runners/*.sh")),
    *sorted(ROOT.glob("manifests/**/*.sh")),
    *sorted(ROOT.glob("skills/**/*.sh")),
    *sorted(ROOT.glob("tests/**/*.sh")),
    ROOT / ".ci/run",
]


def test_sub_runners_pass_their_own_check_in_bash() -> None:
    done = subprocess.run(
        ["bash", ROOT / "tests/runners/check.sh"], cwd="/", env={"PATH": os.defpath}, capture_output=True
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b" passed\n")


@pytest.mark.scenario("TRI-24")
def test_every_agent_has_a_sub_runner_on_common_ground() -> None:
    agents = plugins.names("runner.agents")

    for agent in agents:
        assert '/common.sh"' in (ROOT / "runners" / f"{agent}.sh").read_text()
        assert (ROOT / "runners" / f"{agent}-post.sh").exists() is (agent != "script")
    assert set(agents) > {"claude", "codex", "gemini", "goose"}


@pytest.mark.parametrize("script", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
@SHELLCHECK.mark
def test_shell_is_clean(script: Path) -> None:
    done = subprocess.run(["shellcheck", "-x", "-P", "SCRIPTDIR", script], capture_output=True, text=True)

    assert done.stdout + done.stderr == ""
