"""Change the pure rules in every small way that mutmut knows, and list the changes that nothing notices.

``make mutation`` does it in a copy of this tree, for ``ROOMS`` or those that are named; a room is a folder or a module.
A change is noticed when mypy refuses it, when a test of its room fails, or when that does not end: a loop without an
end is a failure. Literals with a blank in them are left as they are, for they are the words of messages. A survivor is
killed by a test, or stands in ``survivors.yaml`` with the reason why it may live: by the function, and the line that it
makes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from tests.mutants.run import NOT_COPIED, ROOT

ROOMS = ("compiler", "core/redact", "lifecycle", "plan", "policy", "triage")
NAMED = Path(__file__).with_name("survivors.yaml")
NOTICED = ("killed", "caught by type check", "timeout")
CONFIG = """
[tool.mutmut]
source_paths = ["runner"]
only_mutate = {only}
also_copy = ["manifests", "runners", "schemas", "skills"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-x", "-m", "not nightly and not slow"]
pytest_add_cli_args_test_selection = {tests}
type_check_command = [
  "{python}", "-m", "mypy", "--output", "json", "--no-warn-unused-ignores",
  "--disable-error-code", "no-redef",  # all copies of a method define the same attributes
]
process_isolation = "forkserver"  # or what a test has cached would hide changes from the next
track_dependencies = false
use_git_change_detection = false
"""
MUTMUT = """
from mutmut.mutation import mutators
words = lambda node: () if " " in getattr(node, "value", "") else string(node)
string = mutators.operator_string
mutators.mutation_operators[:] = [(of, words if op is string else op) for of, op in mutators.mutation_operators]
from mutmut.__main__ import cli
cli()
"""
_MUTANT = re.compile(r"^ *(\S+)__mutmut_(\d+): (.+)$", re.MULTILINE)


def tried(copy: Path) -> list[tuple[str, str, str]]:
    """The function of each mutant, what became of it, and the line that it makes, unless it was noticed."""
    _mutmut(copy, "run", "--max-children", "2")
    found = _MUTANT.findall(_mutmut(copy, "results", "--all", "yes"))
    return [(of, told, "" if told in NOTICED else _line(copy, f"{of}__mutmut_{number}")) for of, number, told in found]


def _line(copy: Path, mutant: str) -> str:
    made = re.findall(r"^\+(?!\+\+)(.*)", _mutmut(copy, "show", mutant), re.MULTILINE)
    return " ".join(line.strip() for line in made) or "(removed)"


def _mutmut(copy: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", MUTMUT, *words], cwd=copy, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"mutmut {words[0]} ended with {done.returncode}: {done.stdout[-5_000:]}{done.stderr[-5_000:]}")
    return done.stdout


def judge(found: Sequence[tuple[str, str, str]], named: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What nobody named of what nothing noticed, and what is named and not there."""
    alive = {(function, line) for function, _, line in found if line}
    modules = {function.rpartition(".")[0] for function, _, _ in found}
    expected = {(function, line) for function, lines in named.items() for line in lines}
    gone = {(function, line) for function, line in expected - alive if function.rpartition(".")[0] in modules}
    return [f"{'named, and gone: ' if one in gone else ''}{': '.join(one)}" for one in sorted(alive - expected | gone)]


def main(rooms: Sequence[str]) -> int:
    places = [
        (f"runner/{room}/*.py", f"tests/{room}")
        if (ROOT / "runner" / room).is_dir()
        else (f"runner/{room}.py", f"tests/{room.replace('/', '/test_')}.py")
        for room in rooms or ROOMS
    ]
    only, tests = map(list, zip(*places, strict=True))
    with tempfile.TemporaryDirectory(prefix="runner-mutation-") as name:
        copy = Path(name) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        with (copy / "pyproject.toml").open("a") as config:
            config.write(CONFIG.format(only=only, tests=tests, python=sys.executable))
        found = tried(copy)
    left = judge(found, YAML(typ="safe").load(NAMED))
    print("\n".join(left))
    print(f"{len(found)} changes: {dict(Counter(told for _, told, _ in found))}; {len(left)} to be read")
    return 1 if left or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
