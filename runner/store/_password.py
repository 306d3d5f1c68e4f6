"""A password that a command prints, for databases whose passwords live for minutes."""

from __future__ import annotations

import shlex
import subprocess  # noqa: TID251  # called in the threads of the store, which trio cannot
import time
from urllib.parse import unquote

from runner.core.errors import StoreFailed
from runner.core.sanitize import excerpt

OPTION = "password_command"  # of the store's URL, where the settings put it
SECONDS = 30.0  # for the command
KEPT = 60.0  # seconds that a password is used for further connections
_LONGEST = 16 << 10  # bytes; a token of a cloud has some 2,000


def split_command(url: str) -> tuple[str, PasswordCommand | None]:
    """Return a URL without the command for its password, and that."""
    before, mark, query = url.partition("?")
    options = [option for option in query.split("&") if option]
    found = [option for option in options if option.startswith(f"{OPTION}=")]
    if not found:
        return url, None
    rest = "&".join(option for option in options if option not in found)
    return before + (mark + rest if rest else ""), PasswordCommand(unquote(found[-1].partition("=")[2]))


class PasswordCommand:
    """A command, and what it printed last. Its output is never repeated."""

    def __init__(self, command: str) -> None:
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise self._fault(str(error)) from error
        if not self._argv:
            raise self._fault("it is empty")
        self._password, self._until = "", 0.0
        self._reused = False  # whether the password that was returned last had been printed before

    def password(self) -> str:
        """Return a password that was printed a moment ago, or now. Raises ``StoreFailed``."""
        self._reused = time.monotonic() < self._until
        if not self._reused:
            self._password, self._until = self._printed(), time.monotonic() + KEPT
        return self._password

    def forget(self) -> bool:
        """Forget a password that the server refused; tell whether it was an older one, so that a new one may do."""
        self._until = 0.0
        return self._reused

    def _printed(self) -> str:
        try:
            done = subprocess.run(
                self._argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise self._fault(f"it took more than {SECONDS:.0f} s") from None
        except OSError as error:
            raise self._fault(f"it cannot be started: {error.strerror}") from error
        printed = done.stdout.rstrip(b"\r\n")
        if done.returncode:
            said = excerpt(done.stderr.decode(errors="replace").strip())
            raise self._fault(f"it ended with {done.returncode}" + (f": {said}" if said else ""))
        if not printed or len(printed) > _LONGEST or b"\n" in printed or b"\0" in printed:
            raise self._fault("it did not print one line")
        return printed.decode(errors="replace")

    @staticmethod
    def _fault(why: str) -> StoreFailed:
        message = f"the command of `RUNNER_DATABASE_PASSWORD_COMMAND` gave no password: {why}"
        return StoreFailed(message, hint="run it by hand: it has to print the password alone")
