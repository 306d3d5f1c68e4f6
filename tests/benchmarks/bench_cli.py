"""CPU of starting the command, beside a Python that imports what any command line in Python would, and of its common
verbs beside `pre-commit validate-config`.

Run: ``python tests/benchmarks/bench_cli.py``. Medians; asserts nothing. The targets are ratios of 2 for the command,
2.2 for a plan of two documents, 1.0 for a list of runs, 1.5 to validate, 3.0 for a run on `local` that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.benchmarks import measure
from tests.benchmarks.measure import Cost, in_turns, python
from tests.benchmarks.sizes import rounds

ROOT = Path(__file__).parents[2]
ROUNDS = rounds(21)
FLOOR = "python -c 'import argparse, json'"
COMMANDS = {
    FLOOR: ["-c", "import argparse, json"],
    "runner --version": ["-m", "runner", "--version"],
    "runner --help": ["-m", "runner", "--help"],
}
YARDSTICK = "pre-commit validate-config"
DOCUMENTS = """\
apiVersion: runner/v1
kind: AgentType
metadata: {name: nothing}
spec:
  agent: script
  script: {files: [{path: run.sh, content: "true", executable: true}]}
  workspace: {enabled: true, providers: [local], repo_source: {type: none}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {name: nothing}
spec: {agent_type: nothing, prompt: nothing}
"""
VERBS = {
    YARDSTICK: ["pre_commit", "validate-config", "config.yaml"],
    "runner validate": ["runner", "validate", "nothing.runner.yaml"],
    "runner plan": ["runner", "plan", "nothing.runner.yaml"],
    "runner runs list": ["runner", "runs", "list"],
    "runner apply": ["runner", "apply", "--yes", "nothing.runner.yaml"],
}


def medians() -> dict[str, Cost]:
    """Seconds of each command."""
    return measure.medians(in_turns(ROUNDS, {name: partial(python, *words) for name, words in COMMANDS.items()}))


def verbs() -> dict[str, Cost]:
    """Seconds of common verbs, with a state of their own, and of the yardstick."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text("repos: []\n")
        Path(folder, "nothing.runner.yaml").write_text(DOCUMENTS)
        env = {**measure.compiled(), "PYTHONPATH": str(ROOT), "RUNNER_HOME": f"{folder}/state"}

        def start(*words: str) -> None:
            subprocess.run([sys.executable, "-m", *words], cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True)

        for words in VERBS.values():
            start(*words)  # what is not compiled yet is compiled now
        return measure.medians(in_turns(ROUNDS, {name: partial(start, *words) for name, words in VERBS.items()}))


def main() -> None:
    for found, floor in ((medians(), FLOOR), (verbs(), YARDSTICK)):
        for name, (wall, cpu) in found.items():
            ratio = cpu / found[floor][1]
            print(f"{name:34} wall {wall * 1e3:5.0f} ms  cpu {cpu * 1e3:5.0f} ms  cpu ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
