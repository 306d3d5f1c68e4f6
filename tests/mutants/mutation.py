"""Change the pure rules in every small way that mutmut knows, and list the changes that no test of theirs notices.

``make mutation`` does it in a copy of this tree, for ``ROOMS`` or the rooms that are named. A survivor is killed
by a test, or stands in ``survivors.yaml`` with the reason why it may live: by the function, and the line that it makes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from tests.mutants.run import NOT_COPIED, ROOT

ROOMS = ("lifecycle", "policy")
SECONDS = 3_600  # for all of them; what was not tried by then is said
NAMED = Path(__file__).with_name("survivors.yaml")
CONFIG = """
[tool.mutmut]
source_paths = ["runner"]
only_mutate = [{only}]
also_copy = ["manifests", "runners", "schemas", "skills"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-x", "-m", "not nightly and not slow"]
pytest_add_cli_args_test_selection = [{tests}]
track_dependencies = false
use_git_change_detection = false
"""
_MUTANT = re.compile(r"^ *(\S+)__mutmut_(\d+): (.+)$", re.MULTILINE)


def survivors(copy: Path) -> Iterator[tuple[str, str]]:
    """The function and the new line of each mutant that no test noticed, or that no test runs."""
    listed = _mutmut(copy, "results").stdout
    for function, number, status in _MUTANT.findall(listed):
        if status in ("survived", "no tests"):
            shown = _mutmut(copy, "show", f"{function}__mutmut_{number}").stdout
            lines = [line[1:].strip() for line in shown.splitlines() if re.match(r"\+(?!\+\+)", line)]
            yield function, " ".join(lines) or "(removed)"
        elif status == "not checked":
            yield function, "not tried in time"


def _mutmut(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=copy, text=True, capture_output=True, check=False)


def unnamed(found: Sequence[tuple[str, str]], named: Mapping[str, Mapping[str, str]]) -> list[str]:
    return sorted({f"{function}: {line}" for function, line in found if line not in named.get(function, {})})


def main(rooms: Sequence[str]) -> int:
    rooms = rooms or ROOMS
    with tempfile.TemporaryDirectory(prefix="runner-mutation-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        only = ", ".join(f'"runner/{room}/*.py"' for room in rooms)
        tests = ", ".join(f'"tests/{room}"' for room in rooms)
        with (copy / "pyproject.toml").open("a") as config:
            config.write(CONFIG.format(only=only, tests=tests))
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "2"]
        try:
            subprocess.run(command, cwd=copy, stdout=subprocess.DEVNULL, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"not all was tried in {SECONDS} s")
        left = unnamed([*survivors(copy)], YAML(typ="safe").load(NAMED) or {})
    print("\n".join([*left, f"{len(left)} changes that no test notices and nobody named"]))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
