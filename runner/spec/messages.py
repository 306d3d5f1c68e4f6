"""Messages in and out of a run: what they must be for this run, and their secrets."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from runner.core.errors import BadValue, MissingField, RunnerError, Untrusted
from runner.core.hosts import canonical_host
from runner.core.settings import is_url
from runner.manifest.load import Document
from runner.manifest.messages import Notification, Webhook
from runner.plan.model import PlannedMessage, PlannedWebhook
from runner.spec.model import SecretSpec
from runner.spec.secrets import source_of
from runner.spec.select import Selected

_EVENTS = {"github": ("push", "pull_request"), "gitlab": ("push", "merge_request"), "alertmanager": ()}
NO_REPOSITORY = "a webhook names a branch and a commit, and never the repository"
REPOSITORY_HINT = "write task: {repository_url: https://...}"
_UNSIGNED = "only a message of `json` can be signed"


def webhook_of(selected: Selected) -> PlannedWebhook | None:
    webhook = selected.spec.webhook
    if webhook is None:
        return None
    return PlannedWebhook(
        service=webhook.from_,
        events=tuple(webhook.events),
        labels=webhook.labels,
        max_parallel=webhook.max_parallel,
        per_hour=webhook.per_hour,
        origin=selected.run.origin("webhook"),
    )


def webhook_secret(run: Document, webhook: Webhook) -> SecretSpec:
    """Return the secret that proves the messages of a webhook, which no step gets."""
    return SecretSpec(
        name=f"webhook of {run.name}",
        source=source_of(webhook.secret, run),
        steps=(),
        as_file=False,
        at=run.place("webhook", "secret"),
    )


def messages_of(selected: Selected) -> tuple[tuple[PlannedMessage, ...], tuple[SecretSpec, ...]]:
    """Return the messages about a run, and their secrets, which no step gets."""
    found = [(one, f"notify {number}") for number, one in enumerate(selected.spec.notify, 1)]
    messages = tuple(
        PlannedMessage(
            form=one.to,
            url=one.url,
            url_secret=f"{name} url" if one.url_from is not None else None,
            signed_with=f"{name} secret" if one.secret is not None else None,
            states=tuple(one.states),
            private=one.private,
            origin=selected.run.origin("notify", number),
        )
        for number, (one, name) in enumerate(found)
    )
    secrets = (
        SecretSpec(
            name=f"{name} {words}",
            source=source_of(source, selected.run),
            steps=(),
            as_file=False,
            at=selected.run.place("notify", number, key),
        )
        for number, (one, name) in enumerate(found)
        for key, words, source in (("url_from", "url", one.url_from), ("secret", "secret", one.secret))
        if source is not None
    )
    return messages, tuple(secrets)


def message_faults(selected: Selected, *, untrusted: bool) -> Iterator[RunnerError]:
    run, spec = selected.run, selected.spec
    if untrusted:
        hint = "apply it without --untrusted"
        if spec.webhook is not None:
            yield Untrusted("an untrusted manifest may not have a webhook", at=run.place("webhook"), hint=hint)
        if spec.notify:
            yield Untrusted("an untrusted manifest may not send messages", at=run.place("notify"), hint=hint)
        return
    for number, one in enumerate(spec.notify):
        yield from _notification_faults(run, number, one)
    if spec.webhook is not None:
        yield from _webhook_faults(selected, spec.webhook)


def _notification_faults(run: Document, number: int, one: Notification) -> Iterator[RunnerError]:
    if (one.url is None) is (one.url_from is None):
        message = "a message is posted to one place, `url` or `url_from`"
        yield BadValue(message, at=run.place("notify", number), hint="write one of them")
    if one.url is not None and not fit_url(one.url, private=one.private):
        at = run.place("notify", number, "url")._replace(text="")  # it may hold a password
        yield BadValue("`url` is not an https URL without a user", at=at, hint=URL_HINT)
    if one.to != "json" and one.secret is not None:
        yield BadValue(_UNSIGNED, at=run.place("notify", number, "secret"), hint="write to: json, or remove it")


URL_HINT = "write https://HOST/PATH; with `private: true` also http"


def fit_url(url: str, *, private: bool) -> bool:
    """Tell whether messages can be posted to a URL."""
    if not is_url(url, "https", *(("http",) if private else ())) or "@" in url:
        return False
    host = urlsplit(url).hostname or ""
    return canonical_host(f"[{host}]" if ":" in host else host) is not None


def _webhook_faults(selected: Selected, webhook: Webhook) -> Iterator[RunnerError]:
    run, spec, service = selected.run, selected.spec, webhook.from_
    known = _EVENTS[service]
    for number, event in enumerate(webhook.events):
        if event.partition(".")[0] not in known:
            hint = f"valid choices: {', '.join(known)}" if known else "remove it, or write `labels`"
            at = run.place("webhook", "events", number)
            yield BadValue(f"`{event}` is not an event of {service} that starts runs", at=at, hint=hint)
    if known and not webhook.events:
        message = "`events` is missing: which of them start the run"
        yield MissingField(message, at=run.place("webhook"), hint=f"valid choices: {', '.join(known)}")
    if known and webhook.labels:
        at = run.place("webhook", "labels")
        yield BadValue(f"only alerts have labels, and {service} sends none", at=at, hint="write `events`")
    if known and (spec.task is None or spec.task.repository_url is None):
        yield MissingField(NO_REPOSITORY, at=run.place("webhook"), hint=REPOSITORY_HINT)
    if not known and (spec.incident is None or (spec.matrix is not None and spec.matrix.incident is not None)):
        message = "an alert becomes an incident, and this run has none of its own"
        hint = "write incident: {directory: DIR}, an example that alerts replace"
        yield MissingField(message, at=run.place("webhook"), hint=hint)
