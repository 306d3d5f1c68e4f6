"""Bringing a repository of 10,000 files, 100 MB, by URL, beside `git clone --depth 1` of it in the same run.

    python -m tests.benchmarks.bench_clone [ROUNDS]

The server is git's own back end behind https on the loopback, all on tmpfs. The methods take turns; the least wall
and CPU time, the server's included, are printed, for the objects alone (beside `clone --no-checkout`) and with the
files. The targets are at most 1.1 cold, and under 0.2 warm, with a mirror that has the commit. ``next`` is a commit
that the mirror has not, of which one file is new.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

from runner.core.settings import Settings
from runner.git.binary import GitBinary
from runner.git.remote import RemoteAccess
from runner.safefs import trees
from tests.benchmarks.bench_checkout import ENV, make_repository
from tests.benchmarks.measure import Cost, since
from tests.benchmarks.sizes import rounds
from tests.support.git_servers import https


def clone(git: str, url: str, env: dict[str, str], into: Path, *words: str) -> Cost:
    begun = since()
    trusting = f"http.sslCAInfo={env['SSL_CERT_FILE']}"
    argv = [git, "-c", trusting, "clone", "--quiet", "--depth=1", *words, url, str(into)]
    subprocess.run(argv, env=ENV | {"PATH": os.environ["PATH"]}, check=True)
    return since(begun)


async def bring(git: GitBinary, url: str, commit: str, into: Path) -> tuple[Cost, Cost]:
    """What the objects took, and what these and the files."""
    begun = since()
    await git.fetch_url(url, commit, into=into / "private", depth=1)
    objects = since(begun)
    (into / "tree").mkdir()
    await git.check_out(into / "private", commit, into=into / "tree", branch="main", origin=url)
    return objects, since(begun)


def main(rounds: int) -> None:
    git = shutil.which("git")
    took: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in ("git clone", "cold", "warm", "next")}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        room = Path(folder)
        source = room / "served" / "source"
        commit = make_repository(source, git)
        with https(room / "served", room) as server:
            url, home, into = f"{server.url}/source", room / "home", room / "into"
            settings = Settings.from_env({"RUNNER_HOME": str(home), "PATH": os.environ["PATH"], **server.env})
            adapter = GitBinary(git, RemoteAccess.of(settings, os.environ["PATH"]))
            for number in range(rounds):
                whole, bare = (clone(git, url, server.env, into / name, *words) for name, words in
                               (("c", ()), ("n", ("--no-checkout",))))  # fmt: skip
                took["git clone"].append((bare, whole))
                trees.remove(home)
                for name in ("cold", "warm", "next"):
                    if name == "next":
                        (source / "new").write_text(str(number))
                        for argv in (["add", "."], ["commit", "--quiet", "-m", "x"]):
                            subprocess.run([git, "-C", str(source), *argv], env=ENV, check=True)
                        commit = subprocess.check_output(
                            [git, "-C", str(source), "rev-parse", "HEAD"], text=True
                        ).strip()
                    trees.remove(into)
                    into.mkdir()
                    took[name].append(trio.run(bring, adapter, url, commit, into))
                trees.remove(into)
    for part, what in enumerate(("objects", "with files")):
        least = {name: [min(each[part][unit] for each in took[name]) for unit in (0, 1)] for name in took}
        for name, (wall, used) in least.items():
            of = [wall / least["git clone"][0], used / least["git clone"][1]]
            print(f"{name:10} {what:10} wall {wall:6.3f} s {of[0]:5.2f} x  cpu {used:6.3f} s {of[1]:5.2f} x git clone")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else rounds(5))
