"""A cluster behind TLS, a client as kubectl is, and the runner between the two."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from runner.cluster.access_review import parse_review
from runner.cluster.authorized import AuthorizedUpstream
from runner.cluster.clusters import Clusters
from runner.cluster.credential_plugin import Credential
from runner.cluster.kubeconfig import read_target
from runner.cluster.session import BUSY_SECONDS, MAX_REQUESTS, READ_SECONDS, ReadOnlySession
from runner.core.errors import ClusterDenied, ClusterUnreachable, InputChanged
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.ports.cluster import ClusterGrant, ClusterRequest, ClusterSession
from tests.skills.api_server import Cluster
from tests.support.gateway_wire import Client, Connecting, Heard, Provider, Said
from tests.support.kubernetes import CONTEXT, NAMESPACE, POD, SECRET, TOKEN, Api, serving
from tests.support.params import nightly

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LOG = f"{PODS}/{POD}/log"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@pytest.fixture
def api(authority: Path) -> Iterator[Api]:
    with serving(authority) as found:
        yield found


@dataclass
class Line:
    session: ClusterSession
    connect: Callable[[], Client]
    told: list[ClusterRequest]

    async def get(self, target: str, **headers: str) -> Heard:
        return await self.ask("GET", target, **headers)

    async def ask(self, method: str, target: str, body: object = None, **headers: str) -> Heard:
        with trio.fail_after(20):
            return await self.connect().ask(method, target, body, **headers)


@asynccontextmanager
async def connected(
    session: ClusterSession, told: list[ClusterRequest], pair: Callable[[], Any] = memory_stream_pair
) -> AsyncIterator[Line]:
    async with AsyncExitStack() as near_ends, open_services() as services:

        async def serve(stream: Any) -> None:
            try:
                await session.serve(stream)
            except trio.BrokenResourceError:
                pass
            finally:
                await stream.aclose()

        def connect() -> Client:
            near, far = pair()
            near_ends.push_async_callback(near.aclose)
            services.start_soon(serve, far)
            return _Local(near)

        yield Line(session, connect, told)


class _Local(Client):
    """Says that it talks to this host."""

    async def send(self, method: str, target: str, body: bytes = b"", headers: Any = None) -> None:
        await super().send(method, target, body, {"host": "127.0.0.1:1", **(headers or {})})


def sockets() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Which take no more than they are read, as streams in memory do."""
    near, far = map(trio.SocketStream, trio.socket.socketpair())
    return near, far


def grant(api: Api, path: Path) -> ClusterGrant:
    return ClusterGrant(
        kubeconfig=str(path),
        context=CONTEXT,
        server=json.loads(path.read_text())["clusters"][0]["cluster"]["server"],
        namespace=NAMESPACE,
    )


@asynccontextmanager
async def open_line(api: Api, path: Path) -> AsyncIterator[Line]:
    told: list[ClusterRequest] = []
    async with (
        Clusters(Settings.from_env({})).open(grant(api, path), told.append) as session,
        connected(session, told, sockets) as line,
    ):
        yield line


@asynccontextmanager
async def scripted(tmp_path: Path, authority: Path, *said: Said) -> AsyncIterator[tuple[Line, Provider]]:
    """A session whose cluster is a script, for what takes long."""
    provider, told = Provider(*said), list[ClusterRequest]()
    path = Api(authority, Cluster()).write(tmp_path / "config")
    target = read_target(str(path), None, None, {})

    async def own(refused: Credential | None = None) -> Credential:
        await trio.lowlevel.checkpoint()
        return target.credential()

    async with AuthorizedUpstream(own, lambda certificate: nullcontext(provider)) as way:
        session = ReadOnlySession(target, way, told.append, max_reported=5)
        async with connected(session, told) as line:
            yield line, provider
        session.close()


async def test_a_request_goes_out_with_the_credential_and_without_the_client_s_own(api: Api, tmp_path: Path) -> None:
    forged = {"x_forwarded_user": "root", "cookie": "a=b"}
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.get(f"{PODS}?limit=500", accept="application/json", **forged)

    assert (heard.status, heard.json()["kind"], heard.whole) == (200, "PodList", True)
    (asked,) = api.asked
    assert (asked.target, asked.headers["authorization"]) == (f"{PODS}?limit=500", f"Bearer {TOKEN}")
    assert set(asked.headers) == {"host", "accept", "accept-encoding", "authorization"}
    (told,) = line.told
    assert (told.verb, told.resource, told.namespace, told.status, told.refusal) == (
        "list",
        "pods",
        NAMESPACE,
        200,
        None,
    )
    assert 0 < told.seconds < 20


