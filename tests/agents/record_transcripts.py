"""Record what the real CLIs print when things go well and wrong, against the model double, and what we make of it.

    .venv/bin/python -m tests.agents.record_transcripts [CLI [CASE]]
    .venv/bin/python -m tests.agents.record_transcripts judge          # only what we make of those that are there

For each CLI a folder beside this file: ``CASE.jsonl`` is its standard output, ``CASE.stderr`` the last line of its
complaints if there is one, and ``expected.json`` how it exited and what its module says of that, to be read before it
is committed. Ids, paths, ports and times are replaced, and what is long and read by nobody is left out. The CLIs are
where ``tests/cli/test_agent_clis.py`` looks for them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import asdict, replace

import runner.agents
from runner.agents._cli import CliAgent
from runner.core import plugins
from runner.core.model import Budget, Exit
from runner.core.settings import shipped
from runner.fake_model.provider import FakeModel, serve_fake_model
from runner.fake_model.script import Turn
from runner.gateway.gateway import open_session
from runner.ports.agent import AgentResult, ModelAccess
from runner.ports.gateway import ModelGrant
from runner.ports.provider import Paths
from runner.runtime.subrunner import read_command
from runner.steps.agent.home import furnish
from tests.cli.test_agent_clis import PLACE

TRANSCRIPTS = Path(__file__).parent / "transcripts"
MODELS = {"claude": "sonnet", "codex": "gpt-6.1-sol", "gemini": "gemini-2.5-pro", "goose": "gpt-4.1"}
SHELLS = {"claude": "Bash", "gemini": "run_shell_command"}  # of those that can be told which tools they have
READERS = {"claude": ("Read",), "gemini": ("read_file",)}

_LONGEST = 240  # characters of a text that are kept
_UNREAD = {
    *("agents", "annotations", "capabilities", "iterations", "memory_paths", "messaging_socket_path"),
    *("model_usage_since_last_result", "models", "plugins", "skills", "slash_commands", "subagent_stats"),
    *("terminal_slash_commands", "tools", "usage"),
}
_SESSION = "6f2a5a0e-0000-4000-8000-000000000001"
_IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIMES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|(?<=\"created\": )\d{10}")


@dataclass(frozen=True)
class Case:
    """``turns`` are the model's, the last one again and again. ``until``: TERM comes once this was printed."""

    turns: Sequence[Mapping[str, Any]]
    limit: int | None = None
    budget: Budget | None = None
    restricted: bool = False
    key: str = "stands-for-a-key"
    until: str = ""
    clis: Sequence[str] = field(default=tuple(MODELS))


def _fails(status: int) -> Case:
    return Case([{"fail": {"status": status, "message": f"scripted {status}"}}])


_DONE = {"say": "All done."}
CASES = {
    "finished": Case([{"run": "echo hi > made.txt; cat made.txt"}, _DONE]),
    "failing-command": Case([{"run": "exit 3"}, {"run": "cat > x <<'EOF'\nline\nEOF\nfalse"}, _DONE]),
    "denied": Case([{"call": {"tool": "", "arguments": {"command": "touch made.txt"}}}, _DONE], restricted=True),
    "stopped": Case([{"run": "echo once"}, {"run": "echo $$ > pid; exec sleep 1000"}], until="exec sleep 1000"),
    "turn-limit": Case([{"run": "true"}], limit=2, clis=("claude", "gemini", "goose")),
    "over-budget": Case([{"run": "true"}], budget=Budget(tokens=1)),
    "no-key": Case([{"run": "true"}], key="", clis=("claude", "gemini")),  # the others ask their provider without one
    "wrong-key": _fails(401),
    "forbidden": _fails(403),
    "unknown-model": _fails(404),
    "over-quota": _fails(429),
    "provider-down": _fails(500),
}


async def record(name: str, case: str) -> dict[str, Any]:
    """Write one transcript, and give what is expected of it."""
    with tempfile.TemporaryDirectory(prefix="record-", dir=PLACE.parent) as root:
        agent: CliAgent = plugins.load(runner.agents, name).agent
        began = time.monotonic()
        exit, port = await _play(name, agent, CASES[case], Path(root))
        print(f"{name:<8}{case:<18}{time.monotonic() - began:6.1f}s  {exit}")
        folder = TRANSCRIPTS / name
        folder.mkdir(parents=True, exist_ok=True)
        clean = partial(_clean, root=root, port=port)
        lines = (Path(root) / "stdout").read_text(errors="replace").splitlines()
        _write(folder / f"{case}.jsonl", [clean(_trimmed(line)) for line in lines])
        complaints = (Path(root) / "stderr").read_text(errors="replace").strip().splitlines()
        _write(folder / f"{case}.stderr", [clean(line[:_LONGEST]) for line in complaints[-1:]])
    return {"exit": asdict(exit), **verdict_of(agent, name, case, exit)}


def verdict_of(agent: CliAgent, name: str, case: str, exit: Exit) -> dict[str, Any]:
    """What a CLI's module says of a transcript, in plain form."""
    errors = TRANSCRIPTS / name / f"{case}.stderr"
    ended = AgentResult(exit, TRANSCRIPTS / name / f"{case}.jsonl", errors if errors.exists() else Path("/dev/null"))
    outcome, usage = agent.outcome(ended), agent.usage(ended)
    return {
        "status": outcome.status.value,
        "reason": outcome.reason.value if outcome.reason else None,
        "message": outcome.message,
        "warnings": list(outcome.warnings),
        "commands": [[command.status.value, command.exit, command.text] for command in agent.commands(ended)],
        "tokens": usage.tokens if usage is not None else None,
    }


