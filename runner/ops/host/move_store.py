"""Carry a whole store to another database by way of a file.

The file holds what the store does: names, commands and words of agents, and hashes of tokens. Directories of runs and
workspaces stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runner.core.errors import BadExport, StoreFailed, UsageError
from runner.core.settings import Settings
from runner.ops.host.state import make_home
from runner.store import export, open_to_restore


async def export_store(settings: Settings, path: Path) -> int:
    """Write the store to a new file that only its owner can read, and return the number of rows.

    Others may write to the store meanwhile: the file has what was there at one moment. Cancelling leaves no file.
    Raises ``UsageError`` for a file that is there already and for an empty store, and ``StoreFailed``.
    """
    with _new_file(path) as file:
        return await export(settings.store_url, file)


async def import_store(settings: Settings, path: Path) -> int:
    """Fill an empty store, made if need be, with what an export holds, all or nothing; return the number of rows.

    Raises ``UsageError`` for a file that cannot be read, ``BadExport`` and ``StoreNotEmpty``.
    """
    make_home(settings)
    with _readable(path) as file:
        async with open_to_restore(settings.store_url, entropy=os.urandom) as store:
            try:
                return await store.load(file)
            except BadExport as error:
                raise BadExport(f"`{path}`: {error.message}", hint=error.hint) from error


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Make a file that is durable at the end of the block, and gone when that raises."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb+")
    except FileExistsError as error:
        raise UsageError(f"`{path}` is there already", hint="name a new file") from error
    except OSError as error:
        raise UsageError(f"`{path}` cannot be made: {error.strerror}", hint="name another place") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError):
            raise StoreFailed(f"`{path}` cannot be written: {error.strerror}", hint="make room there") from error
        raise


def _readable(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}", hint="name an export of a store") from error