@pytest.mark.parametrize(
    "header",
    [
        "Impersonate-User",
        "impersonate-group",
        "Impersonate-Uid",
        "IMPERSONATE-EXTRA-scopes",
        "Impersonate-Later",
        "X-Remote-User",
        "X-Remote-Group",
        "X-Remote-Extra-a",
    ],
)
@pytest.mark.parametrize("value", ["system:serviceaccount:payments:checkout", ""], ids=["named", "empty"])
async def test_a_question_in_the_name_of_another_is_refused_and_never_answered_for_the_asker(
    api: Api, tmp_path: Path, header: str, value: str
) -> None:
    """Answered with the caller's own rights it would be false evidence of the other's."""
    review = {"kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": {"verb": "create", "resource": "pods"}}}
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.get(PODS, **{header: value})
        asked = await line.ask("POST", REVIEWS, review, **{header: value})

    for one in (heard, asked):
        assert (one.status, one.json()["kind"], one.json()["reason"]) == (403, "Status", "Forbidden")
        assert one.json()["message"].startswith("runner: impersonation (`--as`) is not forwarded")
    assert api.asked == []
    assert [(one.verb, one.status, one.refusal) for one in line.told] == [
        ("list", 403, "impersonation"),
        ("create", 403, "impersonation"),
    ]


@pytest.mark.parametrize("header", ["Authorization", "AUTHORIZATION"])
async def test_a_credential_of_the_client_s_own_is_refused_and_not_dropped(
    api: Api, tmp_path: Path, header: str
) -> None:
    """Answered with the runner's it would be false evidence of what that credential may do."""
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.get(PODS, **{header: "Bearer mine"})

    assert (heard.status, heard.json()["reason"]) == (403, "Forbidden")
    assert heard.json()["message"].startswith("runner: a credential of your own (`--token`) is not forwarded")
    assert api.asked == []
    assert [one.refusal for one in line.told] == ["impersonation"]


