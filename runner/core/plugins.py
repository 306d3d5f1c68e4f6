"""Plug-ins are modules in a room: the file name is the registration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from runner.core.errors import UnknownPlugin, nearest


@cache
def names(room: ModuleType) -> Sequence[str]:
    """List the plug-ins of a room without importing them; pkgutil would import ``inspect`` for it."""
    found = (entry for folder in room.__path__ for entry in os.scandir(folder) if not entry.name.startswith(("_", ".")))
    modules = (entry.name.removesuffix(".py") for entry in found if entry.name.endswith(".py") or _is_package(entry))
    return tuple(sorted(modules))


def _is_package(entry: os.DirEntry[str]) -> bool:
    return os.path.exists(os.path.join(entry.path, "__init__.py"))


def load(room: ModuleType, name: str) -> ModuleType:
    """Import one plug-in, and only that one: the others may need libraries we lack."""
    if name not in names(room):
        raise UnknownPlugin(f"`{name}` is not in {room.__name__}", hint=nearest(name, names(room)))
    return import_module(f"{room.__name__}.{name}")
