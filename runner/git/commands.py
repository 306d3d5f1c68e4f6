"""Git commands on one repository: run with limits, their exit checked, their output parsed.

The binary adapter and the quarantine of agents' bundles are built from these.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

from runner.core.errors import GitFailed, RemoteOverLimit
from runner.core.sanitize import printable_path
from runner.git._profile import git_environment
from runner.git._run import GitResult, ProcessLimits, run, with_limits
from runner.ports.git import TreeEntry

_ENVIRONMENT = git_environment({})


class GitCommands:
    def __init__(self, program: str, *, objects: Path | None = None, limits: ProcessLimits | None = None) -> None:
        """``objects`` replaces the object directory of every repository; ``limits`` apply to each git process."""
        self.program = program
        self._limits = limits
        self._argv = [program] if limits is None else [*with_limits(limits, die_on_file_size=True), program]
        self._environment = _ENVIRONMENT if objects is None else _ENVIRONMENT | {"GIT_OBJECT_DIRECTORY": str(objects)}

    async def run_git(
        self,
        git: Path,
        *argv: str | bytes,
        tree: Path | None = None,
        index: Path | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
    ) -> GitResult:
        """Run git on a repository and return its result, whatever its exit status.

        Raises ``RemoteOverLimit`` when it was ended for the size of its output.
        """
        env = self._environment | {"GIT_DIR": str(git)}
        if tree is not None:
            env["GIT_WORK_TREE"] = str(tree)
        if index is not None:
            env["GIT_INDEX_FILE"] = str(index)
        result = await run([*self._argv, *argv], env=env, stdin=stdin, stdout=stdout)
        if self._limits is not None and result.code == -signal.SIGXFSZ:
            limit = self._limits.file_bytes >> 20
            raise RemoteOverLimit(f"output of `git {argv[0]!s}` exceeds the limit of {limit:,} MiB")
        return result

    async def git(
        self,
        git: Path,
        *argv: str | bytes,
        tree: Path | None = None,
        index: Path | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
        accept: tuple[int, ...] = (0,),
    ) -> GitResult:
        """Run git on a repository. Raises ``GitFailed`` for an exit status that is not in ``accept``."""
        result = await self.run_git(git, *argv, tree=tree, index=index, stdin=stdin, stdout=stdout)
        return check_exit(str(argv[0]), result, accept)

    async def find_commit(self, git: Path, name: str) -> str | None:
        """See ``GitAdapter``."""
        argv = ("rev-parse", "--verify", "--quiet", "--end-of-options", name + "^{commit}")
        return (await self.git(git, *argv, accept=(0, 1, 128))).stdout.decode().strip() or None

    async def tree_entries(self, git: Path, commit: str) -> list[TreeEntry]:
        """See ``GitAdapter``."""
        listed = await self.git(git, "ls-tree", "-r", "-z", "-l", "--full-tree", "--end-of-options", commit)
        return [_parse_entry(row) for row in listed.stdout.split(b"\0")[:-1]]

    async def tree_entry(self, git: Path, commit: str, path: bytes) -> TreeEntry | None:
        """See ``GitAdapter``."""
        listed = await self.git(git, "ls-tree", "-z", "-l", "--full-tree", "--end-of-options", commit, path)
        return next((_parse_entry(row) for row in listed.stdout.split(b"\0")[:-1]), None)

    async def read_blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]:
        """Return the contents of objects in the order of ``ids``."""
        if not ids:
            return []
        batch = await self.git(repository, "cat-file", "--batch", stdin="".join(f"{id}\n" for id in ids).encode())
        output = BytesIO(batch.stdout)
        contents = []
        for _ in ids:
            size = int(output.readline().split()[2])
            contents.append(output.read(size))
            output.read(1)
        return contents


def check_exit(verb: str, result: GitResult, accept: tuple[int, ...] = (0,)) -> GitResult:
    """Return the result. Raises ``GitFailed`` for an exit status that is not in ``accept``."""
    if result.code not in accept:
        raise GitFailed(f"`git {verb}` ended with {result.code}: {result.stderr or 'no message'}")
    return result


def _parse_entry(row: bytes) -> TreeEntry:
    head, _, path = row.partition(b"\t")
    mode, _, id, size = head.split()
    if size == b"BAD":
        raise GitFailed(f"object `{id.decode()}` of `{printable_path(path)}` is missing or damaged")
    return TreeEntry(path, int(mode, 8), id.decode(), 0 if size == b"-" else int(size))
