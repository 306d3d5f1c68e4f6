"""Hosting of MCP servers: each in a persistent sandbox, started with the host, and anew when it has crashed.

A server is hosted by one process, which holds the lease of its workspace. Its files stay from start to start.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio
from msgspec.structs import asdict, replace

from runner.core.errors import LeaseError, McpServerUnhealthy, RunnerError, WorkspaceLost
from runner.core.model import Limits, WorkspaceStatus
from runner.core.nurseries import unwrapping_groups
from runner.core.plural import plural
from runner.core.redact import Redactor
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.lifecycle.restart import STEPS, Restarts
from runner.manifest.load import files
from runner.mcp.bridge import Bridge, Lists, ServerRefused, ServerSilent
from runner.ops.mcp import records
from runner.ops.mcp.manifests import STEP, HostedSpec, folder_of, read_servers
from runner.ops.mcp.records import HostedRecord
from runner.ops.mcp.registrations import FOLDER
from runner.ops.planning.host_paths import lend_toolchains
from runner.ops.runs.secret_values import make_redactor, read_secret
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.create_checks import ChosenProvider, choose_provider, limits_of, require_isolation
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.network import Credential, EgressConnection
from runner.ports.provider import Process, SandboxSpec, Workspace
from runner.report.format import limits as in_words
from runner.runtime.mcp_talk import MISSES, start_of_image, talk
from runner.runtime.network import open_way
from runner.runtime.secrets import give

HOST = "mcp"  # the command that holds the workspace of a server
GRACE = 30.0  # seconds between SIGTERM and SIGKILL
LOOK_SECONDS = 1.0  # between looks at what people ask for, and at the manifests
TOLD_SECONDS = 60.0  # between warnings in the journal about what a server should not do
LOG = "mcp.log"  # in the workspace's own directory, which the server never sees
LOG_BYTES = 1 << 20  # after which a log becomes the old one, of which there is one
_IDLE = ("ended", "failed", "approval")


class HostedServer:
    """One server. ``state`` is ``starting``, ``ready``, ``unhealthy``, ``waiting``, ``ended``, ``failed``, or
    ``approval`` when its image or its command has changed.
    """

    def __init__(self, env: WorkspaceEnv, spec: HostedSpec) -> None:
        self.env, self.spec = env, spec
        self.bridge = Bridge(spec.bridge, self._approve, self._tell)
        self._home = records.home_of(env.settings)
        self.record = HostedRecord(name=spec.name, home=self._home)
        self._redactor: Redactor = make_redactor(env.settings)
        self._stream, self._at_line = self._redactor.stream(), True
        self._restarts = Restarts(random.random)
        self._again = trio.Event()  # a person wants it to be started anew
        self._events, _ = trio.open_memory_channel[ev.Event](math.inf)
        self._told = -math.inf
        self._unhealthy = ""
        self._held: HeldWorkspace | None = None
        self.gone = trio.Event()

    async def run(self, scope: trio.CancelScope) -> None:
        """Host the server until ``scope`` is cancelled; then it has its grace."""
        try:
            with scope:
                while True:
                    try:
                        with unwrapping_groups():
                            await self._host()
                    except RunnerError as error:
                        self.env.advise(error)
                        if not isinstance(error, LeaseError):  # else another process writes how it is
                            await self._become("failed", error.message)
                    await self._again.wait()
        finally:
            self.gone.set()

    async def look(self, record: HostedRecord) -> None:
        """Do what a person has asked for since the last look."""
        before, self.record = self.record, replace(self.record, approved=record.approved, restarts=record.restarts)
        consented = record.approved != before.approved
        if record.restarts != before.restarts or (self.record.state == "approval" and consented):
            self._again.set()
        elif consented:
            self.bridge.relist.set()

    async def _become(self, state: str, detail: str = "", **more: object) -> None:
        """Record how the server is."""
        is_so = f"has {state}" if state in ("ended", "failed") else f"is {state}"
        self.bridge.became(is_so + (f": {detail}" if detail else ""), idle=state in _IDLE)
        since, text = await self.env.store.now(), self._redactor.text(sanitize(detail))

        def changed(one: HostedRecord) -> HostedRecord:
            return replace(one, state=state, detail=text, since=since, crashes=self.record.crashes, **more)

        self.record = await records.change(self.env.store, self.spec.name, self._home, changed)

    def _tell(self, what: str) -> None:
        """Note something that the server should not do."""
        self._write_log(f"-- {what}")
        if trio.current_time() - self._told > TOLD_SECONDS:
            self._told = trio.current_time()
            self._events.send_nowait(ev.WarningIssued("mcp.unhealthy", self._redactor.text(what), STEP))
        self._unhealthy = what

    # --- its workspace -------------------------------------------------------------------------------

    async def _host(self) -> None:
        spec, env = self.spec, self.env
        self._again = trio.Event()
        chosen = await choose_provider(env, spec.provider, spec.image, adopting=False)
        require_isolation(chosen.probe)
        if not await self._may_use(chosen.image):
            return
        async with await self._workspace(chosen) as held:
            self._held = held
            self._events, journal = trio.open_memory_channel[ev.Event](math.inf)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_journal, held, journal)
                if (missing := held.row.not_enforced) is not None:
                    self._write_log(f"-- limits that `{chosen.provider.name}` cannot enforce here: {in_words(missing)}")
                with self._events:
                    try:
                        await self._become("starting", workspace=held.row.id)
                        await self._serve(held)
                    finally:
                        cancelled = trio.current_effective_deadline() == -math.inf  # an error may say so too: a group
                        if cancelled and self.record.state not in _IDLE:
                            with trio.CancelScope(shield=True):
                                await self._become("stopped")

    async def _workspace(self, chosen: ChosenProvider) -> AbstractAsyncContextManager[HeldWorkspace]:
        """Hold the server's workspace for a block, a new one where there is none that fits."""
        spec, env = self.spec, self.env
        limits, _ = limits_of(env.settings, chosen.probe, spec.limits)
        for row in await env.store.workspaces():
            if row.mcp_server != spec.name or not env.has(row):
                continue
            had = row.limits or Limits()  # which an ordinary user's may have none of
            if (row.provider, row.image, had) == (chosen.provider.name, chosen.image, limits):
                return hold(env, await ws.resume(env, row.id) if row.status is WorkspaceStatus.STOPPED else row, HOST)
            removed = await ws.destroy(env, row.id, reason="its manifest has changed")
            if removed.saved is not None:
                self._tell(f"its files of before are in {removed.saved}")
        options = WorkspaceOptions(image=spec.image, limits=spec.limits, persistent=True, mcp_server=spec.name)
        return ws.creating(env, options, chosen=chosen, command=HOST)

    async def _may_use(self, image: str | None) -> bool:
        """Tell whether the image and the command are those that were approved; the first ones are."""
        command = self.spec.command

        def seen(one: HostedRecord) -> HostedRecord:
            approved = one.approved
            if approved.tools is None:
                approved = replace(approved, image=image)
            if approved.command is None:
                approved = replace(approved, command=command)
            return replace(one, seen=replace(one.seen, image=image, command=command), approved=approved)

        self.record = await records.change(self.env.store, self.spec.name, self._home, seen)
        approved = self.record.approved
        if (approved.image, approved.command) == (image, command):
            return True
        what = "command" if approved.image == image else "image"
        await self._become("approval", f"its {what} has changed")
        text = f"MCP server `{self.spec.name}` is not started: its {what} has changed"
        self.env.advise(McpServerUnhealthy(text, hint=f"runner mcp approve {self.spec.name}"))
        return False

    async def _approve(self, found: Lists) -> Lists:
        """Return what of each list is as it was approved; the first ones are."""

        def seen(one: HostedRecord) -> HostedRecord:
            first = {kind: items for kind, items in found.items() if getattr(one.approved, kind) is None}
            return replace(one, seen=replace(one.seen, **found), approved=replace(one.approved, **first))

        self.record = await records.change(self.env.store, self.spec.name, self._home, seen)
        same: Lists = {}
        for kind, items in found.items():
            approved = getattr(self.record.approved, kind)
            same[kind] = {key: item for key, item in items.items() if approved.get(key) == item}
            if withheld := len(items) - len(same[kind]):
                self._write_log(f"-- {plural(withheld, kind[:-1])} not as approved: runner mcp approve")
        return same

    # --- its process ---------------------------------------------------------------------------------

    async def _serve(self, held: HeldWorkspace) -> None:
        """Run the server, and anew when it has ended; one that is to stay so waits for a person who wants it."""
        while True:
            self._again = trio.Event()
            started = trio.current_time()
            how, crashed = await self._run(held)
            again = self._again.is_set()
            if again:
                pause: float | None = 0.0
            elif self.spec.restart == "never" or (not crashed and self.spec.restart == "on-failure"):
                pause = None
            else:
                pause = self._restarts.pause(started, trio.current_time())
                self.record = replace(self.record, crashes=self.record.crashes + 1)
            self._write_log(f"-- {how}" + (f"; again in {pause:.1f} s" if pause else ""))
            self._events.send_nowait(ev.McpServerEnded(self._redactor.text(how), pause))
            if pause is None:
                await self._become("ended" if not crashed else "failed", how)
                await self._again.wait()
                continue
            if pause >= STEPS[0]:
                self._alert(how, pause)
            await self._become("waiting" if pause else "starting", how)
            with trio.move_on_after(pause):
                await self._again.wait()

    def _alert(self, how: str, pause: float) -> None:
        text = f"MCP server `{self.spec.name}` crashes again and again: {how}; it is started anew in {pause:.0f} s"
        self._events.send_nowait(ev.WarningIssued("mcp.crash-loop", self._redactor.text(text), STEP))
        self.env.advise(McpServerUnhealthy(text, hint=f"runner mcp hosted logs {self.spec.name}"))

    async def _run(self, held: HeldWorkspace) -> tuple[str, bool]:
        """Run the server once. Return how it ended, and whether that was a crash."""
        spec, variables = self.spec, self.env.settings.variables
        lent = await lend_toolchains(spec.toolchains, variables, None)
        secrets = {one.name: await read_secret(one, self.env.settings, self._redactor) for one in spec.secrets}
        credentials = [Credential(one.injection, secrets[one.name]) for one in spec.secrets if one.injection]
        provider, handle = await held.handle()
        image = held.row.image if spec.image is not None else None
        start = await start_of_image(provider, image, spec.image, spec.command)
        sandbox = SandboxSpec(toolchains=lent.toolchains, env={**start.env, **lent.environment, **spec.env})
        try:
            with unwrapping_groups():
                async with (
                    provider.open(handle, sandbox) as workspace,
                    self._way(workspace, credentials) as leading,
                ):
                    given: dict[str, str] = {}
                    for one in spec.secrets:
                        if one.injection is None:
                            given |= await give(workspace, one.name, secrets[one.name], as_file=one.as_file)
                    env = {**leading, **given}
                    command = spec.command or start.command
                    async with workspace.exec(command, env=env, cwd=start.cwd or None, grace=GRACE) as process:
                        return await self._talk(process)
        except WorkspaceLost as error:
            return error.message, True

    @asynccontextmanager
    async def _way(self, workspace: Workspace, credentials: list[Credential]) -> AsyncIterator[Mapping[str, str]]:
        allowed = self.spec.network
        if not allowed:
            yield {}
            return

        def tell(one: EgressConnection) -> None:
            self._events.send_nowait(ev.ConnectionEnded(step=STEP, **asdict(one)))

        egress = self.env.deps.open_egress(allowed, tell, credentials)
        async with open_way(egress, workspace, allowed) as variables:
            yield variables

    async def _talk(self, process: Process) -> tuple[str, bool]:
        """Let clients talk with the process until it ends, answers no more, or is to be started anew."""
        return await talk(
            process,
            attach=partial(self.bridge.attach, process.stdin, process.stdout),
            copy_log=partial(self._copy_log, process),
            watch=self._watch,
            restart=self._again,
            on_oom=self._tell_oom,
        )

    async def _watch(self) -> str:
        """Look at a server again and again; return why it is to be ended."""
        await self.bridge.ready.wait()
        await self._become("ready")
        self._events.send_nowait(ev.McpServerStarted(len(self.bridge.enabled())))
        misses = 0
        while True:
            self._unhealthy = ""
            await trio.sleep(self.spec.health_interval)
            try:
                await self.bridge.ask("ping", {}, self.spec.health_timeout)
                misses = 0
            except ServerSilent as error:
                misses += 1
                self._tell(str(error))
            except ServerRefused:
                misses = 0  # it answers, if not this
            if misses == MISSES:
                return f"did not answer {MISSES} looks"
            if bool(self._unhealthy) != (self.record.state == "unhealthy"):
                await self._become("unhealthy" if self._unhealthy else "ready", self._unhealthy)

    def _tell_oom(self, more: int) -> None:
        self._events.send_nowait(ev.OomKilled(STEP, more))
        self._tell(f"out of memory: {more} of its processes killed")

    # --- what is written -----------------------------------------------------------------------------

    async def _write_journal(self, held: HeldWorkspace, journal: trio.MemoryReceiveChannel[ev.Event]) -> None:
        with trio.CancelScope(shield=True):
            async for event in journal:
                await held.write(event)

    async def _copy_log(self, process: Process) -> None:
        while chunk := await process.stderr.receive_some(1 << 16):
            self._write(chunk)
        self._log(self._stream.end())

    def _write_log(self, line: str) -> None:
        own = sanitize(line, 1000).encode() + b"\n"
        self._write(own if self._at_line else b"\n" + own)

    def _write(self, raw: bytes) -> None:
        """Write to the log, but for what may be the beginning of a secret, which waits for what comes next."""
        self._at_line = raw.endswith(b"\n")
        self._log(self._stream.feed(raw))

    def _log(self, raw: bytes) -> None:
        if self._held is None or not raw:
            return
        log = self.env.folder(self._held.row.id) / LOG
        with open(log, "ab") as file:
            file.write(raw)
            size = file.tell()
        if size > LOG_BYTES:
            os.replace(log, log.with_suffix(".old"))


