"""Survey of a repository: how its tests are run, by which programs, and where its dependencies are.

Nothing is run: each answer comes from a file that a tool maintains. Several ways to run the tests may be found, the
likeliest first; trials decide which one works.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from runner.core.errors import RunnerError
from runner.git import source

_DEPTH = 3  # folders down to which packages of one repository have their own dependencies
_MOST = 20  # of them
_ENVIRONMENTS = (".venv", "venv", "env", ".env")
_FOLDERS = ("node_modules", "vendor", "vendor/bundle", ".bundle")
_PYTHON = ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini", "requirements.txt", "Pipfile")
REQUIREMENTS = (
    *(f"{name}.txt" for name in ("requirements", "requirements-dev", "requirements-test", "requirements-tests")),
    *(f"{name}.txt" for name in ("dev-requirements", "test-requirements", "requirements/test", "requirements/tests")),
)
_PYTEST = ("pytest.ini", "conftest.py", "tests/conftest.py", "test/conftest.py")


class Way(Struct, frozen=True):
    """A way to run the tests: ``setup`` commands, ``command``, and the programs that run both.

    ``language`` owns the dependencies, and is empty for a command that a person gave.
    """

    command: tuple[str, ...] | str
    tools: tuple[str, ...]
    language: str = ""
    setup: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return the command as a person types it."""
        return self.command if isinstance(self.command, str) else " ".join(self.command)


class Survey(Struct, frozen=True):
    """Result of a survey: ``ways`` to run the tests, likeliest first, ``dependencies`` and ``languages``."""

    top: Path
    ways: tuple[Way, ...]
    dependencies: tuple[str, ...]
    languages: tuple[str, ...]


def survey(top: Path, test: str | None = None) -> Survey:
    """Look at a repository's files. ``test`` is a shell command instead of the ways that would be found."""
    dependencies = tuple(find_dependencies(top))
    languages = tuple(language for language, files in _LANGUAGES.items() if _any(top, files))
    tools = tuple(dict.fromkeys(tool for language in languages for tool in _tools(top, language, dependencies)))
    if test is not None:
        return Survey(top, (Way(test, tools, next(iter(languages), "")),), dependencies, languages)
    ways = [Way(("make", target), tools, next(iter(languages), "c")) for target in _make_targets(top)]
    ways += [way for language in languages for way in _ways(top, language, _tools(top, language, dependencies))]
    return Survey(top, tuple(ways), dependencies, languages)


def install_words(top: Path, language: str) -> str:
    """Return the command that installs what a repository needs where a workspace can be shown it."""
    known = (words for file, words in _INSTALL.get(language, ()) if not file or (top / file).exists())
    return next(known, _pip_words(top) if language == "python" else "")


def _pip_words(top: Path) -> str:
    """Return the commands for a virtual environment with the repository's requirements, also for tests."""
    try:
        project = tomllib.loads(_text(top / "pyproject.toml"))
    except tomllib.TOMLDecodeError:
        project = {}
    extra = _first(project.get("project", {}).get("optional-dependencies", {}))
    group = _first(project.get("dependency-groups", {}))
    words = ["pytest", *(f"-r {name}" for name in REQUIREMENTS if (top / name).is_file())]
    words += [f"--group {group}"] if group else []
    if _any(top, ("pyproject.toml", "setup.py")):
        words.append(f"-e '.[{extra}]'" if extra else "-e .")
    return f"python3 -m venv .venv && .venv/bin/pip install {' '.join(words)}"


def _first(names: object) -> str:
    """Return the name that is for the tests."""
    wanted = ("test", "tests", "testing", "dev")
    return next((name for name in wanted if isinstance(names, dict) and name in names), "")


_LANGUAGES = {  # and the files that say so
    "node": ("package.json",),
    "python": (*_PYTHON, *_PYTEST, "test*.py", "tests/*.py"),
    "go": ("go.mod",),
    "rust": ("Cargo.toml",),
    "ruby": ("Gemfile", "Rakefile", "*.gemspec"),
    "php": ("composer.json",),
    "java": ("pom.xml", "build.gradle", "build.gradle.kts"),
    "c": ("CMakeLists.txt", "meson.build", "configure", "configure.ac"),
    "perl": ("Makefile.PL", "cpanfile"),
}