async def test_nothing_is_compressed_since_no_credential_could_be_found_in_it(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.get(PODS, accept_encoding="gzip")

    assert api.asked[0].headers["accept-encoding"] == "identity"
    assert "content-encoding" not in heard.headers
    assert heard.json()["kind"] == "PodList"


async def test_an_answer_in_an_encoding_that_was_not_asked_for_is_not_passed_on(
    tmp_path: Path, authority: Path
) -> None:
    coded = Said([b"coded"], headers=[(b"content-encoding", b"gzip")])
    async with scripted(tmp_path, authority, coded) as (line, _):
        heard = await line.get(PODS)

    assert heard.status == 502
    assert heard.json()["message"].endswith("it answers in an encoding that was not asked for")
    assert [one.refusal for one in line.told] == ["cluster"]


@pytest.mark.parametrize("status", [200, 403])
async def test_a_credential_that_the_cluster_repeats_is_hidden(tmp_path: Path, authority: Path, status: int) -> None:
    """In headers, too, in base64, and wherever an answer is cut into pieces."""
    coded = b64encode(f"user:{TOKEN}:".encode()).decode()
    shown = f"<Bearer {TOKEN}> {coded} {TOKEN}{TOKEN[:9]}".encode()
    for at in range(len(shown)):
        said = Said([shown[:at], shown[at:]], status=status, headers=[(b"warning", TOKEN.encode())])
        async with scripted(tmp_path, authority, said) as (line, _):
            heard = await line.get(PODS)

        assert (heard.status, heard.whole, heard.headers["warning"]) == (status, True, "[redacted]")
        assert heard.body.startswith(b"<Bearer [redacted]> ")
        assert heard.body.endswith(f" [redacted]{TOKEN[:9]}".encode())
        assert (len(heard.body) < len(shown) - 2 * len(TOKEN), coded[12:-12].encode() in heard.body) == (True, False)


async def test_an_error_that_never_ends_is_passed_on_as_it_comes(
    tmp_path: Path, authority: Path, autojump_clock: MockClock
) -> None:
    endless = Said([b"no\n" * 999] * 999, status=403, pace=60)
    async with scripted(tmp_path, authority, endless) as (line, _):
        client = line.connect()
        await client.send("GET", f"{PODS}?watch=true")
        with trio.fail_after(20):
            heard = await client.receive(until=b"no")

    assert (heard.status, heard.whole) == (403, False)


@pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
async def test_a_client_that_hangs_up_while_the_cluster_is_connected_to_ends_nothing_else(
    tmp_path: Path, authority: Path, half: bool
) -> None:
    """Connecting tries several addresses at once, so what is cancelled there is a group."""
    provider, told = Connecting(), list[ClusterRequest]()
    path = Api(authority, Cluster()).write(tmp_path / "config")
    session = ReadOnlySession(read_target(str(path), None, None, {}), provider, told.append)
    others: list[int] = []
    async with connected(session, told) as line:
        client = line.connect()
        with trio.fail_after(5):
            await client.send("GET", PODS)
            await provider.begun.wait()
            await (client.stream.send_eof() if half else client.stream.aclose())
            while not told:
                await trio.sleep(0.001)
        await wait_all_tasks_blocked()
        others.append((await line.get("/api/v1/secrets")).status)

    assert others == [403]
    assert [(one.verb, one.refusal) for one in told] == [("list", None), ("list", "secrets")]


async def test_who_waits_for_a_place_is_told_so_after_a_while(
    tmp_path: Path, authority: Path, autojump_clock: MockClock
) -> None:
    async with scripted(tmp_path, authority, Said([b"one\n"], stalls=7200)) as (line, provider):
        for _ in range(MAX_REQUESTS):
            await line.connect().send("GET", f"{PODS}?watch=true")
        while len(provider.asked) < MAX_REQUESTS:
            await trio.sleep(0.01)
        start = trio.current_time()
        heard = await line.connect().ask("GET", PODS)
        waited = trio.current_time() - start

    assert (heard.status, heard.json()["reason"]) == (429, "TooManyRequests")
    assert math.isclose(waited, BUSY_SECONDS, abs_tol=0.1)
    assert line.told[0].refusal == "busy"


@pytest.mark.parametrize("name", ["Upgrade", "Origin"])
async def test_a_header_that_follows_an_empty_one_counts(api: Api, tmp_path: Path, name: str) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        client = line.connect()
        with trio.fail_after(5):
            await client.stream.send_all(
                f"GET {PODS} HTTP/1.1\r\nHost: localhost\r\n{name}:\r\n{name}: http://a.example\r\n\r\n".encode()
            )
            answer = await client.stream.receive_some(1 << 16)

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert api.asked == []


@pytest.mark.parametrize(
    ("method", "target", "headers", "refusal"),
    [
        pytest.param("GET", "/api/v1/secrets", {}, "secrets", id="secrets"),
        pytest.param("GET", "/api/v1/namespaces/a/%73ecrets", {}, "request", id="spelling"),
        pytest.param("DELETE", f"{PODS}/{POD}", {}, "write", id="delete"),
        pytest.param("GET", PODS, {"connection": "upgrade", "upgrade": "websocket"}, "request", id="upgrade"),
        pytest.param("GET", PODS, {"origin": "http://a.example"}, "request", id="web page"),
        pytest.param("GET", PODS, {"host": "a.example"}, "request", id="name of somebody else"),
    ],
)
async def test_a_refusal_is_a_status_and_reaches_no_cluster(
    api: Api, tmp_path: Path, method: str, target: str, headers: dict[str, str], refusal: str
) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.ask(method, target, **headers)

    status = heard.json()
    assert (heard.status, status["kind"], status["reason"], status["code"]) == (403, "Status", "Forbidden", 403)
    assert status["message"].startswith("runner: ")
    assert api.asked == []
    assert [one.refusal for one in line.told] == [refusal]


async def test_a_watch_is_there_at_once_and_ends_with_its_client(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        client = line.connect()
        with trio.fail_after(10):
            await client.send("GET", f"{PODS}?watch=true")
            heard = await client.receive(until=b"ADDED")
            await client.stream.aclose()
            while not line.told:
                await trio.sleep(0.01)

    assert (heard.status, heard.whole) == (200, False)
    assert [(one.verb, one.resource) for one in line.told] == [("watch", "pods")]


async def test_a_client_that_does_not_read_holds_the_cluster_back(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        client = line.connect()
        await client.send("GET", f"{LOG}?follow=true&tailLines=0")
        before = -1
        with trio.fail_after(20):
            while before != api.flooded:
                before = api.flooded
                await trio.sleep(0.3)

    assert 0 < api.flooded < 24 << 20


async def test_a_token_that_was_renewed_under_way_is_tried_once_more(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old-token-123")
    api.tokens = {"new-token-456"}
    api.refused = lambda: (tmp_path / "token").write_text("new-token-456")
    async with open_line(api, api.write(tmp_path / "config", {"tokenFile": "token"})) as line:
        heard = [(await line.get(PODS)).status for _ in range(2)]

    assert heard == [200, 200]
    assert [one.headers["authorization"][-3:] for one in api.asked] == ["123", "456", "456"]


async def test_a_token_s_file_that_is_gone_is_said_without_its_place(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with open_line(api, api.write(tmp_path / "config", {"tokenFile": str(tmp_path / "token")})) as line:
        (tmp_path / "token").unlink()
        heard = await line.get(PODS)

    assert heard.status == 502
    assert heard.json()["message"].endswith(": its credential is gone")


async def test_a_credential_that_is_refused_stays_so_and_is_not_shown(api: Api, tmp_path: Path) -> None:
    api.tokens = set()
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.get(PODS)

    assert (heard.status, len(api.asked)) == (401, 1)
    assert TOKEN.encode() not in heard.body


async def test_a_client_certificate_is_shown(api: Api, tmp_path: Path, authority: Path) -> None:
    user = {"client-certificate": str(authority / "client.pem"), "client-key": str(authority / "client.key")}
    async with open_line(api, api.write(tmp_path / "config", user)) as line:
        heard = await line.get(PODS)

    assert heard.status == 200
    assert "authorization" not in api.asked[0].headers


@pytest.mark.parametrize(("name", "status"), [("kube.test", 200), (None, 502)])
async def test_a_server_is_judged_by_the_name_that_it_should_have(
    api: Api, tmp_path: Path, name: str | None, status: int
) -> None:
    path = api.write(tmp_path / "config", server=f"https://localhost:{api.port}", tls_server_name=name)
    async with open_line(api, path) as line:
        heard = await line.get(PODS)

    assert heard.status == status
    assert [one.refusal for one in line.told] == [None if status == 200 else "cluster"]
    assert name or "certificate" in heard.json()["message"]


@pytest.mark.parametrize(
    ("exempt", "status"), [("10.0.0.0/8", 502), ("10.0.0.0/8, 127.0.0.0/8", 200), ("127.0.0.1", 200)]
)
async def test_the_host_s_proxy_is_used_but_for_the_networks_that_are_exempt(
    api: Api, tmp_path: Path, exempt: str, status: int
) -> None:
    reach = {"HTTPS_PROXY": "http://127.0.0.1:1", "NO_PROXY": exempt}
    told: list[ClusterRequest] = []
    path = api.write(tmp_path / "config")
    async with (
        Clusters(Settings.from_env(reach)).open(grant(api, path), told.append) as session,
        connected(session, told, sockets) as line,
    ):
        heard = await line.get(PODS)

    assert heard.status == status


async def test_a_cluster_that_has_gone_is_said_as_a_cluster_would(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config", server="https://127.0.0.1:1")) as line:
        heard = await line.get(PODS)

    assert (heard.status, heard.json()["reason"]) == (502, "ServiceUnavailable")
    assert heard.json()["message"].startswith("runner: the cluster cannot be reached")


async def test_a_body_is_bounded_and_goes_out_with_reviews_only(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        large = await line.ask("POST", REVIEWS, b"x" * (80 << 10))
        await line.ask("GET", PODS, b"body")

    assert large.status == 413
    assert [one.body for one in api.asked] == [b""]


@pytest.mark.parametrize(
    ("verb", "resource", "subresource", "asked", "allowed"),
    [
        ("get", "pods", "log", 1, True),
        ("get", "nodes", "", 1, False),
        ("get", "secrets", "", 0, False),
        ("delete", "pods", "", 0, False),
        ("get", "pods", "exec", 0, False),
        ("*", "*", "", 0, False),
    ],
)
async def test_a_right_that_nobody_has_here_is_denied_here(
    api: Api, tmp_path: Path, verb: str, resource: str, subresource: str, asked: int, allowed: bool
) -> None:
    attributes = {"verb": verb, "resource": resource, "subresource": subresource, "namespace": NAMESPACE}
    review = {"kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
    async with open_line(api, api.write(tmp_path / "config")) as line:
        heard = await line.ask("POST", REVIEWS, review)

    assert (heard.status, heard.json()["status"]["allowed"], len(api.asked)) == (201, allowed, asked)


def in_protobuf(**attributes: str) -> bytes:
    """A question as kubectl 1.33 writes it: field 2 of each message but the last is the next one."""
    names = ("namespace", "verb", "group", "version", "resource", "subresource", "name")
    wanted = b"".join(field(names.index(name) + 1, value.encode()) for name, value in attributes.items())
    kind = field(1, b"authorization.k8s.io/v1") + field(2, b"SelfSubjectAccessReview")
    review = field(1, b"") + field(2, field(1, wanted)) + field(3, b"\x08\x00\x1a\x00")
    return b"k8s\0" + field(1, kind) + field(2, review) + field(3, b"") + field(4, b"")


def field(number: int, content: bytes) -> bytes:
    size = len(content)
    return bytes([number << 3 | 2, *([size & 0x7F | 0x80, size >> 7] if size > 0x7F else [size])]) + content


@pytest.mark.parametrize(
    ("verb", "resource", "is_asked"), [("get", "secrets", False), ("delete", "pods", False), ("get", "pods", True)]
)
async def test_a_question_in_protobuf_is_answered_as_one_in_json(
    tmp_path: Path, authority: Path, verb: str, resource: str, is_asked: bool
) -> None:
    """kubectl 1.33 asks so, and asks in no other way when it is told that this is not understood."""
    body = in_protobuf(namespace=NAMESPACE, verb=verb, group="", resource=resource, name="n" * 200)
    async with scripted(tmp_path, authority, Said([b"{}"], status=201)) as (line, provider):
        heard = await line.ask("POST", REVIEWS, body, content_type="application/vnd.kubernetes.protobuf")

    assert (heard.status, len(provider.asked)) == (201, is_asked)
    if not is_asked:
        assert heard.headers["content-type"] == "application/json"
        assert {key: heard.json()[key] for key in ("apiVersion", "kind")} == {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
        }
        assert heard.json()["status"]["allowed"] is False


def test_what_is_no_whole_message_is_no_question() -> None:
    whole = in_protobuf(verb="get", resource="secrets")
    attributes = {"verb": "get", "resource": "secrets"}

    assert (parse_review(whole) or {})["spec"] == {"resourceAttributes": attributes}
    assert (parse_review(whole + b"\x28\x80\x01\x31" + bytes(8)) or {})["spec"] == {"resourceAttributes": attributes}
    for body in (whole[:40], whole + b"\x0a", whole + b"\x0a\xff", whole + b"\x0b", whole + b"\xff" * 60_000):
        assert parse_review(body) is None
    assert parse_review(b"k8s\0" + field(2, field(2, field(1, field(2, b"\xff"))))) is None


async def test_no_more_than_some_requests_are_told_one_by_one(tmp_path: Path, authority: Path) -> None:
    async with scripted(tmp_path, authority, Said([b"{}"])) as (line, _):
        client = line.connect()
        for _ in range(8):
            await client.ask("GET", "/api/v1/secrets")
        await client.ask("GET", "/version")

    assert [(one.verb, one.resource, one.refusal, one.count) for one in line.told] == [
        *[("list", "secrets", "secrets", 1)] * 5,
        ("list", "", "secrets", 3),
        ("get", "", None, 1),
    ]


async def test_a_silent_cluster_is_given_up_and_a_silent_watch_is_not(
    tmp_path: Path, authority: Path, autojump_clock: MockClock
) -> None:
    quiet = Said([b"one\n"], stalls=7200)
    async with scripted(tmp_path, authority, quiet) as (line, _):
        start = trio.current_time()
        listed = await line.connect().ask("GET", PODS)
        given_up = trio.current_time() - start
        followed = await line.connect().ask("GET", f"{LOG}?follow=true")

    assert (listed.whole, math.isclose(given_up, READ_SECONDS, abs_tol=1)) == (False, True)
    assert (followed.whole, followed.body) == (True, b"one\n")


async def test_what_is_under_way_at_the_end_is_broken_off(
    tmp_path: Path, authority: Path, autojump_clock: MockClock
) -> None:
    async with scripted(tmp_path, authority, Said([b"one\n"], stalls=7200)) as (line, provider):
        client = line.connect()
        await client.send("GET", f"{PODS}?watch=true")
        await client.receive(until=b"one")
        assert isinstance(line.session, ReadOnlySession)
        line.session.close()
        await trio.sleep(1)

    assert provider.asked[0].broken_off
    assert [one.verb for one in line.told] == ["watch"]


# --- before anything starts ---


async def test_rights_are_what_the_cluster_says_of_its_credential(api: Api, tmp_path: Path) -> None:
    async with open_line(api, api.write(tmp_path / "config")) as line:
        rights = await line.session.permissions()

    assert rights.document("2026-11-21T02:52:00Z") == {
        "cluster_name": CONTEXT,
        "asked_as": "the runner's account: --token, --username, --client-certificate and --as do not change it",
        "validated_at": "2026-11-21T02:52:00Z",
        "can_get_pods": True,
        "can_get_logs": True,
        "can_get_events": True,
        "can_get_deployments": True,
        "can_get_services": True,
        "secrets_access_allowed": False,
        "can_get_secrets": False,
        "can_get_configmaps": True,
        "can_get_nodes": False,
    }
    wanted = [json.loads(one.body)["spec"]["resourceAttributes"] for one in api.asked]
    assert {one["namespace"] for one in wanted if one["resource"] != "nodes"} == {NAMESPACE}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param(Said([b"{}"], status=201, stalls=60), "no answer in 5 s", id="hangs"),
        pytest.param(Said([b"{}"], status=500), "the cluster answered 500", id="fails"),
        pytest.param(Said([b"[]"], status=201), "the cluster answered 201 without saying it", id="no object"),
        nightly(Said([b"{}"] * 70_000, status=201), "the cluster answered 201 without saying it", id="long"),
    ],
)
async def test_rights_that_nobody_tells_are_not_known_which_is_said_once(
    tmp_path: Path, authority: Path, autojump_clock: MockClock, said: Said, why: str
) -> None:
    start = trio.current_time()
    async with scripted(tmp_path, authority, said) as (line, _):
        rights = await line.session.permissions()

    assert trio.current_time() - start < 6
    assert (rights.pods, rights.document("")["can_get_pods"]) == (None, None)
    every = "pods, logs, events, deployments, services, configmaps, nodes"
    assert rights.warnings == (f"whether {every} can be read is not known: {why}",)


async def test_a_cluster_is_reached_or_it_is_said_why_not(api: Api, tmp_path: Path) -> None:
    clusters = Clusters(Settings.from_env({}))
    path = api.write(tmp_path / "config")

    await clusters.check(grant(api, path))

    api.tokens = set()
    with pytest.raises(ClusterDenied, match="does not accept the credential of context `prod-eu`"):
        await clusters.check(grant(api, path))
    gone = api.write(tmp_path / "gone", server="https://127.0.0.1:1")
    with pytest.raises(ClusterUnreachable, match=r"https://127.0.0.1:1 cannot be reached: .*refused"):
        await clusters.check(grant(api, gone))
    with pytest.raises(InputChanged, match=r"leads to https://127.0.0.1:1 now"):
        await clusters.check(
            ClusterGrant(kubeconfig=str(gone), context=CONTEXT, server="https://127.0.0.1:2", namespace=NAMESPACE)
        )
    assert SECRET not in str(api.asked)


async def test_a_server_of_another_authority_is_not_reached(api: Api, tmp_path: Path) -> None:
    path = api.write(tmp_path / "config", certificate_authority_data=None)

    with pytest.raises(ClusterUnreachable, match="certificate"):
        await Clusters(Settings.from_env({})).check(grant(api, path))
    assert api.asked == []
