"""Programs that a person installed outside of the system's packages, and the directories that they need.

A sandbox shows a few directories of this host read-only. These functions return as little as makes a program run: never
a home directory, nor a directory in it that holds settings or credentials beside programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner.core.errors import UsageError
from runner.core.sanitize import excerpt
from runner.policy.toolchains import check_toolchain
from runner.ports.provider import PATH, PROGRAM_DIRECTORIES

_LINKS = 40  # as many as the kernel follows
_LINE = 256  # bytes of a `#!` line that the kernel reads
_ENV = re.compile(rb"#!\s*\S*/env\s+(?:-S\s*)?(?:-\S+\s+|\w+=\S*\s+)*(\S+)")
_DIRECT = re.compile(rb"#!\s*(\S+)")
_SHIMS = ("shims", "volta-shim")  # stand for a program, and find it by the environment and the home of their user
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")  # what every sandbox sees

# Below a home directory; of several versions the newest is taken.
_BINS = (
    ".local/bin", "bin", ".npm-global/bin", ".npm-packages/bin", ".claude/local/node_modules/.bin",
    ".nvm/versions/node/*/bin", ".volta/tools/image/packages/*/bin", ".volta/tools/image/packages/*/*/bin",
    ".volta/tools/image/node/*/bin", ".local/share/fnm/node-versions/*/installation/bin",
    ".local/share/mise/installs/*/*/bin", ".asdf/installs/*/*/bin", ".bun/bin",
)  # fmt: skip
_SHARED_BINS = ("/home/linuxbrew/.linuxbrew/bin",)


def search_path(variables: Mapping[str, str]) -> list[str]:
    """Return the directories to search for a person's programs: ``PATH``, then those of npm, version managers and
    the agents' installers.
    """
    home = Path(variables.get("HOME") or "/nonexistent")
    named = variables.get("PATH", "").split(":")
    prefixes = [f"{prefix}/bin" for prefix in _npm_prefixes(variables, home)]
    managed = [str(found) for pattern in _BINS for found in sorted(home.glob(pattern), key=_version, reverse=True)]
    places = (*named, *prefixes, *managed, *_SHARED_BINS, *PATH.split(":"))
    return [place for place in dict.fromkeys(places) if os.path.isabs(place)]


def _npm_prefixes(variables: Mapping[str, str], home: Path) -> Iterator[str]:
    for name in ("NPM_CONFIG_PREFIX", "npm_config_prefix"):
        if prefix := variables.get(name):
            yield prefix
    try:
        lines = (home / ".npmrc").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip() == "prefix":
            yield value.strip().strip("\"'").replace("${HOME}", str(home)).replace("~", str(home), 1)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(path)))


def find_program(name: str, folders: Sequence[str], home: Path) -> Path | None:
    """Find the first program of that name that can be shown with everything it links to."""
    for folder in folders:
        program = Path(os.path.realpath(folder), name)
        if not os.access(program, os.X_OK) or program.is_dir():
            continue
        if {program.parent.name, os.path.basename(os.path.realpath(program))} & {*_SHIMS}:
            continue
        if _is_system(program) or (program.parent.name in PROGRAM_DIRECTORIES and _can_be_shown(program, home)):
            return program
    return None


def _can_be_shown(program: Path, home: Path) -> bool:
    """Tell whether a program runs where only real directories are shown: no link on its way passes through another."""
    hops = list(_hops(program))
    links = (os.path.normpath(hop.parent / hop.readlink()) for hop in hops if hop.is_symlink())
    straight = all(
        link == os.path.join(os.path.realpath(os.path.dirname(link)), os.path.basename(link)) for link in links
    )
    return straight and all(_may_be_shown(place, home) for hop in hops for place in _around(hop))


def linked_directories(program: Path, folders: Sequence[str], home: Path) -> tuple[str, ...]:
    """Return the directories of everything a program links to, its own first, without those of the system.

    These hold the links on the way to its file, its package, its interpreter, and what that needs. Raises
    ``UsageError`` when the interpreter is missing.
    """
    found: dict[Path, None] = {}
    named = {program.parent}  # where a name is looked up, so they stand on the PATH
    waiting, seen = [program], set[Path]()
    while waiting:
        hops = list(_hops(waiting.pop(0)))
        if hops[-1] in seen:
            continue
        seen.add(hops[-1])
        found |= dict.fromkeys(place for hop in hops for place in _around(hop))
        if (word := _interpreter(hops[-1])) is not None:
            near = [str(hop.parent) for hop in hops]
            interpreter = Path(word) if "/" in word else find_program(word, [*near, *folders], home)
            if interpreter is None:
                message = f"`{excerpt(word)}`, which runs `{excerpt(str(program))}`, is not on this host"
                raise UsageError(message, hint="install it, or name with --toolchain a DIR that has both in DIR/bin")
            waiting.append(interpreter)
            named |= {interpreter.parent} if "/" not in word else set()
        if (base := _base_of_environment(hops)) is not None:
            waiting.append(base)
    places = [place for place in found if _may_be_shown(place, home) and not _is_system(place)]
    return tuple(str(place) for place in places if place in named or not {*place.parents} & {*places})


def _hops(program: Path) -> Iterator[Path]:
    """Yield a program, and each file that it links to in turn, by its real directory."""
    for _ in range(_LINKS):
        program = Path(os.path.realpath(program.parent), program.name)
        yield program
        if not program.is_symlink():
            return
        program = program.parent / program.readlink()


def _around(program: Path) -> Iterator[Path]:
    """Return what a file needs around it: its directory, and the whole package, environment or prefix."""
    yield program.parent
    parts = program.parts
    if "node_modules" in parts:
        yield Path(*parts[: parts.index("node_modules") + 1])  # with those that it depends on
    if ".linuxbrew" in parts:
        yield Path(*parts[: parts.index(".linuxbrew") + 1])  # its libraries and its loader
    prefix = program.parent.parent
    is_python = program.name.startswith("python") and any(prefix.glob("lib/python3*"))
    if is_python or (prefix / "pyvenv.cfg").is_file():
        yield prefix


def _interpreter(file: Path) -> str | None:
    """Return the interpreter of a script: a path, or the name of a program."""
    try:
        with file.open("rb") as stream:
            line = stream.read(_LINE).partition(b"\n")[0]
    except OSError:
        return None
    found = _ENV.match(line) or _DIRECT.match(line)
    return os.fsdecode(found[1]) if found else None


def _base_of_environment(hops: Sequence[Path]) -> Path | None:
    """Return the Python that a virtual environment is based on, if one of the files is in such."""
    for hop in hops:
        try:
            lines = (hop.parent.parent / "pyvenv.cfg").read_text(errors="replace").splitlines()
        except OSError:
            continue
        values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
        if home := values.get("home"):
            return Path(home, "python3")
    return None


def _is_system(place: Path) -> bool:
    return any(place.is_relative_to(part) for part in _SYSTEM)


def _may_be_shown(place: Path, home: Path) -> bool:
    """Tell whether a directory holds only programs: not a home, nor a settings directory in one."""
    home = Path(os.path.realpath(home))
    within = place.relative_to(home).parts if place.is_relative_to(home) else None
    private = within is not None and (
        not within or (len(within) == 1 and within[0].startswith(".")) or within[0] == ".config"
    )
    shares = within in ((".local", "share"), (".local", "state"))
    return not (private or shares or home.is_relative_to(place)) and check_toolchain(str(place)) is None
