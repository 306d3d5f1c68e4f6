"""CPU of `runner validate` on three documents, beside `pre-commit validate-config`; and of 1,000 documents alone.

Run: python tests/benchmarks/bench_validate.py. Whole processes, in turns; medians; asserts nothing. The target is a
ratio of 1.0. What pydantic and ruamel cost before they have read anything is the last row.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from shutil import copy

from tests.benchmarks.measure import cost, in_turns, python
from tests.benchmarks.sizes import rounds

ROUNDS = rounds(15)
QUICKSTART = Path(__file__).parents[2] / "manifests" / "quickstart"
YARDSTICK = "pre-commit validate-config"
LIBRARIES = "from pydantic import BaseModel\nimport ruamel.yaml\nclass Model(BaseModel): field: int"

AGENT = """\
---
apiVersion: runner/v1
kind: AgentType
metadata: {{name: agent-{n}}}
spec:
  agent: script
  script:
    files:
      - path: run.sh
        content: |
          set -eu
          make build
          make report
        executable: true
  prompt:
    system: Change as little as you can.
    user: "{{{{ run.prompt }}}}"
  env:
    CI: "true"
    NAME: "{{{{ run.name }}}}"
  timeouts:
    setup: 5m
    agent: 15m
  workspace:
    enabled: true
    providers: [local, process]
    isolation: none
    repo_source:
      type: none
    resource_limits:
      cpu: "2"
      memory: 4G
      pids: 512
    setup_commands:
      - [make, deps]
      - [make, tools]
    setup:
      timeout: 5m
      on_failure: fail
    protected_paths:
      - AGENTS.md
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("selftest.runner.yaml", "selftest.sh"):
            copy(QUICKSTART / file, folder)
        (folder / "config.yaml").write_text("repos: []\n")
        commands = {
            YARDSTICK: ["-m", "pre_commit", "validate-config", str(folder / "config.yaml")],
            "runner validate": ["-m", "runner", "validate", str(folder / "selftest.runner.yaml")],
            "pydantic and ruamel alone": ["-c", LIBRARIES],
        }
        costs = in_turns(ROUNDS, {label: partial(python, *words) for label, words in commands.items()})
        for label, figures in costs.items():
            ratio = statistics.median(a / b for (_, a), (_, b) in zip(figures, costs[YARDSTICK], strict=True))
            print(f"{label:28} cpu {statistics.median(cpu for _, cpu in figures) * 1e3:5.0f} ms  ratio {ratio:.2f}")
        text = "".join(AGENT.format(n=n) for n in range(1000))
        (folder / "many.runner.yaml").write_text(text)
        validate = partial(python, "-m", "runner", "validate", str(folder / "many.runner.yaml"))
        took = min(cost(validate)[1] for _ in range(3))
        print(f"1,000 documents, {text.count(chr(10)):,} lines: cpu {took:.2f} s")


if __name__ == "__main__":
    main()
