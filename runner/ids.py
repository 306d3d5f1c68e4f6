"""Names: the grammar that users' names obey, and the identifiers that the runner makes."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # an RFC 1123 label
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def is_name(text: str) -> bool:
    """Whether ``text`` may name a document; also safe as a file name, label and ref component."""
    return NAME.fullmatch(text) is not None


def run_id(entropy: bytes) -> str:
    """Twelve characters out of at least eight random bytes."""
    number = int.from_bytes(entropy[:8], "big") >> 4
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(55, -1, -5))


def resource_name(run: str, attempt: int, kind: str) -> str:
    """The name of an external resource, known before it exists, so that a crash leaves nothing nameless."""
    return f"runner-{run}-{attempt}-{kind}"
