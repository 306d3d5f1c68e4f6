"""Hand the secret for one https server to one git process: never in its arguments, its environment, or a file.

Git asks a credential helper, a line of shell in its configuration, which reads a pipe that both inherit. The pipe
delivers once, and only when git asks for this server: a second question or another host gets nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from runner.core.errors import RemoteDenied
from runner.core.settings import Token

_USER = "x-access-token"  # what servers take with a token when they want any name
_MAX_BYTES = 4096  # bytes: a pipe takes them at once
_HELPER = (
    """!answer() { test "$1" = get || return 0; asked=; while IFS= read -r line; do case $line in """
    """protocol=https|%s) asked=$asked.;; esac; done; test "$asked" = .. && cat /dev/fd/%d; }; answer"""
)


@contextmanager
def credential_helper(token: Token, host: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor for git to inherit, and the ``credential.helper`` that answers for ``host`` with it.

    Raises ``RemoteDenied`` when the secret cannot be read; the error repeats nothing of it.
    """
    secret = _read_credential(token)
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(secret)
        yield reading, _HELPER % (shlex.quote(f"host={host}"), reading)
    finally:
        os.close(reading)


def _read_credential(token: Token) -> bytes:
    """Read ``USER:SECRET`` or a token alone, and return it as a helper's answer."""
    try:
        text = token.read(_MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RemoteDenied(f"the credentials for `{token.host}` cannot be read from {token.place}: {why}") from None
    if not text or not text.isprintable() or len(text.encode()) > _MAX_BYTES:
        raise RemoteDenied(
            f"{token.place} has no credentials for `{token.host}`", hint="write one line: a token, or USER:PASSWORD"
        )
    user, colon, password = text.partition(":")
    user, password = (user, password) if colon else (_USER, text)
    return f"username={user}\npassword={password}\n".encode()