_INSTALL = {
    "python": (
        ("uv.lock", "uv sync"),
        ("poetry.lock", "POETRY_VIRTUALENVS_IN_PROJECT=true poetry install"),
        ("pdm.lock", "pdm install"),
        ("Pipfile", "PIPENV_VENV_IN_PROJECT=1 pipenv install --dev"),
    ),
    "node": (
        ("pnpm-lock.yaml", "pnpm install --frozen-lockfile"),
        ("yarn.lock", "yarn install --frozen-lockfile"),
        ("bun.lock", "bun install --frozen-lockfile"),
        ("package-lock.json", "npm ci"),
        ("", "npm install"),
    ),
    "go": (("", "go mod download"),),
    "rust": (("", "cargo fetch"),),
    "ruby": (("Gemfile", "bundle config set --local path vendor/bundle && bundle install"),),
    "php": (("", "composer install"),),
}


def _any(top: Path, patterns: Sequence[str]) -> bool:
    return any(path.is_file() for pattern in patterns for path in top.glob(pattern))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _make_targets(top: Path) -> Iterator[str]:
    """Return the team's own make target for its tests."""
    text = "\n".join(_text(top / name) for name in ("GNUmakefile", "makefile", "Makefile"))
    for target in ("test", "check"):
        if re.search(rf"^{target}\s*::?(?!=)", text, re.MULTILINE):
            yield target


def _tools(top: Path, language: str, dependencies: Sequence[str]) -> tuple[str, ...]:
    match language:
        case "python":
            return () if any((top / name / "pyvenv.cfg").is_file() for name in dependencies) else ("python3",)
        case "node":
            manager = _node_manager(top)
            return ("node",) if manager == "npm" else ("node", manager)
        case "go" | "ruby" | "php" | "perl":
            return (language,)
        case "rust":
            return ("cargo",)
        case "java":
            return (
                "java",
                *(name for name, file in (("mvn", "pom.xml"), ("gradle", "build.gradle")) if _lacks(top, file, name)),
            )
    return ()


def _lacks(top: Path, file: str, name: str) -> bool:
    """Tell whether the repository describes a build for a program that it does not contain."""
    return (top / file).is_file() and not (top / f"{name}w").is_file()


def _node_manager(top: Path) -> str:
    locks = {"pnpm": "pnpm-lock.yaml", "yarn": "yarn.lock", "bun": "bun.lock"}
    return next((name for name, lock in locks.items() if (top / lock).is_file()), "npm")


def _ways(top: Path, language: str, tools: tuple[str, ...]) -> Iterator[Way]:
    match language:
        case "python":
            yield from _python_ways(top, tools)
        case "node" if _has_script(top, "test"):
            yield Way((_node_manager(top), "test"), tools, language)
        case "go":
            yield Way(("go", "test", "./..."), tools, language)
        case "rust":
            yield Way(("cargo", "test"), tools, language)
        case "ruby":
            yield from _ruby_ways(top, tools)
        case "php" if (top / "phpunit.xml").is_file() or (top / "phpunit.xml.dist").is_file():
            yield Way(("vendor/bin/phpunit",), tools, language)
        case "java":
            for name, files in (("mvn", ("pom.xml",)), ("gradle", ("build.gradle", "build.gradle.kts"))):
                if _any(top, files):
                    yield Way((f"./{name}w" if (top / f"{name}w").is_file() else name, "test"), tools, language)
        case "c":
            yield from _c_ways(top)
        case "perl" if (top / "t").is_dir():
            yield Way(("prove", "-lr", "t"), tools, language)


