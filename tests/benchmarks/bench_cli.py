"""CPU of starting the command, beside a Python that imports what any command line in Python would.

Run: ``python tests/benchmarks/bench_cli.py``. Medians; asserts nothing. The target is a ratio of 3.
"""

from __future__ import annotations

from functools import partial

from tests.benchmarks import measure
from tests.benchmarks.measure import Cost, in_turns, python
from tests.benchmarks.sizes import rounds

ROUNDS = rounds(21)
FLOOR = "python -c 'import argparse, json'"
COMMANDS = {
    FLOOR: ["-c", "import argparse, json"],
    "runner --version": ["-m", "runner", "--version"],
    "runner --help": ["-m", "runner", "--help"],
}


def medians() -> dict[str, Cost]:
    """Seconds of each command."""
    return measure.medians(in_turns(ROUNDS, {name: partial(python, *words) for name, words in COMMANDS.items()}))


def main() -> None:
    found = medians()
    for name, (wall, cpu) in found.items():
        print(f"{name:34} wall {wall * 1e3:5.0f} ms  cpu {cpu * 1e3:5.0f} ms  cpu ratio {cpu / found[FLOOR][1]:.2f}")


if __name__ == "__main__":
    main()
