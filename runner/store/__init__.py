"""Stores of events, opened by URL. One conformance suite for all.

A scheme is a module of this room: ``place`` turns a URL into what its ``open_store``, ``open_reader`` and ``exists``
take. ``postgres`` is another name of ``postgresql``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from runner.core import plugins
from runner.core.errors import BadStoreUrl, UnknownPlugin, UsageError
from runner.core.sanitize import excerpt

if TYPE_CHECKING:
    from runner.ports.store import Reader, RunnerRow, Store
    from runner.store._sql import Store as SqlStore

_ALIASES = {"postgres": "postgresql"}


def open_store(
    url: str,
    *,
    entropy: Callable[[int], bytes] = os.urandom,
    must_exist: bool = False,
    runner: RunnerRow | None = None,
) -> AbstractAsyncContextManager[Store]:
    """Open a store for a runner, made unless it ``must_exist``. Raises ``BadStoreUrl``, and what the scheme raises."""
    scheme, place = _locate(url)
    opened = scheme.open_store(place, entropy=entropy, must_exist=must_exist, runner=runner)
    return cast("AbstractAsyncContextManager[Store]", opened)


def open_to_restore(url: str, *, entropy: Callable[[int], bytes]) -> AbstractAsyncContextManager[SqlStore]:
    """Open a store that can be given what it once had. Raises ``BadStoreUrl``, also for one in memory."""
    scheme, place = _locate_kept(url)
    opened = scheme.open_store(place, entropy=entropy)
    return cast("AbstractAsyncContextManager[SqlStore]", opened)


async def export(url: str, file: BinaryIO) -> int:
    """Write a whole store to a file, and return the number of its rows.

    Raises ``UsageError`` for an empty one, ``BadStoreUrl``, also for one in memory, and what the scheme raises.
    """
    from runner.store.memory import MemoryStore

    scheme, place = _locate_kept(url)
    async with scheme.open_reader(place) as store:
        rows = 0 if isinstance(store, MemoryStore) else int(await store.export(file))
    if not rows:
        raise UsageError("the store is empty", hint="name the store to export in RUNNER_DATABASE_URL")
    return rows


def open_reader(url: str, *, must_exist: bool = False) -> AbstractAsyncContextManager[Reader]:
    """Open a store for reading, and make none. Raises like ``open_store``."""
    scheme, place = _locate(url)
    return cast("AbstractAsyncContextManager[Reader]", scheme.open_reader(place, must_exist=must_exist))


def open_at_once(url: str, *, must_exist: bool = False) -> AbstractContextManager[Reader] | None:
    """Open a store for reading whose methods never wait, if it is a file. Raises like ``open_store``."""
    scheme, place = _locate(url)
    if not hasattr(scheme, "open_at_once"):
        return None
    return cast("AbstractContextManager[Reader]", scheme.open_at_once(place, must_exist=must_exist))


def exists(url: str) -> bool:
    """Tell whether anything was ever stored there. Raises ``BadStoreUrl``."""
    scheme, place = _locate(url)
    return bool(scheme.exists(place))


def _locate_kept(url: str) -> tuple[ModuleType, Any]:
    if url == "memory:":
        raise BadStoreUrl("a store in memory keeps nothing", hint="set RUNNER_DATABASE_URL to another, or unset it")
    return _locate(url)


def _locate(url: str) -> tuple[ModuleType, Any]:
    name = url.partition(":")[0]
    name = _ALIASES.get(name, name)
    try:
        scheme = plugins.load(sys.modules[__name__], name)
    except UnknownPlugin as error:
        known = ", ".join(plugins.names(sys.modules[__name__]))
        raise BadStoreUrl(
            f"the store's URL has an unknown scheme: `{excerpt(name)}`", hint=f"known: {known}"
        ) from error
    return scheme, scheme.place(url)
