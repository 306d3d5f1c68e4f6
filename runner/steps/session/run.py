"""See ``plan``. The agent's own post-hook runs inside and only names files; what is kept of them is decided here.

Both what the hook prints and what lies in the home directory are the agent's to forge: a file is kept if its path is
one where this CLI has transcripts, if it is reached through no link and if it is small enough, and without secrets.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath

import trio
from msgspec import Struct

from runner.core.errors import ProviderFailed, RunnerError, WorkspaceLost, first_leaf
from runner.core.model import Command, CommandStatus, Exit, Outcome, succeeded
from runner.core.plural import plural
from runner.core.sanitize import escape_unprintable
from runner.ports.agent import AgentResult, ModelAgent
from runner.runtime.context import RunContext, write_new
from runner.runtime.exec import open_logs, run_command
from runner.runtime.subrunner import script_of
from runner.safefs.safe_open import open_beneath, read_beneath
from runner.steps.agent.variables import incident_id, session_id, standard
from runner.steps.session.plan import HOOK_SECONDS, SessionBody

STEP = "session"
ARCHIVE = "agent-session.tar.gz"
COMMANDS = "agent-commands-executed.log"

_PRINTED = 1 << 20  # bytes of the hook's output that are kept
_NAMED = 100  # files
_FILE = 16 << 20  # bytes
_ALL = 64 << 20
_MARKS = {CommandStatus.EXECUTED: "", CommandStatus.DENIED: "  # refused", CommandStatus.UNFINISHED: "  # cut off"}


class _Kept(Struct):
    files: dict[str, bytes] = {}
    warnings: list[str] = []


async def perform(body: SessionBody, run: RunContext) -> Outcome:
    kept = _Kept()
    agent = run.deps.agent(body.agent)
    commands: tuple[Command, ...] = ()
    keeps = body.debug or not run.results.agent_succeeded
    try:
        if (hook := _hook(body.agent)) is None:
            kept.warnings.append(f"there is no runners/{body.agent}-post.sh")
        else:
            named = await _ask(hook, body, run, kept)
            if isinstance(agent, ModelAgent) and keeps:
                await trio.to_thread.run_sync(_gather, agent, named, run, kept)
    except* (ProviderFailed, WorkspaceLost) as group:
        kept.warnings.append(f"there is no session to ask for: {_message(group)}")
    if not keeps:
        return succeeded("nothing kept of a session that went well", warnings=tuple(kept.warnings))
    if isinstance(agent, ModelAgent):
        out, err = (run.paths.logs / f"agent.{stream}" for stream in ("stdout", "stderr"))
        ended = AgentResult(Exit(), out, err)
        commands = await trio.to_thread.run_sync(agent.commands, ended) if out.exists() else ()
        write_new(run.paths.logs / COMMANDS, run.deps.redact.clean(_listing(body, run, commands).encode()))
    if kept.files:
        content = await trio.to_thread.run_sync(_packed, kept.files)
        write_new(run.paths.logs / ARCHIVE, content)
    count = len(kept.files)
    said = f"{plural(count, 'transcript')}, {plural(len(commands), 'command')}"
    return succeeded(said, warnings=tuple(kept.warnings))


def _message(group: ExceptionGroup[ProviderFailed | WorkspaceLost]) -> str:
    error = first_leaf(group)
    assert isinstance(error, RunnerError)
    return error.message


def _hook(agent: str) -> str | None:
    path = script_of(agent, "-post")
    return path.read_text(encoding="utf-8") if path.exists() else None


async def _ask(hook: str, body: SessionBody, run: RunContext, kept: _Kept) -> list[str]:
    """The paths that the hook prints. It has no more than half of the time that is left."""
    workspace = await run.open(body.mount_plan)
    env = run.variables(workspace.paths) | run.fill_all(body.env) | standard(run, body.agent, workspace.paths)
    del env["PATH"]  # the workspace's own, where the CLI is
    seconds = min(HOOK_SECONDS, (trio.current_effective_deadline() - trio.current_time()) / 2)
    name = f"runners/{body.agent}-post.sh"
    with open_logs(run.paths.logs, STEP, _PRINTED) as logs:
        try:
            words = ("bash", "--noprofile", "--norc", "-c", hook)
            exit = await run_command(run, workspace, words, logs, env=env | {"DEBUG": "true"}, seconds=seconds)
            if not exit.ok:
                kept.warnings.append(f"{name} {exit}")
        except trio.TooSlowError:
            kept.warnings.append(f"{name} was stopped after {seconds:.3g}s")
    await run.sandboxes.close()
    with logs[0].path.open("rb") as printed:
        return printed.read(_PRINTED).decode(errors="replace").splitlines()


def _gather(agent: ModelAgent, named: Sequence[str], run: RunContext, kept: _Kept) -> None:
    """Read what of the named files may be kept. Blocking."""
    _, handle = run.workspace.require()
    wanted = {name for name in named if agent.is_transcript(name)}
    others = len({name for name in named if name}) - len(wanted)
    if others:
        kept.warnings.append(f"{others} of the paths that it printed are not transcripts of {agent.program}")
    if len(wanted) > _NAMED:
        kept.warnings.append(f"{len(wanted) - _NAMED} transcripts are left out: there are more than {_NAMED}")
    room = _ALL
    home = handle.private / "home"
    for name in likeliest_first(home, wanted, session_id(run))[:_NAMED]:
        try:
            content = read_beneath(home, name, min(_FILE, room))
        except OSError as error:
            kept.warnings.append(f"{name}: {error.strerror}")
            continue
        room -= len(content)
        kept.files[name] = run.deps.redact.clean(content)


def likeliest_first(home: Path, names: Iterable[str], session: str) -> list[str]:
    """The session's own transcript before those that an agent has put beside it to fill the archive. Blocking.

    Its name has the session's id, where the CLI takes one; and the CLI writes to it last, when the agent has no more
    to say. The time is that of the change, which nobody can set.
    """
    return sorted(names, key=lambda name: (session[:8] not in PurePath(name).name, -_changed(home, name), name))


def _changed(home: Path, name: str) -> int:
    """Nanoseconds since the epoch; 0 for what is not there, or behind a link."""
    try:
        descriptor = open_beneath(home, name)
    except OSError:
        return 0
    try:
        return os.fstat(descriptor).st_ctime_ns
    finally:
        os.close(descriptor)


def _packed(files: dict[str, bytes]) -> bytes:
    """The same bytes for the same files in the same order."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(tar.getvalue(), mtime=0)


def _listing(body: SessionBody, run: RunContext, commands: Sequence[Command]) -> str:
    statuses = Counter(command.status for command in commands)
    time = datetime.fromtimestamp(run.deps.now() / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    head = [
        f"# Agent: {body.agent}",
        f"# Time: {time}",
        f"# Incident: {incident_id(run)}",
        f"# Session: {session_id(run)}",
        f"# Commands: {len(commands)}, of which {statuses[CommandStatus.DENIED]} refused"
        f" and {statuses[CommandStatus.UNFINISHED]} cut off",
    ]
    return "\n".join([*head, "", *(_line(command) for command in commands)]) + "\n"


def _line(command: Command) -> str:
    """Format a command as a terminal would, with ``>`` before its further lines and nothing that a terminal obeys."""
    first, *more = [escape_unprintable(line) for line in command.text.split("\n")]
    mark = f"  # exit {command.exit}" if command.exit else _MARKS[command.status]
    return "\n".join([f"$ {first}", *(f"> {line}" for line in more)]) + mark
