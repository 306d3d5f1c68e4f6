"""What every request passes, by the real server: names, tokens, form and size of bodies."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.core.errors import BadRequest
from runner.server.border import EVEN
from runner.server.route import read_body
from runner.server.routes.agent_types import NewAgentType
from tests.support.server import Connection, Served, create_token, serving
from tests.support.situations import Project

DOCUMENT = "/api/v1/openapi.json"
Guess = Callable[[], int]  # makes a request and returns the status of its answer


def test_what_is_not_a_request_of_a_client_is_refused_before_any_work(served: Served) -> None:
    cases = {
        "no token": ("GET", DOCUMENT, {"Authorization": ""}, 401, "server.unauthorized"),
        "unknown token": ("GET", DOCUMENT, {"Authorization": "Bearer rt_tests_x"}, 401, "server.unauthorized"),
        "a token that climbs": ("GET", DOCUMENT, {"Authorization": "Bearer rt_../x_x"}, 401, "server.unauthorized"),
        "a long token": (
            "GET",
            DOCUMENT,
            {"Authorization": "Bearer rt_tests_" + "x" * 9999},
            401,
            "server.unauthorized",
        ),
        "a token in the query": (
            "GET",
            f"{DOCUMENT}?token={served.token}",
            {"Authorization": ""},
            401,
            "server.unauthorized",
        ),
        "another host": ("GET", DOCUMENT, {"Host": "evil.test"}, 403, "server.origin"),
        "a host with a user": ("GET", DOCUMENT, {"Host": "localhost@evil.test"}, 403, "server.origin"),
        "a user with a host": ("GET", DOCUMENT, {"Host": "evil.test@localhost"}, 403, "server.origin"),
        "a host with a path": ("GET", DOCUMENT, {"Host": "localhost/.evil.test"}, 403, "server.origin"),
        "a host with a dot": ("GET", DOCUMENT, {"Host": "localhost."}, 403, "server.origin"),
        "a host that begins so": ("GET", DOCUMENT, {"Host": "localhost.evil.test"}, 403, "server.origin"),
        "a number": ("GET", DOCUMENT, {"Host": "0x7f.1"}, 403, "server.origin"),
        "another origin": ("GET", DOCUMENT, {"Origin": "http://evil.test"}, 403, "server.origin"),
        "no origin": ("GET", DOCUMENT, {"Origin": "null"}, 403, "server.origin"),
        "an origin with a user": ("GET", DOCUMENT, {"Origin": "http://evil.test@localhost"}, 403, "server.origin"),
        "no route": ("GET", "/x", {}, 404, "server.no-route"),
        "no route, no token": ("GET", "/x", {"Authorization": ""}, 401, "server.unauthorized"),
        "no method": ("DELETE", DOCUMENT, {}, 405, "server.method"),
    }

    found = {name: served.ask(method, path, headers=headers) for name, (method, path, headers, *_) in cases.items()}

    assert {name: (one.status, one.code) for name, one in found.items()} == {
        name: (status, code) for name, (*_, status, code) in cases.items()
    }
    assert found["no token"].headers["www-authenticate"] == "Bearer"
    assert found["no method"].headers["allow"] == "GET"


def test_names_in_any_spelling_of_the_server_are_its_own(served: Served) -> None:
    for host in ("LOCALHOST", "localhost:8700", "[::1]", "[::1]:8700", "127.0.0.1"):
        assert served.ask("GET", "/healthz", headers={"Host": host, "Origin": f"http://{host}"}).status == 200


def test_a_request_that_can_be_read_in_two_ways_is_refused_and_ends_its_connection(served: Served) -> None:
    """Of what a proxy in front took for the rest of the body, nothing is answered."""
    own = ("POST /api/v1/workspaces HTTP/1.1", "Host: localhost", f"Authorization: Bearer {served.token}")
    cases = {
        ("Content-Length: 5", "Transfer-Encoding: chunked"): 400,
        ("Content-Length: 5", "Content-Length: 6"): 400,
        ("Transfer-Encoding: x",): 501,
        ("Content-Length: 5", "Host: evil.test"): 400,
    }
    found = dict.fromkeys(cases, b"")
    for lines in cases:
        raw = "\r\n".join((*own, "Content-Type: application/json", *lines, "", "0", "", "GET /healthz HTTP/1.1"))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(served.socket))
            client.sendall(f"{raw}\r\nHost: localhost\r\n\r\n".encode())
            found[lines] = b"".join(iter(lambda sent=client: sent.recv(1000), b""))

    assert {lines: (int(raw[9:12]), raw.count(b"HTTP/1.1 ")) for lines, raw in found.items()} == {
        lines: (status, 1) for lines, status in cases.items()
    }
    assert served.get("/workspaces")["workspaces"] == []


def test_of_several_origins_each_one_is_judged(served: Served) -> None:
    """A proxy may have joined what a page has sent with its own."""
    found = []
    for second in ("localhost", "evil.test"):
        connection = Connection(served.socket, 20)
        connection.putrequest("GET", "/healthz")
        for name in ("localhost", second):
            connection.putheader("Origin", f"http://{name}")
        connection.endheaders()
        found.append(connection.getresponse().status)
        connection.close()

    assert found == [200, 403]


@pytest.fixture
def guesses(served: Served) -> Iterator[dict[str, tuple[Guess, Guess]]]:
    """Pairs of requests with the same answer: for what there is and is not, for guesses near to a token and far."""
    other = create_token(served.project.settings(), "other", ("project:other",))
    workspace = served.post("/workspaces", {"provider": "local"})["id"]
    served.tool(workspace, "write", file_path="file", content="")  # which opens it
    stopped = served.post("/workspaces", {"provider": "local"})["id"]
    served.post("/agent-types", {"name": "reviewer"})
    session = served.post("/sessions", {"agent_type": "reviewer"})["id"]

    def absent(id: str) -> str:
        return f"{id[:-6]}{int(id[-6:], 16) ^ 1:06x}"

    def ask(path: str, body: object = None) -> Guess:
        return lambda: served.ask("GET" if body is None else "POST", f"/api/v1{path}", body, token=other).status

    def log_in(token: str) -> Guess:
        return lambda: served.ask("GET", DOCUMENT, token=token).status

    wrong = served.token[:-1] + ("A" if served.token[-1] != "A" else "B")
    both = {
        "a workspace": (ask(f"/workspaces/{id}") for id in (stopped, absent(stopped))),
        "an open workspace": (
            ask(f"/workspaces/{id}/tools/read", {"file_path": "file"}) for id in (workspace, absent(workspace))
        ),
        "a session": (ask(f"/sessions/{id}") for id in (session, absent(session))),
        "a token": (log_in(wrong), log_in(f"{served.token[:9]}{'x' * 43}")),
        "the name of a token": (log_in(wrong), log_in(f"rt_nobody_{'x' * 43}")),
    }
    yield {name: (one, another) for name, (one, another) in both.items()}
    for id in (workspace, stopped):
        served.ask("DELETE", f"/api/v1/workspaces/{id}?discard=true")


def seconds(guess: Guess) -> tuple[int, float]:
    began = time.perf_counter()
    return guess(), time.perf_counter() - began


def test_what_is_not_known_is_refused_on_time(guesses: dict[str, tuple[Guess, Guess]]) -> None:
    """The time of a refusal would tell what there is for others, and how near a guess of a token was."""
    for name, pair in guesses.items():
        status, _ = seconds(pair[0])
        times = [seconds(guess) for guess in pair * 5]
        assert {found for found, _ in times} == {status}, name
        assert status in (401, 404), name
        assert min(took for _, took in times) >= EVEN, name


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_difference_in_time_tells_what_there_is(guesses: dict[str, tuple[Guess, Guess]]) -> None:
    """Of a thousand tries of each, in turns, the quickest quarter has the least of what else the machine was doing."""
    ratios = {}
    for name, pair in guesses.items():
        tries = [[seconds(guess)[1] for guess in pair] for _ in range(1000)]
        there, absent = (statistics.median(sorted(column)[:250]) for column in zip(*tries, strict=True))
        ratios[name] = there / absent

    assert all(0.97 < ratio < 1.03 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ('{"nme": "a"}', "did you mean `name`?"),
        ('{"name": "a", "workspace": {"warm_pool": {"count": 1}}}', "valid choices: size"),
        ('{"name": "a", "workspace": {"repo_source": {"type": "fix"}}}', "did you mean `fixed`?"),
        ('{"name": "a", "workspace": {"setup": {"on_failure": ""}}}', "valid choices: fail, warn"),
        ('{"name": 1}', "see /api/v1/openapi.json"),
    ],
    ids=str,
)
def test_a_body_that_does_not_fit_is_told_what_would(body: str, hint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_body(body.encode(), NewAgentType)

    assert caught.value.hint == hint


def test_health_needs_no_token(served: Served) -> None:
    answers = [served.ask("GET", path, headers={"Authorization": ""}) for path in ("/healthz", "/readyz")]

    assert [answer.json for answer in answers] == [{"status": "ok"}, {"status": "ready"}]


def test_a_revoked_token_is_refused_at_once(served: Served) -> None:
    settings = served.project.settings()
    token = create_token(settings, "short", ("admin:ro",))
    assert served.ask("GET", DOCUMENT, token=token).status == 200

    assert served.project.runner("token", "revoke", "short").code == 0

    assert served.ask("GET", DOCUMENT, token=token).status == 401


def test_a_token_is_stored_as_a_digest_for_its_owner_only(project: Project) -> None:
    text = create_token(project.settings(), "ci", ("project:shop:ro",))

    for file in (project.home / "state").glob("state.db*"):
        assert text.rpartition("_")[2].encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arguments", [("a/b", "admin"), ("ci", "root"), ("ci", "project:../x")], ids=" ".join)
def test_a_bad_token_is_not_made(project: Project, arguments: tuple[str, str]) -> None:
    done = project.runner("token", "create", arguments[0], "--scope", arguments[1])

    assert (done.code, done.errors) == (2, ["cli.usage"])
    assert project.json("token", "list") == []


def test_only_its_user_reaches_the_socket(served: Served) -> None:
    assert served.socket.stat().st_mode & 0o777 == 0o600


def test_the_socket_of_a_server_that_was_killed_is_taken_over(project: Project) -> None:
    (project.home / "state").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(project.home / "state" / "server.sock"))

    with serving(project) as server:
        assert server.ask("GET", "/healthz").status == 200
        second = project.runner("serve")

    assert (second.code, second.errors) == (2, ["cli.usage"])


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param(("0.0.0.0:0",), "server.exposed", id="every address"),
        pytest.param(("[::]:0",), "server.exposed", id="every address of IPv6"),
        pytest.param(("192.0.2.1:0",), "server.exposed", id="one that is not loopback"),
        pytest.param(("localhost:0",), "cli.usage", id="a name"),
        pytest.param(("127.0.0.1:0", "--key", "k.pem"), "cli.usage", id="half of TLS"),
        pytest.param(("127.0.0.1:0", "--key", "k.pem", "--certificate", "c.pem"), "cli.usage", id="no files of TLS"),
        pytest.param((f"unix:/{'x' * 200}",), "cli.usage", id="a long socket"),
        pytest.param(("unix:/proc/x/s",), "host.refused", id="a socket nowhere"),
    ],
)
def test_a_listener_that_is_not_safe_does_not_start(project: Project, options: tuple[str, ...], code: str) -> None:
    done = project.runner("serve", "--listen", *options, timeout=20)

    assert done.errors == [code]


def test_the_server_is_not_imported_unless_it_is_started() -> None:
    code = "import sys, runner.ops.runs.start; print({'starlette', 'hypercorn'} & {*sys.modules})"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=True)

    assert done.stdout == "set()\n"


SYSTEMD = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_systemd_opens_the_socket_and_hears_how_the_server_is(project: Project, tmp_path: Path) -> None:
    """The place of systemd is taken by its protocol: a socket as descriptor 3, and another for messages."""
    path, place = project.home / "state" / "server.sock", str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(place)
        project.env["NOTIFY_SOCKET"] = place
        assert project.runner("serve", "--listen", "systemd").code == 2
        project.within = (sys.executable, "-c", SYSTEMD, str(path))
        with serving(project, "--listen", "systemd") as served:
            assert heard.recv(100) == b"READY=1"
            assert served.get("/workspaces")["workspaces"] == []
        assert heard.recv(100) == b"STOPPING=1"
        assert path.exists()  # it is systemd's
