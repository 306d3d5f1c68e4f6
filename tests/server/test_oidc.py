"""Tokens of an OpenID Connect issuer, by a small one that publishes its keys over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from runner.core.errors import Unauthorized, UsageError
from runner.server import oidc
from runner.server.oidc import Issuer, read_options
from tests.support.http_servers import Handler, serving_http
from tests.support.server import serving
from tests.support.situations import Project

SHOP = ["project:shop", "repository=acme/shop", "ref=refs/heads/main"]
CLAIMS = {"sub": "repo:acme/shop", "aud": "runner", "repository": "acme/shop", "ref": "refs/heads/main"}


class SmallIssuer:
    """An issuer; ``rotate`` replaces its key."""

    def __init__(self, url: str) -> None:
        self.url, self.fetches = url, 0
        self.rotate("RS256")

    def rotate(self, algorithm: str) -> None:
        self.algorithm, self.id = algorithm, f"{algorithm}-{time.time_ns()}"
        self.key: Any = (
            rsa.generate_private_key(65537, 2048) if algorithm == "RS256" else ec.generate_private_key(ec.SECP256R1())
        )

    def answer(self, path: str) -> object:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        self.fetches += 1
        kind = RSAAlgorithm if self.algorithm == "RS256" else ECAlgorithm
        return {"keys": [{**kind.to_jwk(self.key.public_key(), as_dict=True), "kid": self.id, "use": "sig"}]}

    def token(self, **claims: Any) -> str:
        said = {**CLAIMS, "iss": self.url, "exp": time.time() + 300, **claims}
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, self.key, self.algorithm, headers={"kid": self.id})


@contextmanager
def open_issuer() -> Iterator[SmallIssuer]:
    class Answer(Handler):
        def do_GET(self) -> None:
            self.tell(json.dumps(small.answer(self.path)).encode())

    with serving_http(Answer) as port:
        small = SmallIssuer(f"http://127.0.0.1:{port}")
        yield small


@pytest.fixture
def issuer() -> Iterator[SmallIssuer]:
    with open_issuer() as opened:
        yield opened


def taken(issuer: SmallIssuer) -> Issuer:
    options = read_options(issuer.url, "runner", [SHOP, ["admin:ro", "sub=watcher"]])
    assert options is not None
    return Issuer(options)


async def test_a_token_gets_the_scopes_whose_claims_it_has(issuer: SmallIssuer) -> None:
    found = await taken(issuer).find(issuer.token())
    assert (found.name, found.scopes) == ("repo:acme/shop", ("project:shop",))
    both = await taken(issuer).find(issuer.token(sub="watcher", aud=["other", "runner"]))
    assert both.scopes == ("project:shop", "admin:ro")


async def test_a_token_that_is_not_in_order_is_refused(issuer: SmallIssuer) -> None:
    known, now = taken(issuer), time.time()
    good = issuer.token()
    head, body, signature = good.split(".")
    said = jwt.decode(good, options={"verify_signature": False})
    public = issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    by_public = jwt.api_jws.PyJWS()
    hmac = by_public.get_algorithm_by_name("HS256")
    first = jwt.utils.base64url_encode(json.dumps({"alg": "HS256", "kid": issuer.id}).encode()) + b"." + body.encode()
    cases = {
        "another audience": issuer.token(aud="other"),
        "no audience": issuer.token(aud=None),
        "another issuer": issuer.token(iss="https://evil.test"),
        "expired": issuer.token(exp=now - 60),
        "without an end": issuer.token(exp=None),
        "not yet": issuer.token(nbf=now + 600),
        "no subject": issuer.token(sub=None),
        "another branch": issuer.token(ref="refs/heads/evil"),
        "a claim that is a list": issuer.token(ref=["refs/heads/main"]),
        "not signed": jwt.encode(said, "", "none", headers={"kid": issuer.id}),
        "signed by the public key as a secret": (
            first + b"." + jwt.utils.base64url_encode(hmac.sign(first, public))
        ).decode(),
        "an unknown key": jwt.encode(said, issuer.key, "RS256", headers={"kid": "other"}),
        "no name of a key": jwt.encode(said, issuer.key, "RS256"),
        "another signature": f"{head}.{body}.{signature[:-8]}AAAAAAAA",
        "another body": f"{head}.{jwt.utils.base64url_encode(b'{}').decode()}.{signature}",
        "no token": "a.b.c",
    }
    found = {}
    for name, token in cases.items():
        try:
            found[name] = (await known.find(token)).scopes
        except Unauthorized:
            continue
    assert found == {}
    assert (await known.find(good)).scopes == ("project:shop",)
    assert issuer.fetches == 1


async def test_keys_are_kept_and_fetched_anew_when_they_rotate(
    issuer: SmallIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, before = taken(issuer), issuer.token()
    for _ in range(3):
        await known.find(before)
    assert issuer.fetches == 1
    monkeypatch.setattr(oidc, "_PAUSE", 0.0)
    issuer.rotate("ES256")
    assert (await known.find(issuer.token())).name == "repo:acme/shop"
    with pytest.raises(Unauthorized, match="does not publish"):
        await known.find(before)


@pytest.mark.parametrize(
    ("issuer_url", "audience", "grants"),
    [
        ("http://issuer.test", "runner", [SHOP]),
        ("https://issuer.test", None, [SHOP]),
        (None, "runner", [SHOP]),
        ("https://issuer.test", "runner", []),
        ("https://issuer.test", "runner", [["project:shop"]]),
        ("https://issuer.test", "runner", [["project:shop", "sub="]]),
        ("https://issuer.test", "runner", [["root", "sub=x"]]),
    ],
)
def test_an_issuer_that_is_not_whole_is_refused(
    issuer_url: str | None, audience: str | None, grants: list[list[str]]
) -> None:
    with pytest.raises(UsageError):
        read_options(issuer_url, audience, grants)


def test_the_server_takes_tokens_of_an_issuer_within_the_rate(project: Project, issuer: SmallIssuer) -> None:
    said = ("--oidc-issuer", issuer.url, "--oidc-audience", "runner", "--rate", "2", "--oidc-grant", *SHOP)
    with serving(project, *said) as served:
        token = issuer.token()
        assert served.get("/workspaces", token=token)["workspaces"] == []
        assert served.refused("POST", "/agent-types", {"name": "worker"}, token=token)[0] == 403
        assert served.refused("GET", "/workspaces", token=issuer.token(aud="other")) == (401, "server.unauthorized")
        answers = [served.ask("GET", "/api/v1/workspaces", token=token) for _ in range(12)]
        refused = [answer for answer in answers if answer.status == 429]
        assert {answer.code for answer in refused} == {"server.rate"}
        assert refused[0].headers["retry-after"]
        assert served.ask("GET", "/api/v1/workspaces").status == 200
