"""Logins by an OpenID Connect issuer: the browser is sent there, and comes back with a code that only we can redeem.

It is the flow of authorization codes with PKCE. What a person may do is said by grants, as it is of the tokens of jobs;
the token that tells their claims is for this login and no other, and is not kept.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import trio
from msgspec import Struct

from runner.core.errors import Unauthorized, UsageError
from runner.core.sanitize import excerpt
from runner.ops.host.tokens import StoredToken
from runner.server.oidc import Issuer, OidcOptions

RETURN = "/login/return"  # where browsers come back to
LIFE = 600.0  # seconds to log in there
MOST = 1_000  # logins that have begun; of more, the oldest end
_SCOPE = "openid profile email"
_LONGEST = 4096  # characters of a secret


class LoginOptions(Struct, frozen=True):
    """An issuer, whose audience is the client that we are there, and that client's secret, if it has one."""

    oidc: OidcOptions
    secret: str | None


def read_secret(file: Path | None) -> str | None:
    """Return the secret in a file. Raises ``UsageError``."""
    if file is None:
        return None
    try:
        found = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"`{excerpt(str(file))}` cannot be read: {excerpt(str(error))}") from error
    if not found or len(found) > _LONGEST or "\n" in found:
        raise UsageError(f"`{excerpt(str(file))}` holds no secret", hint="write it alone, in one line")
    return found


class _Begun(Struct, frozen=True):
    verifier: str
    nonce: str
    then: str
    until: float


class OidcLogin:
    """``name`` is the issuer's host, for people."""

    def __init__(self, options: LoginOptions) -> None:
        self._issuer = Issuer(options.oidc, groups=True)
        self._client, self._secret = options.oidc.audience, options.secret
        self._begun: dict[str, _Begun] = {}
        self.name = urlsplit(options.oidc.issuer).hostname or ""

    async def begin(self, base: str, then: str) -> tuple[str, str]:
        """Return the URL to send a browser to, and the state that it has to come back with. Raises ``Unauthorized``."""
        place = await self._issuer.endpoint("authorization_endpoint")
        state, now = secrets.token_urlsafe(32), trio.current_time()
        begun = _Begun(secrets.token_urlsafe(48), secrets.token_urlsafe(32), then, now + LIFE)
        kept = [(id, one) for id, one in self._begun.items() if one.until > now][-MOST + 1 :]
        self._begun = {**dict(kept), state: begun}
        challenge = urlsafe_b64encode(sha256(begun.verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self._client,
            "redirect_uri": f"{base}{RETURN}",
            "scope": _SCOPE,
            "state": state,
            "nonce": begun.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return f"{place}{'&' if '?' in place else '?'}{urlencode(asked)}", state

    async def end(self, base: str, state: str, query: Mapping[str, str]) -> tuple[StoredToken, str]:
        """Return what somebody may do who has come back, and where they were going; ``state`` is their browser's.

        Raises ``Unauthorized``. A state is good for one return.
        """
        if not state or not hmac.compare_digest(state.encode(), query.get("state", "").encode()):
            raise Unauthorized("the login was begun in another browser", hint="begin again")
        begun = self._begun.pop(state, None)
        if begun is None or begun.until < trio.current_time():
            raise Unauthorized("the login has taken too long", hint="begin again")
        if "code" not in query:
            said = query.get("error_description") or query.get("error") or "it gave no reason"
            raise Unauthorized(f"`{self.name}` has not logged you in: {excerpt(said)}")
        fields = {
            "grant_type": "authorization_code",
            "code": query["code"],
            "redirect_uri": f"{base}{RETURN}",
            "client_id": self._client,
            "code_verifier": begun.verifier,
        }
        answer = await self._issuer.redeem(fields, self._secret)
        return await self._issuer.find(str(answer.get("id_token", "")), nonce=begun.nonce), begun.then
