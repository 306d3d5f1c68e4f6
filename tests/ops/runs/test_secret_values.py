"""Where the values of secrets come from, and what is said when one cannot be had."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from runner.core.errors import Rejected
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.runs import secret_values
from runner.ops.runs.secret_values import make_redactor, resolve_secrets
from runner.report.plan import render_plan
from tests.support.folder_contents import put
from tests.support.runs import apply
from tests.support.situations import Project

VALUE = "s3cr3t-8d7f6g"


@pytest.fixture
def ask(project: Project) -> Callable[..., object]:
    async def values(source: str, env: dict[str, str] | None = None, how: str = "env") -> bytes:
        """The value of the only secret of a run."""
        secret = f"{{name: TOKEN, from: {source}, steps: [agent], as: {how}}}"
        project.script("true", agent=f"secrets: [{secret}]", provider="local" if how == "file" else "process")
        home = {"RUNNER_HOME": str(project.home), "HOME": str(project.home), "PATH": os.environ["PATH"]}
        settings = Settings.from_env({**home, **(env or {})})
        planned = await make_plan(project.folder, settings)
        redactor = Redactor()
        found = await resolve_secrets(planned.secrets, planned.plan.runs, settings, redactor)
        value = found["work"]["TOKEN"].reveal()
        assert redactor.clean(b"<" + value.strip() + b">") == b"<[redacted:TOKEN]>"
        return value

    return values


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    return put(path, text, mode)


async def test_a_value_comes_from_each_kind_of_place(ask, project: Project) -> None:  # type: ignore[no-untyped-def]
    absolute = private(project.home / "absolute", VALUE)
    private(project.home / ".config" / "token", f"{VALUE}\n")
    private(project.folder / "beside", VALUE)
    keyring = private(project.home / "bin" / "keyring", '#!/bin/sh\necho "$1-$2-$3-8d7f"\n', 0o755)
    path = {"PATH": f"{keyring.parent}:{os.environ['PATH']}"}

    assert await ask("{env: X}", {"X": VALUE}) == VALUE.encode()
    assert await ask(f"{{file: {absolute}}}") == VALUE.encode()
    assert await ask('{file: "~/.config/token"}') == f"{VALUE}\n".encode()
    assert await ask("{file: beside}") == VALUE.encode()
    assert await ask("{command: [printenv, X]}", {"X": VALUE}) == f"{VALUE}\n".encode()
    assert await ask("{keyring: {service: npm, user: me}}", path) == b"get-npm-me-8d7f\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{env: X}", "variable `X` is not set"),
        ("{env: EMPTY}", "is empty in variable `EMPTY`"),
        ("{env: WORD}", "is a common word"),
        ("{env: TINY}", "has fewer than 6 bytes"),
        ("{file: nowhere}", "No such file or directory"),
        ("{file: .}", "is not a regular file"),
        ("{file: open}", "others can read or change"),
        ("{file: large}", "has more than 64 KiB"),
        ("{file: nul}", "holds a NUL"),
        ("{command: [no-such-program]}", "`no-such-program` cannot be started: No such file or directory"),
        ("{command: [sh, -c, 'echo s3cr3t-complaint >&2; exit 7']}", "`sh` exited 7"),
        ("{command: [yes]}", "has more than 64 KiB"),
        ("{keyring: {service: s, user: u}}", "`keyring get s u` cannot be started"),
    ],
)
async def test_what_cannot_be_had_is_said_with_its_place(  # type: ignore[no-untyped-def]
    ask, project: Project, source: str, message: str
) -> None:
    private(project.folder / "open", VALUE, 0o640)
    private(project.folder / "large", VALUE * 10_000)
    private(project.folder / "nul", "a\0bcdefgh")

    with pytest.raises(Rejected) as caught:
        await ask(source, {"EMPTY": " ", "WORD": "password", "TINY": "12345"})

    (finding,) = caught.value.findings
    assert finding.message.startswith("secret `TOKEN` ")
    assert message in finding.message
    assert "s3cr3t" not in f"{finding.message} {finding.hint}"
    assert finding.at.file.endswith("all.runner.yaml")
    assert finding.exit_code == 2


async def test_a_command_has_a_time(ask, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(secret_values, "SECONDS", 0.1)

    with pytest.raises(Rejected) as caught:
        await ask("{command: [sh, -c, 'sleep 1000 & sleep 1000']}")

    assert "took more than 0.1 s" in caught.value.findings[0].message


async def test_of_a_command_that_is_given_up_nothing_lives_on(  # type: ignore[no-untyped-def]
    ask, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shell may have ended long ago, while what it started still holds the pipe."""
    monkeypatch.setattr(secret_values, "SECONDS", 1.0)
    alive = project.home / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)

    with pytest.raises(Rejected):
        await ask(f"{{command: [sh, -c, 'exec 9>{alive}; sleep 1000 &']}}")

    with trio.fail_after(30):
        await trio.lowlevel.wait_readable(reader)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_runner_that_is_terminated_takes_the_command_along(project: Project) -> None:
    alive = project.home / "alive"
    os.mkfifo(alive)
    command = f"[sh, -c, 'exec 9>{alive}; echo begun >&9; sleep 60']"
    project.script("true", agent=f"secrets: [{{name: TOKEN, from: {{command: {command}}}, steps: [agent]}}]")
    process = project.start("apply", str(project.folder))
    with alive.open() as reader:
        assert reader.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)

        assert process.communicate(timeout=20) == ("", "")
        assert (process.returncode, reader.read()) == (130, "")


