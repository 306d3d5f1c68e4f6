"""Tokens of the server: bearer secrets with scopes. The home has a file for each, with a digest of the secret only."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from runner.core.clock import now_microseconds
from runner.core.codec import decode, encode
from runner.core.errors import StoreDamaged, Unauthorized, UnknownToken, UsageError, nearest
from runner.core.ids import NAME, is_name
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.host.state import make_home

TOKENS = "tokens"  # in the home
_KIND = "rt"  # begins a token, so that scanners of secrets can know it
_SCOPE = re.compile(rf"(?:admin|project:{NAME.pattern})(?::ro)?")
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

    def may_see(self, project: str) -> bool:
        return self.admin or bool({f"project:{project}", f"project:{project}:ro"} & {*self.scopes})

    def may_change(self, project: str | None) -> bool:
        """Tell whether it may change a project, or what belongs to none, which takes ``admin``."""
        return bool({"admin", f"project:{project}"} & {*self.scopes})


def create_token(settings: Settings, name: str, scopes: tuple[str, ...]) -> str:
    """Make a token and return its text, which is not stored. Raises ``UsageError``."""
    if not is_name(name):
        raise UsageError(f"`{excerpt(name)}` cannot name a token", hint="use small letters, digits and `-`")
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            hint = "admin, admin:ro, project:NAME or project:NAME:ro"
            raise UsageError(f"`{excerpt(scope)}` is not a scope", hint=hint)
    make_home(settings)
    text = f"{_KIND}_{name}_{secrets.token_urlsafe(32)}"
    stored = StoredToken(name=name, scopes=scopes, created=now_microseconds(), sha256=_digest(text))
    folder = settings.home / TOKENS
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        hint = f"runner token revoke {name}"
        raise UsageError(f"there is a token `{name}` already", hint=hint) from error
    with open(file, "wb") as out:
        out.write(encode(stored))
    return text


def list_tokens(settings: Settings) -> list[StoredToken]:
    """List every token, by name."""
    return [_read(path) for path in sorted((settings.home / TOKENS).glob("*"))]


def revoke_token(settings: Settings, name: str) -> None:
    """End a token; the next request with it is refused. Raises ``UnknownToken``."""
    try:
        _path(settings, name).unlink()
    except FileNotFoundError as error:
        hint = nearest(name, [token.name for token in list_tokens(settings)])
        raise UnknownToken(f"there is no token `{excerpt(name)}`", hint=hint) from error


def find_token(settings: Settings, text: str) -> StoredToken:
    """Return the token with this text. Raises ``Unauthorized``."""
    kind, _, rest = text.partition("_")
    try:
        stored = _read(_path(settings, rest.partition("_")[0])) if len(text) <= _LONGEST else None
    except FileNotFoundError:
        stored = None
    same = hmac.compare_digest(_digest(text), stored.sha256 if stored is not None else "")
    if stored is None or not same or kind != _KIND:
        raise Unauthorized("the token is not known", hint="make one: runner token create NAME --scope admin")
    return stored


def _path(settings: Settings, name: str) -> Path:
    if not is_name(name):
        raise FileNotFoundError
    return settings.home / TOKENS / name


def _read(path: Path) -> StoredToken:
    try:
        return decode(path.read_bytes(), StoredToken)
    except ValueError as error:
        raise StoreDamaged(f"`{path}` is not a token", hint=f"runner token revoke {path.name}") from error


def _digest(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()