async def _play(name: str, agent: CliAgent, case: Case, root: Path) -> tuple[Exit, int]:
    home, workspace = root / "home", root / "workspace"
    home.mkdir()
    workspace.mkdir()
    tool = SHELLS.get(name, "delete_everything")
    turns = [_turn(turn, tool) for turn in case.turns]
    tools = READERS.get(name) if case.restricted else None
    async with _served(agent, name, case, [*turns, *[turns[-1]] * 30]) as port:
        url = f"http://127.0.0.1:{port}{agent.api.base_path}"
        access = ModelAccess(
            model=MODELS[name],
            key=case.key,
            base_url=url,
            max_turns=case.limit,
            tools=tools,
            workspace=str(workspace),
            home=str(home),
        )
        prepared = agent.set_up(access)
        env = {"HOME": str(home), "PATH": f"{PLACE}/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **prepared.env}
        places = replace(Paths(**dict.fromkeys(Paths.__struct_fields__, str(root))), home=str(home))
        if furnishing := furnish(prepared, places, ()):
            await trio.run_process(furnishing)
        if prepared.login and case.key:
            await trio.run_process(prepared.login, stdin=case.key.encode(), env=env, capture_stderr=True)
        standard = {"LLM_MODEL": MODELS[name], "SESSION_ID": _SESSION, "PATH": "/usr/bin:/bin"}
        standard |= {"AGENT_MAX_TURNS": str(case.limit)} if case.limit else {}
        standard |= {"AGENT_ALLOWED_TOOLS": ",".join(tools)} if tools is not None else {}
        argv = await read_command(shipped("runners") / f"{name}.sh", standard)
        with (root / "stdout").open("wb") as out, (root / "stderr").open("wb") as errors:
            started = partial(
                trio.run_process, argv, stdin=b"do it\n", stdout=out, stderr=errors, env=env, cwd=workspace
            )
            async with trio.open_nursery() as nursery:
                process: trio.Process = await nursery.start(partial(started, check=False))
                with trio.move_on_after(120):
                    while process.poll() is None:
                        await trio.sleep(0.05)
                        if case.until and case.until in (root / "stdout").read_text(errors="replace"):
                            await trio.sleep(1)
                            process.terminate()
                            await process.wait()
                if process.returncode is None:
                    process.kill()
        _end_what_it_left(workspace / "pid")
    code = process.returncode
    return (Exit(signal=-code) if code < 0 else Exit(code)), port


def _end_what_it_left(pid: Path) -> None:
    """Of a CLI that was stopped, the command that it had started."""
    if pid.exists():
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


def _turn(turn: Mapping[str, Any], tool: str) -> Turn:
    return Turn.model_validate({**turn, "call": {**turn["call"], "tool": tool}} if "call" in turn else turn)


@asynccontextmanager
async def _served(agent: CliAgent, name: str, case: Case, turns: Sequence[Turn]) -> AsyncIterator[int]:
    """The double, or for a case with a budget the gateway before it."""
    if case.budget is None:
        async with serve_fake_model(turns) as port:
            yield port
        return
    grant = ModelGrant(agent.api, (MODELS[name],), case.budget)
    opened = open_session(grant, FakeModel(agent.api, turns), "", lambda exchange: None)
    async with opened as session, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, session.serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def _trimmed(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return line[:_LONGEST]
    return json.dumps(_pruned(value))


def _pruned(value: Any, *, keep: bool = False) -> Any:
    match value:
        case dict():
            usage = value.get("type") == "turn.completed"  # where Codex has it
            return {key: _pruned(item, keep=usage) for key, item in value.items() if key not in _UNREAD or usage}
        case list():
            return [_pruned(item) for item in value]
        case str() if len(value) > _LONGEST:
            return value[:_LONGEST] + "..."
    return value


def _clean(line: str, *, root: str, port: int) -> str:
    line = line.replace(root, "/root-of-it").replace(re.sub(r"[^A-Za-z0-9]", "-", root), "-root-of-it")
    line = line.replace(f":{port}", ":8080")
    ids: dict[str, str] = {}
    line = _IDS.sub(lambda found: ids.setdefault(found[0], f"{len(ids):08}-0000-4000-8000-000000000000"), line)
    return _TIMES.sub(lambda found: "1795343827" if found[0].isdigit() else "2026-11-22T10:00:00.000Z", line)


def _write(path: Path, lines: Sequence[str]) -> None:
    path.unlink(missing_ok=True)
    if lines or path.suffix == ".jsonl":
        path.write_text("".join(f"{line}\n" for line in lines))


def judge() -> None:
    for name in MODELS:
        table = TRANSCRIPTS / name / "expected.json"
        agent: CliAgent = plugins.load(runner.agents, name).agent
        exits = {
            case: value["exit"] for case, value in json.loads(table.read_text()).items() if name in CASES[case].clis
        }
        expected = {case: {"exit": exit, **verdict_of(agent, name, case, Exit(**exit))} for case, exit in exits.items()}
        table.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


async def main(wanted: Sequence[str]) -> None:
    for name in MODELS:
        if wanted and wanted[0] != name:
            continue
        table = TRANSCRIPTS / name / "expected.json"
        expected = json.loads(table.read_text()) if table.exists() else {}
        for case, how in CASES.items():
            if name in how.clis and (len(wanted) < 2 or wanted[1] == case):
                expected[case] = await record(name, case)
        table.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    judge() if sys.argv[1:] == ["judge"] else trio.run(main, sys.argv[1:])
