"""A first ``.runner/`` for a repository: an agent that changes nothing, a policy, and the tests that judge it.

What is written names only what the repository says itself: a test command found by the files that its
tools keep. Nothing is ever overwritten. The schemas that editors check the manifests with are copied
beside them, so that they are there, and of the right version, wherever the repository is cloned.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.errors import FileExists, FileNotWritten, UnknownCommit, UsageError
from runner.git import open_git
from runner.manifest import schema
from runner.settings import Settings

SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")  # where the commands of every workspace are looked for
SYSTEM = ("/usr/", "/bin/")  # what every workspace shows
HOOKS = ".pre-commit-config.yaml"
GITLAB = ".gitlab-ci.yml"
_NPM_TEST = r'"scripts"\s*:\s*\{[^}]*"test"\s*:'


@dataclass(frozen=True)
class Rule:
    """A command that runs the tests of a repository that holds one of ``files`` (patterns).

    One of them must also match ``says``, and ``beside`` must be there too. ``tool`` is the program that
    must be found, where that is not the command's first word.
    """

    files: tuple[str, ...]
    command: tuple[str, ...]
    says: str = ""
    beside: str | None = None
    tool: str | None = None


_PYTHON = ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini")
_PYTEST = ("python3", "-m", "pytest")
RULES = (
    Rule(("GNUmakefile", "makefile", "Makefile"), ("make", "test"), says=r"^test\s*:(?!=)"),  # the team's own word
    Rule(("package.json",), ("pnpm", "test"), says=_NPM_TEST, beside="pnpm-lock.yaml"),
    Rule(("package.json",), ("yarn", "test"), says=_NPM_TEST, beside="yarn.lock"),
    Rule(("package.json",), ("npm", "test"), says=_NPM_TEST),
    Rule(("pytest.ini", "conftest.py", "tests/conftest.py"), _PYTEST, tool="pytest"),
    Rule(
        ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini"),
        ("python3", "-m", "pytest"),
        says="pytest",
        tool="pytest",
    ),
    Rule(("tests/__init__.py",), ("python3", "-m", "unittest")),
    Rule(("tests/test*.py",), ("python3", "-m", "unittest", "discover", "-s", "tests")),
    Rule((*_PYTHON, "test*.py"), ("python3", "-m", "unittest")),
    Rule(("go.mod",), ("go", "test", "./...")),
    Rule(("Cargo.toml",), ("cargo", "test")),
    Rule(("mvnw",), ("./mvnw", "test")),
    Rule(("pom.xml",), ("mvn", "test")),
    Rule(("gradlew",), ("./gradlew", "test")),
    Rule(("build.gradle", "build.gradle.kts"), ("gradle", "test")),
)


@dataclass(frozen=True)
class Toolchain:
    """Directories outside the system that a program needs to be seen, and the one that is to be on the ``PATH``.

    ``missing`` is the program when it was not found.
    """

    directories: tuple[str, ...] = ()
    search: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Begun:
    """What was written, the test command, and what is left for a person to put in place, by the file it is for.

    ``notes`` are what a person has to see to before it works everywhere, a line each.
    """

    top: Path
    written: tuple[Path, ...]
    test: str
    left: Mapping[str, str]
    notes: tuple[str, ...]


async def begin(path: Path, settings: Settings, *, test: str | None, hooks: bool) -> Begun:
    """Write ``.runner/`` at the top of the repository of ``path``, and what its CI needs. All of it or nothing.

    ``test`` is a shell command to use in place of the one that would be found; ``hooks`` asks for the
    pre-commit configuration too. Raises ``FileExists``, ``FileNotWritten``, ``UsageError`` without a test
    command, and what git says of a directory that is no repository or has no commit.
    """
    source = await open_git(settings).inspect(path)
    top = source.top
    if source.head is None:
        raise UnknownCommit(f"`{top}` has no commit yet", hint="a run works on a clone of HEAD: commit something first")
    command: str | Sequence[str]
    notes: tuple[str, ...]
    if test:
        command, toolchain, notes = test, Toolchain(), ()
    elif rule := find_rule(top):
        command, toolchain = rule.command, find_toolchain(rule, top, settings)
        notes = tuple(_notes(toolchain))
    else:
        raise UsageError("there is no test command that is known here", hint="name yours: runner init --test COMMAND")
    files = {f".runner/{name}": text for name, text in _manifests(command, toolchain).items()}
    left = {}
    if (top / ".github").is_dir():
        files[".github/workflows/runner.yml"] = _GITHUB
    if (top / GITLAB).is_file():
        left[GITLAB] = _GITLAB
    if hooks:
        files[HOOKS] = _HOOKS
    else:
        left[HOOKS] = _HOOKS
    _write(top, files)
    words = command if isinstance(command, str) else " ".join(command)
    return Begun(top, tuple(top / name for name in files), words, left, notes)


def find_rule(top: Path) -> Rule | None:
    """The first rule that fits a repository."""
    return next((rule for rule in RULES if _fits(rule, top)), None)


def _fits(rule: Rule, top: Path) -> bool:
    if rule.beside is not None and not os.path.isfile(top / rule.beside):
        return False
    found = (path for pattern in rule.files for path in top.glob(pattern) if os.path.isfile(path))
    return any(re.search(rule.says, path.read_text(errors="replace"), re.MULTILINE) for path in found)


def find_toolchain(rule: Rule, top: Path, settings: Settings) -> Toolchain:
    """Where a rule's program lives on this machine; empty when every workspace has it, or nobody has.

    A virtual environment that happens to be on the ``PATH`` is nobody's: only the repository's own is meant by it.
    """
    path = settings.environment.get("PATH", "").split(os.pathsep)
    own = (p for p in path if os.path.isabs(p) and not _foreign(Path(p), top))
    search = [str(top / ".venv/bin"), *SYSTEM_PATH, *own]
    name = rule.tool or rule.command[0]
    program = None if "/" in name else shutil.which(name, path=os.pathsep.join(search))
    if program is None:
        return Toolchain(missing=None if "/" in name else name)
    first = os.path.join(os.path.dirname(program), rule.command[0])  # of an environment, a link to the real Python
    folders = [*_folders(program), *(_folders(first) if os.path.exists(first) else ())]
    outside = {_prefix(Path(folder), Path.home()) for folder in folders if not f"{folder}/".startswith(SYSTEM)}
    alone = sorted(str(p) for p in outside if p is not None and not outside & {*p.parents})
    return Toolchain(tuple(alone), folders[0] if folders[0] not in SYSTEM_PATH else None)


def _notes(toolchain: Toolchain) -> Iterator[str]:
    if toolchain.missing is not None:
        yield f"`{toolchain.missing}` is neither in the repository's .venv nor elsewhere here: install it before a run"
    if toolchain.directories:
        places = ", ".join(f"`{place}`" for place in toolchain.directories)
        yield f"{places}: of this machine; take `toolchains` and `PATH` out where others, or a CI, use these manifests"


def _foreign(folder: Path, top: Path) -> bool:
    """Whether programs there are of a virtual environment that is not the repository's, such as runner's own."""
    environment = Path(os.path.realpath(folder)).parent
    return os.path.isfile(environment / "pyvenv.cfg") and not environment.is_relative_to(Path(os.path.realpath(top)))


def _folders(program: str) -> Iterator[str]:
    """The real directory of a program, and of each file that it is a link to in turn."""
    while True:
        folder = os.path.realpath(os.path.dirname(program))
        yield folder
        if not os.path.islink(program):
            return
        program = os.path.join(folder, os.readlink(program))


def _prefix(folder: Path, home: Path) -> Path | None:
    """What a program in ``folder`` needs around it, as far as it can be shown without a person's own files.

    ``~/.cargo`` and ``~/.local`` hold credentials beside programs: of those, only the folder itself.
    """
    whole = folder.parent
    if folder.name == "bin" and whole.parent != home and not home.is_relative_to(whole):
        return whole
    return None if home.is_relative_to(folder) else folder


def _write(top: Path, files: Mapping[str, str]) -> None:
    """Create all files, or none. Nothing that exists is touched."""
    there = [name for name in (".runner", *(n for n in files if not n.startswith(".runner/"))) if _exists(top / name)]
    if there:
        names = ", ".join(f"`{name}`" for name in there)
        verb = "exists" if len(there) == 1 else "exist"
        raise FileExists(f"{names} {verb} already in `{top}`", hint="nothing was written; move what is there")
    with ExitStack() as undo:
        for name, text in files.items():
            path = top / name
            try:
                for folder in [p for p in reversed(path.parents) if not _exists(p)]:
                    folder.mkdir()
                    undo.callback(folder.rmdir)
                with path.open("x", encoding="utf-8") as file:
                    undo.callback(path.unlink)
                    file.write(text)
                if path.suffix == ".sh":
                    path.chmod(0o755)
            except OSError as error:
                message = f"`{path}` can not be written: {error.strerror}"
                raise FileNotWritten(message, hint="nothing was written") from error
        undo.pop_all()


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _manifests(command: str | Sequence[str], toolchain: Toolchain) -> dict[str, str]:
    """The files of ``.runner/``, by name."""
    own, words = "", command
    if toolchain.directories:
        own += f"    toolchains: {json.dumps(toolchain.directories)}   # of this machine, visible and read-only\n"
    if toolchain.search is not None:
        path = os.pathsep.join((toolchain.search, *SYSTEM_PATH))
        own += f"  env: {{PATH: {json.dumps(path)}}}\n"
        words = ["env", f"PATH={path}", *command]  # the checks do not see the agent's variables
    return {
        "agent.runner.yaml": _head("AgentType", "agent") + _AGENT + own,
        "agent.sh": _SCRIPT,
        "policy.runner.yaml": _head("Policy", "house") + _POLICY,
        "check.runner.yaml": _head("IncidentRun", "check") + _CHECK.replace("COMMAND", json.dumps(words)),
        **{
            f"schemas/{name}": schema.text_of(schema.as_draft_07(content)) for name, content in schema.schemas().items()
        },
    }


def _head(kind: str, name: str) -> str:
    modeline = f"# yaml-language-server: $schema=schemas/{schema.file_of(kind)}\n"
    return f"{modeline}apiVersion: runner/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"


_AGENT = """\
  agent: script
  script: {path: agent.sh}
  workspace:
    enabled: true
    providers: [local]
    repo_source: {type: local, path: ..}      # always a private clone of HEAD
    protected_paths: [.runner/, .github/, .gitlab-ci.yml, .pre-commit-config.yaml]
