"""Agents that work with a model: stand-ins of the CLIs, and a double of the providers behind the gateway."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from runner.agents._cli import CliAgent
from runner.core.errors import Rejected
from runner.core.model import Reason, Usage
from runner.core.settings import Settings
from runner.events.record import RunRecord
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.planning.plan_file import save
from runner.ops.planning.saved_plan import load_plan
from runner.ports.agent import ModelAccess
from runner.report.format import usage
from runner.report.json import record_document
from runner.report.plan import render_plan
from runner.report.text import render_run
from runner.report.triage import Header, Result, closing
from runner.steps.agent.model import MODEL_BUSY, STANDS_FOR_KEY
from runner.steps.agent.run import UNTESTED
from tests.support.needs import USERS
from tests.support.runs import apply
from tests.support.situations import Project, document, outcome_of

KEYS = {
    "ANTHROPIC_API_KEY": "sk-ant-0123456789",
    "OPENAI_API_KEY": "sk-0123456789",
    "GEMINI_API_KEY": "AIza-0123456789",
}
CASES = Path(__file__).parents[1] / "cases" / "agents"

# It keeps what it was given and says that it is done; Goose's asks its model first, as often as it is told.
STAND_IN = """\
#!/bin/bash
set -eu
[[ "$1" != session ]] || exit 1  # its post-hook, which wants a transcript
printf '%s\\n' "${0##*/}" "$@" >> "$RUNNER_OUTPUT/words"
env | grep -v API_KEY > "$RUNNER_OUTPUT/env"
env | sed -n 's/.*API_KEY=//p' | tr -d '\\n' | sha256sum > "$RUNNER_OUTPUT/key"
cat >> "$RUNNER_OUTPUT/stdin"
find ~ -type f -printf '%m %P\\n' > "$RUNNER_OUTPUT/home"
[[ "$1" != login ]] || exit 0
for ((n = 0; n < ${ASKS:-0}; n++)); do
    body='{"model":"'${ASKED:-gpt-4.1}'","messages":[],"tools":[{"type":"function","function":{"name":"shell"}}]}'
    exec 3<> "/dev/tcp/127.0.0.1/${OPENAI_HOST##*:}"
    printf 'POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n' >&3
    printf 'Content-Length: %d\\r\\nConnection: close\\r\\n\\r\\n%s' "${#body}" "$body" >&3
    cat <&3 >> "$RUNNER_OUTPUT/answers"
