"""The deterministic agent: a committed shell script. Its exit status is the verdict."""

from __future__ import annotations

import os
from pathlib import Path

from runner.agents._lines import last_line
from runner.model import Outcome, Reason, Status, failed, succeeded
from runner.ports.agent import Agent, Ended

_TAIL = 8 << 10  # bytes of a stream that are looked at for its last line


class ScriptAgent:
    def judge(self, ended: Ended) -> Outcome:
        """Rule on a script that has ended; its last line, on stderr if it failed, is its word on it."""
        if ended.exit.oom:
            return failed(Reason.OOM, str(ended.exit))
        if ended.exit.ok:
            return succeeded(last_line(_tail(ended.stdout)))
        said = last_line(_tail(ended.stderr))
        message = f"{ended.exit}: {said}" if said else str(ended.exit)
        if ended.exit.code is None and ended.exit.signal is None:
            return Outcome(Status.UNKNOWN, Reason.UNKNOWN, message)
        return failed(Reason.EXIT, message)


agent: Agent = ScriptAgent()


def _tail(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL))
        return stream.read()
