"""Provider ``process``, class none: commands of this host with nothing around them but a user and a session.

For hosts where no sandbox can be had, and never chosen unless named. Started as root, commands run as
a uid that only this workspace has; otherwise as ourselves, and can then do what we can. What it does
promise is an end: a guest runs the commands and is the parent of what loses its own, until it is killed, which Landlock
keeps commands from where the kernel has it.

In an installation without a guest every process carries a mark that its descendants inherit, whatever session they
make or parent they lose. The mark is a soft limit that nothing else uses. A process that changes it on
purpose lives until the opening ends, and for good if it forgets its environment too and we are not root.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import trio

from runner import trees
from runner.errors import Escaped, ProviderFailed
from runner.guest import binary
from runner.model import Exit, Feature, Handle, Isolation, IsolationClass, Rung
from runner.ports.provider import KILL_GRACE, STOP_GRACE, ExecResult, Opening, Paths, Probe, Workspace, WorkspaceRequest
from runner.providers import _cgroup, _readback, spawn
from runner.providers._directories import Directories
from runner.providers._guest import NO_GUEST, GuestWorkspace, Surroundings, open_workspace
from runner.providers._mounts import can_stage
from runner.providers._opening import Room, open_room
from runner.settings import Settings

_PATH = "/usr/local/bin:/usr/bin:/bin"
_NO_NAMESPACES = "process runs commands directly on this host"
_PLACES = ("/incident", "/output")
_MARKED = resource.RLIMIT_MSGQUEUE


def provider(settings: Settings) -> OnHost:
    return OnHost(settings.home)


class OnHost:
    """``grace`` is how long a command has between TERM and KILL, in seconds; ``guest`` as for ``Local``."""

    name = "process"

    def __init__(self, home: Path, *, grace: float = STOP_GRACE, guest: bool = True) -> None:
        self._directories = Directories(home, self.name)
        self._grace = grace
        self._guest = guest
        self._root = trees.can_give()

    async def probe(self) -> Probe:
        missing = {
            **_cgroup.missing(),
            Feature.DISK: f"{self.name} has no disk quota",
            Feature.NETWORK_NONE: _NO_NAMESPACES,
            Feature.PROTECTED_PATHS: _NO_NAMESPACES,
        }
        versions = {"kernel": os.uname().release}
        if program := self._program():
            versions["guest"] = program.sha256[:12]
        else:
            missing[Feature.GUEST] = NO_GUEST
        if self._root and not can_stage() and (closed := _closed_to_others(self._directories.home)):
            reason = f"other users cannot enter `{closed}`, and commands do not run as root"
            hint = "set RUNNER_HOME to a place such as /var/lib/runner"
            return Probe(self.name, False, IsolationClass.NONE, missing, versions, reason=reason, hint=hint)
        return Probe(self.name, True, IsolationClass.NONE, missing, versions)

    async def create(self, request: WorkspaceRequest) -> Handle:
        _cgroup.check(request.limits, self.name)
        return await trio.to_thread.run_sync(self._directories.create, request)

    @asynccontextmanager
    async def open(self, handle: Handle, opening: Opening) -> AsyncIterator[Workspace]:
        self._directories.check(handle)
        if opening.protected:
            raise ProviderFailed("`process` cannot protect paths", hint="use provider `local`")
        if other := [mount.target for mount in opening.mounts if mount.target not in _PLACES]:
            raise ProviderFailed(f"`process` has no mounts, so nothing can be at `{other[0]}`")
        async with (
            open_room(handle, opening, staged=self._root and can_stage()) as room,
            _cgroup.open_group(handle.id, handle.limits) as group,
        ):
            around = self._surroundings(handle, opening, room, group)
            program = self._program()
            try:
                async with self._inhabit(program, handle, around) if program else _bare(around) as workspace:
                    yield workspace
            finally:
                with trio.CancelScope(shield=True):
                    await self._kill_left(handle)

    def _program(self) -> binary.Program | None:
        return binary.find() if self._guest else None

    def _surroundings(self, handle: Handle, opening: Opening, room: Room, group: _cgroup.Group) -> Surroundings:
        shown = {mount.target: room.add(mount.source).path for mount in opening.mounts}
        paths = Paths(
            workspace=room.tree.path,
            output=shown.get("/output", room.output.path),
            incident=shown.get("/incident", "/incident"),
            runner=room.runner.path,
            home=room.home.path,
        )
        env = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": room.home.path, "TMPDIR": room.tmp.path, **opening.env}
        uid = handle.uid if self._root else os.geteuid()
        return Surroundings(self.name, IsolationClass.NONE, uid, paths, env, group, self._grace)

    @asynccontextmanager
    async def _inhabit(
        self, program: binary.Program, handle: Handle, around: Surroundings
    ) -> AsyncIterator[GuestWorkspace]:
        what = f"workspace `{handle.id}`"
        file = os.open(program.path, os.O_RDONLY)  # its user may not be able to walk there
        try:
            uid = around.uid if self._root else None
            child = spawn.spawn([f"/proc/self/fd/{file}"], env={}, cwd="/", uid=uid, pass_fds=[file], channel=True)
        except OSError as error:
            raise ProviderFailed(f"the guest of {what} cannot be started: {error}") from error
        finally:
            os.close(file)
        try:
            around.group.join(child.pid)
            async with open_workspace(child.stdin, around, what=what, kill_sandbox=child.kill) as workspace:
                yield workspace
        finally:
            with trio.CancelScope(shield=True):
                # Its supervisors end their trees when it is gone, if it goes by itself; what does not is looked for.
                with trio.move_on_after(KILL_GRACE):
                    await child.wait()
                child.kill()
                await child.aclose()

    async def give(self, handle: Handle) -> None:
        await trio.to_thread.run_sync(self._directories.give, handle)

    async def list_owned(self, nonce: str) -> list[Handle]:
        return await trio.to_thread.run_sync(self._directories.owned, nonce)

    async def destroy(self, handle: Handle) -> None:
        self._directories.check(handle)
        await _cgroup.find_group(handle.id).remove()
        await self._kill_left(handle)
        await trio.to_thread.run_sync(self._directories.destroy, handle)

    async def _kill_left(self, handle: Handle) -> None:
        """End whatever lives on: as root all of the workspace's own user, else what has its home in the workspace."""
        home = f"={handle.private}/".encode()

        def belongs(pid: int) -> bool:
            if self._root:
                return spawn.user(pid) == handle.uid
            return spawn.owner(pid) == handle.uid and home in spawn.environment(pid)

        await spawn.kill_all(belongs, what=f"workspace `{handle.id}`")


