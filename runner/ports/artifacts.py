"""The port of a store of artifacts: where the files of runs are kept for every host, such as a bucket of S3.

It knows objects and no files: small contents, written once under a name that the caller chooses from plain ASCII
(``judge_name``). ``runner.artifacts.run_copy`` makes runs of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

MAX_OBJECT = 8 << 20  # bytes
MAX_NAME = 700  # characters; S3 has room for 1024 bytes, a prefix included
_NAME = re.compile(r"[A-Za-z0-9~_-][A-Za-z0-9.~_-]*(/[A-Za-z0-9~_-][A-Za-z0-9.~_-]*)*")


def is_name(name: str) -> bool:
    """Tell whether a text may be the name of an object: no empty part, none that begins with a dot."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


class StoredObject(NamedTuple):
    name: str
    size: int


class ArtifactStore(Protocol):
    """Objects by name. Blocking: called in worker threads, several at once.

    Every call is bounded in time and tries again what may pass. It raises ``ArtifactsUnreachable`` when the store did
    not answer in that time, and ``ArtifactsRefused`` for an answer that will not change by itself: no rights, no such
    bucket or folder, no room. Both say which store it is, without secrets.
    """

    url: str  # without secrets, for people

    def put(self, name: str, content: bytes) -> None:
        """Write an object, whole or not at all; one that is there is replaced. ``content`` is at most ``MAX_OBJECT``
        long. What was written is flushed, and checked on its way where the store can.
        """

    def get(self, name: str) -> bytes:
        """Return an object. Raises ``ArtifactsMissing`` when it is not there, ``ArtifactsDamaged`` when it is longer
        than ``MAX_OBJECT`` or ends early.
        """

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        """Yield the objects below a folder ``prefix``, which ends with a slash, ordered by name; only those whose name
        is greater than ``after``. Their names are whole ones. A listing is complete or raises; of objects that are
        written meanwhile it may have any. A folder that is not there is empty.
        """

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders directly below a folder, without the prefix."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def check(self) -> None:
        """Write a small object, read it back and remove it."""
