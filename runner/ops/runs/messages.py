"""Messages about a run: sent beside it and tried again; its end waits for the last of them, for a bounded time."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from uuid import uuid4

import trio

from runner.core.clock import now_microseconds
from runner.core.codec import encode
from runner.core.errors import NotTold, Rejected, UnfitSecret
from runner.core.model import NetworkRefusal
from runner.core.redact import Secret
from runner.core.settings import Settings
from runner.events import events as ev
from runner.events.events import Recorded
from runner.ops.runs.dependencies import Advise
from runner.ops.runs.history import state_name
from runner.plan.model import PlannedMessage, RunPlan
from runner.ports.sink import Sink
from runner.spec.messages import URL_HINT, fit_url
from runner.steps.provision.plan import project_of

TRIES = (0.0, 1.0, 4.0)  # seconds before each
AT_END = 30.0  # seconds that the end of a run waits for its messages
_LONGEST = 2000  # characters of why a run did not succeed
_SLACK = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def check_messages(plans: Iterable[RunPlan], values: Mapping[str, Mapping[str, Secret]]) -> None:
    """Raise ``Rejected`` for secrets that are not the URLs that they should be; ``values`` are by run."""
    found = {
        message.origin: UnfitSecret(f"what `url_from` of {message.origin} leads to is not an https URL", hint=URL_HINT)
        for plan in plans
        for message in plan.messages
        if not fit_url(_url(message, values[plan.name]), private=message.private)
    }
    if found:
        raise Rejected(found.values())


def _url(message: PlannedMessage, secrets: Mapping[str, Secret]) -> str:
    if message.url_secret is None:
        return message.url or ""
    return secrets[message.url_secret].reveal().decode(errors="replace").strip()


@asynccontextmanager
async def telling(
    plan: RunPlan, secrets: Mapping[str, Secret], settings: Settings, advise: Advise
) -> AsyncIterator[Sink]:
    """Yield a sink that sends the messages about a run; one that nobody takes is told to ``advise``."""
    if not plan.messages:
        yield lambda recorded: None
        return
    async with trio.open_nursery() as nursery:

        def tell(recorded: Recorded) -> None:
            about = _about(plan, recorded)
            for message in plan.messages:
                if about is not None and about["state"] in message.states:
                    nursery.start_soon(_send, message, about, secrets, settings, advise)

        yield tell
        nursery.cancel_scope.deadline = trio.current_time() + AT_END


def _about(plan: RunPlan, recorded: Recorded) -> dict[str, object] | None:
    """Return what is told of an event; ``None`` for one that changes no state."""
    match recorded.event:
        case ev.RunStarted():
            more: dict[str, object] = {"state": "running"}
        case ev.RunEnded(outcome=outcome, exit_code=exit_code):
            reason, message = outcome.reason, outcome.message[:_LONGEST]
            state = state_name(outcome.status, exit_code)
            more = {"state": state, "exit_code": exit_code, "reason": reason, "message": message}
        case _:
            return None
    at = recorded.at / 1e6
    return {"run": recorded.run, "name": plan.name, "project": project_of(plan), "at": at, **more}


async def _send(
    message: PlannedMessage,
    about: Mapping[str, object],
    secrets: Mapping[str, Secret],
    settings: Settings,
    advise: Advise,
) -> None:
    from runner.network.exchange import Refused
    from runner.network.post import post  # with all that HTTP takes, which most runs do without

    body = json.dumps({"text": _text(about)}).encode() if message.form == "slack" else encode(about)
    url, private = _url(message, secrets), message.private
    id, why = str(uuid4()), "the run has ended"
    try:
        for seconds in TRIES:
            await trio.sleep(seconds)
            stamp = str(now_microseconds() // 1_000_000)
            key = secrets[message.signed_with].reveal() if message.signed_with is not None else None
            try:
                status = await post(url, signed(id, stamp, body, key), body, private=private, reach=settings.reach)
            except Refused as refused:
                why = str(refused)
                if refused.refusal in (NetworkRefusal.PRIVATE, NetworkRefusal.CERTIFICATE):
                    break
                continue
            if status // 100 == 2:
                return
            why = f"it answered {status}"
            if status // 100 == 4 and status != 429:
                break
    except trio.Cancelled:
        advise(NotTold(f"a message at {message.origin} was given up: {why}"))
        raise
    advise(NotTold(f"a message at {message.origin} was not taken: {why}", hint="the run is not affected"))


def signed(id: str, stamp: str, body: bytes, key: bytes | None) -> dict[str, str]:
    """Return the headers of a message as Standard Webhooks has them, signed if there is a key."""
    headers = {"webhook-id": id, "webhook-timestamp": stamp}
    if key is None:
        return headers
    key = key.strip()
    if key.startswith(b"whsec_"):
        with suppress(binascii.Error):  # of a key that only begins like one
            key = base64.b64decode(key.removeprefix(b"whsec_"), validate=True)
    digest = hmac.digest(key, f"{id}.{stamp}.".encode() + body, sha256)
    return headers | {"webhook-signature": f"v1,{base64.b64encode(digest).decode()}"}


def _text(about: Mapping[str, object]) -> str:
    why = f": {about['message']}" if about.get("message") else ""
    return f"{about['name']} {about['state']}{why} (run {about['run']})".translate(_SLACK)