@asynccontextmanager
async def _bare(around: Surroundings) -> AsyncIterator[Unconfined]:
    workspace = Unconfined(around)
    try:
        yield workspace
    finally:
        with trio.CancelScope(shield=True):
            await workspace.kill()


class Unconfined:
    """An open workspace of ``process``: its paths are this host's."""

    def __init__(self, around: Surroundings) -> None:
        self._uid = around.uid if trees.can_give() else None
        self._group = around.group
        self._grace = around.grace
        self._env = around.env
        self._running: set[Marked] = set()
        self.paths = around.paths

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_rung: Callable[[Rung], None] | None = None,
    ) -> AbstractAsyncContextManager[Marked]:
        where = os.path.join(self.paths.workspace, cwd) if cwd else self.paths.workspace
        return self._exec(argv, env or {}, where, on_rung or (lambda rung: None))

    @asynccontextmanager
    async def _exec(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, on_rung: Callable[[Rung], None]
    ) -> AsyncIterator[Marked]:
        await trio.lowlevel.checkpoint_if_cancelled()
        with _marking() as mark:
            child = self._spawn(argv, {**self._env, **env, "PWD": cwd}, cwd)
        process = Marked(child, mark, os.geteuid() if self._uid is None else self._uid, self._group, on_rung)
        self._running.add(process)
        try:
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

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> spawn.Child:
        # The gate is a line on standard input: a shell's ``read`` takes no byte beyond it.
        gated = ["/bin/sh", "-c", 'read -r _ && exec "$@"', "sh", *argv]
        try:
            return spawn.spawn(gated if self._group.needed else argv, env=env, cwd=cwd, uid=self._uid)
        except (FileNotFoundError, PermissionError):
            pass
        try:  # the shell says why in words, and ends with the status that everyone knows
            return spawn.spawn(["/bin/sh", "-c", 'exec "$@"', "sh", *argv], env=env, cwd=cwd, uid=self._uid)
        except OSError as error:
            raise ProviderFailed(f"`{argv[0]}` cannot be started in `{cwd}`: {error.strerror}") from error

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
            outside = _readback.Outside(_readback.namespaces(), spawn.user(process.pid), self._group.limits())
        return _readback.read_back(
            text, outside, provider="process", isolation=IsolationClass.NONE, workspace=self.paths.workspace
        )


