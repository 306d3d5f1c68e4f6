"""The secret for one https server, lent to one git process: never in its words, its environment, or a file.

Git asks a helper, which is a few words of shell in its configuration, and the helper reads a pipe that all of them
inherit. The pipe delivers once, and only when git asks for this very server, so that neither a second question nor
another host gets anything.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from runner.core.errors import RemoteDenied
from runner.core.settings import Token

_USER = "x-access-token"  # what servers take with a token when they want any name
_MOST = 4096  # bytes: a pipe takes them at once
_HELPER = (
    """!answer() { test "$1" = get || return 0; asked=; while IFS= read -r line; do case $line in """
    """protocol=https|%s) asked=$asked.;; esac; done; test "$asked" = .. && cat /dev/fd/%d; }; answer"""
)


@contextmanager
def lent(token: Token, host: str) -> Iterator[tuple[int, str]]:
    """A descriptor for git to inherit, and the ``credential.helper`` that answers for ``host`` with it.

    Raises ``RemoteDenied`` when the secret cannot be had; nothing of it is repeated.
    """
    secret = _secret(token)
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(secret)
        yield reading, _HELPER % (shlex.quote(f"host={host}"), reading)
    finally:
        os.close(reading)


def _secret(token: Token) -> bytes:
    """In the words of a helper. ``USER:SECRET``, or a token alone."""
    try:
        text = token.read(_MOST).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RemoteDenied(f"the credentials for `{token.host}` cannot be read from {token.place}: {why}") from None
    if not text or not text.isprintable() or len(text.encode()) > _MOST:
        raise RemoteDenied(
            f"{token.place} has no credentials for `{token.host}`", hint="one line: a token, or USER:PASSWORD"
        )
    user, colon, password = text.partition(":")
    user, password = (user, password) if colon else (_USER, text)
    return f"username={user}\npassword={password}\n".encode()
