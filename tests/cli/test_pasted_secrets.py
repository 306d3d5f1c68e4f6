"""A password where somebody pasted it in error is printed, stored and logged by nothing."""

from __future__ import annotations

import pytest

from tests.support.situations import Project

PASSWORD = "hunter22-Zx81kLq0Vw7T"
URL = f"https://me:{PASSWORD}@git.example.org/team/shop"


def shown_or_kept(project: Project, *arguments: str) -> str:
    """What a command prints, and the names of the files that have the password after it."""
    done = project.runner(*arguments)
    state = project.home / "state"
    files = [path for path in state.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    return done.out + done.err + "".join(f"\nkept in {path}" for path in files)


@pytest.mark.parametrize(
    "value", [PASSWORD, f"git.example.org={PASSWORD}", URL, f"git.example.org=env:{PASSWORD.replace('-', '_')}"]
)
@pytest.mark.parametrize("arguments", [("doctor", "--settings"), ("apply", ".")], ids=["settings", "apply"])
def test_a_token_in_the_place_of_where_it_is(project: Project, value: str, arguments: tuple[str, ...]) -> None:
    project.script("true")
    project.env["RUNNER_GIT_CREDENTIALS"] = value

    told = shown_or_kept(project, *arguments)

    assert PASSWORD not in told
    assert PASSWORD.replace("-", "_") not in told
    assert ("RUNNER_GIT_CREDENTIALS" in told) == (arguments[0] == "doctor" or "=env:" not in value)


@pytest.mark.parametrize("host", [f"tcp://me:{PASSWORD}@h:1", f"unix://me:{PASSWORD}@", f"tcp://[me:{PASSWORD}@h"])
@pytest.mark.parametrize("arguments", [("doctor", "--settings"), ("doctor",), ("apply", ".")], ids=" ".join)
def test_a_password_in_where_docker_is(project: Project, host: str, arguments: tuple[str, ...]) -> None:
    project.script("true", provider="docker", workspace="base_image: debian:12")
    project.env["DOCKER_HOST"] = host

    told = shown_or_kept(project, *arguments)

    assert PASSWORD not in told
    assert "DOCKER_HOST" in told


@pytest.mark.parametrize("source", ["type: none", "type: task_context", "type: fixed, url: https://example.org/x/y"])
@pytest.mark.parametrize(
    "flags",
    [
        ("--task", f"repository_url={URL}"),
        ("--task", f"repository_url={URL.upper().replace(PASSWORD.upper(), PASSWORD)}"),
        ("--task", f"repository_url={URL.removeprefix('https://')}"),
        ("--task", f"repository_url={URL}", "--task", "pull_request_number=x"),
        ("--task", URL),
        ("--task-file", "task.json"),
    ],
    ids=["a flag", "in capitals", "without a scheme", "beside another error", "no field", "a file"],
)
@pytest.mark.parametrize("verb", ["plan", pytest.param("apply", marks=pytest.mark.nightly)])
def test_a_password_in_the_url_of_a_task(project: Project, source: str, flags: tuple[str, ...], verb: str) -> None:
    project.script("env", workspace=f"repo_source: {{{source}}}")
    (project.folder / "task.json").write_text(f'{{"branch": "main", "repository_url": "{URL}"}}')

    done = shown_or_kept(project, verb, ".", *flags)

    assert PASSWORD not in done
    assert "error[" in done


def test_a_password_in_a_manifest_is_not_shown_with_another_error_of_its_line(project: Project) -> None:
    project.script("true", workspace=f"repo_source: {{type: fixed, url: '{URL}', brunch: main}}")

    done = shown_or_kept(project, "validate", ".")

    assert "`brunch`" in done
    assert PASSWORD not in done
