"""Route of webhooks, which services call that have no token: each message proves itself."""

from __future__ import annotations

from msgspec import Struct

from runner.core.errors import ServerStopping
from runner.server.route import Call, api
from runner.server.webhooks import MOST_BODY


class Taken(Struct, kw_only=True):
    """The number of runs that a message starts, now or when there is room, and why it starts no others."""

    accepted: int
    ignored: list[str]


async def _receive(call: Call) -> Taken:
    if call.server.stopping.is_set():
        raise ServerStopping("the server is stopping", hint="send it again when it has started")
    accepted, ignored = call.server.webhooks.receive(call.path["run"], call.headers, call.body)
    return Taken(accepted=accepted, ignored=ignored)


ROUTES = (
    api(
        "POST",
        "/webhooks/{run}",
        "Take a message of GitHub, GitLab or Alertmanager",
        _receive,
        answer=Taken,
        status=202,
        open=True,
        raw_bytes=MOST_BODY,
    ),
)
