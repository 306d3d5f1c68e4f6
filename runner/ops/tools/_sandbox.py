"""Shared by the tools: paths, scripts, and commands whose output is bounded."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

import trio
from msgspec import Struct

from runner.core.errors import NoSuchFile, OutsideWorkspace, ToolArgument, ToolFailed
from runner.core.sanitize import excerpt
from runner.ops.workspaces.exec import CommandStreams, StreamedCommand, exit_code
from runner.ports.provider import ExecResult, Workspace

HEAD = 32 << 10  # bytes of a command's stream that are returned from its beginning
TAIL = 32 << 10  # and from its end
WHOLE = 16 << 20  # bytes of a longer one that are kept in a file
KEPT = 20  # such files of a workspace
SECONDS = 30.0  # for a tool that only looks, or writes a file
_MISSING, _OUTSIDE, OTHER_KIND, _GIT, _CUT, _READ_ONLY, _CHANGED = range(71, 78)  # how a script ends

_HANDLE = re.compile(r"[0-9a-f]{16}")
_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

# Others may work in the same tree: what was opened is judged, by the name that the kernel has for it, never a path that
# will be opened. A directory is entered first; a file is descriptor 3.
_PRELUDE = f"""
set -u
cd -P . && root=$PWD
inside() {{
    case "$1/" in "$root"/*) ;; *) exit {_OUTSIDE} ;; esac
}}
enter() {{
    cd -P "$1" || exit {_MISSING}
    at=$(readlink /proc/self/cwd)
    inside "$at"
}}
open_file() {{
    [ -e "$1" ] || exit {_MISSING}
    [ -f "$1" ] || exit {OTHER_KIND}
    exec 3<"$1"
    at=$(readlink /proc/self/fd/3)
    inside "$at"
}}
"""
_STATE = "stat -Lc '%i %s %y %z'"  # what says that nobody has changed a file
_READ = f"""
open_file "$1"
{_STATE} /proc/self/fd/3
exec head -c "$2" <&3
"""
_WRITE = f"""
path=$1 rest=
if [ -e "$path" ] || [ -L "$path" ]; then
    path=$(readlink -f "$path") && [ -e "$path" ] || exit {_MISSING}
    inside "$path"
    [ -f "$path" ] || exit {OTHER_KIND}
    [ -w "$path" ] || exit {_READ_ONLY}
fi
name=${{path##*/}} near=${{path%/*}}
while [ ! -e "$near" ] && [ ! -L "$near" ]; do rest=${{near##*/}}/$rest near=${{near%/*}}; done
[ -e "$near" ] || exit {_MISSING}
[ -d "$near" ] || exit {OTHER_KIND}
enter "$near"
case "$at/" in */.git/*) exit {_GIT} ;; esac
while [ -n "$rest" ]; do
    mkdir "./${{rest%%/*}}" || exit 1
    enter "./${{rest%%/*}}"
    rest=${{rest#*/}}
done
set -C
trap 'rm -f "./$2"' EXIT
cat >"./$2" || exit 1
[ "$(wc -c <"./$2")" -eq "$3" ] || exit {_CUT}
if [ -n "$4" ] && [ "$({_STATE} "./$name")" != "$4" ]; then exit {_CHANGED}; fi
if [ -e "./$name" ]; then chmod "$(stat -c %a "./$name")" "./$2" || exit 1; fi
mv -fT "./$2" "./$name"
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
    """Run a script with ``enter`` and ``open_file``; its words are data. Raises ``ToolFailed`` unless it succeeds."""
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
        case code if code == _CHANGED:
            raise ToolFailed(f"`{excerpt(path)}` has changed meanwhile", hint="read it, and edit it again")
    said = done.stderr.decode(errors="replace").strip().splitlines()
    raise ToolFailed(f"`{excerpt(path)}`: {excerpt(said[-1]) if said else f'the script {done.exit}'}")


async def read_file(workspace: Workspace, path: str, most: int) -> tuple[bytes, str]:
    """Return all of a file, and the state that it had. Raises ``ToolArgument`` for more than ``most`` bytes."""
    words = (place(path), str(most + 1))
    done = await run_script(workspace, _READ, *words, path=path, keep_bytes=most + 1000)
    state, _, content = done.stdout.partition(b"\n")
    if len(content) > most:
        raise ToolArgument(f"`{excerpt(path)}` is larger than {most >> 20} MiB", hint="use the tool `bash`")
    return content, state.decode()


