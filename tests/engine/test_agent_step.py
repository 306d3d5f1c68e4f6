"""What the agent step tells a sub-runner, and what the workspace can read of it."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio
from msgspec.structs import replace

from runner.core.compiled_programs import Program
from runner.core.model import Handle
from runner.core.settings import shipped
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.guest import build
from runner.ports.provider import SandboxSpec
from runner.providers.local import LocalProvider
from runner.runtime.subrunner import read_command
from runner.steps.agent.run import SMALL_PROMPT
from tests.support.fake_provider import FakeProvider
from tests.support.situations import Project
from tests.support.state_machine import Machine


@pytest.mark.scenario("TRI-25")
@pytest.mark.parametrize("long", [False, True], ids=["a prompt", "a prompt too large for a variable"])
async def test_a_sub_runner_gets_the_standard_variables_and_nothing_of_this_host(
    project: Project, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-0123456789")
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "incident.json").write_text('{"incidentId": "INC-7"}')
    words = "x" * SMALL_PROMPT if long else "it's $HOME"
    project.script(
        'cat > "$RUNNER_OUTPUT/stdin"; cp /run/runner/prompt.md "$RUNNER_OUTPUT/file"',
        agent="prompt: {system: be brief}",
        run=f'prompt: "{words}"\nincident: {{directory: incident}}',
    )
    machine, seen = Machine(project), dict[str, str]()

    async def sub_runner(name: str, env: Mapping[str, str]) -> list[str]:
        seen.update(env)
        return await read_command(shipped("runners") / f"{name}.sh", env)

    machine.deps = replace(machine.deps, sub_runner=sub_runner)
    record = await machine.run()

    assert record.exit_code == 0, record.outcome
    prompt = f"be brief\n\n{words}"
    expected = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "AGENT_CLI": "script",
        "AGENT_HOME": "/home/agent",
        "AGENT_SCRIPT": "/run/runner/script",
        "PROMPT_FILE": "/run/runner/prompt.md",
        "WORKSPACE_DIR": "/workspace",
        "INCIDENT_ID": "INC-7",
        "RUN_ID": record.id,
    }
    assert UUID(seen.pop("SESSION_ID")).version == 5
    assert seen == (expected if long else {**expected, "PROMPT": prompt})
    directory = machine.settings.home / "runs" / record.id
    assert {(directory / name).read_text() for name in ("prompt-sent.md", "output/stdin", "output/file")} == {prompt}


class Slow(FakeProvider):
    """Nothing runs in its sandboxes any more when their work is saved; it takes longer until they are cleared away."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.saved, self.cleared = trio.Event(), False

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[Any]:
        async with super().open(handle, spec) as stage:
            yield stage
        stage.terminated.set()
        await self.saved.wait()
        self.cleared = True

    async def destroy(self, handle: Handle) -> None:
        assert self.cleared
        await super().destroy(handle)


async def test_work_is_looked_at_as_soon_as_nothing_runs_in_its_sandbox(project: Project) -> None:
    project.script("true")
    machine = Machine(project)
    slow = Slow(machine.settings.home)
    machine.deps = replace(machine.deps, provider=lambda name: slow)

    def watch(recorded: ev.Recorded, control: RunCancellation) -> None:
        if isinstance(recorded.event, ev.WorkSaved):
            assert not slow.cleared
            slow.saved.set()

    with trio.fail_after(20):
        record = await machine.run(watch)

    assert record.exit_code == 0, record.outcome
    assert slow.cleared


class Altered(LocalProvider):
    """``local`` with a guest of another source."""

    def __init__(self, home: Path, program: Program) -> None:
        super().__init__(home)
        self._altered = program

    def _program(self) -> Program:
        return self._altered


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [("!keep_calls()", "false"), ("CLOSE(io_uring_setup),", "")],
    ids=["no filter", "one that lets a call through"],
)
async def test_no_agent_starts_where_system_calls_are_not_refused(
    project: Project, tmp_path: Path, fault: tuple[str, str]
) -> None:
    for file in Path(build.__file__).parent.glob("*.[ch]"):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace(*fault))
    compiler = build.system_compiler() or build.pinned_compiler(platform.machine(), tmp_path / "cache")
    build.compile_program(compiler, tmp_path, "guest", tmp_path / "guest")
    project.script("echo ran")
    machine = Machine(project)
    local = Altered(machine.settings.home, Program(tmp_path / "guest", ""))
    machine.deps = replace(machine.deps, provider=lambda name: local)

    record = await machine.run()

    assert "system calls that lead out of the sandbox are not refused" in record.outcome.message
    assert not record.observed.filtered
    assert not (machine.settings.home / "runs" / record.id / "logs" / "agent.out").exists()
