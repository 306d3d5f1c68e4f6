"""Break the product on purpose, one small change at a time, and see that the tests of the scenario notice.

``make mutants`` runs all of ``tests/mutants/ID-*.yaml``, ``make mutants MUTANT=TRI-33`` those whose name begins so. The
checkout is never changed: each worker has a copy with an environment that imports the copy. A test that notices a
mutant must pass without it, so a broken test kills nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("runner", "manifests", "runners", "skills")
NOT_COPIED = (".git", ".venv*", ".runner-state", "__pycache__", "dist", ".*_cache", "node_modules")
WORKERS = 2
SECONDS = 900  # for the tests of one scenario
TEST_SECONDS = 120  # for one of them: a mutant may hang, which a test notices by failing then
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?$", re.MULTILINE)


class Stale(Exception):
    """The product has no longer just one place that reads as the mutant says."""


@dataclass(frozen=True)
class Change:
    """In the only place of the product, or of the files that ``within`` matches, that reads ``old``, put ``new``."""

    old: str
    new: str
    within: str | None = None

    def applied(self, tree: Path) -> tuple[Path, str]:
        """The file and its changed text. Raises ``Stale``."""
        found = [(path, text) for path in self._files(tree) if (text := _text(path)) and self._pattern.search(text)]
        if len(found) != 1 or len(self._pattern.findall(found[0][1])) != 1:
            places = ", ".join(str(path.relative_to(tree)) for path, _ in found) or "no file"
            raise Stale(f"`{self.old.strip().splitlines()[0]}` should be in one place, and is in {places}")
        path, text = found[0]
        return path, self._pattern.sub(self._replacement, text)

    def _files(self, tree: Path) -> Iterator[Path]:
        for pattern in [self.within] if self.within else [f"{folder}/**/*" for folder in PRODUCT]:
            yield from _matching(tree, pattern)

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Lines keep their indentation to each other, and may stand deeper than in the mutant."""
        first, *rest = self.old.rstrip().split("\n")
        if not rest:
            return re.compile(re.escape(first.strip()))
        lines = "".join(rf"\n(?P=indent){re.escape(line)}" if line else r"\n" for line in rest)
        return re.compile(rf"^(?P<indent>[ \t]*){re.escape(first)}{lines}$", re.MULTILINE)

    def _replacement(self, found: re.Match[str]) -> str:
        if "\n" not in self.old.rstrip():
            return self.new.strip()
        return "\n".join(f"{found['indent']}{line}".rstrip() for line in self.new.rstrip().split("\n"))


@dataclass(frozen=True)
class Mutant:
    """Changes of the product that together break a scenario, and are named by its id and a few words.

    ``noticed_by`` names the tests of what is promised beside scenarios, in a mutant that is named `ALSO`.
    """

    name: str
    breaks: str
    changes: tuple[Change, ...]
    noticed_by: tuple[str, ...] = ()

    @property
    def scenario(self) -> str:
        return self.name[:6]


def load(folder: Path = Path(__file__).parent) -> list[Mutant]:
    return [read(path) for path in sorted(folder.glob("[A-Z]*.yaml"))]


def read(path: Path) -> Mutant:
    found = YAML(typ="safe").load(path)
    parts = found.get("changes", [found])
    changes = tuple(Change(p["old"], p["new"], p.get("in")) for p in parts)
    return Mutant(path.stem, found["breaks"], changes, tuple(found.get("noticed_by", ())))


@cache
def _matching(tree: Path, pattern: str) -> list[Path]:
    """The files of a tree, in which no mutant makes another."""
    return [path for path in sorted(tree.glob(pattern)) if path.suffix != ".pyc" and path.is_file()]


def _text(path: Path) -> str:
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, written: int) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""  # a program