async def write_file(workspace: Workspace, path: str, content: bytes, part: str, *, state: str = "") -> None:
    """Put a file in place at once, with the mode that it had; ``part`` is a name that no other file has.

    Raises ``ToolFailed`` for one that does not have this ``state`` any more.
    """
    words = (place(path, git=False), part, str(len(content)), state)
    await run_script(workspace, _WRITE, *words, path=path, stdin=content)


class CommandResult(Struct, kw_only=True):
    """The end of a command: ``exit_code`` is ``null`` when it was stopped, with what it had printed until then.

    Of a stream that is longer than 64 KiB there are the beginning and the end; its size is that of the whole, which can
    be read by its handle: the first 16 MiB of it, and the newest 20 of a workspace.
    """

    exit_code: int | None
    timed_out: bool
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    stdout_handle: str | None = None
    stderr_handle: str | None = None


class Outputs(Struct, frozen=True):
    """Directory of the long outputs of a workspace's commands; commands never see it."""

    folder: Path

    def find(self, handle: str) -> Path:
        """Return the file with an output. Raises ``NoSuchFile``."""
        path = self.folder / handle
        if not _HANDLE.fullmatch(handle) or not path.is_file():
            raise NoSuchFile(
                f"there is no output `{excerpt(handle)}`", hint=f"the newest {KEPT} of a workspace are kept"
            )
        return path

    def open(self) -> BinaryIO:
        """Open a new one, whose name is its handle; the oldest goes when there are too many."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        old = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in old[KEPT - 1 :]:
            path.unlink()
        return (self.folder / token_hex(8)).open("xb")


class Sandbox(Struct, eq=False):
    """Place where tools work: an open workspace, and the outputs of its commands."""

    workspace: Workspace
    outputs: Outputs
    _bash: bool | None = None  # what was seen at the first look

    async def has_bash(self) -> bool:
        """Tell whether the workspace has a bash, so that no other shell has to start it."""
        if self._bash is None:
            with trio.move_on_after(SECONDS):
                self._bash = (await self.workspace.run(["bash", "-c", ":"])).exit.ok
        return self._bash or False


class _Stream:
    """The beginning and the end of a stream, and the whole of a long one in a file."""

    def __init__(self, outputs: Outputs) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._outputs = outputs
        self._file: BinaryIO | None = None
        self.size = 0

    async def write(self, chunk: bytes) -> None:
        if self.size + len(chunk) > HEAD + TAIL and self.size < WHOLE:
            await trio.to_thread.run_sync(self._write_file, chunk)
        self.size += len(chunk)
        room = HEAD - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[max(room, 0) :]
        del self._tail[:-TAIL]

    def _write_file(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = self._outputs.open()
            self._file.write(self._head + self._tail)
        self._file.write(chunk[: WHOLE - self.size])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def handle(self) -> str | None:
        return None if self._file is None else Path(self._file.name).name

    @property
    def cut(self) -> int:
        return self.size - len(self._head) - len(self._tail)

    @property
    def text(self) -> str:
        gap = b"\n[%d bytes are left out]\n" % self.cut if self.cut else b""
        return (self._head + gap + self._tail).decode(errors="replace")


async def run_command(
    sandbox: Sandbox, argv: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command for at most some seconds; then its whole tree is ended."""
    with closing(_Stream(sandbox.outputs)) as out, closing(_Stream(sandbox.outputs)) as err:
        command = StreamedCommand(CommandStreams(_nothing, out.write, err.write))
        ended = None
        with trio.move_on_after(seconds) as limit:
            ended = await command.run(sandbox.workspace, argv, env=env)
    return CommandResult(
        exit_code=None if ended is None else exit_code(ended),
        timed_out=limit.cancelled_caught,
        stdout=out.text,
        stderr=err.text,
        stdout_bytes=out.size,
        stderr_bytes=err.size,
        truncated=bool(out.cut or err.cut),
        stdout_handle=out.handle,
        stderr_handle=err.handle,
    )


async def _nothing() -> bytes:
    await trio.lowlevel.checkpoint()
    return b""
