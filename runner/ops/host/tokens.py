"""Tokens of the server: bearer secrets with scopes. The store has a digest of each secret only."""

from __future__ import annotations

import hmac
import re
import secrets
from functools import lru_cache
from hashlib import sha256

from msgspec import Struct

from runner.core.codec import decode, encode
from runner.core.errors import Unauthorized, UnknownToken, UsageError, nearest
from runner.core.ids import NAME, is_name
from runner.core.sanitize import excerpt
from runner.ports.store import EntryRow, Reader, Store

KIND = "token"
SCOPES = ("admin", "admin:ro", "project:NAME", "project:NAME:ro", "session:ID")
_PREFIX = "rt"  # begins a token, so that scanners of secrets can know it
_SESSION = "session:"
_SCOPE = re.compile(rf"(?:admin|project:{NAME.pattern})(?::ro)?|{_SESSION}[0-9a-f-]{{36}}")
_LONGEST = 256  # characters of a token


class StoredToken(Struct, frozen=True, kw_only=True):
    """A token as it is stored. ``created`` is in microseconds since the epoch, UTC."""

    name: str
    scopes: tuple[str, ...]
    created: int
    sha256: str

    @property
    def admin(self) -> bool:
        """Tell whether it may see everything."""
        return bool({"admin", "admin:ro"} & {*self.scopes})

    @property
    def projects(self) -> list[str] | None:
        """Return those that it may see, ``None`` for all."""
        return None if self.admin else [scope.split(":")[1] for scope in self.scopes if scope.startswith("project:")]

    @property
    def session(self) -> str | None:
        """Return the session whose tools it may call over MCP, and nothing else; ``None`` for other tokens."""
        found = [scope.removeprefix(_SESSION) for scope in self.scopes if scope.startswith(_SESSION)]
        return found[0] if found else None

    @property
    def reads_only(self) -> bool:
        return all(scope.endswith(":ro") for scope in self.scopes)

    def may_see(self, project: str) -> bool:
        return self.admin or bool({f"project:{project}", f"project:{project}:ro"} & {*self.scopes})

    def may_change(self, project: str | None) -> bool:
        """Tell whether it may change a project, or what belongs to none, which takes ``admin``."""
        return bool({"admin", f"project:{project}"} & {*self.scopes})


async def create_token(store: Store, name: str, scopes: tuple[str, ...]) -> str:
    """Make a token and return its text, which is not stored. Raises ``UsageError``."""
    if not is_name(name):
        raise UsageError(f"`{excerpt(name)}` cannot name a token", hint="use small letters, digits and `-`")
    for scope in scopes:
        check_scope(scope)
        if scope.startswith(_SESSION) and len(scopes) > 1:
            raise UsageError(f"a token with the scope {scope} has no other one", hint="make a token for each")
    text = f"{_PREFIX}_{name}_{secrets.token_urlsafe(32)}"
    stored = StoredToken(name=name, scopes=scopes, created=await store.now(), sha256=_digest(text))
    if await store.put_entry(EntryRow(kind=KIND, name=name, body=encode(stored).decode())) is None:
        hint = f"runner token revoke {name}"
        raise UsageError(f"there is a token `{name}` already", hint=hint)
    return text


def check_scope(scope: str) -> None:
    """Raise ``UsageError`` for what is not a scope."""
    if not _SCOPE.fullmatch(scope):
        raise UsageError(f"`{excerpt(scope)}` is not a scope", hint=", ".join(SCOPES))


async def list_tokens(store: Reader) -> list[StoredToken]:
    """List every token, by name."""
    return sorted((_token(row.body) for row in await store.entries(KIND)), key=lambda token: token.name)


async def revoke_token(store: Store, name: str) -> None:
    """End a token; the next request with it is refused. Raises ``UnknownToken``."""
    if not await store.remove_entry(KIND, name):
        hint = nearest(name, [token.name for token in await list_tokens(store)])
        raise UnknownToken(f"there is no token `{excerpt(name)}`", hint=hint)


async def find_token(store: Reader, text: str) -> StoredToken:
    """Return the token with this text. Raises ``Unauthorized``."""
    kind, _, rest = text.partition("_")
    name = rest.partition("_")[0]
    rows = await store.entries(KIND, name=name) if len(text) <= _LONGEST and is_name(name) else []
    stored = _token(rows[0].body) if rows else None
    same = hmac.compare_digest(_digest(text), stored.sha256 if stored is not None else "")
    if stored is None or not same or kind != _PREFIX:
        raise Unauthorized("the token is not known", hint="make one: runner token create NAME --scope admin")
    return stored


@lru_cache(maxsize=1_000)
def _token(body: str) -> StoredToken:
    return decode(body, StoredToken)


def _digest(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()