done
cat FINISHED
"""


@pytest.fixture
def tools() -> Iterator[Path]:
    """A toolchain with a stand-in for each CLI, where every user may go."""
    folder = Path(tempfile.mkdtemp(prefix="runner-tools-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir(mode=0o755)
    for name in ("claude", "codex", "gemini", "goose"):
        finished = (CASES / name / "finished.jsonl").resolve().read_text()
        (folder / f"{name}.jsonl").write_text(finished)
        program(folder, name, STAND_IN.replace("FINISHED", str(folder / f"{name}.jsonl")))
    yield folder
    rmtree(folder)


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def write(project: Project, tools: Path, spec: str, *, run: str = "", provider: str = "local") -> None:
    workspace = f"workspace: {{enabled: true, providers: [{provider}], toolchains: [{tools}]}}"
    project.write(
        document("AgentType", "worker", f"{spec}\n{workspace}"),
        document("IncidentRun", "work", f"agent_type: worker\nprompt: do it\n{run}"),
    )


@asynccontextmanager
async def doubled(project: Project, turns: Sequence[dict[str, Any]]) -> AsyncIterator[Settings]:
    """Settings with every key, and a double in the providers' place."""
    async with serve_fake_model([Turn.model_validate(turn) for turn in turns]) as port:
        url = f"http://127.0.0.1:{port}"
        urls = {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        yield project.settings(**KEYS, **urls)


async def apply_with_double(project: Project, turns: Sequence[dict[str, Any]] = ({"say": "ok"},)) -> RunRecord:
    async with doubled(project, turns) as settings:
        (record,) = await apply(await make_plan(project.folder, settings), settings, [])
        return record


def output_lines(project: Project, record: RunRecord, what: str) -> list[str]:
    return (project.directory(record) / "output" / what).read_text().splitlines()


def hashed(key: str) -> list[str]:
    """What a stand-in keeps of its key."""
    return [f"{sha256(key.encode()).hexdigest()}  -"]


# CLI: its words, where it is told of the gateway, and a file in its home
STARTS = {
    "claude": (
        "claude -p --model sonnet --output-format stream-json --verbose --session-id SESSION --setting-sources user "
        "--strict-mcp-config --permission-prompts none --tools=Read,Grep --allowedTools=Read,Grep --max-turns 7",
        "ANTHROPIC_BASE_URL",
        "600 .claude/CLAUDE.md",
    ),
    "codex": (
        "codex login --with-api-key codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
        "-m gpt-6.1-sol --json -",
        None,
        "600 .codex/config.toml",
    ),
    "gemini": (
        "gemini --session-id SESSION -m gemini-2.5-pro -o stream-json",
        "GOOGLE_GEMINI_BASE_URL",
        "600 .gemini/policies/runner.toml",
    ),
    "goose": (
        "goose run -q --output-format stream-json --model gpt-4.1 -n SESSION --no-profile --with-builtin developer "
        "--max-turns 7 -i -",
        "OPENAI_HOST",
        "600 .config/goose/config.yaml",
    ),
}


@pytest.mark.scenario("TRI-19")
@pytest.mark.parametrize("name", STARTS)
async def test_a_cli_is_started_as_its_sub_runner_says_and_has_no_key(project: Project, tools: Path, name: str) -> None:
    own = "cli_tools: [Read, Grep]\n" if name == "claude" else ""
    write(project, tools, f"agent: {name}\nbudget: {{turns: 7}}\n{own}prompt: {{system: be brief}}")
    words, variable, file = STARTS[name]

    record = await apply_with_double(project)

    said = output_lines(project, record, "words")
    (session,) = {word for word in said if word.count("-") == 4 and len(word) == 36} or {""}
    assert said == words.replace("SESSION", session).split()
    assert list(record.argv) == said[said.index(name, 1) if name == "codex" else 0 :]
    env = dict(line.split("=", 1) for line in output_lines(project, record, "env") if "=" in line)
    assert variable is None or env[variable].startswith("http://127.0.0.1:")
    assert output_lines(project, record, "key") == hashed("" if name == "codex" else STANDS_FOR_KEY)
    assert env["PATH"].startswith(f"{tools}/bin:")
    assert file is None or file in output_lines(project, record, "home")
    read = (project.directory(record) / "output" / "stdin").read_text()
    sent = (project.directory(record) / "prompt-sent.md").read_text()
    assert (read, sent) == ((STANDS_FOR_KEY if name == "codex" else "") + sent, "be brief\n\ndo it")


def test_a_model_that_was_refused_shows_no_tokens() -> None:
    assert (usage(Usage()), usage(Usage(requests=1))) == ("nothing used", "1 request, 0 tokens, $0.00")


@pytest.mark.scenario("BEY-16")
async def test_what_was_used_is_in_the_record_and_the_report(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '2'}\nbudget: {tokens: 1000, cost_usd: 1, turns: 2}")
    told = {"input": 100, "output": 20, "cached": 40}

    record = await apply_with_double(project, [{"say": "a", "usage": told}, {"say": "b", "usage": told}])

    assert record.exit_code == 0, record.outcome
    used = record.models["gpt-4.1"]
    assert (used.requests, used.input_tokens, used.cached_tokens, used.output_tokens) == (2, 200, 80, 40)
    assert used.cost_usd == pytest.approx((120 * 2 + 80 * 0.5 + 40 * 8) / 1e6)
    line = "  model      gpt-4.1: 2 requests, 240 tokens (80 of them cached), less than $0.01"
    assert line in render_run(record, project.home).splitlines()
    assert record_document(record)["models"]["gpt-4.1"]["output_tokens"] == 40
    events = [json.loads(line) for line in (project.directory(record) / "events.jsonl").read_text().splitlines()]
    asked = [event for event in events if event["type"] == "ModelRequestFinished"]
    assert [(event["step"], event["status"], event["model"]) for event in asked] == [("agent", 200, "gpt-4.1")] * 2


@pytest.mark.parametrize(
    ("spec", "turns", "reason", "said"),
    [
        pytest.param("env: {ASKS: '3'}\nbudget: {turns: 2}", 3, "turns", "2 turns", id="turns",
                     marks=pytest.mark.scenario("BEY-16")),
        pytest.param("env: {ASKS: '3'}\nbudget: {tokens: 10}", 3, "budget", "10 tokens", id="tokens"),
        pytest.param("env: {ASKS: '3'}\nbudget: {cost_usd: 0.01}", 3, "budget", "$0.01", id="dollars"),
        pytest.param("env: {ASKS: '1', ASKED: gpt-5}", 1, "model", "gpt-5", id="another model"),
        pytest.param("env: {ASKS: '1'}", {"fail": {"status": 401}}, "auth", "401", id="wrong key"),
        pytest.param("env: {ASKS: '1'}", {"fail": {"status": 429}}, "quota", "429", id="no quota",
                     marks=pytest.mark.nightly),  # asked again for some seconds, as one below
        pytest.param("env: {ASKS: '1'}", {"fail": {"status": 503}}, "gateway", "503", id="provider down"),
        pytest.param("env: {ASKS: '0'}", 1, "no-evidence", "was never asked", id="forged"),
    ],
)  # fmt: skip
async def test_what_the_gateway_has_seen_counts_before_what_the_agent_says(
    project: Project, tools: Path, spec: str, turns: int | dict[str, Any], reason: str, said: str
) -> None:
    """The stand-in exits 0 and prints a finished turn, whatever it was answered."""
    write(project, tools, f"agent: goose\ntimeouts: {{agent: 12s}}\n{spec}")  # a third of it is for waiting
    answer = {"say": "ok", "usage": {"input": 4000, "output": 1000}}

    record = await apply_with_double(project, [answer] * turns if isinstance(turns, int) else [turns] * 5)

    outcome = outcome_of(record)
    assert (record.exit_code, outcome.reason, said in outcome.message) == (1, Reason(reason), True), outcome
    assert reason == "no-evidence" or outcome.details[-1] == "the agent: All done."


async def test_a_model_that_is_busy_is_waited_for_and_that_is_told(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}\ntimeouts: {agent: 60s}")

    record = await apply_with_double(project, [{"fail": {"status": 429, "message": "slow down"}}, {"say": "ok"}])

    assert record.exit_code == 0
    reason = "agent: asking the model failed and was tried again: it answered 429, slow down"
    assert record.warnings == [(MODEL_BUSY, reason)]
    events = [json.loads(line) for line in (project.directory(record) / "events.jsonl").read_text().splitlines()]
    (waited,) = (event for event in events if event["type"] == "RetryScheduled")
    assert (waited["step"], waited["pause_seconds"]) == ("agent", 1)


@pytest.mark.parametrize(
    ("url", "proxy", "said"),
    [
        ("http://127.0.0.1:1/v1", "", "`127.0.0.1:1` could not be reached: connection refused"),
        (
            "https://api.example/v1",
            "http://user:hush@127.0.0.1:1",
            "`api.example` could not be reached: connection refused (through the proxy 127.0.0.1:1)",
        ),
    ],
    ids=["by itself", "by its proxy"],
)
async def test_a_model_that_cannot_be_reached_is_the_platform_s_fault(
    project: Project, tools: Path, url: str, proxy: str, said: str
) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}\ntimeouts: {agent: 8s}")
    settings = project.settings(**KEYS, RUNNER_OPENAI_URL=url, HTTPS_PROXY=proxy)

    (record,) = await apply(await make_plan(project.folder, settings), settings, [])

    outcome = outcome_of(record)
    assert (record.exit_code, outcome.reason) == (4, Reason.PLATFORM)
    assert outcome.message == said
    assert outcome.details[0] == (
        "hint: look at `RUNNER_OPENAI_URL`, `HTTPS_PROXY` and `SSL_CERT_FILE` where runner is started"
    )
    assert "`RUNNER_OPENAI_URL`" in render_run(record, project.home)
    assert "  = hint: look at `RUNNER_OPENAI_URL`" in "\n".join(closing(record, Header(), Result()))


