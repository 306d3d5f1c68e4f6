"""The ``AGENTS.md`` of a project, where agents look for it: the runner's own, and never work of theirs.

It is in the tree, unless that has one of its own; where commands see the whole project, it is there instead.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

import trio

from runner.events import events as ev
from runner.runtime.context import RunContext, read_input, write_new
from runner.safefs import safe_open, trees
from runner.spec.model import AGENTS_FILE, ContextFile

_MOST = 16 << 20  # bytes of a copy


async def place_in_tree(run: RunContext, wanted: ContextFile | None) -> None:
    """Copy it to the root of the tree, if nothing has its name there. Nothing may run in the tree yet."""
    _, handle = run.workspace.require()
    path = handle.tree / AGENTS_FILE
    if wanted is None or await trio.to_thread.run_sync(os.path.lexists, path):
        return
    content = await trio.to_thread.run_sync(read_input, wanted)
    await run.emit(ev.FileInjected(AGENTS_FILE, wanted.sha256))
    run.workspace.injected_files = {AGENTS_FILE: wanted.sha256}
    await trio.to_thread.run_sync(write_new, path, content, 0o644)


async def place_in_project(run: RunContext, wanted: ContextFile | None) -> None:
    """Make it that of the project's directory, whole at every moment, since others are at work there."""
    _, handle = run.workspace.require()
    if wanted is None or handle.project_tree is None:
        return
    content = await trio.to_thread.run_sync(read_input, wanted)
    await trio.to_thread.run_sync(replace_in_project, handle.project_tree, content, handle.uid)


def replace_in_project(directory: Path, content: bytes, uid: int) -> None:
    half = f".{AGENTS_FILE}.{token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with safe_open.open_directory(directory) as fd:
        try:
            with os.fdopen(os.open(half, flags, 0o644, dir_fd=fd), "wb") as file:
                trees.chown(file.fileno(), uid)
                file.write(content)
            os.rename(half, AGENTS_FILE, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError:
            os.unlink(half, dir_fd=fd)
            raise


def changed(run: RunContext) -> tuple[str, ...]:
    """Say what became of the copies that were changed. Nothing may run in the tree."""
    _, handle = run.workspace.require()
    warnings = []
    for name, wanted in run.workspace.injected_files.items():
        try:
            same = sha256(safe_open.read_beneath(handle.tree, name, _MOST)).hexdigest() == wanted
        except OSError:
            same = False
        if not same:
            warnings.append(f"`{name}` was changed; it is a copy of the project's, not part of the work")
    return tuple(warnings)
