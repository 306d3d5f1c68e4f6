"""The deterministic agent: a committed shell script. Its exit status is the outcome."""

from __future__ import annotations

from runner.core.last_line import last_line, tail
from runner.core.model import Outcome, Reason, Status, failed, succeeded
from runner.ports.agent import Agent, AgentResult


class ScriptAgent:
    def display(self, line: str) -> str | None:
        """Return the line as it is."""
        return f"{line}\n"

    def outcome(self, result: AgentResult) -> Outcome:
        """Return the outcome of a script; the message is its last line, on stderr if it failed."""
        if result.exit.oom:
            return failed(Reason.OOM, str(result.exit))
        if result.exit.ok:
            return succeeded(last_line(tail(result.stdout)))
        said = last_line(tail(result.stderr))
        message = f"{result.exit}: {said}" if said else str(result.exit)
        if result.exit.code is None and result.exit.signal is None:
            return Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message=message)
        return failed(Reason.EXIT, message)


agent: Agent = ScriptAgent()
