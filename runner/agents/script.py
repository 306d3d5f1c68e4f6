"""The deterministic agent: a committed shell script. Its exit status is the verdict."""

from __future__ import annotations

from runner.agents._lines import last_line, tail
from runner.core.model import Outcome, Reason, Status, failed, succeeded
from runner.ports.agent import Agent, Ended


class ScriptAgent:
    def say(self, line: str) -> str | None:
        """It says what it prints."""
        return f"{line}\n"

    def judge(self, ended: Ended) -> Outcome:
        """Rule on a script that has ended; its last line, on stderr if it failed, is its word on it."""
        if ended.exit.oom:
            return failed(Reason.OOM, str(ended.exit))
        if ended.exit.ok:
            return succeeded(last_line(tail(ended.stdout)))
        said = last_line(tail(ended.stderr))
        message = f"{ended.exit}: {said}" if said else str(ended.exit)
        if ended.exit.code is None and ended.exit.signal is None:
            return Outcome(Status.UNKNOWN, Reason.UNKNOWN, message)
        return failed(Reason.EXIT, message)


agent: Agent = ScriptAgent()
