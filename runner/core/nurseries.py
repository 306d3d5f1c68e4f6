"""Nurseries for tasks that serve a block of code and end with it, and blocks whose errors come out ungrouped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from runner.core.errors import HostRefused, RunnerError, first_leaf

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio


@asynccontextmanager
async def open_services() -> AsyncIterator[trio.Nursery]:
    """Open a nursery that is cancelled when the block ends; errors of the block come out ungrouped."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except trio.Cancelled:
            raise
        except BaseException as error:  # raised below, outside of the nursery that would wrap it
            if _has_cancelled(error):
                raise  # a nursery in the block was cancelled, maybe by this one: then nobody beyond it may see that
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until one of several waits is over, and cancel the others."""
    async with trio.open_nursery() as nursery:

        async def one(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            nursery.cancel_scope.cancel()

        for wait in waits:
            nursery.start_soon(one, wait)


@contextmanager
def unwrapping_groups() -> Iterator[None]:
    """Raise one error in place of a group of errors that the host or its user caused.

    An ``OSError`` becomes ``HostRefused``, but ``BrokenPipeError`` stays: a reader of ours has gone.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        known, others = group.split((RunnerError, OSError))
        if known is None or others is not None:
            raise
        error = first_leaf(known)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise HostRefused.of(error) from group
        raise error from group


def _has_cancelled(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(trio.Cancelled) is not None
