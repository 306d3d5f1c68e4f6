"""Output files that a user has named, outside of a run's directory."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp

from msgspec import Struct

from runner.core.errors import HostRefused, ReportNotWritten

ENCODING_ERRORS = "backslashreplace"  # of names that are not UTF-8


class OutputFile(Struct, frozen=True):
    """A file that could be written when it was named. ``adds``: to its end, beside what others write there."""

    path: Path
    adds: bool

    @classmethod
    def replacing(cls, path: Path) -> OutputFile:
        """Make one that is replaced at once; links are followed, directories made. Raises ``ReportNotWritten``."""
        target = Path(os.path.realpath(path))
        if os.path.exists(target) and not os.path.isfile(target):
            raise ReportNotWritten(f"`{path}` is not a regular file", hint="name a new file")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(descriptor)
            os.unlink(name)
        except OSError as error:
            raise _not_writable(path, error) from error
        return cls(target, adds=False)

    @classmethod
    def appending(cls, path: Path) -> OutputFile:
        """Make one that is appended to. Raises ``ReportNotWritten``."""
        try:
            path.open("ab").close()
        except OSError as error:
            raise _not_writable(path, error) from error
        return cls(path, adds=True)

    def room(self, most: int) -> int:
        """Return the bytes that are left of ``most``."""
        return max(0, most - self.path.stat().st_size) if self.adds else most

    def write(self, text: str) -> None:
        """Write the text, whole or not at all. Raises ``HostRefused``."""
        content = text.encode(errors=ENCODING_ERRORS)
        try:
            if self.adds:
                with self.path.open("ab", buffering=0) as file:
                    file.write(content)
                return
            descriptor, name = mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                    os.fchmod(descriptor, _mode(self.path))
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise HostRefused.of(error) from error


def _not_writable(path: Path, error: OSError) -> ReportNotWritten:
    return ReportNotWritten(f"`{path}` cannot be written: {error.strerror}", hint="name another file")


def _mode(path: Path) -> int:
    """Return the mode of an existing file, else the one of any new file."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