class Tree:
    """A copy of the checkout, and an interpreter that imports it."""

    def __init__(self, folder: Path) -> None:
        for closed in (folder, folder.parent):  # some tests start the product as another user
            closed.chmod(0o755)
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.python = self.root / ".venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / ".venv"], check=True)
        (site,) = (self.root / ".venv" / "lib").glob("python*/site-packages")
        ours = sysconfig.get_path("purelib")
        (site / "copy.pth").write_text(f"{self.root}\nimport site; site.addsitedir({ours!r})\n")
        self._written = int(time.time())
        self._sound: dict[str, bool] = {}

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        before: dict[Path, str] = {}
        try:
            for change in mutant.changes:
                path, text = change.applied(self.root)
                before.setdefault(path, path.read_text())
                self._write(path, text)
            yield
        finally:
            for path, text in before.items():
                self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """With a time that it never had: compiled modules are told apart by size and second."""
        path.write_text(text)
        self._written += 1
        os.utime(path, (self._written, self._written))

    def run(self, *arguments: str) -> tuple[int, str]:
        env = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONPATH")}
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly"]
        command += [f"--timeout={TEST_SECONDS}", *arguments]
        with (
            tempfile.TemporaryFile("w+") as out,
            subprocess.Popen(
                command, cwd=self.root, env=env, stdout=out, stderr=out, start_new_session=True
            ) as process,
        ):
            for number in (signal.SIGINT, signal.SIGKILL):  # at the first it ends what its fixtures have started
                try:
                    process.wait(SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, number)
            code = process.wait()
            out.seek(0)
            return code, out.read()

    def is_sound(self, test: str) -> bool:
        """Whether a test passes without a mutant, for which it runs once."""
        if test not in self._sound:
            self._sound[test] = self.run(test)[0] == 0
        return self._sound[test]

    def files_of(self, scenario: str) -> list[str]:
        """The test files that name a scenario, themselves or by the conformance suite that they import."""
        named = []
        for path in sorted(self.root.glob("tests/**/test_*.py")):
            suite = self.root / "runner" / "testing" / "conformance" / path.name
            texts = [path, suite] if path.parent.name == "conformance" and suite.exists() else [path]
            if any(scenario in text.read_text() for text in texts) and path.name != "test_scenarios.py":
                named.append(str(path.relative_to(self.root)))
        return named


def judge(mutant: Mutant, tree: Tree) -> tuple[bool, str]:
    """Whether the mutant died, and by which test, or why it lives."""
    tests = mutant.noticed_by
    if not tests:
        files = tree.files_of(mutant.scenario)
        if not files:
            return False, f"NO TEST   {mutant.name}: no test names {mutant.scenario}"
        tests = ("--scenario", mutant.scenario, *files)
    try:
        with tree.broken(mutant):
            code, out = tree.run("-x", "--tb=short", *tests)
    except Stale as stale:
        return False, f"STALE     {mutant.name}: {stale}"
    failed = FAILED.search(out)
    if code == 0:
        return False, f"SURVIVED  {mutant.name}: {mutant.breaks}"
    if failed is None:
        return False, f"BROKEN    {mutant.name}: pytest ended with {code}: {out[-1_000:]}"
    killer = failed[1]
    if not tree.is_sound(killer):
        return False, f"BROKEN    {mutant.name}: {killer} fails without it, too"
    return True, f"killed    {mutant.name}: {mutant.breaks}, by {killer}"


def judge_all(mutants: Sequence[Mutant], workers: int = WORKERS) -> list[str]:
    """The lines about those that live. Each is printed as soon as it is known."""
    local, alive = threading.local(), []
    with tempfile.TemporaryDirectory(prefix="runner-mutants-") as folder:

        def begin() -> None:
            local.tree = Tree(Path(tempfile.mkdtemp(dir=folder)))

        def one(mutant: Mutant) -> None:
            began = time.monotonic()
            died, line = judge(mutant, local.tree)
            print(f"{line} ({time.monotonic() - began:.0f} s)", flush=True)
            if not died:
                alive.append(line)

        Path(folder).chmod(0o755)  # tests look as other users
        with ThreadPoolExecutor(workers, initializer=begin) as pool:
            list(pool.map(one, mutants))
    return alive


def main(wanted: Sequence[str]) -> int:
    from tests.support.claims import claimed

    mutants = load()
    chosen = [mutant for mutant in mutants if not wanted or mutant.name.startswith(tuple(wanted))]
    alive = judge_all(chosen)
    without = [] if wanted else sorted(set(claimed()) - {mutant.scenario for mutant in mutants})
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants died")
    if without:
        print(f"claimed, and without a mutant: {', '.join(without)}")
    return 1 if alive or without or not chosen else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
