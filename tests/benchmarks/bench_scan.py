"""Our scan (every file's size included) beside ``rg --files`` (names only) on the same 100,000 files.

Run: ``python tests/benchmarks/bench_scan.py [FILES]``. Prints medians; asserts nothing. "listed" is the scan without
judging, "in Python" the scan of an installation without programs. The target is no more wall time than ``rg``.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner.policy.paths import PathPolicy
from runner.runtime.tree_scan import scan
from runner.safefs import listing, safe_open
from tests.benchmarks.measure import in_turns, medians
from tests.benchmarks.sizes import amount, rounds
from tests.policy.test_paths import DOCUMENTED

ROUNDS = rounds(7)
POLICY = PathPolicy(("**",), DOCUMENTED, 10 << 20)


def make_tree(root: Path, files: int) -> None:
    for number in range(files):
        directory = root / f"package{number // 5000}" / f"module{number // 100}"
        if number % 100 == 0:
            directory.mkdir(parents=True)
        name = "key.pem" if number % 5000 == 0 else f"some_source_file_{number % 100}.py"
        os.close(os.open(directory / name, os.O_CREAT))


def listed(root: Path) -> None:
    with safe_open.open_directory(root) as top, listing.open_lister(top, POLICY.max_file_size, ()) as lister:
        lister.ask("", "")
        for path, chunk in lister:
            for entry in chunk.special:
                lister.ask(f"{path}/{entry.name}".removeprefix("/"), f"{path}/{entry.name}".removeprefix("/"))


def main() -> None:
    files = int(sys.argv[1]) if len(sys.argv) > 1 else amount(100_000)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_tree(root, files)
        actions: dict[str, Callable[[], object]] = {
            "scan": lambda: scan(root, POLICY, limit_entries=10 * files),
            "listed": lambda: listed(root),
            "in Python": lambda: scan(
                root, POLICY, limit_entries=10 * files, open_lister=listing.open_in_process_lister
            ),
        }
        if shutil.which("rg"):
            command = ["rg", "--files", "--hidden", "--no-ignore", folder]
            actions["rg --files"] = lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        actions["scan"]()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        median = medians(in_turns(ROUNDS, actions))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    floor = median.get("rg --files", median["listed"])
    for name, (wall, cpu) in median.items():
        ratio = f"ratio wall {wall / floor[0]:.2f} cpu {cpu / floor[1]:.2f}"
        print(f"{name:12} {files} files  wall {wall * 1000:6.0f} ms  cpu {cpu * 1000:6.0f} ms  {ratio}")
    print(f"{'memory':12} {grown} KiB more after {ROUNDS} scans")


if __name__ == "__main__":
    main()
