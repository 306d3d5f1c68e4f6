"""Toolchains of this host that a workspace can be shown: programs, and the directories that they link to.

A workspace sees the system, ``/usr``. Programs that a version manager, an installer or a CI step put elsewhere are
found on the caller's ``PATH`` and shown read-only: the program's own prefix, that of each link on the way to it, and
that of a script's interpreter. Version managers (pyenv, rbenv, nodenv, asdf, mise, volta, rustup) are asked for the
program behind a shim; neither shim nor manager is shown.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import trio
from msgspec import Struct

from runner.policy.toolchains import check_toolchain

SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")  # where the commands of every workspace are looked for
PATIENCE = 10.0  # seconds for a version manager's answer
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")  # what every workspace shows
_STORES = ("/nix/store", "/home/linuxbrew/.linuxbrew")  # whose packages link to each other, each in a prefix of its own
_HEAD = 4096  # bytes of a script in which its interpreter, or the manager of a shim, is looked for
_MOST_LINKS = 40
_SHIM = re.compile(rb'^\s*exec\s+"?([^"\s]+)"?\s+exec\s', re.MULTILINE)  # pyenv and its kin, asdf
_MULTICALL = ("rustup", "mise", "volta")  # one program under many names, or links to its shim


class Toolchain(Struct, frozen=True):
    """A program with the ``directories`` outside of the system that it needs, and variables for its commands."""

    program: str
    directories: tuple[str, ...]
    environment: Mapping[str, str] = {}


async def find_toolchain(
    name: str, variables: Mapping[str, str], top: Path | None, *, packages: bool = True, patience: float = PATIENCE
) -> Toolchain | None:
    """Find the toolchain of a program by name, as ``variables`` and the repository at ``top`` choose it.

    ``None`` when it is not on the ``PATH``. Programs of the repository itself, and of virtual environments, do not
    count: they belong to one repository. ``packages`` asks for those that it has downloaded here as well.
    """
    program = await _find_program(name, variables, top, patience)
    if program is None:
        return None
    downloaded, environment = _packages_of(name, variables) if packages else ([], {})
    directories = (*directories_of(program, variables.get("PATH", "")), *downloaded)
    return Toolchain(program, tuple(dict.fromkeys(directories)), environment)


def directories_of(program: str, path: str = "") -> tuple[str, ...]:
    """Return the directories of a program and everything it links to, without those of the system.

    The program's own comes first, and none is inside another. ``path`` is where ``env`` looks for a script's
    interpreter.
    """
    prefixes = [str(prefix) for folder in _folders(program, path) if (prefix := _prefix(Path(folder), Path.home()))]
    found = [folder for folder in prefixes if not f"{folder}/".startswith(_SYSTEM) and not check_toolchain(folder)]
    return tuple(dict.fromkeys(folder for folder in found if not any(str(p) in found for p in Path(folder).parents)))


async def _find_program(name: str, variables: Mapping[str, str], top: Path | None, patience: float) -> str | None:
    """Find the real program behind a name; for a shim, the one that its manager would start in ``top``."""
    folders = [
        f for f in variables.get("PATH", "").split(os.pathsep) if os.path.isabs(f) and not _foreign(Path(f), top)
    ]
    program = shutil.which(name, path=os.pathsep.join((*folders, *SYSTEM_PATH)))
    if program is None or (manager := _manager(program)) is None:
        return program
    answer: list[str] = []
    with trio.move_on_after(patience):
        said = await trio.run_process(
            [manager, "which", name],
            cwd=top or "/",
            env=dict(variables),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        answer = os.fsdecode(said.stdout).split("\n") if said.returncode == 0 else []
    found = answer[0].strip() if answer else ""
    usable = os.path.isabs(found) and os.access(found, os.X_OK) and not _foreign(Path(found).parent, top)
    return found if usable else None


def _manager(program: str) -> str | None:
    """Return the version manager behind a program, recognised by the form of its shims."""
    real = os.path.realpath(program)
    for name in _MULTICALL:
        manager = os.path.join(os.path.dirname(real), name)
        is_shim = os.path.basename(real) in (name, f"{name}-shim")
        if os.path.isfile(manager) and (is_shim or os.path.samefile(real, manager)):
            return manager
    head = _head(real)
    shim = _SHIM.search(head) if head.startswith(b"#!") else None
    return shutil.which(os.fsdecode(shim[1])) if shim else None


def _foreign(folder: Path, top: Path | None) -> bool:
    """Tell whether programs there belong to a repository or a virtual environment, such as runner's own."""
    real = Path(os.path.realpath(folder))
    return (top is not None and real.is_relative_to(os.path.realpath(top))) or os.path.isfile(
        real.parent / "pyvenv.cfg"
    )


def _folders(program: str, path: str) -> Iterator[str]:
    """Yield the real directory of a program, of each file that it links to in turn, and of a script's interpreter."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(program))
        yield folder
        program = os.path.join(folder, os.path.basename(program))
        if os.path.islink(program):
            program = os.path.join(folder, os.readlink(program))
        elif interpreter := _interpreter(program, path):
            program = interpreter
        else:
            return


def _interpreter(program: str, path: str) -> str | None:
    """Return the program in a script's first line; for ``env``, the one that it would find."""
    line, _, _ = _head(program).partition(b"\n")
    words = [os.fsdecode(word) for word in line.removeprefix(b"#!").split()] if line.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), None)
        return shutil.which(name, path=path) if name else None
    return words[0] if words and os.path.isabs(words[0]) else None


def _head(file: str) -> bytes:
    """Read the start of a file; nothing if it cannot be read."""
    try:
        with open(file, "rb") as opened:
            return opened.read(_HEAD)
    except OSError:
        return b""


def _prefix(folder: Path, home: Path) -> Path | None:
    """Return what a program in ``folder`` needs around it, without a person's own files.

    ``~/.cargo`` and ``~/.local`` hold credentials beside programs: of those, only the folder itself.
    """
    if store := next((store for store in _STORES if folder.is_relative_to(store)), None):
        return Path(store)
    if "node_modules" in folder.parts:  # where one package finds others
        return Path(*folder.parts[: folder.parts.index("node_modules") + 1])
    whole = folder.parent
    own = whole.parent == home and (whole.name.startswith(".") or not (whole / "lib").is_dir())
    if folder.name == "bin" and not own and not home.is_relative_to(whole):
        return whole
    return None if home.is_relative_to(folder) else folder


def _packages_of(name: str, variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return packages that a toolchain downloaded for everybody, and the variables that make it use them offline."""
    home = variables.get("HOME", "")
    match name:
        case "go":
            first = variables.get("GOPATH", "").split(os.pathsep)[0] or f"{home}/go"
            modules = os.path.realpath(variables.get("GOMODCACHE") or f"{first}/pkg/mod")
            known = os.path.isdir(modules)
            return [modules] if known else [], {"GOPROXY": "off", **({"GOMODCACHE": modules} if known else {})}
        case "cargo":
            place = os.path.realpath(variables.get("CARGO_HOME") or f"{home}/.cargo")
            found = [folder for part in ("registry", "git") if os.path.isdir(folder := f"{place}/{part}")]
            return found, {"CARGO_NET_OFFLINE": "true", **({"CARGO_HOME": place} if found else {})}
    return [], {}
