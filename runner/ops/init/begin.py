"""Write a first ``.runner/`` for a repository: an agent that changes nothing, a policy, and the tests that judge it.

The tests are tried first: each way to run them that the repository's files suggest runs in the sandbox that a run would
use, and the first that works is taken. Nothing is overwritten. The schemas for editors are copied beside the manifests,
so that every clone has the right version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from runner.core.errors import FileExists, FileNotWritten, PlatformError, UnknownCommit, UsageError
from runner.core.settings import Settings
from runner.git import open_git
from runner.ops.init import ci
from runner.ops.init.manifests import manifests_of
from runner.ops.init.survey import Survey, survey
from runner.ops.init.trial import Trial, best, try_ways
from runner.spec.model import Lent

HOOKS = ".pre-commit-config.yaml"
_HOOKS = r"""repos:
  - repo: local
    hooks:
      - id: runner-validate
        name: runner validate
        entry: runner validate .
        language: system
        files: (^|/)\.runner/.*\.ya?ml$|\.runner\.ya?ml$
        pass_filenames: false
"""


class InitResult(Struct, frozen=True, kw_only=True):
    """The files written, the way to run the tests that was ``taken``, and all that were ``tried``.

    ``untried`` says why none was. ``left`` are texts for a person to add to files that exist.
    """

    seen: Survey
    written: tuple[Path, ...]
    taken: Trial
    tried: tuple[Trial, ...]
    left: Mapping[str, str]
    untried: PlatformError | None = None


async def begin(
    path: Path,
    settings: Settings,
    *,
    test: str | None,
    hooks: bool,
    ci_of: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> InitResult:
    """Write ``.runner/`` at the top of the repository of ``path``, and what its CI needs. All or nothing.

    ``test`` is a shell command instead of the ways that would be found; ``hooks`` also writes the pre-commit
    configuration, and ``ci_of`` the job of a CI, which is written for GitHub where there is a ``.github/``. ``tell``
    gets progress. Raises ``FileExists``, ``FileNotWritten``, ``UsageError`` without a test command, and what git says
    of a directory that is not a repository or has no commit.
    """
    source = await open_git(settings).inspect(path)
    top = source.top
    if source.head is None:
        raise UnknownCommit(f"`{top}` has no commit yet", hint="a run works on a clone of HEAD: commit something first")
    seen = survey(top, test)
    if not seen.ways:
        raise UsageError("no test command was found here", hint="name yours: runner init --test COMMAND")
    files, left = _beside(seen, hooks=hooks, ci_of=ci_of)
    _check_absent(top, files)
    untried: PlatformError | None = None
    tried: list[Trial] = []
    try:
        tried = await try_ways(seen, settings, tell)
    except PlatformError as error:
        untried = error
    taken = best(tried) if tried else Trial(way=seen.ways[0], lent=Lent(), why="not tried")
    files = {f".runner/{name}": text for name, text in manifests_of(seen, taken).items()} | files
    _write(top, files)
    return InitResult(
        seen=seen,
        written=tuple(top / name for name in files),
        taken=taken,
        tried=tuple(tried),
        left=left,
        untried=untried,
    )


def _beside(seen: Survey, *, hooks: bool, ci_of: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files to write beside the manifests, and those that a person has to merge because they exist."""
    files, left = {}, {}
    if ci_of == "github" or (ci_of is None and (seen.top / ".github").is_dir()):
        files[ci.GITHUB] = ci.github_job(seen)
    if ci_of == "gitlab" and not (seen.top / ci.GITLAB).is_file():
        files[ci.GITLAB] = ci.gitlab_job(seen)
    elif (seen.top / ci.GITLAB).is_file():
        left[ci.GITLAB] = ci.gitlab_job(seen)
    if hooks:
        files[HOOKS] = _HOOKS
    elif (seen.top / HOOKS).is_file():
        left[HOOKS] = _HOOKS
    return files, left


def _check_absent(top: Path, files: Mapping[str, str]) -> None:
    there = [name for name in (".runner", *files) if os.path.lexists(top / name)]
    if there:
        names = ", ".join(f"`{name}`" for name in there)
        verb = "exists" if len(there) == 1 else "exist"
        raise FileExists(f"{names} {verb} already in `{top}`", hint="move what is there; nothing was written")


def _write(top: Path, files: Mapping[str, str]) -> None:
    """Create all files, or none. Existing files are not touched."""
    with ExitStack() as undo:
        for name, text in files.items():
            path = top / name
            try:
                for folder in [p for p in reversed(path.parents) if not os.path.lexists(p)]:
                    folder.mkdir()
                    undo.callback(folder.rmdir)
                with path.open("x", encoding="utf-8") as file:
                    undo.callback(path.unlink)
                    file.write(text)
                if path.suffix == ".sh":
                    path.chmod(0o755)
            except OSError as error:
                message = f"`{path}` cannot be written: {error.strerror}"
                raise FileNotWritten(message, hint="make room or give access; nothing was written") from error
        undo.pop_all()