def _python_ways(top: Path, tools: tuple[str, ...]) -> Iterator[Way]:
    """Yield ways as the project configures them. Code of the checkout goes before an installed copy of it."""
    configured = any("pytest" in _text(top / name) for name in _PYTHON) or _any(top, _PYTEST)
    configured |= any(True for name in _ENVIRONMENTS for _ in top.glob(f"{name}/lib/python*/site-packages/pytest"))
    commands: list[tuple[str, ...]] = [("python3", "-m", "pytest")] if configured else []
    if _any(top, ("tests/__init__.py", "test/__init__.py")) or _any(top, ("test*.py",)):
        commands.append(("python3", "-m", "unittest"))
    commands += [
        ("python3", "-m", "unittest", "discover", "-s", folder)
        for folder in ("tests", "test")
        if _any(top, (f"{folder}/test*.py",)) and not (top / folder / "__init__.py").is_file()
    ]
    if not configured:
        commands += [("python3", "-m", "unittest")] * (not commands) + [("python3", "-m", "pytest")]
    inside = ("env", "PYTHONPATH=src") if _any(top, ("src/*/__init__.py", "src/*.py")) else ()
    for command in commands:
        yield Way((*inside, *command), tools, "python")


def _has_script(top: Path, name: str) -> bool:
    try:
        scripts = json.loads(_text(top / "package.json")).get("scripts", {})
    except (ValueError, AttributeError):
        return False
    return isinstance(scripts, dict) and name in scripts


def _ruby_ways(top: Path, tools: tuple[str, ...]) -> Iterator[Way]:
    bundle = ("bundle", "exec") if (top / "Gemfile.lock").is_file() else ()
    if (top / "spec").is_dir():
        yield Way((*bundle, "rspec"), tools, "ruby")
    if (top / "Rakefile").is_file():
        yield Way((*bundle, "rake", "test"), tools, "ruby")
    if _any(top, ("test/**/*_test.rb", "test/**/test_*.rb")):
        load = "Dir['test/**/{*_test,test_*}.rb'].sort.each { |file| require './' + file }"
        yield Way((*bundle, "ruby", "-Ilib", "-Itest", "-e", load), tools, "ruby")


def _c_ways(top: Path) -> Iterator[Way]:
    if (top / "CMakeLists.txt").is_file():
        command = ("ctest", "--test-dir", "build", "--output-on-failure")
        yield Way(command, (), "c", ("cmake -B build && cmake --build build",))
    if (top / "meson.build").is_file():
        yield Way(("meson", "test", "-C", "build"), (), "c", ("meson setup build",))
    if (top / "configure").is_file():
        yield Way(("make", "check"), (), "c", ("./configure",))
    elif (top / "configure.ac").is_file():
        yield Way(("make", "check"), (), "c", ("autoreconf -i && ./configure",))


def find_dependencies(top: Path) -> Iterator[str]:
    """Return the directories that package managers have filled and git ignores, also of nested packages."""
    place = source.find_repository(top)
    names = [name for name in _ENVIRONMENTS if (top / name / "pyvenv.cfg").is_file()][:1]
    names += [name for name in _FOLDERS if (top / name).is_dir() and not _links(top, name)]
    names += _nested(top)
    found: list[str] = []
    for name in dict.fromkeys(names):
        if len(found) < _MOST and not any(name.startswith(f"{outer}/") for outer in found) and is_ignored(place, name):
            found.append(name)
    yield from found


def _links(top: Path, name: str) -> bool:
    return os.path.realpath(top / name) != os.path.join(os.path.realpath(top), name)


def is_ignored(place: source.LocalRepository, name: str) -> bool:
    """Tell whether git ignores a directory of a work tree."""
    try:
        return source.why_not_ignored(place, name) is None
    except (RunnerError, OSError):
        return False


def _nested(top: Path) -> Iterator[str]:
    """Return the ``node_modules`` of nested packages."""
    waiting = [(top, 0)]
    while waiting:
        folder, depth = waiting.pop()
        with os.scandir(folder) as entries:
            inner = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for name in inner:
            if name == "node_modules":
                yield str((folder / name).relative_to(top))
            elif depth < _DEPTH and name not in ("vendor", "venv", "env", "target"):
                waiting.append((folder / name, depth + 1))
