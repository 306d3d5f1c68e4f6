"""Pages of the real server, as a browser asks for them: logins, forms, and what a token may see."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlencode

import pytest

from runner.ops.runs.history import STATES
from tests.support.server import Answer, Served, create_token, serving
from tests.support.situations import Project, until

OURS = {"Origin": "http://localhost", "Content-Type": "application/x-www-form-urlencoded"}


class Visitor:
    """A browser without scripts: it keeps cookies, and sends the forms of the last page."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._cookies: dict[str, str] = {}
        self.proof = ""

    @property
    def _cookie(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self._cookies.items())

    def _keep(self, answer: Answer) -> Answer:
        for one in answer.headers.get_all("set-cookie", []):
            self._cookies |= {name: morsel.value for name, morsel in SimpleCookie(one).items()}
        return answer

    def get(self, path: str) -> Answer:
        answer = self._served.ask("GET", path, headers={"Authorization": "", "Cookie": self._cookie})
        if found := re.search(r'name="proof" value="([^"]+)"', answer.raw.decode()):
            self.proof = found[1]
        return self._keep(answer)

    def send(self, path: str, headers: dict[str, str] | None = None, **fields: str) -> Answer:
        sent = {**OURS, "Authorization": "", "Cookie": self._cookie, **(headers or {})}
        return self._keep(self._served.ask("POST", path, urlencode({"proof": self.proof, **fields}), headers=sent))

    def log_in(self, token: str, then: str = "/") -> Answer:
        self._cookies = {}
        return self.send(f"/login?{urlencode({'next': then})}", token=token)


def place(answer: Answer) -> str | None:
    assert answer.status == 303, answer.raw
    return answer.headers["location"]


def test_a_login_is_a_cookie_that_ends_with_its_token(served: Served) -> None:
    visitor = Visitor(served)
    assert place(visitor.get("/runs/x?a=b")) == "/login?next=%2Fruns%2Fx%3Fa%3Db"
    assert visitor.log_in("rt_tests_guess").status == 401
    wanted = {
        there: place(visitor.log_in(served.token, there)) for there in ("/plan", "//evil.test", "https://x", "/\\x")
    }
    assert wanted == {"/plan": "/plan", "//evil.test": "/", "https://x": "/", "/\\x": "/"}

    token = create_token(served.project.settings(), "short", ("admin:ro",))
    cookie = visitor.log_in(token).headers["set-cookie"]

    assert re.fullmatch(r"runner=[\w-]{43}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict", cookie)
    shown = visitor.get("/")
    assert (shown.status, shown.headers["cache-control"]) == (200, "no-store")
    assert "script-src 'self'" in shown.headers["content-security-policy"]
    assert served.project.runner("token", "revoke", "short").code == 0
    assert place(visitor.get("/")) == "/login?next=%2F"
    visitor.log_in(served.token)
    visitor.get("/host")
    again = {**visitor._cookies}
    assert place(visitor.send("/logout")) == "/login"
    visitor._cookies = again
    assert place(visitor.get("/")) == "/login?next=%2F"


def test_a_form_is_answered_only_if_a_page_of_this_server_sent_it(served: Served) -> None:
    visitor = Visitor(served)
    visitor.log_in(served.token)
    visitor.get("/")
    refused = {
        "another port": {"Origin": "http://localhost:3000"},
        "no origin": {"Origin": "null"},
        "another site, as the browser says": {"Sec-Fetch-Site": "same-site"},
        "not a form": {"Content-Type": "text/plain"},
    }

    found = {name: visitor.send("/logout", headers).status for name, headers in refused.items()}
    proofless = visitor.send("/logout", proof="x")

    assert found == {**dict.fromkeys(refused, 403), "not a form": 415}
    assert (proofless.status, b"server.origin" in proofless.raw) == (403, True)
    assert visitor.send("/login", {"Origin": "http://localhost:3000"}, token=served.token).status == 403
    assert place(visitor.send("/logout", {"Sec-Fetch-Site": "same-origin"})) == "/login"


def test_a_form_of_anybody_is_small(served: Served) -> None:
    visitor = Visitor(served)
    assert visitor.send("/login", token="x" * (1 << 16)).status == 413
    assert visitor.send("/login", **{f"field{number}": "" for number in range(200)}).status == 400
    assert visitor.send("/login", token="\x00\ud800"[:1]).status == 401


@pytest.mark.nightly
def test_a_run_is_watched_cancelled_and_resumed_by_forms(project: Project) -> None:
    project.script("echo '<b>begun</b>' | tee file; sleep 300")
    with serving(project, "--manifests", str(project.folder)) as served:
        [run] = served.post("/runs")["runs"]
        page = f"/runs/{run['id']}"
        visitor, reader, other = Visitor(served), Visitor(served), Visitor(served)
        visitor.log_in(served.token)
        reader.log_in(create_token(project.settings(), "reader", ("admin:ro",)))
        other.log_in(create_token(project.settings(), "shop", ("project:shop",)))
        until(lambda: b"&lt;b&gt;begun&lt;/b&gt;" in visitor.get(page).raw)
        assert b'action="/plan' not in visitor.get("/plan").raw
        assert b"Cancel" not in reader.get(page).raw
        assert reader.send(f"{page}/cancel").status == 403
        assert (other.get(page).status, other.get("/plan").status) == (404, 403)
        assert b"no such run" in other.get("/").raw

        assert place(visitor.send(f"{page}/cancel")) == page
        until(lambda: b"CANCELLED" in visitor.get(page).raw)

        assert visitor.send(f"{page}/cancel").status == 409
        project.script("echo again >file")
        again = place(visitor.send(f"{page}/resume"))
        assert again is not None
        assert again != page
        until(lambda: b"SUCCEEDED" in visitor.get(again).raw)
        assert run["id"].encode() in visitor.get(again).raw
        listed = visitor.get("/?state=cancelled&name=w*").raw.decode()
        assert (page in listed, again in listed) == (True, False)


@pytest.mark.nightly
def test_the_cookie_of_a_server_behind_tls_is_sent_by_tls_only(project: Project) -> None:
    with serving(project, "--behind-proxy") as served:
        cookie = Visitor(served).log_in(served.token).headers["set-cookie"]

    assert cookie.startswith("__Host-runner=")
    assert "; Secure" in cookie


@pytest.mark.nightly
def test_lists_of_a_hundred_thousand_runs_are_there_at_once(served: Served) -> None:
    states = [("succeeded", 0)] * 900 + [("failed", 1)] * 90 + [("failed", 124)] * 9 + [("cancelled", 130)]
    columns = "id, name, status, exit_code, plan, created, ended, project"
    rows = [
        (f"r{number:011}", f"run-{number % 200}", *states[number % 1000], "sha256:0", number, number, "default")
        for number in range(100_000)
    ]
    with closing(sqlite3.connect(served.project.home / "state" / "state.db")) as connection, connection:
        connection.executemany(f"INSERT INTO runs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    visitor = Visitor(served)
    visitor.log_in(served.token)

    def cpu_seconds() -> float:
        ticks = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def seconds(query: str) -> float:
        """CPU seconds of the server for one of seven: what a busy machine takes longer for does not count."""
        began = cpu_seconds()
        for _ in range(7):
            assert visitor.get(f"/?{query}").status == 200
        return (cpu_seconds() - began) / 7

    asked = ("", "cursor=50000.r", "name=run-7*", "name=none", *(f"state={state}" for state in STATES))
    found = {query: seconds(query) for query in asked}

    assert {query: taken for query, taken in found.items() if taken > 0.05} == {}
