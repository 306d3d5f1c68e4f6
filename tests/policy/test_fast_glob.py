"""Our globs beside those of fast-glob, the library that the documents name.

fast-glob is asked with ``dot``. Where the two differ on purpose, ``spelled`` says in its words what a pattern means:

* a pattern without ``/`` holds at any depth, not at the top only;
* a trailing ``/`` stands for what is below directories, where fast-glob matches nothing;
* an allowed ``src/**`` is what is below ``src``, not a file ``src`` as well;
* a forbidden pattern is also against everything below what it matches, and holds with case aside, too.

Its own slips are gone round: it takes a directory such as ``a?`` for a literal name, and a file called like the ``x``
of ``x/**`` it finds only where ``x`` is no wildcard.

Patterns that fast-glob reads and ours refuses are not compared: groups, classes by name, ``!``, ``\\``, a leading
``/``. Neither are parentheses without ``|``, which are literal here, nor ``]`` as the first character of a
class, which is one of its characters here and sometimes there.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from runner.policy.paths import PathPolicy, check_pattern
from tests.support.needs import program

ASK = """
const glob = require(process.argv[1]);
const answer = {};
for (const [root, patterns] of JSON.parse(require("fs").readFileSync(0, "utf8")))
    answer[root] = Object.fromEntries(patterns.map((pattern) =>
        [pattern, glob.sync(pattern, {cwd: root, dot: true, followSymbolicLinks: false, suppressErrors: true})]));
