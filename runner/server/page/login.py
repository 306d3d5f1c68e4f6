"""Logins of browsers: a cookie stands for a token that was shown once, or for what an issuer said, for twelve hours.

They are in memory only. A token is looked up at each request, so that one which was revoked ends its logins too.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import trio
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from runner.core.errors import BadOrigin
from runner.ops.host.tokens import StoredToken, find_token
from runner.ports.store import Reader

LIFE = 12 * 3600  # seconds
MOST = 1_000  # logins; of more, the oldest end


class Login(Struct, frozen=True, kw_only=True):
    """``token`` is its text, or what an issuer's was good for. ``proof`` is in every form, which another site cannot
    read. ``until`` is a time of the clock of trio.
    """

    token: str | StoredToken
    proof: str
    until: float


class Logins:
    """``secure`` cookies are sent by TLS only, and to this host alone."""

    def __init__(self, *, secure: bool) -> None:
        self.secure = secure
        self._cookie = "__Host-runner" if secure else "runner"
        self._logins: dict[str, Login] = {}

    def begin(self, token: str | StoredToken, response: Response) -> None:
        """Set the cookie of a new login."""
        now = trio.current_time()
        kept = [(id, one) for id, one in self._logins.items() if one.until > now][-MOST + 1 :]
        id = secrets.token_urlsafe(32)
        self._logins = {**dict(kept), id: Login(token=token, proof=secrets.token_urlsafe(32), until=now + LIFE)}
        self._set(response, self._cookie, id, LIFE)

    def send_away(self, state: str, seconds: float, response: Response) -> None:
        """Set the cookie of a browser that has to come back, from another site, with this state."""
        self._set(response, f"{self._cookie}-state", state, int(seconds), samesite="lax")

    def state(self, request: Request) -> str:
        """Return the state that a browser was sent away with."""
        return request.cookies.get(f"{self._cookie}-state", "")

    def _set(
        self,
        response: Response,
        name: str,
        value: str,
        seconds: int,
        *,
        samesite: Literal["lax", "strict"] = "strict",
    ) -> None:
        response.set_cookie(
            name, value, max_age=seconds, path="/", secure=self.secure, httponly=True, samesite=samesite
        )

    def find(self, request: Request) -> Login | None:
        found = self._logins.get(request.cookies.get(self._cookie, ""))
        return found if found is not None and found.until > trio.current_time() else None

    def end(self, request: Request, response: Response) -> None:
        self._logins.pop(request.cookies.get(self._cookie, ""), None)
        response.delete_cookie(self._cookie, path="/", secure=self.secure, httponly=True, samesite="strict")


async def token_of(login: Login, store: Reader) -> StoredToken:
    """Return what a login may do. Raises ``Unauthorized`` when its token was revoked."""
    return await find_token(store, login.token) if isinstance(login.token, str) else login.token


def check_origin(request: Request) -> None:
    """Refuse a form that no page of this server has sent: not of another site, and not of another port either."""
    site = request.headers.get("sec-fetch-site")  # browsers send it by TLS and on loopback
    origin = request.headers.get("origin", "").partition("://")[2]
    if site != "same-origin" if site is not None else origin != request.headers.get("host"):
        raise BadOrigin("the form was not sent by a page of this server")


def check_proof(login: Login, proof: str) -> None:
    if not hmac.compare_digest(login.proof.encode(), proof.encode(errors="replace")):
        raise BadOrigin("the form is of another login", hint="load the page again")
