"""Credentials that are added to requests outside a workspace: to which host, as what, and for which requests.

Nothing here knows a credential's value before ``header_of`` is given it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Literal

from msgspec import Struct

from runner.core.patterns import pattern

TLS_PORT = 443  # of an injection that names none
REQUEST_RULE = pattern(r"(?:[A-Z]{3,20} )?/[!-~]*")
_ENCODED = pattern(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_SEGMENT_END = pattern(r"/|\\|%2F|%5C")
_WILD = pattern(r"(\*\*|\*)")


class Injection(Struct, frozen=True, kw_only=True):
    """A secret, by its name, that requests to a host get outside the workspace.

    ``how`` is ``bearer``, ``basic`` with ``name`` for the user, or ``header`` with its ``name``. ``allow`` limits the
    requests that are sent at all. ``origin`` is the manifest line.
    """

    host: str
    secret: str
    how: Literal["bearer", "basic", "header"]
    port: int = TLS_PORT
    name: str = ""
    allow: tuple[str, ...] = ()
    origin: str = ""

    def __str__(self) -> str:
        kind = {"bearer": "bearer", "basic": f"basic {self.name}", "header": f"header {self.name}"}[self.how]
        only = f", {', '.join(self.allow)} only" if self.allow else ""
        return f"{self.secret} for {self.host}:{self.port} as {kind}{only}"

    def allows(self, method: str, path: str) -> bool:
        """Tell whether a request is one that may be sent. ``HEAD`` is allowed where ``GET`` is."""
        if not self.allow:
            return True
        asked = canonical_path(path)
        return asked is not None and any(_matches(rule, method, asked) for rule in self.allow)

    def header_of(self, value: bytes) -> tuple[bytes, bytes]:
        """Return the header that carries a secret."""
        value = value.rstrip(b"\r\n")
        match self.how:
            case "bearer":
                return b"authorization", b"Bearer " + value
            case "basic":
                return b"authorization", b"Basic " + b64encode(self.name.encode() + b":" + value)
            case "header":
                return self.name.lower().encode(), value


def canonical_path(path: str) -> str | None:
    """Return a path in the one spelling that rules are compared in; ``None`` for one that servers read in several ways.

    That is one with ``..``, with ``%25``, or with characters that no path has.
    """

    def decoded(found: re.Match[str]) -> str:
        character = chr(int(found[1], 16))
        return character if character in _UNRESERVED else found[0].upper()

    if not REQUEST_RULE.fullmatch(path) or "%25" in path or re.search(r"%(?![0-9A-Fa-f]{2})", path):
        return None
    path = _ENCODED.sub(decoded, path)
    segments = [one.partition(";")[0] for one in _SEGMENT_END.split(path)]
    return None if {".", ".."} & {*segments} or "" in segments[1:-1] else path


def _matches(rule: str, method: str, path: str) -> bool:
    wanted, _, pattern = rule.rpartition(" ")
    if wanted and method != wanted and (method, wanted) != ("HEAD", "GET"):
        return False
    parts = ({"**": ".*", "*": "(?:(?!%2F|%5C)[^/\\\\])*"}.get(part, re.escape(part)) for part in _WILD.split(pattern))
    return re.fullmatch("".join(parts), path) is not None