@pytest.mark.nightly
async def test_a_model_that_was_silent_is_why_the_time_ran_out(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}\ntimeouts: {agent: 14s}")

    record = await apply_with_double(project, [{"stall": "1h", "say": "ok"}])

    assert record.exit_code == 124
    told = outcome_of(record).message
    assert re.fullmatch(r"stopped at its deadline of 14s: the model had not answered for 1\ds", told)


@pytest.mark.nightly
async def test_a_provider_that_stalls_costs_the_step_s_time_and_no_more(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}\ntimeouts: {agent: 4s}")

    record = await apply_with_double(project, [{"stall": "1h", "say": "ok"}])

    assert record.exit_code == 124
    assert outcome_of(record).message == "stopped at its deadline of 4s"
    assert record.models["gpt-4.1"].requests == 1


@pytest.mark.parametrize("version", ["1.52.0", "1.50.0"])
async def test_the_version_of_a_cli_is_in_plan_and_record_and_told_when_it_is_not_a_tested_one(
    project: Project, tools: Path, version: str
) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}")
    (tools / "package.json").write_text(json.dumps({"name": "@aaif/goose-binary-linux-x64", "version": version}))

    async with doubled(project, [{"say": "ok"}]) as settings:
        planned = await make_plan(project.folder, settings)
        (record,) = await apply(planned, settings, [])

    is_tested = version == "1.52.0"
    row = f"CLI {version}" if is_tested else f"CLI {version}, NOT the tested 1.52.0"
    assert row in " ".join(render_plan(planned.plan).split())
    assert record_document(record)["version"] == version
    assert f"  agent      goose {version}" in render_run(record, project.home).splitlines()
    told = f"goose {version} is not the version that this runner is tested with, 1.52.0"
    assert record.warnings == ([] if is_tested else [(UNTESTED, told)])