class Marked:
    """A command, and every process that carries its mark."""

    def __init__(
        self, child: spawn.Child, mark: int, uid: int, group: _cgroup.Group, on_rung: Callable[[Rung], None]
    ) -> None:
        self._child = child
        self._mark = mark
        self._uid = uid
        self._group = group
        self._on_rung = on_rung
        self._killed = False
        self._oom_kills_before = group.oom_kills()
        self._in_group = ""
        self.oom_kills = 0
        self.over = trio.Event()  # set when the block around the command has ended
        self.pid = child.pid
        self.stdin = child.stdin
        self.stdout = child.stdout
        self.stderr = child.stderr

    async def begin(self) -> None:
        if self._group.needed:
            self._group.join(self.pid)
            self._in_group = _cgroup.in_group(self.pid)
            await self.stdin.send_all(b"\n")

    async def wait(self) -> Exit:
        ended = await self._child.wait()
        killed = ended.signal == signal.SIGKILL or ended.code == 128 + signal.SIGKILL
        self._count()
        return Exit(ended.code, ended.signal, oom=killed and self.oom_kills > 0)

    async def end(self, grace: float) -> None:
        """TERM to all that carry the mark, ``grace`` seconds, KILL. Raises ``Escaped``."""
        if not self._child.ended and not self._killed:
            self._on_rung(Rung.TERM)
            spawn.signal_where(spawn.processes(), signal.SIGTERM, self._belongs)
            with trio.move_on_after(grace):
                await self._child.wait()
        try:
            if not (self._child.ended and spawn.newest() == self.pid):  # else nothing was started after it
                await spawn.kill_all(self._is_to_be_killed, what=f"the command{self._in_group}")
            with trio.move_on_after(KILL_GRACE) as patience:
                await self._child.wait()
        finally:
            self._count()
            await self._child.aclose()
        if patience.cancelled_caught:
            raise Escaped(f"killed processes of the command{self._in_group} still live: {self.pid}")

    def kill(self) -> None:
        if not self._child.ended:
            self._begin_killing()
            self._child.kill()

    def _is_to_be_killed(self, pid: int) -> bool:
        found = self._belongs(pid) and _lives(pid)
        if found:
            self._begin_killing()
        return found

    def _begin_killing(self) -> None:
        if not self._killed:
            self._killed = True
            self._on_rung(Rung.KILL)

    def _count(self) -> None:
        self.oom_kills = self._group.oom_kills() - self._oom_kills_before

    def _belongs(self, pid: int) -> bool:
        return spawn.owner(pid) == self._uid and spawn.soft_limit(pid, "Max msgqueue size") == self._mark


def _lives(pid: int) -> bool:
    """Whether it is no zombie. Raises as ``spawn.parent``."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"


@contextmanager
def _marking() -> Iterator[int]:
    """Processes spawned in the block carry the mark, and so does all that they start."""
    soft, hard = resource.getrlimit(_MARKED)
    mark = 1 + secrets.randbelow((soft if soft > 0 else 1 << 32) - 1)
    resource.setrlimit(_MARKED, (mark, hard))
    try:
        yield mark
    finally:
        resource.setrlimit(_MARKED, (soft, hard))


def _closed_to_others(path: Path) -> Path | None:
    """The first directory on the way to ``path`` that other users cannot enter."""
    way = [*reversed(path.parents), path]
    return next((place for place in way if place.exists() and not place.stat().st_mode & 0o001), None)
