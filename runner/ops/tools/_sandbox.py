"""Shared by the tools: paths, scripts, and commands whose output is bounded."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

import trio
from msgspec import Struct

from runner.core.errors import NoSuchFile, OutsideWorkspace, ToolArgument, ToolFailed
from runner.core.sanitize import excerpt
from runner.ops.workspaces.exec import CommandStreams, StreamedCommand, exit_code
from runner.ports.provider import ExecResult, Workspace

HEAD = 32 << 10  # bytes of a command's stream that are returned from its beginning
TAIL = 32 << 10  # and from its end
SECONDS = 30.0  # for a tool that only looks, or writes a file
_MISSING, _OUTSIDE, OTHER_KIND, _GIT, _CUT, _READ_ONLY = range(71, 77)  # how a script ends

_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

# Sets ``$at`` to the real path of ``$1``, or ends. Nothing else runs in the workspace: what was found stays so.
_PRELUDE = f"""
set -u
root=$(pwd -P)
resolve() {{
    [ -e "$1" ] || exit {_MISSING}
    at=$(readlink -f "$1") || exit {_MISSING}
    case "$at/" in "$root"/*) ;; *) exit {_OUTSIDE} ;; esac
}}
"""
_OPEN_FILE = f"""
resolve "$1"
[ -f "$at" ] || exit {OTHER_KIND}
"""
_WRITE = f"""
path=$1 near=$1
while [ ! -e "$near" ] && [ ! -L "$near" ]; do near=$(dirname "$near"); done
resolve "$near"
if [ "$near" = "$path" ]; then
    [ -f "$at" ] || exit {OTHER_KIND}
    [ -w "$at" ] || exit {_READ_ONLY}
else
    [ -d "$at" ] || exit {OTHER_KIND}
    case "$at/" in */.git/*) exit {_GIT} ;; esac
    mkdir -p "$(dirname "$path")" || exit 1
    at=$(readlink -f "$(dirname "$path")")/${{path##*/}}
fi
case "$at/" in */.git/*) exit {_GIT} ;; esac
part=$(dirname "$at")/$2
trap 'rm -f "$part"' EXIT
cat >"$part" || exit 1
[ "$(wc -c <"$part")" -eq "$3" ] || exit {_CUT}
if [ -e "$at" ]; then chmod "$(stat -c %a "$at")" "$part" || exit 1; fi
mv -f "$part" "$at"
"""


def place(path: str, *, git: bool = True) -> str:
    """Return a path of the workspace as scripts get it. Raises ``ToolArgument`` and ``OutsideWorkspace``.

    Without ``git`` it may not lead into the directory of a repository, whose programs git would run.
    """
    if not path or _UNFIT.search(path) or len(path) > 4096:
        raise ToolArgument(f"`{excerpt(path)}` is not the path of a file")
    inside = posixpath.normpath(posixpath.join("/workspace", path))
    if inside != "/workspace" and not inside.startswith("/workspace/"):
        raise OutsideWorkspace(f"`{excerpt(path)}` is not in the workspace", hint="paths begin at its root")
    found = posixpath.relpath(inside, "/workspace")
    if not git and ".git" in found.lower().split("/"):
        raise OutsideWorkspace(f"`{excerpt(path)}` belongs to git", hint="use the tool `git`")
    return f"./{found}"


async def run_script(
    workspace: Workspace, script: str, *words: str, path: str, stdin: bytes = b"", keep_bytes: int = 1 << 20
) -> ExecResult:
    """Run a script that knows ``resolve``; its words are data. Raises ``ToolError`` unless it succeeds."""
    argv = ["sh", "-c", _PRELUDE + script, "sh", *words]
    with trio.move_on_after(SECONDS) as limit:
        done = await workspace.run(argv, stdin=stdin, keep_bytes=keep_bytes)
    if limit.cancelled_caught:
        raise ToolFailed(f"`{excerpt(path)}`: it took longer than {SECONDS:g} s", hint="name less")
    match done.exit.code:
        case 0:
            return done
        case code if code == _MISSING:
            raise NoSuchFile(f"there is no `{excerpt(path)}`")
        case code if code == _OUTSIDE:
            raise OutsideWorkspace(f"`{excerpt(path)}` leads out of the workspace")
        case code if code == OTHER_KIND:
            raise ToolArgument(f"`{excerpt(path)}` is not a file")
        case code if code == _GIT:
            raise OutsideWorkspace(f"`{excerpt(path)}` belongs to git", hint="use the tool `git`")
        case code if code == _READ_ONLY:
            raise ToolFailed(f"`{excerpt(path)}` is read-only")
    said = done.stderr.decode(errors="replace").strip().splitlines()
    raise ToolFailed(f"`{excerpt(path)}`: {excerpt(said[-1]) if said else f'the script {done.exit}'}")


async def read_file(workspace: Workspace, path: str, most: int) -> bytes:
    """Return all of a file. Raises ``ToolError``, also for one that is larger than ``most`` bytes."""
    done = await run_script(workspace, f'{_OPEN_FILE} cat "$at"', place(path), path=path, keep_bytes=most)
    if done.cut:
        raise ToolArgument(f"`{excerpt(path)}` is larger than {most >> 20} MiB", hint="use the tool `bash`")
    return done.stdout


async def write_file(workspace: Workspace, path: str, content: bytes, part: str) -> None:
    """Put a file in place at once, with the mode that it had; ``part`` is a name that no other file has."""
    words = (place(path, git=False), part, str(len(content)))
    await run_script(workspace, _WRITE, *words, path=path, stdin=content)


class CommandResult(Struct, kw_only=True):
    """The end of a command: ``exit_code`` is ``null`` when it was stopped, with what it had printed until then.

    Of a stream that is longer than 64 KiB there are the beginning and the end; its size is that of the whole.
    """

    exit_code: int | None
    timed_out: bool
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool


class _Stream:
    """The beginning and the end of a stream."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0

    async def write(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = HEAD - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[max(room, 0) :]
        del self._tail[:-TAIL]

    @property
    def cut(self) -> int:
        return self.size - len(self._head) - len(self._tail)

    @property
    def text(self) -> str:
        gap = b"\n[%d bytes are left out]\n" % self.cut if self.cut else b""
        return (self._head + gap + self._tail).decode(errors="replace")


async def run_command(
    workspace: Workspace, argv: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command for at most some seconds; then its whole tree is ended."""
    out, err = _Stream(), _Stream()
    command = StreamedCommand(CommandStreams(_nothing, out.write, err.write))
    ended = None
    with trio.move_on_after(seconds) as limit:
        ended = await command.run(workspace, argv, env=env)
    return CommandResult(
        exit_code=None if ended is None else exit_code(ended),
        timed_out=limit.cancelled_caught,
        stdout=out.text,
        stderr=err.text,
        stdout_bytes=out.size,
        stderr_bytes=err.size,
        truncated=bool(out.cut or err.cut),
    )


async def _nothing() -> bytes:
    await trio.lowlevel.checkpoint()
    return b""