async def test_another_version_of_a_cli_is_no_other_plan(project: Project, tools: Path) -> None:
    """A saved one is carried out where its host has been renewed; the record says with what."""
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}")
    package = {"name": "@aaif/goose-binary-linux-x64", "version": "1.50.0"}
    async with doubled(project, [{"say": "ok"}]) as settings:
        (tools / "package.json").write_text(json.dumps(package))
        before = await make_plan(project.folder, settings)
        save(before, project.home / "a.json")
        (tools / "package.json").write_text(json.dumps({**package, "version": "1.52.0"}))
        (record,) = await apply(await load_plan(project.home / "a.json", settings), settings, [])

    assert (record.exit_code, record.version, record.plan) == (0, "1.52.0", before.plan.digest)


async def test_a_cli_that_is_not_there_is_named(project: Project, tools: Path) -> None:
    (tools / "bin" / "gemini").unlink()
    write(project, tools, "agent: gemini")

    with pytest.raises(Rejected) as refused:
        await apply_with_double(project)

    (finding,) = refused.value.findings
    assert (finding.code, refused.value.exit_code) == ("agent.cli-missing", 4)
    assert finding.message.startswith(f"`gemini` is not on this host; looked in `{tools}/bin`")
    assert "`workspace.toolchains`" in str(finding.hint)
    assert not (project.home / "state" / "runs").exists()


async def test_a_cli_that_goes_while_it_is_set_up_is_named(project: Project, tools: Path) -> None:
    write(project, tools, "agent: gemini\nenv: {PATH: /nowhere}")

    record = await apply_with_double(project)

    assert record.exit_code == 1
    assert outcome_of(record).message == "`gemini` is not in the workspace"
    assert "workspace.toolchains" in render_run(record, project.home)


