"""Messages about a run, received by a real HTTP server."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from hashlib import sha256

import pytest

from tests.support.http_servers import Handler, serving_http
from tests.support.situations import Project

KEY = b"a key that signs the messages"


@dataclass
class Received:
    port: int = 0
    answers: list[int] = field(default_factory=list)  # before those that take the message
    messages: list[tuple[Message, bytes]] = field(default_factory=list)


@pytest.fixture
def received() -> Iterator[Received]:
    found = Received()

    class Receiver(Handler):
        def do_POST(self) -> None:
            found.messages.append((self.headers, self.heard()))
            self.tell(status=found.answers.pop(0) if found.answers else 200)

    with serving_http(Receiver) as found.port:
        yield found


def test_whoever_is_named_is_told_and_can_prove_who_told_it(project: Project, received: Received) -> None:
    """Slack's URL is a secret; what a service does not take at first is sent again."""
    key = "whsec_" + base64.b64encode(KEY).decode()
    project.env |= {"SLACK": f"http://localhost:{received.port}/slack/T0/B0", "KEY": key}
    project.script(
        "echo ran >file; exit 3",
        run=f"""
notify:
  - to: json
    url: "http://localhost:{received.port}/hook?a=b"
    secret: {{env: KEY}}
    private: true
    states: [running, failed]
  - {{to: slack, url_from: {{env: SLACK}}, private: true}}
  - {{to: slack, url_from: {{env: SLACK}}, private: true, states: [succeeded]}}
""",
    )
    received.answers = [503]

    done, record = project.apply()

    assert (done.code, "run.not-told" in done.err) == (1, False)
    signed = {head["webhook-id"]: (head, body) for head, body in received.messages if "webhook-signature" in head}
    for id, (head, body) in signed.items():
        expected = hmac.digest(KEY, f"{id}.{head['webhook-timestamp']}.".encode() + body, sha256)
        assert head["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
    told = [json.loads(body) for _, body in signed.values()]
    assert [(one["state"], one["run"], one["name"], one["project"]) for one in told] == [
        ("running", record["id"], "work", "default"),
        ("failed", record["id"], "work", "default"),
    ]
    assert told[1]["exit_code"] == 1
    [text] = [json.loads(body)["text"] for head, body in received.messages if "webhook-signature" not in head]
    assert text.startswith("work failed: ")
    assert len(received.messages) == 4  # one of them twice
    plan = project.home / "state" / "runs" / record["id"] / "plan.json"
    assert key not in plan.read_text()


def test_a_message_to_a_private_host_is_not_sent_unless_it_is_named(project: Project, received: Received) -> None:
    project.env |= {"URL": f"https://localhost:{received.port}/"}
    project.script("echo ran >file", run="notify: [{to: slack, url_from: {env: URL}}]")

    done, record = project.apply()

    assert (done.code, record["status"], received.messages) == (0, "succeeded", [])
    assert "run.not-told" in done.err
    assert "private addresses" in done.err


@pytest.mark.parametrize("url", ["http://example.org", "https://0x7f.1"])
def test_a_secret_that_is_no_url_is_an_error_before_anything_starts(project: Project, url: str) -> None:
    project.env |= {"URL": url}
    project.script("echo ran >file", run="notify: [{to: slack, url_from: {env: URL}}]")

    done = project.runner("apply", str(project.folder))

    assert (done.code, "secret.unfit" in done.err, url in done.err) == (2, True, False)
    assert not (project.home / "state" / "runs").exists()
