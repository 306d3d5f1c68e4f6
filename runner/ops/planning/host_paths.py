"""Paths of this host that a run's commands see, as its manifest names them: toolchains and dependencies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from runner.core.errors import BadValue, ToolchainMissing
from runner.core.model import Checkout, Mount
from runner.git import source
from runner.ops.planning.toolchains import directories_of, find_toolchain
from runner.ports.provider import IN_HOME
from runner.spec.model import Lent

_PACKAGES = {"go": "~/go/", "cargo": "~/.cargo/"}  # where commands find the packages of a toolchain


async def lend_toolchains(
    toolchains: Sequence[str], variables: Mapping[str, str], top: Path | None, made: Sequence[str] = ()
) -> Lent:
    """Return the directories of toolchains in manifest order, with what belongs to them.

    ``top`` is the local repository that chooses versions, if any. Packages of a toolchain that commands have ``made``
    in the home take the place of those that it has downloaded on this host. Raises ``ToolchainMissing``.
    """
    if gone := absent([path for path in toolchains if path.startswith("/")]):
        raise ToolchainMissing(f"`{gone[0]}` is not a directory here", hint="name the real path: links do not count")
    directories: list[str] = []
    environment: dict[str, str] = {}
    for name in toolchains:
        if name.startswith("/"):
            directories.append(name)
            continue
        packages = not any(path.startswith(_PACKAGES.get(name, "/")) for path in made)
        found = await find_toolchain(name, variables, top, packages=packages)
        if found is None:
            hint = "install it, or remove it from toolchains"
            raise ToolchainMissing(f"`{name}` is not on the `PATH` here", hint=hint)
        directories += found.directories
        environment |= found.environment
    return Lent(tuple(dict.fromkeys(directories)), environment)


def lend_dependencies(dependencies: Sequence[str], checkout: Checkout, lent: Lent) -> Lent:
    """Add dependencies of a local repository, and the interpreters that environments among them link to.

    Raises ``BadValue`` for one that is missing, or that git tracks or would take for work.
    """
    if not dependencies or checkout.path is None:
        return lent
    place = source.find_repository(checkout.path, within=checkout.within)
    mounts: list[Mount] = []
    linked: list[str] = []
    for name in (name.rstrip("/") for name in dependencies):
        path = place.top / name
        if absent([os.path.realpath(place.top) + "/" + name]):
            hint = (
                "install what the repository needs there"
                if not path.exists()
                else "name the real path: links do not count"
            )
            raise BadValue(f"`{name}` is not a directory of `{place.top}`", hint=hint)
        require_ignored(place, [name])
        mounts.append(Mount(Path(os.path.realpath(path)), name))
        linked += interpreter_of(path)
    toolchains = (*linked, *(path for path in lent.toolchains if path not in linked))
    return replace(lent, toolchains=toolchains, dependencies=tuple(mounts))


def require_ignored(place: source.LocalRepository, names: Sequence[str]) -> None:
    """Raise ``BadValue`` for a directory of a work tree that git tracks or would take for work."""
    for name in names:
        if not name.startswith(IN_HOME) and (why := source.why_not_ignored(place, name)):
            hint = "name directories that git ignores, such as .venv or node_modules"
            raise BadValue(f"`{name}` {why}", hint=hint)


def interpreter_of(folder: Path) -> tuple[str, ...]:
    """Return a virtual environment's own path, by which its scripts call it, and the Python that it links to."""
    if not (folder / "pyvenv.cfg").is_file():
        return ()
    return directories_of(str(folder / "bin" / "python"))


def absent(directories: Sequence[str]) -> list[str]:
    """Return the paths that are not directories, or are reached through a link."""
    return [path for path in directories if os.path.realpath(path) != path.rstrip("/") or not os.path.isdir(path)]
