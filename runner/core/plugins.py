"""Plug-ins are modules in a room: the file name is the registration.

Two rooms are open to other distributions, which register a module by an entry point in the group of the room's name.
Looking for those takes 20 ms and more, so it is done only for a name that is not built in, and for listings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import runner
from runner.core.errors import PluginBroken, UnknownPlugin, first_leaf, nearest

if TYPE_CHECKING:
    from pathlib import Path

_OPEN = {"runner.agents": "agent", "runner.providers": "provider"}  # rooms, and what a module of each has

Room = ModuleType | str


class Registered(NamedTuple):
    """A plug-in of another distribution. ``problem`` says why its name cannot be used, if it cannot."""

    name: str
    module: str
    distribution: str
    version: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def _name_of(room: Room) -> str:
    return room if isinstance(room, str) else room.__name__


def _folders(room: Room) -> Sequence[str]:
    if isinstance(room, ModuleType):
        return [*room.__path__]
    return [os.path.join(folder, *room.split(".")[1:]) for folder in runner.__path__]


@cache
def names(room: Room) -> Sequence[str]:
    """List the built-in plug-ins of a room without importing them; pkgutil would import ``inspect`` for it."""
    found = (
        entry for folder in _folders(room) for entry in os.scandir(folder) if not entry.name.startswith(("_", "."))
    )
    modules = (entry.name.removesuffix(".py") for entry in found if entry.name.endswith(".py") or _is_package(entry))
    return tuple(sorted(modules))


def _is_package(entry: os.DirEntry[str]) -> bool:
    return os.path.exists(os.path.join(entry.path, "__init__.py"))


@cache
def registered(room: Room) -> Mapping[str, Registered]:
    """Return the plug-ins that other distributions have registered for an open room, by name; none is imported."""
    from importlib.metadata import entry_points

    found: dict[str, Registered] = {}
    for entry in entry_points(group=_name_of(room)):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
        problem = "a built-in plug-in has this name" if entry.name in names(room) else ""
        one = Registered(name=entry.name, module=entry.module, distribution=name, version=version, problem=problem)
        if entry.name in found and str(found[entry.name]) != str(one):
            problem = f"{found[entry.name]} and {one} both register it"
            one = one._replace(problem=problem)
        found[entry.name] = one
    return found


def known(room: Room) -> list[str]:
    """List all plug-ins of an open room by name, those of other distributions included."""
    return sorted({*names(room), *(one.name for one in registered(room).values() if not one.problem)})


def importable(room: Room) -> list[str]:
    """List all plug-ins of an open room that can be used; those of other distributions are imported."""
    others = (name for name in registered(room) if name not in names(room) and problem_of(room, name) is None)
    return sorted([*names(room), *others])


def problem_of(room: Room, name: str) -> PluginBroken | None:
    """Import a plug-in, and return what is wrong with it."""
    try:
        load(room, name)
    except PluginBroken as error:
        return error
    return None


def exists(room: Room, name: str) -> bool:
    """Tell whether an open room has a plug-in, which may still turn out to be broken."""
    return name in names(room) or name in registered(room)


def load(room: Room, name: str) -> Any:
    """Import one plug-in, and only that one: the others may need libraries we lack.

    Raises ``UnknownPlugin``, and ``PluginBroken`` for one of another distribution.
    """
    where = _name_of(room)
    if name in names(room):
        return import_module(f"{where}.{name}")
    found = registered(room).get(name) if where in _OPEN else None
    if found is None:
        choices = known(room) if where in _OPEN else names(room)
        raise UnknownPlugin(f"`{name}` is not in {where}", hint=nearest(name, choices))
    if found.problem:
        raise PluginBroken(f"`{name}` of {found} cannot be used: {found.problem}", hint="uninstall one of them")
    hint = f"install another version of {found.distribution}, or uninstall it"
    try:
        module = import_module(found.module)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        cause = f"{type(first_leaf(error)).__name__}: {error}"
        raise PluginBroken(f"`{name}` of {found} cannot be imported: {cause}", hint=hint) from None
    if not hasattr(module, _OPEN[where]):
        raise PluginBroken(f"`{name}` of {found} has no `{_OPEN[where]}` in {found.module}", hint=hint)
    return module


@cache
def fact(room: Room, name: str, constant: str, default: Any = None) -> Any:
    """Return a constant of a plug-in, one literal on one line; ``default`` without it, and for an unknown name.

    A built-in one is read from its text, since to import a provider may take longer than everything else together.
    """
    if name.partition(".")[0] not in names(room):
        return getattr(load(room, name), constant, default) if exists(room, name) else default
    line = re.search(rf"^{constant}(?:: [^=\n]+)? = ([^#\n]+)", _text(room, name), re.MULTILINE)
    if line is None:
        return default
    literal = line[1].strip()
    if re.fullmatch(r'"[^"\\]*"', literal):
        return literal[1:-1]
    from ast import literal_eval  # takes as long to import as all texts to read

    return literal_eval(literal)


@cache
def _text(room: Room, name: str) -> str:
    places = (os.path.join(folder, *name.split(".")) + ".py" for folder in _folders(room))
    with open(next(place for place in places if os.path.exists(place)), encoding="utf-8") as module:
        return module.read()


def beside(room: Room, name: str) -> Path | None:
    """Return the folder of a plug-in of another distribution, which is as trusted as its code; ``None`` if built in."""
    from pathlib import Path

    if name in names(room):
        return None
    file = load(room, name).__file__
    return Path(file).parent if file else None
