"""What the README and the Makefile say is so."""

import io
import re
import subprocess
from pathlib import Path

import pytest

import runner.cli.verbs
import runner.core.errors
from runner.cli.main import BUG, main
from runner.cli.output import Output
from runner.cli.verbs.plan import DIFFERS
from runner.core import plugins
from runner.core.errors import RunnerError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(arguments, Output(out, out)), out.getvalue()


def test_the_manifest_of_the_readme_is_fine(tmp_path: Path) -> None:
    manifest = re.search(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert manifest is not None
    (tmp_path / "readme.runner.yaml").write_text(manifest[1])
    (tmp_path / "fix.sh").write_text("true\n")

    assert run("validate", str(tmp_path)) == (0, "3 documents fine\n")


def test_the_verbs_of_the_readme_are_the_verbs() -> None:
    told = re.findall(r"^\| `runner (\w+)", README, re.MULTILINE)

    assert sorted(told) == list(plugins.names(runner.cli.verbs))


def test_the_exit_codes_of_the_readme_are_the_exit_codes() -> None:
    families = [
        cls for cls in vars(runner.core.errors).values() if isinstance(cls, type) and issubclass(cls, RunnerError)
    ]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}

    assert told == {cls.exit_code for cls in families} | {0, 1, DIFFERS, BUG, 124, 130}


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_make_knows_the_targets_of_the_first_screen(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)

    assert f"make {target}" in README
    assert (done.returncode, done.stderr) == (0, "")