async def test_as_a_file_a_value_may_have_any_byte(ask, project: Project) -> None:  # type: ignore[no-untyped-def]
    private(project.folder / "nul", "a\0b8defgh\n")

    assert await ask("{file: nul}", how="file") == b"a\0b8defgh\n"


SECRETS = """
secrets:
  - {name: NPM_TOKEN, from: {env: CI_NPM_TOKEN}, steps: [agent]}
  - {name: DEPLOY, from: {file: deploy.key}, steps: [agent], as: file}
"""


@pytest.mark.scenario("BEY-12")
async def test_nothing_is_made_when_a_secret_is_missing(project: Project) -> None:
    private(project.folder / "deploy.key", VALUE, 0o644)
    project.script("true", agent=SECRETS)
    settings = Settings.from_env({"RUNNER_HOME": str(project.home / "state"), "PATH": os.environ["PATH"]})
    planned = await make_plan(project.folder, settings)

    with pytest.raises(Rejected) as caught:
        await apply(planned, settings, [])

    lines = (project.folder / "all.runner.yaml").read_text().splitlines()
    assert [
        (finding.code, finding.at and lines[finding.at.line - 1].split()[2]) for finding in caught.value.findings
    ] == [
        ("secret.missing", "NPM_TOKEN,"),
        ("secret.exposed", "DEPLOY,"),
    ]
    assert caught.value.exit_code == 2
    assert not (project.home / "state").exists()


@pytest.mark.scenario("BEY-12")
async def test_manifests_of_a_stranger_get_no_secret(project: Project) -> None:
    project.script("true", agent=SECRETS)

    with pytest.raises(Rejected) as caught:
        await make_plan(project.folder, Settings.from_env({"PATH": "/bin"}), Request(untrusted=True))

    assert [finding.message for finding in caught.value.findings] == [
        "an untrusted manifest may not have secret `NPM_TOKEN`",
        "an untrusted manifest may not have secret `DEPLOY`",
    ]
    assert caught.value.exit_code == 3


async def test_a_file_in_memory_is_refused_where_there_is_no_memory_of_its_own(project: Project) -> None:
    project.script("true", agent=SECRETS, provider="process")

    with pytest.raises(Rejected, match="1 error") as caught:
        await make_plan(project.folder, Settings.from_env({"PATH": "/bin"}))

    assert "`process` cannot enforce a file in memory for secret DEPLOY" in caught.value.findings[0].message


async def test_a_variable_is_of_a_secret_or_of_env_but_not_both(project: Project) -> None:
    project.script("true", agent=SECRETS + "env: {DEPLOY_FILE: x, DEPLOY: y}")

    with pytest.raises(Rejected) as caught:
        await make_plan(project.folder, Settings.from_env({"PATH": "/bin"}))

    assert [finding.message for finding in caught.value.findings if finding.severity == "error"] == [
        "`DEPLOY_FILE` is the variable of a secret, and in `env` as well"
    ]


async def test_a_plan_has_the_names_of_secrets_only(project: Project) -> None:
    project.script("true", agent=SECRETS)
    settings = Settings.from_env({"PATH": "/bin", "CI_NPM_TOKEN": VALUE})

    plan = (await make_plan(project.folder, settings)).plan
    text, document = render_plan(plan, width=400), json.dumps(plan.document())

    assert "secret NPM_TOKEN, gone afterwards" in text
    assert "secret DEPLOY as a file, gone afterwards" in text
    assert '"name": "NPM_TOKEN", "as_file": false' in document
    for hidden in (VALUE, "CI_NPM_TOKEN", "deploy.key"):
        assert hidden not in text + document


def test_the_keys_that_the_runner_uses_itself_are_hidden_and_no_setting_shows_one() -> None:
    settings = Settings.from_env(
        {
            "ANTHROPIC_API_KEY": "sk-ant-9d8f7g6d8f7g6",
            "OPENAI_API_KEY": "dummy",
            "RUNNER_GIT_CREDENTIALS": "git.example.org=env:GIT",
            "GIT": "glpat-8sd7f6s8d7f6",
            "OTHER": "other-8s7df6s8d7f",
        }
    )

    assert make_redactor(settings).text("sk-ant-9d8f7g6d8f7g6 dummy glpat-8sd7f6s8d7f6") == (
        "[redacted:ANTHROPIC_API_KEY] dummy [redacted:token of git.example.org]"
    )
    for value in ("sk-ant", "glpat", "other-8s7"):
        assert value not in repr(settings)
