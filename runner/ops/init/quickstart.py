"""Copy of the shipped quickstart, with a small repository of its own.

In a checkout of this product the selftest changes a clone of that checkout; an installed package has none, and must not
be written to. The copy's repository holds the sub-runners that the selftest lists, and a check.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.core.errors import FileExists, FileNotWritten, UsageError
from runner.core.sanitize import excerpt
from runner.core.settings import Settings, shipped
from runner.git import open_git
from runner.ports.git import Author, SnapshotOptions

REPOSITORY = "repository"
_SELFTEST = "selftest.runner.yaml"
_NOT_SHIPPED = shutil.ignore_patterns("output", "logs", "prompt-sent.md")  # what a run leaves in an incident
_CHECK = """\
#!/usr/bin/env bash
# Every sub-runner is sound Bash, and the list names each of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../runners"

for script in *.sh; do
    bash -n "$script"
    case "$script" in common.sh | *-post.sh) continue ;; esac
    grep -q "^| ${script%.sh} |" README.md
done
"""


async def copy_quickstart(to: Path, settings: Settings) -> None:
    """Fill the directory ``to``, which is empty or missing. All or nothing.

    Raises ``FileExists`` and ``FileNotWritten``.
    """
    try:
        with _empty(to) as place, tempfile.TemporaryDirectory(dir=place, prefix=".runner-") as folder:
            copy = _copy(Path(folder))
            await _commit(_tree(Path(folder)), Path(folder, "private"), copy / REPOSITORY, settings)
            for name in os.listdir(copy):
                os.rename(copy / name, place / name)
    except OSError as error:
        message = f"`{excerpt(str(to), 200)}` cannot be written: {error.strerror}"
        raise FileNotWritten(message, hint="make room or give access; nothing was written") from error


async def _commit(tree: Path, private: Path, repository: Path, settings: Settings) -> None:
    """Commit what is in ``tree``; ``private`` is scratch space."""
    git = open_git(settings)
    await git.create_empty(private)
    author = Author("runner", "runner@localhost", 0)
    snapshot = await git.snapshot(private, tree, None, SnapshotOptions("The sub-runners", author))
    await git.check_out(private, snapshot.commit, into=repository, branch="main")


@contextmanager
def _empty(to: Path) -> Iterator[Path]:
    """Yield the real path of an empty directory to fill. A new one is removed again on failure."""
    to = Path(os.path.realpath(to))
    made = not os.path.lexists(to)
    to.mkdir(parents=True, exist_ok=True)
    if os.listdir(to):
        hint = "name a new directory; nothing was written"
        raise FileExists(f"`{excerpt(str(to), 200)}` is not empty", hint=hint)
    try:
        yield to
    except BaseException:
        if made:
            to.rmdir()
        raise


def _copy(folder: Path) -> Path:
    """Copy the quickstart, with an empty directory for its repository."""
    copy = Path(shutil.copytree(shipped("manifests") / "quickstart", folder / "quickstart", ignore=_NOT_SHIPPED))
    selftest = copy / _SELFTEST
    selftest.write_text(selftest.read_text().replace("path: ../..", f"path: {REPOSITORY}"))
    (copy / REPOSITORY).mkdir()
    return copy


def _tree(folder: Path) -> Path:
    """Write the files of the repository."""
    tree = folder / "tree"
    shutil.copytree(shipped("runners"), tree / "runners", ignore=lambda path, names: {*names} - _scripts(path, names))
    (tree / "tests" / "runners").mkdir(parents=True)
    (tree / "tests" / "runners" / "check.sh").write_text(_CHECK)
    return tree


def _scripts(path: str, names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".sh") and os.path.isfile(os.path.join(path, name))}


def refuse_installed(path: Path) -> None:
    """Raise ``UsageError`` for manifests of an installed package: a run writes beside its manifests."""
    package = os.path.realpath(shipped("manifests"))
    if "_files" in Path(package).parts and Path(os.path.realpath(path)).is_relative_to(package):
        message = f"`{excerpt(str(path), 200)}` belongs to the installed runner, and a run would write there"
        raise UsageError(message, hint="copy it to a place of your own: runner init --quickstart DIR")