async def test_a_home_that_can_not_be_prepared_fails_the_step(project: Project, tools: Path) -> None:
    write(project, tools, "agent: codex")
    text = project.manifest.read_text()
    project.manifest.write_text(text.replace("enabled: true", "enabled: true, setup_commands: [touch ~/.codex]"))

    record = await apply_with_double(project)

    assert record.exit_code == 1
    assert ".codex" in outcome_of(record).message
    assert not (project.directory(record) / "output" / "words").exists()


# what is set, and what is said of it
NO_KEY = {
    "claude": ({"OPENAI_API_KEY": "x" * 9, "GEMINI_API_KEY": "x" * 9}, "`ANTHROPIC_API_KEY` is not set"),
    "codex": ({"ANTHROPIC_API_KEY": "x" * 9}, "`OPENAI_API_KEY` or `CODEX_API_KEY` is not set"),
    "gemini": ({"GEMINI_API_KEY": ""}, "`GEMINI_API_KEY` or `GOOGLE_API_KEY` is not set"),
    "goose": ({"OPENAI_API_KEY": "  "}, "`OPENAI_API_KEY` is not a key"),
    "claude ": ({"ANTHROPIC_API_KEY": "sk-a\nb"}, "`ANTHROPIC_API_KEY` is not a key"),
}


@pytest.mark.scenario("TRI-15")
@pytest.mark.parametrize("name", NO_KEY)
async def test_without_a_key_nothing_is_made(project: Project, tools: Path, name: str) -> None:
    env, said = NO_KEY[name]
    settings = project.settings(**env)
    write(project, tools, f"agent: {name}")
    planned = await make_plan(project.folder, settings)

    with pytest.raises(Rejected) as refused:
        await apply(planned, settings, [])

    (finding,) = refused.value.findings
    assert (refused.value.exit_code, finding.code, said in finding.message) == (2, "gateway.key-missing", True)
    assert not any(text.strip() and text in f"{finding.message}{finding.hint}" for text in env.values())
    assert not (project.home / "state" / "runs").exists()


async def test_keys_of_several_runs_are_asked_for_together(project: Project, tools: Path) -> None:
    worker = f"workspace: {{enabled: true, toolchains: [{tools}]}}"
    project.write(
        *(document("AgentType", name, f"agent: {name}\n{worker}") for name in ("claude", "codex", "goose")),
        document("IncidentRun", "work", "matrix: {agent_type: [claude, codex, goose]}"),
    )
    settings = project.settings()

    with pytest.raises(Rejected) as refused:
        await apply(await make_plan(project.folder, settings), settings, [])

    assert len(refused.value.findings) == 2  # that of Codex is Goose's as well


@pytest.mark.scenario("BEY-14")
async def test_a_matrix_over_models_is_a_run_for_each(project: Project, tools: Path) -> None:
    write(
        project, tools, "agent: goose\nenv: {ASKS: '1', ASKED: gpt-5}", run="matrix: {model: [gpt-4.1, gpt-5, GPT-5]}"
    )

    async with doubled(project, [{"say": "ok"}] * 3) as settings:
        records = await apply(await make_plan(project.folder, settings), settings, [])

    assert [(record.name, record.exit_code) for record in records] == [
        ("work.gpt-4-1", 1),
        ("work.gpt-5-2", 0),
        ("work.gpt-5-3", 1),
    ]


