"""Detect changes to the files of a commit in a tree, as those see it who work in it. Blocking."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from runner.policy.names import parents
from runner.ports.git import TreeEntry

_Stamp = tuple[int, ...]


class Untouched:
    """The files of a commit in the open directory ``tree``, beside which there may be others.

    The kernel stamps each change of a file, and nobody in a sandbox can set that stamp. So looking costs an ``lstat``
    a file, and only what was written to has to be read.
    """

    def __init__(self, tree: int, entries: Iterable[TreeEntry]) -> None:
        self._files = [entry.path for entry in entries]
        self._folders = sorted(parents(self._files))
        self.tree = os.dup(tree)  # the sandbox may be ended before it is looked at
        self._stamps = self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.tree)

    def written(self) -> bool:
        """Tell whether any file may have changed since the last call."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> list[_Stamp]:
        files = [self._status(path) for path in self._files]
        folders = [self._status(path) for path in self._folders]
        return [(s.st_dev, s.st_ino, s.st_mode, s.st_size, s.st_ctime_ns) if s else () for s in files] + [
            (s.st_dev, s.st_ino, stat.S_IFMT(s.st_mode)) if s else () for s in folders
        ]

    def _status(self, path: bytes) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self.tree, follow_symlinks=False)
        except OSError:  # whatever is there instead, it is not what was there
            return None
