"""Tokens of an OpenID Connect issuer, such as those of CI jobs and Kubernetes service accounts: none is stored here.

The issuer's keys are fetched when the first token comes, kept for an hour, and fetched anew for a key that is not among
them. What a token may do is said by grants: each names a scope, and claims that must all have exactly these values.
"""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jwt
import trio
from msgspec import Struct

from runner.core.errors import Unauthorized, UsageError
from runner.core.sanitize import excerpt
from runner.ops.host.tokens import StoredToken, check_scope

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY = 30.0  # seconds that clocks may differ
_FRESH = 3600.0  # seconds that keys are used without asking again
_PAUSE = 10.0  # seconds between fetches, whoever sends unknown keys
_SECONDS = 10.0  # for an answer of the issuer
_LONGEST = 1 << 20  # bytes of it
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REQUIRED = ["exp", "iss", "aud", "sub"]


class Grant(Struct, frozen=True):
    """A scope for tokens whose claims all have these values."""

    scope: str
    claims: Mapping[str, str]


class OidcOptions(Struct, frozen=True):
    """An issuer's URL, the audience that its tokens must be for, and what they may do."""

    issuer: str
    audience: str
    grants: tuple[Grant, ...]


def read_options(
    issuer: str | None, audience: str | None, grants: Sequence[Sequence[str]], *, words: str = "oidc audience"
) -> OidcOptions | None:
    """Return what the command line says, ``None`` for nothing; ``words`` are those of its options.

    Raises ``UsageError``.
    """
    kind, named = words.split()
    if issuer is None and audience is None and not grants:
        return None
    if issuer is None or not audience or not grants:
        hint = f"--{kind}-issuer URL --{kind}-{named} NAME --{kind}-grant SCOPE CLAIM=VALUE"
        raise UsageError(f"an issuer takes `--{kind}-{named}` and at least one `--{kind}-grant`", hint=hint)
    _check_url(issuer)
    read = []
    for scope, *claims in grants:
        check_scope(scope)
        pairs = [claim.partition("=") for claim in claims]
        if not pairs or not all(name and value for name, _, value in pairs):
            hint = f"--{kind}-grant {excerpt(scope)} sub=system:serviceaccount:ci:builder"
            raise UsageError(f"the grant of `{excerpt(scope)}` names no claims with their values", hint=hint)
        read.append(Grant(scope, {name: value for name, _, value in pairs}))
    return OidcOptions(issuer, audience, tuple(read))


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname or (
        parts.scheme != "https" and (parts.scheme, parts.hostname in _LOOPBACK) != ("http", True)
    ):
        raise UsageError(f"`{excerpt(url)}` is not the URL of an issuer", hint="write an https URL")


class Issuer:
    """An issuer whose tokens are taken. With ``groups`` a claim may be a list, which has the value of a grant."""

    def __init__(self, options: OidcOptions, *, groups: bool = False) -> None:
        self._options, self._groups = options, groups
        self.url = options.issuer
        self._keys: dict[str, jwt.PyJWK] = {}
        self._turn = trio.Lock()
        self._fetched = self._tried = -_FRESH

    async def find(self, text: str, *, nonce: str | None = None) -> StoredToken:
        """Return what a token may do, which has to be of a login with this ``nonce`` if there is one.

        Raises ``Unauthorized`` for one that is not in order, or that no grant fits.
        """
        options = self._options
        try:
            header = jwt.get_unverified_header(text)
            if header.get("alg") not in ALGORITHMS:
                raise Unauthorized(f"tokens signed by `{excerpt(str(header.get('alg')))}` are not taken")
            claims = jwt.decode(
                text,
                await self._key(str(header.get("kid", ""))),
                algorithms=ALGORITHMS,
                audience=options.audience,
                issuer=options.issuer,
                leeway=LEEWAY,
                options={"require": _REQUIRED},
            )
        except jwt.PyJWTError as error:
            raise Unauthorized(f"the token is not in order: {excerpt(str(error)).lower()}") from error
        if nonce is not None and claims.get("nonce") != nonce:
            raise Unauthorized("the token is of another login")
        scopes = tuple(grant.scope for grant in options.grants if self._fits(grant, claims))
        if not scopes:
            raise Unauthorized(
                f"nothing is granted to `{excerpt(claims['sub'])}`", hint="--oidc-grant SCOPE CLAIM=VALUE"
            )
        return StoredToken(name=excerpt(claims["sub"]), scopes=scopes, created=0, sha256="")

    async def endpoint(self, name: str) -> str:
        """Return the URL of one of the issuer's services. Raises ``Unauthorized`` when it has none."""
        try:
            place = str((await self._configuration())[name])
            _check_url(place)
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise Unauthorized(f"`{self.url}` tells no {name}: {excerpt(str(error))}") from error
        return place

    async def redeem(self, fields: Mapping[str, str], secret: str | None) -> Mapping[str, Any]:
        """Return what a code is good for; with a ``secret`` as the client that it is of. Raises ``Unauthorized``."""
        request = urllib.request.Request(await self.endpoint("token_endpoint"), urlencode(fields).encode())
        if secret is not None:
            who = f"{quote(self._options.audience, safe='')}:{quote(secret, safe='')}"
            request.add_header("Authorization", f"Basic {b64encode(who.encode()).decode()}")
        try:
            answer = await _get(request)
        except (OSError, ValueError) as error:
            raise Unauthorized(f"`{self.url}` takes no code: {excerpt(str(error))}") from error
        return answer if isinstance(answer, dict) else {}

    async def _key(self, id: str) -> jwt.PyJWK:
        async with self._turn:
            now = trio.current_time()
            stale = id not in self._keys or now > self._fetched + _FRESH
            if stale and now > self._tried + _PAUSE:
                self._tried = now
                self._keys = await self._fetch()
                self._fetched = now
        if id not in self._keys:
            raise Unauthorized("the token is signed with a key that its issuer does not publish")
        return self._keys[id]

    async def _fetch(self) -> dict[str, jwt.PyJWK]:
        issuer = self._options.issuer
        try:
            place = str((await self._configuration())["jwks_uri"])
            _check_url(place)
            keys = [key for key in (await _get(place))["keys"] if key.get("use", "sig") == "sig" and "kid" in key]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise Unauthorized(f"the keys of `{issuer}` cannot be read: {excerpt(str(error))}") from error
        return {key["kid"]: jwt.PyJWK(key) for key in keys if _is_usable(key)}

    def _fits(self, grant: Grant, claims: Mapping[str, Any]) -> bool:
        def has(name: str, value: str) -> bool:
            found = claims.get(name)
            return value in found if self._groups and isinstance(found, list) else found == value

        return all(has(name, value) for name, value in grant.claims.items())

    async def _configuration(self) -> Mapping[str, Any]:
        issuer = self._options.issuer
        found: Mapping[str, Any] = await _get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found["issuer"] != issuer:
            raise Unauthorized(f"`{issuer}` says that it is `{excerpt(str(found['issuer']))}`")
        return found


def _is_usable(key: dict[str, Any]) -> bool:
    return key.get("kty") in ("RSA", "EC", "OKP") and key.get("alg", ALGORITHMS[0]) in ALGORITHMS


async def _get(url: str | urllib.request.Request) -> Any:
    def get() -> Any:
        with _OPENER.open(url, timeout=_SECONDS) as answer:
            return json.loads(answer.read(_LONGEST))

    return await trio.to_thread.run_sync(partial(get), abandon_on_cancel=True)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Keys come from where the issuer says, and from nowhere that an answer there leads to."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
