"""Messages of GitHub, GitLab and Alertmanager: who sent them, and what each of them asks to be done.

Nothing in a message is trusted but what the manifest leaves to it: branch, commit and number of a change in the
repository that the manifest names, or an alert, which becomes an incident's file.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

from msgspec import Struct

from runner.core.errors import BadRequest, MissingField, Rejected, RunnerError, StoreFailed
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.load import Document, load
from runner.manifest.messages import Webhook
from runner.ops.planning.carried_incident import INCIDENTS
from runner.ops.runs.secret_values import read_secret
from runner.spec.messages import NO_REPOSITORY, REPOSITORY_HINT, webhook_secret
from runner.triage.alert import IncidentMetadata, incident_of, misnamed
from runner.triage.alert_forms import items, mapping, text, texts
from runner.triage.strict_json import read_object, written

MOST_ALERTS = 100  # of a message
_HEADERS = {"github": "x-hub-signature-256", "gitlab": "x-gitlab-token", "alertmanager": "authorization"}


class Hook(Struct, frozen=True, kw_only=True):
    """Webhook of the run with this name."""

    run: str
    webhook: Webhook
    repository: str
    secret: bytes

    def is_proved(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Tell whether a message is from who has the secret, in constant time."""
        given = headers.get(_HEADERS[self.webhook.from_], "")
        match self.webhook.from_:
            case "github":
                expected = b"sha256=" + hmac.new(self.secret, body, sha256).hexdigest().encode()
            case "gitlab":
                expected = self.secret
            case _:
                expected = b"Bearer " + self.secret
        return hmac.compare_digest(given.encode(errors="replace"), expected)


class Delivery(Struct, frozen=True, kw_only=True):
    """A run that is asked for. Of several with one ``key`` the first counts."""

    key: str
    task: Mapping[str, object] = {}
    incident: Mapping[str, object] | None = None


class Message(Struct, frozen=True):
    """The runs that a message asks for, and why nothing else of it does."""

    deliveries: tuple[Delivery, ...] = ()
    ignored: tuple[str, ...] = ()


async def read_hooks(manifests: Path, settings: Settings) -> dict[str, Hook]:
    """Read the webhooks of some manifests, by run, with their secrets. Raises ``Rejected``."""
    documents, findings = load(manifests)
    if wrong := [finding for finding in findings if finding.severity == "error"]:
        raise Rejected(wrong)
    return {
        document.name: await _hook(document, document.spec, settings)
        for document in documents
        if isinstance(document.spec, IncidentRunSpec) and document.spec.webhook is not None
    }


async def _hook(document: Document, spec: IncidentRunSpec, settings: Settings) -> Hook:
    assert spec.webhook is not None
    wanted = webhook_secret(document, spec.webhook)
    try:
        secret = await read_secret(wanted, settings, Redactor())
    except RunnerError as error:
        raise type(error)(error.message, at=wanted.at, hint=error.hint) from error
    repository = spec.task.repository_url if spec.task is not None else None
    if spec.webhook.from_ != "alertmanager" and repository is None:
        raise MissingField(NO_REPOSITORY, at=document.place("webhook"), hint=REPOSITORY_HINT)
    return Hook(
        run=document.name, webhook=spec.webhook, repository=repository or "", secret=secret.reveal().rstrip(b"\r\n")
    )


def read_message(hook: Hook, headers: Mapping[str, str], body: bytes) -> Message:
    """Read a message that is proved. Raises ``BadRequest`` for one that is not JSON."""
    try:
        payload = read_object(body, "the message")
    except ValueError as error:
        raise BadRequest(str(error), hint="set its content type to application/json") from error
    if hook.webhook.from_ == "alertmanager":
        return _alerts(hook, payload)
    try:
        change = (_github if hook.webhook.from_ == "github" else _gitlab)(headers, payload)
        _check(hook, change)
    except _Ignored as ignored:
        return Message(ignored=(str(ignored),))
    task = {name: value for name, value in change.task.items() if value not in (None, "")}
    return Message((Delivery(key=sha256(body).hexdigest()[:32], task=task),))


class _Ignored(Exception):
    """A message asks for nothing."""


class _Change(Struct, frozen=True):
    event: str
    action: str
    repositories: tuple[str, ...]
    task: Mapping[str, object]


def _check(hook: Hook, change: _Change) -> None:
    if not {change.event, f"{change.event}.{change.action}"} & {*hook.webhook.events}:
        raise _Ignored(f"event {change.event}{f'.{change.action}' * bool(change.action)} starts nothing")
    if _plain(hook.repository) not in map(_plain, change.repositories):
        raise _Ignored("it is of another repository than the manifest's")