"""
_SCRIPT = """\
#!/usr/bin/env bash
# Plays the agent's part, in a private clone of this repository. What it changes there is judged by the
# policy, committed outside your checkout, and tested.
set -euo pipefail

echo 'nothing to change yet: see .runner/agent.sh'
"""
_POLICY = """\
  allowed_paths: ["**"]                       # narrow this to what an agent may change
  max_file_size: 1M
  min_isolation: namespaces
"""
_CHECK = """\
  agent_type: agent
  policy: house
  prompt: Keep the tests passing.
  verify:
    commands:                                 # on a clean checkout of the result, without a network
      - run: COMMAND
  timeout: 30m
"""
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
_GITHUB = """\
name: runner
on: [pull_request]

permissions:
  contents: read

jobs:
  runner:
    runs-on: ubuntu-24.04
    timeout-minutes: 45
    env:
      # what pip installs runner from, such as git+https://HOST/PATH@COMMIT: a variable of the repository
      RUNNER_PACKAGE: ${{ vars.RUNNER_PACKAGE }}
    steps:
      - uses: actions/checkout@v4
        with:
          persist-credentials: false
      # 24.04 forbids the namespaces that the sandbox is made of
      - run: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0
      - run: |
          python3 -m venv "$RUNNER_TEMP/runner"
          "$RUNNER_TEMP/runner/bin/pip" install "${RUNNER_PACKAGE:?set this variable of the repository}"
          echo "$RUNNER_TEMP/runner/bin" >>"$GITHUB_PATH"
      - run: runner validate .
      - run: runner plan --task-from github
      - run: runner apply --task-from github --junit runs.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: runs, path: runs.xml, if-no-files-found: ignore}
"""
_GITLAB = """\
runner:
  image: python:3.13
  script:
    - pip install "${RUNNER_PACKAGE:?set this variable to what pip installs runner from}"
    - runner validate .
    - runner apply --task-from gitlab --junit runs.xml   # where `runner doctor` finds namespaces
  artifacts:
    when: always
    reports: {junit: runs.xml}
"""