class Hosting:
    """The servers of a manifest or a folder of them, and those that are registered; changes of both are followed."""

    def __init__(self, env: WorkspaceEnv, path: Path | None, specs: Mapping[str, HostedSpec]) -> None:
        self.servers = {name: HostedServer(env, spec) for name, spec in specs.items()}  # clients wait for them
        self._env, self._specs = env, specs
        self._path, self._registered = path, env.settings.home / FOLDER
        self._home = records.home_of(env.settings)
        self._folders = {folder_of(path), str(self._registered)}
        self._wanted, self._looked = trio.Event(), trio.Event()
        self._scopes: dict[str, trio.CancelScope] = {}

    async def run(self) -> None:
        """Host the servers until this is cancelled; each of them then has its grace, all at once."""
        written = self._written()
        await records.take_over(self._env.store, self._home, lambda one: one.folder in self._folders)
        async with trio.open_nursery() as nursery:
            await self._remove({one.name for one in await self._own()} - {*self._specs})
            for server in [*self.servers.values()]:
                await self._start(server, nursery)
            while True:
                with trio.move_on_after(LOOK_SECONDS):
                    await self._wanted.wait()
                self._wanted, looked, self._looked = trio.Event(), self._looked, trio.Event()
                try:
                    for record in await self._own() if self.servers else ():
                        if record.name in self.servers:
                            await self.servers[record.name].look(record)
                    if (now := self._written()) != written:
                        written = now
                        await self._follow(await read_servers(self._path, self._env.settings), nursery)
                except RunnerError as error:  # the servers go on as they are
                    self._env.advise(error)
                looked.set()

    async def look(self) -> None:
        """Look at the manifests now, and return when what they say is done, but for the start of servers."""
        looked = self._looked
        self._wanted.set()
        await looked.wait()

    async def _own(self) -> list[HostedRecord]:
        found = await records.list_hosted(self._env.store, self._home)
        return [one for one in found if one.home == self._home and one.folder in self._folders]

    async def _start(self, server: HostedServer, nursery: trio.Nursery) -> None:
        name = server.spec.name
        await records.change(self._env.store, name, self._home, lambda one: replace(one, folder=server.spec.folder))
        self.servers[name], self._scopes[name] = server, trio.CancelScope()
        nursery.start_soon(server.run, self._scopes[name])

    async def _follow(self, specs: Mapping[str, HostedSpec], nursery: trio.Nursery) -> None:
        """Do what the manifests say now: start, end, and start anew what they say something else of."""
        changed = [name for name, one in self.servers.items() if specs.get(name) != one.spec]
        for name in changed:
            self._scopes[name].cancel()
        for name in changed:
            await self.servers[name].gone.wait()  # its clients wait for the next one
        for name in {*self.servers} - {*specs}:
            del self.servers[name]
        await self._remove({*self._specs} - {*specs})
        for name, spec in specs.items():
            if name not in self.servers or name in changed:
                await self._start(HostedServer(self._env, spec), nursery)
        self._specs = specs

    async def _remove(self, names: set[str]) -> None:
        """Remove what is left of servers that no manifest names any more; their files are saved."""
        for row in await self._env.store.workspaces():
            if row.mcp_server in names and self._env.has(row):
                await ws.destroy(self._env, row.id, reason="its manifest is gone")
        for name in names:
            await records.remove(self._env.store, name, self._home)

    def _written(self) -> list[tuple[str, int, int]]:
        """Return what tells whether manifests have changed."""
        found: list[tuple[str, int, int]] = []
        for path in (self._path, self._registered):
            with suppress(OSError):
                for file in files(path) if path is not None else ():
                    status = file.stat()
                    found.append((str(file), status.st_mtime_ns, status.st_ino))
        return found