def _plain(url: str) -> str:
    return url.lower().rstrip("/").removesuffix(".git")


def _github(headers: Mapping[str, str], payload: Mapping[str, Any]) -> _Change:
    event, repository = headers.get("x-github-event", ""), mapping(payload.get("repository"))
    urls = tuple(text(repository.get(name)) for name in ("clone_url", "ssh_url", "html_url"))
    if event == "pull_request":
        pull = mapping(payload.get("pull_request"))
        head, base = mapping(pull.get("head")), mapping(pull.get("base"))
        if mapping(head.get("repo")).get("id") != mapping(base.get("repo")).get("id"):
            raise _Ignored("the pull request is from a fork")
        number = {"pull_request_number": payload.get("number"), "base_branch": text(base.get("ref"))}
        task = {"branch": text(head.get("ref")), "commit": text(head.get("sha")), **number}
        return _Change(event, text(payload.get("action")), urls, task)
    return _Change(event, "", urls, _pushed(payload) if event == "push" else {})


def _gitlab(headers: Mapping[str, str], payload: Mapping[str, Any]) -> _Change:
    event, project = text(payload.get("object_kind")), mapping(payload.get("project"))
    urls = tuple(text(project.get(name)) for name in ("git_http_url", "git_ssh_url", "web_url"))
    if event == "merge_request":
        asked = mapping(payload.get("object_attributes"))
        if asked.get("source_project_id") != asked.get("target_project_id"):
            raise _Ignored("the merge request is from a fork")
        number = {"pull_request_number": asked.get("iid"), "base_branch": text(asked.get("target_branch"))}
        commit = text(mapping(asked.get("last_commit")).get("id"))
        task = {"branch": text(asked.get("source_branch")), "commit": commit, **number}
        return _Change(event, text(asked.get("action")), urls, task)
    return _Change(event, "", urls, _pushed(payload) if event == "push" else {})


def _pushed(payload: Mapping[str, Any]) -> Mapping[str, object]:
    """Read a push, which both services describe alike."""
    kind, _, branch = text(payload.get("ref")).removeprefix("refs/").partition("/")
    commit = text(payload.get("after"))
    if kind != "heads" or not commit.strip("0"):
        raise _Ignored("the push is not to a branch, or removes it")
    return {"branch": branch, "commit": commit}


def _alerts(hook: Hook, payload: Mapping[str, Any]) -> Message:
    """Read each firing alert of a message as an incident; the fingerprint and its start tell one from another."""
    found: list[Delivery] = []
    ignored: list[str] = []
    for one in items(payload.get("alerts"))[:MOST_ALERTS]:
        alert, labels = mapping(one), texts(mapping(one).get("labels"))
        fingerprint, since = text(alert.get("fingerprint")), text(alert.get("startsAt"))
        if alert.get("status") != "firing" or not fingerprint:
            ignored.append("an alert is not firing")
        elif any(labels.get(name) != value for name, value in hook.webhook.labels.items()):
            ignored.append("an alert has other labels")
        else:
            key = sha256(json.dumps([fingerprint, since]).encode()).hexdigest()[:32]
            try:
                incident = incident_of({**alert, "groupKey": payload.get("groupKey")}, IncidentMetadata(key, since))
            except ValueError as error:
                ignored.append(str(error))
                continue
            if why := misnamed(incident):
                ignored.append(why)
            else:
                found.append(Delivery(key=key, incident=incident))
    return Message(tuple(found), tuple(ignored))


def write_incident(hook: Hook, delivery: Delivery, settings: Settings) -> str | None:
    """Write the directory of a delivery's incident, once; ``None`` for one without. Raises ``StoreFailed``."""
    if delivery.incident is None:
        return None
    directory = settings.home / INCIDENTS / f"{hook.run}-{delivery.key}"
    half = directory.with_name(f".{token_hex(8)}")
    try:
        if not directory.is_dir():
            (half / "output").mkdir(parents=True, mode=0o700)
            (half / "incident.json").write_text(written(delivery.incident) + "\n", encoding="utf-8")
            half.rename(directory)
    except OSError as error:
        rmtree(half, ignore_errors=True)
        if not directory.is_dir():  # where another server was faster
            message = f"`{directory}` cannot be written: {error.strerror}"
            raise StoreFailed(message, hint="free some space") from error
    return str(directory)
