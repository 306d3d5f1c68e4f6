"""A nursery for tasks that serve a block of code and end with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_services() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the block ends; what the block raises comes out as it is, no group."""
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


def _has_cancelled(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(trio.Cancelled) is not None
