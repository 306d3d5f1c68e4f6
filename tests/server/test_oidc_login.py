"""Logging in at the page by an issuer, which is a small one with the endpoints that a browser and a server use."""

from __future__ import annotations

import json
import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest

from runner.core.errors import UsageError
from runner.server.page.oidc_login import read_secret
from tests.server.test_oidc import SmallIssuer
from tests.server.test_page import Visitor, place
from tests.support.browser import chromium
from tests.support.http_servers import Handler, serving_http
from tests.support.needs import CHROMIUM
from tests.support.server import Served, serving
from tests.support.situations import Project

CLIENT, SECRET = "runner-page", "a secret: of +the client"


class LoginIssuer(SmallIssuer):
    """An issuer where everybody is logged in as whom ``claims`` say, or nobody for an ``error``."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.claims: dict[str, Any] = {}
        self.error = ""
        self.codes: dict[str, dict[str, str]] = {}

    def answer(self, path: str) -> object:
        if path == "/.well-known/openid-configuration":
            ends = {name: f"{self.url}/{name[:9]}" for name in ("authorization_endpoint", "token_endpoint")}
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **ends}
        return super().answer(path)

    def authorize(self, query: str) -> str:
        """Return where the browser goes then."""
        asked = dict(parse_qsl(query))
        assert (asked["client_id"], asked["response_type"]) == (CLIENT, "code")
        assert "openid" in asked["scope"].split()
        said = {"error": self.error} if self.error else {"code": f"code-{len(self.codes)}"}
        self.codes |= {said["code"]: asked} if "code" in said else {}
        return f"{asked['redirect_uri']}?{urlencode({**said, 'state': asked['state']})}"

    def redeem(self, body: str, authorization: str) -> dict[str, str] | None:
        sent = dict(parse_qsl(body))
        user, _, secret = b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        asked = self.codes.pop(sent["code"], None)
        proof = urlsafe_b64encode(sha256(sent["code_verifier"].encode()).digest()).rstrip(b"=").decode()
        known = (user, secret) == (CLIENT, "a%20secret%3A%20of%20%2Bthe%20client")
        if asked is None or not known or proof != asked["code_challenge"]:
            return None
        assert asked["redirect_uri"] == sent["redirect_uri"]
        return {"id_token": self.token(**{"aud": CLIENT, "nonce": asked["nonce"], **self.claims})}


@contextmanager
def open_issuer() -> Iterator[LoginIssuer]:
    class Answer(Handler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/authoriza":
                self.tell(b"", 302, location=small.authorize(query))
            else:
                self.tell(json.dumps(small.answer(path)).encode())

        def do_POST(self) -> None:
            found = small.redeem(self.heard().decode(), self.headers.get("authorization", ""))
            self.tell(json.dumps(found).encode(), 400 if found is None else 200)

    with serving_http(Answer) as port:
        small = LoginIssuer(f"http://127.0.0.1:{port}")
        yield small


@pytest.fixture
def issuer() -> Iterator[LoginIssuer]:
    with open_issuer() as opened:
        yield opened


def options(issuer: LoginIssuer, folder: Path) -> list[str]:
    (folder / "client.secret").write_text(f"{SECRET}\n")
    words = ["--login-issuer", issuer.url, "--login-client", CLIENT, "--login-secret", str(folder / "client.secret")]
    return [*words, "--login-grant", "admin", "groups=platform", "--login-grant", "admin:ro", "sub=mary"]


@pytest.fixture
def served(project: Project, issuer: LoginIssuer, tmp_path: Path) -> Iterator[Served]:
    with serving(project, *options(issuer, tmp_path)) as server:
        yield server


def sent_away(visitor: Visitor, issuer: LoginIssuer, then: str = "/host") -> str:
    """Return the path that somebody comes back to who has logged in at the issuer."""
    wanted = place(visitor.get(f"/login/begin?{urlencode({'next': then})}"))
    assert wanted is not None
    assert wanted.startswith(f"{issuer.url}/authoriza?")
    back = urlsplit(issuer.authorize(urlsplit(wanted).query))
    assert (back.scheme, back.netloc, back.path) == ("http", "localhost", "/login/return")
    return f"{back.path}?{back.query}"


def test_who_has_the_claims_of_a_grant_logs_in_at_the_issuer(served: Served, issuer: LoginIssuer) -> None:
    visitor = Visitor(served)
    assert re.search(rb'href="/login/begin\?next=%2Fplan">log in with 127.0.0.1<', visitor.get("/login?next=/plan").raw)
    issuer.claims = {"sub": "someone", "groups": ["shop", "platform"]}

    back = sent_away(visitor, issuer)
    found = visitor.get(back)

    assert (found.status, b'content="0; url=/host"' in found.raw) == (200, True)
    assert re.match(r"runner=[\w-]{43}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict", found.headers["set-cookie"])
    assert visitor.get("/host").status == 200
    assert visitor.get(back).status == 401, "what was redeemed once"


def test_who_has_not_logged_in_here_is_told_why(served: Served, issuer: LoginIssuer) -> None:
    visitor = Visitor(served)
    for claims, why in (
        ({"sub": "someone", "groups": ["shop"]}, b"nothing is granted to `someone`"),
        ({"sub": "mary", "nonce": "x"}, b"the token is of another login"),
        ({"sub": "mary", "aud": "another-client"}, b"the token is not in order"),
    ):
        issuer.claims = claims
        found = visitor.get(sent_away(visitor, issuer))
        assert (found.status, why in found.raw) == (401, True), found.raw
    issuer.claims = {"sub": "mary"}
    back = sent_away(visitor, issuer)
    assert b"begun in another browser" in Visitor(served).get(back).raw
    assert b"begun in another browser" in visitor.get(f"{back}x").raw
    issuer.codes.clear()
    assert b"takes no code" in visitor.get(back).raw
    issuer.error = "access_denied"
    assert b"has not logged you in: access_denied" in visitor.get(sent_away(visitor, issuer)).raw
    assert place(visitor.get("/")) == "/login?next=%2F"
    wanted = place(visitor.get("/login/begin?next=//evil.test")) or ""
    assert {"code_challenge_method": ["S256"]}.items() <= parse_qs(urlsplit(wanted).query).items()


@pytest.mark.nightly
@CHROMIUM.mark
@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_a_browser_comes_back_logged_in(project: Project, issuer: LoginIssuer, tmp_path: Path, scripts: bool) -> None:
    """Its issuer is another site, from which no strict cookie comes along."""
    issuer.claims = {"sub": "mary"}
    listen = ("--listen", "127.0.0.1:0")
    with serving(project, *listen, *options(issuer, tmp_path)) as server, chromium() as browser:
        page = browser.new_context(java_script_enabled=scripts).new_page()
        page.goto(f"{server.url.replace('127.0.0.1', 'localhost')}/workspaces")
        page.get_by_text("log in with 127.0.0.1").click()
        page.get_by_role("heading", name="Workspaces").wait_for()
        assert page.url.endswith("/workspaces")


def test_a_secret_is_one_line_of_a_file(tmp_path: Path) -> None:
    for content in ("", "\n", "a\nb\n", "\xff", "x" * 5000):
        (tmp_path / "secret").write_text(content)
        with pytest.raises(UsageError):
            read_secret(tmp_path / "secret")
    with pytest.raises(UsageError):
        read_secret(tmp_path / "missing")
