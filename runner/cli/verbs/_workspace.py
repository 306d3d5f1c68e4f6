"""Shared by workspace verbs: run work on a store, and format for a terminal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv

T = TypeVar("T")


def run_with_env(settings: Settings, out: Output, work: Callable[[WorkspaceEnv], Awaitable[T]]) -> T:
    from runner.cli.signals import run_cancellable
    from runner.ops.workspaces.workspace_lease import open_workspace_env

    async def whole() -> T:
        async with open_workspace_env(settings, lambda advice: out.findings([advice])) as env:
            return await work(env)

    return run_cancellable(whole)


def moment(microseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def line(out: Output, text: str) -> None:
    """Escape paths and names, which others chose, for a terminal."""
    from runner.core.sanitize import escape_unprintable

    out.line(escape_unprintable(text))
