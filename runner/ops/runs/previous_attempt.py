"""Report, commands and last words of an agent that has ended, for people and for the agent that continues."""

from __future__ import annotations

from pathlib import Path

import runner.agents
from runner.core import plugins
from runner.core.errors import UnknownRun
from runner.core.model import Command, CommandStatus, Exit
from runner.core.settings import Settings
from runner.events.record import RunRecord
from runner.ops.runs.header import header_of
from runner.ops.runs.history import StoredRun, find_run
from runner.ops.runs.watch import planned
from runner.ports.agent import AgentResult, ModelAgent
from runner.report.triage import Header, Result
from runner.safefs.safe_open import read_beneath
from runner.triage.baseline import cleaned
from runner.triage.prompt import PreviousAttempt

_READ = 1 << 24  # bytes of a report or draft that are looked at
_ENDS = {CommandStatus.DENIED: "refused", CommandStatus.UNFINISHED: "cut off"}


def last_words(agent: str, directory: Path) -> str:
    """Return what the agent of the run in ``directory`` said last, in one line; empty without a model."""
    found = _ended(agent, directory)
    return found[0].last_message(found[1]) if found is not None else ""


def commands_of(agent: str, directory: Path) -> tuple[Command, ...]:
    """Return the commands that the agent of the run in ``directory`` asked for; none without a model."""
    found = _ended(agent, directory)
    return found[0].commands(found[1]) if found is not None else ()


def result_of(record: RunRecord, header: Header, directory: Path) -> Result:
    """Return the report of a run that has ended, its path, and the agent's last words."""
    kept, report, place = directory / "output", None, None
    if header.report:
        delivered = record.saved_work.outputs if record.saved_work is not None else ()
        place = next((Path(path) for path in delivered if path.endswith(f"/{header.report}")), kept / header.report)
        try:
            report = read_beneath(kept, header.report, _READ).decode(errors="replace")
        except OSError:
            place = place if place.is_file() else None
    return Result(report, place, last_words(header.agent, directory), Path.cwd())


async def load_previous_attempt(stored: StoredRun, settings: Settings) -> PreviousAttempt | None:
    """Read what the agent of a run left; if that is nothing, what the agent of the run before it left."""
    attempt = _left_by(stored)
    if attempt is not None or stored.record.resumes is None:
        return attempt
    try:
        before = await find_run(settings, stored.record.resumes)
    except UnknownRun:
        return None
    return await load_previous_attempt(before, settings)


def _left_by(stored: StoredRun) -> PreviousAttempt | None:
    record, directory = stored.record, stored.directory
    header = header_of(planned(stored))
    found = _ended(header.agent, directory)
    if found is None:
        return None
    agent, ended = found
    commands, words = agent.commands(ended), cleaned(agent.last_message(ended).encode(errors="replace"))
    try:
        report = cleaned(read_beneath(directory / "output", header.report, _READ)) if header.report else ""
    except OSError:
        report = ""
    if not (report or commands or words):
        return None
    reason = record.outcome.reason if record.outcome is not None else None
    why = reason.value if reason is not None else record.status.value
    return PreviousAttempt(
        run=record.id, why=why, report=header.report, draft=report, commands=tuple(map(_told, commands)), words=words
    )


def _ended(name: str, directory: Path) -> tuple[ModelAgent, AgentResult] | None:
    out, err = (directory / "logs" / f"agent.{stream}" for stream in ("stdout", "stderr"))
    if not plugins.exists(runner.agents, name) or not out.is_file():
        return None
    agent = plugins.load(runner.agents, name).agent
    return (agent, AgentResult(Exit(), out, err)) if isinstance(agent, ModelAgent) else None


def _told(command: Command) -> str:
    end = _ENDS.get(command.status) or (f"exit {command.exit}" if command.exit is not None else "ran")
    return f"$ {cleaned(command.text.encode(errors='replace'))}   [{end}]"
