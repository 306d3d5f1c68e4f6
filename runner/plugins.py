"""Plug-ins are modules in a room: the file name is the registration."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from runner.errors import UnknownPlugin, nearest


@cache
def names(room: ModuleType) -> Sequence[str]:
    """Plug-ins in a room, sorted, without importing any of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(room.__path__) if not m.name.startswith("_")))


def load(room: ModuleType, name: str) -> ModuleType:
    """Import one plug-in, and only that one: the others may need libraries we lack."""
    if name not in names(room):
        raise UnknownPlugin(f"`{name}` is not in {room.__name__}", hint=nearest(name, names(room)))
    return import_module(f"{room.__name__}.{name}")