console.log(JSON.stringify(answer));
"""
FILES = ("a", "B.pem", "ab", ".a", "d/a", "d/b.pem", "d/e/a", "d/e/.pem", "D2/Ab", "secrets", "x/secrets/k", "x y/[a]")

# What fast-glob 3.3.3 finds among FILES.
RECORDED = {
    "a": "a",
    "**/a": "a d/a d/e/a",
    "*.pem": "B.pem",
    "**/*.pem": "B.pem d/b.pem d/e/.pem",
    "**/*.{pem,key}": "B.pem d/b.pem d/e/.pem",
    "d/*": "d/a d/b.pem",
    "d/**": "d/a d/b.pem d/e/.pem d/e/a",
    "d/**/a": "d/a d/e/a",
    "**/secrets/**": "secrets x/secrets/k",
    "**/secrets/**/*": "x/secrets/k",
    "[!a]": "",
    "**/[!a-z]*": ".a B.pem D2/Ab d/e/.pem x y/[a]",
    "**/[^a-z]*": ".a B.pem D2/Ab d/e/.pem x y/[a]",
    "**/?": "a d/a d/e/a x/secrets/k",
    "*": ".a B.pem a ab secrets",
    "**": ".a B.pem D2/Ab a ab d/a d/b.pem d/e/.pem d/e/a secrets x y/[a] x/secrets/k",
    "**/[[]a]": "x y/[a]",
    "*/[Aa]*": "D2/Ab d/a",
}

Found = Callable[[Path, str], set[str]]


def spelled(pattern: str) -> str:
    """What fast-glob is to be asked for the files below the root that a pattern matches to its end."""
    pattern = pattern if "/" in pattern.removesuffix("/") else f"**/{pattern}"
    above, _, name = (pattern + "**/*" if pattern.endswith("/") else pattern).rpartition("/")
    return above.replace("?", "[!~]") + "/" * bool(above) + name


def allowing(pattern: str) -> str:
    below = spelled(pattern)
    return below + "/*" if below.endswith("/**") and below != "**/**" else below


def forbidding(pattern: str) -> tuple[str, ...]:
    itself = spelled(pattern)
    return itself, itself.removesuffix("/**"), itself.replace("?", "[!~]") + "/**/*"


def allowed(pattern: str, files: Iterable[str]) -> set[str]:
    judged = PathPolicy((pattern,), (), 0)
    return {file for file in files if judged.judge(file).allowed}


def forbidden(pattern: str, files: Iterable[str]) -> set[str]:
    judged = PathPolicy(("**",), (pattern,), 0)
    return {file for file in files if not judged.judge(file).allowed}


@pytest.mark.parametrize("pattern", RECORDED)
def test_a_pattern_matches_what_fast_glob_found(pattern: str) -> None:
    found = {file for file in FILES if f" {file} " in f" {RECORDED[pattern]} "}
    below = {file for file in FILES if any(file.startswith(f"{match}/") for match in found)}

    assert check_pattern(pattern) is None
    if spelled(pattern) == pattern:
        assert forbidden(pattern, FILES) >= found | below
    if allowing(pattern) == pattern:
        assert allowed(pattern, FILES) == found


@pytest.fixture(scope="module")
def fast_glob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program("npm").require()
    folder = tmp_path_factory.mktemp("npm") / "fast-glob"
    shutil.copytree(Path(__file__).parent / "fast-glob", folder)
    words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "node_modules" / "fast-glob"


def ask(fast_glob: Path, patterns: Mapping[Path, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    given = json.dumps([(str(root), list(dict.fromkeys(wanted))) for root, wanted in patterns.items()])
    command = ["node", "-e", ASK, str(fast_glob)]
    done = subprocess.run(command, input=given, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return answer


def tree(root: Path, files: Iterable[str]) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.mark.nightly
def test_the_record_is_what_fast_glob_finds(tmp_path: Path, fast_glob: Path) -> None:
    root = tree(tmp_path / "root", FILES)

    found = ask(fast_glob, {root: list(RECORDED)})[str(root)]

    assert {pattern: " ".join(sorted(found[pattern])) for pattern in RECORDED} == RECORDED


NAMES = ("a", "b", "ab", "B", ".a", "a.b", "Ab.c", "[a]", "{a}", "x y", "a-b", "(a)", "\u00e9", "c1", "c2")
WORDS = (
    *("**", "*", "?", "a", "B", "a*", "*b", "*.b", "a?", ".*", "?*", "**a", "\u00e9", "x y", "{a}", "[[]a]", "*[)]"),
    *("[ab]", "[!a]", "[^a]", "[!A-Z]*", "[a-c]*", "[!a-c]*", "[A-C]*", "[a-]*", "c[0-9]", "c{1..3}"),
    *("{a,b}", "*.{b,c}", "{a,b*,[!x]}", "a{,b}", "{B,.a}*", "{a,{b,ab}}"),
)


def some_files(rng: random.Random) -> Iterator[str]:
    """Paths of which none is another's directory, nor would be with case aside."""
    taken: set[str] = set()
    folders: set[str] = set()
    for _ in range(600):
        path = "/".join(rng.choices(NAMES, k=rng.randint(1, 4)))
        above = {"/".join(path.lower().split("/")[:depth]) for depth in range(1, path.count("/") + 1)}
        if path.lower() not in folders and not above & taken:
            taken.add(path.lower())
            folders |= above
            yield path


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_generated_patterns_match_what_fast_glob_finds(tmp_path: Path, fast_glob: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = list(some_files(rng))
    written, aside = tree(tmp_path / "written", files), tree(tmp_path / "aside", (file.lower() for file in files))
    drawn = ("/".join(rng.choices(WORDS, k=rng.randint(1, 4))) + rng.choice(["", "", "/"]) for _ in range(600))
    patterns = [pattern for pattern in drawn if check_pattern(pattern) is None]
    asked = [query for pattern in patterns for query in (allowing(pattern), *forbidding(pattern))]
    found = ask(fast_glob, {written: asked, aside: [query.lower() for query in asked]})
    as_written, with_case_aside = found[str(written)], found[str(aside)]

    for pattern in patterns:
        anyhow = {match for query in forbidding(pattern) for match in with_case_aside[query.lower()]}
        against = {match for query in forbidding(pattern) for match in as_written[query]}
        against |= {file for file in files if file.lower() in anyhow}

        assert allowed(pattern, files) == set(as_written[allowing(pattern)]), pattern
        assert forbidden(pattern, files) >= against, pattern
        if not re.search(r"\[[!^]", pattern):  # which holds for each name as it is written or with case aside
            assert forbidden(pattern, files) == against, pattern