async def test_an_agent_that_has_the_key_is_marked_everywhere(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\ncredentials: env", provider="process")

    async with doubled(project, [{"say": "ok"}]) as settings:
        planned = await make_plan(project.folder, settings)
        (record,) = await apply(planned, settings, [])

    assert [finding.code for finding in planned.warnings] == ["agent.key-inside"]
    assert "goose gpt-4.1; HAS THE KEY of its model" in render_plan(planned.plan, width=200)
    assert {step.network for run in planned.plan.runs for step in run.steps} == {"host"}
    assert record.exit_code == 0, record.outcome
    assert record.warnings[0] == ("agent.key-inside", "the key of `gpt-4.1` was given to the agent")
    assert output_lines(project, record, "key") == hashed(KEYS["OPENAI_API_KEY"])
    assert not record.models
    assert record.reported_usage is not None
    assert "as the agent says, which had the key: 220 tokens" in render_run(record, project.home)


@pytest.mark.parametrize(
    ("name", "url", "told"),
    [
        pytest.param("claude", "https://gate.example/a", {"ANTHROPIC_BASE_URL=https://gate.example/a"}, id="claude"),
        pytest.param("gemini", "https://gate.example/", {"GOOGLE_GEMINI_BASE_URL=https://gate.example"}, id="gemini"),
        pytest.param(
            "goose",
            "https://gate.example/openai/v1",
            {"OPENAI_HOST=https://gate.example", "OPENAI_BASE_PATH=openai/v1/chat/completions"},
            id="goose",
        ),
        pytest.param("codex", "https://gate.example/v1", {'base_url = "https://gate.example/v1"'}, id="codex"),
    ],
)
def test_an_agent_with_the_key_is_told_where_this_host_has_its_api(name: str, url: str, told: set[str]) -> None:
    agent: CliAgent = import_module(f"runner.agents.{name}").agent
    settings = Settings.from_env({"HOME": "/", f"RUNNER_{agent.api.value.upper()}_URL": url})

    prepared = agent.set_up(ModelAccess(model="m", key="k", base_url=settings.own_model_url(agent.api.value)))

    written = {f"{key}={value}" for key, value in prepared.env.items()}
    assert told <= written | {line for text in prepared.files.values() for line in text.splitlines()}


async def test_a_limit_of_turns_is_told_in_our_words(project: Project, tools: Path) -> None:
    """Gemini says that a setting of its own could be raised."""
    ended = "Reached max session turns for this session. Increase the number of turns by settings.json."
    error = {"type": "FatalTurnLimitedError", "message": ended}
    line = json.dumps({"type": "result", "status": "error", "error": error})
    program(tools, "gemini", f"#!/bin/sh\ncat > /dev/null\necho '{line}'\nexit 53\n")
    write(project, tools, "agent: gemini\nbudget: {turns: 2}")

    record = await apply_with_double(project)

    outcome = outcome_of(record)
    assert outcome.reason is Reason.TURNS
    assert outcome.message == "the budget of this run is used up: 2 of 2 turns are used"
    assert outcome.details == (f"the agent: {ended}",)


@USERS.mark
async def test_a_toolchain_that_the_user_of_commands_cannot_enter_is_named(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose", provider="process")
    tools.chmod(0o700)

    record = await apply_with_double(project)

    outcome = outcome_of(record)
    assert outcome.message == "exited 126: goose: Permission denied"
    (hint,) = outcome.details
    assert hint.startswith(f"hint: the user of its commands cannot enter `{tools}`")


USELESS = {
    "no network": ("goose\ncredentials: env", "`local` has no network, so `goose` cannot"),
    "budget": ("goose\ncredentials: env\nbudget: {turns: 1}", "only the gateway"),
    "from a fork": ("goose\ncredentials: env", "may not have the key of a model"),
    "script": ("script\nscript: {files: []}", "the agent of `worker` uses no model"),
    "tool": ("claude\ncli_tools: [Read, grep]", "`grep` is not a tool of `claude`"),
    "codex's tools": ("codex\ncli_tools: [exec]", "`codex` cannot be told which"),
    "goose's tools": ("goose\ncli_tools: [shell]", "`goose` cannot be told which"),
}


@pytest.mark.parametrize("what", USELESS)
async def test_what_would_be_no_use_is_an_error_at_its_place(project: Project, what: str) -> None:
    (spec, said), untrusted = USELESS[what], what == "from a fork"
    project.write(
        document("AgentType", "worker", f"agent: {spec}\nworkspace: {{enabled: true, providers: [local]}}"),
        document("IncidentRun", "work", "agent_type: worker\nmatrix: {model: [gpt-5]}"),
    )

    with pytest.raises(Rejected) as refused:
        await make_plan(project.folder, project.settings(), Request(untrusted=untrusted))

    (found,) = (finding for finding in refused.value.findings if said in finding.message)
    assert found.exit_code == (3 if untrusted else 2)
    assert found.at is not None
    assert found.at.text.strip().startswith(("credentials", "budget", "matrix", "cli_tools"))
