"""Clean checkouts of 10,000 files, 100 MB, on tmpfs, beside `git archive COMMIT | tar -x` in the same run.

    python -m tests.benchmarks.bench_checkout [ROUNDS]

The methods take turns; medians are printed, wall and CPU (children included). The target is that
``git`` with its comparison takes at most 1.5 times the wall time of archive and tar, which compare nothing.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import trio

from runner.git.binary import GitBinary
from runner.git.dulwich import GitDulwich
from tests.benchmarks.measure import Cost, cost, medians
from tests.benchmarks.sizes import rounds
from tests.support.folder_contents import folder

FILES, FILE_BYTES = 10_000, 10_000
ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "bench" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def make_repository(top: Path, git: str) -> str:
    """Files of which half is noise and half is text, as in source code with some assets."""
    source = random.Random(1)
    for number in range(FILES):
        path = top / f"folder{number % 100}" / f"part{number % 7}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((source.randbytes(FILE_BYTES // 2) + b"a line of text\n" * FILE_BYTES)[:FILE_BYTES])
    for argv in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([git, "-C", str(top), *argv], env=ENV, check=True)
    return subprocess.check_output([git, "-C", str(top), "rev-parse", "HEAD"], env=ENV, text=True).strip()


def archive(git: str, repository: Path, commit: str, into: Path) -> None:
    with subprocess.Popen([git, "-C", str(repository), "archive", commit], env=ENV, stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", str(into)], stdin=packed.stdout, check=True)


def main(rounds: int) -> None:
    git = shutil.which("git")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        room = Path(name)
        commit = make_repository(room / "source", git)
        private = room / "private"
        trio.run(lambda: GitBinary(git).fetch(room / "source", commit, into=private, depth=None))
        methods: dict[str, Callable[[Path], object]] = {
            "archive | tar": lambda into: archive(git, private, commit, into),
            "git": lambda into: trio.run(GitBinary(git).materialise, private, commit, into),
            "dulwich": lambda into: trio.run(GitDulwich().materialise, private, commit, into),
        }
        took: dict[str, list[Cost]] = {name: [] for name in methods}
        for _ in range(rounds):
            for name, method in methods.items():
                into = folder(room / "into")
                took[name].append(cost(lambda into=into, method=method: method(into)))
                shutil.rmtree(into)
    found = medians(took)
    floor = found["archive | tar"][0]
    for name, (wall, used) in found.items():
        print(f"{name:14} wall {wall:6.3f} s  cpu {used:6.3f} s  {wall / floor:5.2f} x archive | tar")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else rounds(7))
