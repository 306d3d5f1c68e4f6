"""Task of a run from outside its manifests: flags override a file, which overrides the CI's variables.

Branch names and URLs may come from an attacker's pull request: they are only checked for type, and never reach a shell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.core.errors import Rejected, UsageError, nearest
from runner.core.sanitize import excerpt
from runner.core.settings import Settings, without_secrets
from runner.manifest import text
from runner.manifest.kinds.incident_run import Task
from runner.manifest.load import load_value

Given = dict[str, object]  # some of the fields of ``IncidentRun.task``


def read_task(
    flags: Sequence[str], file: str | None, ci: str | None, settings: Settings, stdin: Callable[[int], bytes]
) -> Given:
    """Read the given fields, each of the right type; ``stdin`` reads at most so many bytes for the file ``-``.

    Raises ``Rejected`` with every finding, and what reading a file raises.
    """
    given: Given = {}
    if ci is not None:
        given |= _checked(f"--task-from {ci}", json.dumps(FROM[ci](settings.ci), ensure_ascii=False).encode())
    if file is not None:
        raw = stdin(text.FILE_BYTES) if file == "-" else text.read(Path(file), file)
        given |= _checked(file, _without_surrogates(raw))
    return {**given, **checked_task("--task", dict(map(_field, flags)))} if flags else given


def checked_task(name: str, fields: Mapping[str, object]) -> Given:
    """Return the fields if each is of the right type; ``name`` is what places show. Raises ``Rejected``."""
    return _checked(name, json.dumps(fields, ensure_ascii=False).encode())


def _field(flag: str) -> tuple[str, object]:
    key, equals, value = flag.partition("=")
    if not equals:
        raise UsageError(
            f"`{excerpt(without_secrets(flag))}` is not a field of the task", hint="write --task key=value"
        )
    if key not in Task.model_fields:
        raise UsageError(f"`{excerpt(key)}` is not a field of the task", hint=nearest(key, Task.model_fields))
    number = Task.model_fields[key].annotation == int | None and value.isascii() and value.isdigit()
    return key, int(value[:20]) if number else value


def _checked(name: str, raw: bytes) -> Given:
    task, findings = load_value(Task, name, raw)
    if task is None:
        raise Rejected(findings)
    return task.model_dump(exclude_none=True)


def _without_surrogates(raw: bytes) -> bytes:
    """Join surrogate pairs, which JSON writes for emoji and YAML refuses; leave anything else alone."""
    if b"\\ud" not in raw.lower():
        return raw
    try:
        return json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return raw


def _github(env: Mapping[str, str]) -> Given:
    """Read the head of a pull request, also one in a fork; else the branch and commit of the workflow."""
    repository = _need(env, "github", "GITHUB_REPOSITORY")
    given: Given = {"repository_url": f"{env.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"}
    pull = _event(env).get("pull_request")
    if isinstance(pull, dict):
        head, base = _object(pull, "head"), _object(pull, "base")
        given |= {
            "repository_url": _object(head, "repo").get("clone_url"),
            "branch": head.get("ref"),
            "base_branch": base.get("ref"),
            "pull_request_number": pull.get("number"),
            "commit": head.get("sha"),
        }
    else:
        branch = env.get("GITHUB_REF_NAME") if env.get("GITHUB_REF", "").startswith("refs/heads/") else None
        given |= {"branch": branch, "commit": env.get("GITHUB_SHA")}
    return _present(given)


def _event(env: Mapping[str, str]) -> Mapping[str, Any]:
    path = env.get("GITHUB_EVENT_PATH")
    if not path:
        return {}
    try:
        event = json.loads(text.read(Path(path), path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{excerpt(path)}` is not the JSON of an event", hint="see GITHUB_EVENT_PATH") from error
    return event if isinstance(event, dict) else {}


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _gitlab(env: Mapping[str, str]) -> Given:
    """Read the source of a merge request, also one in a fork; else the branch and commit of the pipeline."""
    project = _need(env, "gitlab", "CI_PROJECT_URL")  # CI_REPOSITORY_URL holds a token
    number = env.get("CI_MERGE_REQUEST_IID", "")
    if not number:
        return _present(
            {"repository_url": project, "branch": env.get("CI_COMMIT_BRANCH"), "commit": env.get("CI_COMMIT_SHA")}
        )
    return _present(
        {
            "repository_url": env.get("CI_MERGE_REQUEST_SOURCE_PROJECT_URL") or project,
            "branch": env.get("CI_MERGE_REQUEST_SOURCE_BRANCH_NAME"),
            "base_branch": env.get("CI_MERGE_REQUEST_TARGET_BRANCH_NAME"),
            "pull_request_number": int(number) if number.isascii() and number.isdigit() else number,
            "commit": env.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA") or env.get("CI_COMMIT_SHA"),
        }
    )


def _need(env: Mapping[str, str], ci: str, name: str) -> str:
    if not env.get(name):
        raise UsageError(f"`--task-from {ci}` needs `{name}`, which is not set", hint="use it only in jobs of that CI")
    return env[name]


def _present(given: Given) -> Given:
    return {key: value for key, value in given.items() if value is not None and value != ""}


FROM: Mapping[str, Callable[[Mapping[str, str]], Given]] = {"github": _github, "gitlab": _gitlab}
