"""The MCP servers of an agent for the length of its step: each behind a bridge at a port of the agent's own loopback.

A hosted one runs in a workspace of its own, which is the run's: its lease covers it, its end and ``recover`` remove it.
A server that ends is started anew, and calls get an error meanwhile. One that does not start fails the step before the
agent has begun.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

import trio
from msgspec import Struct
from msgspec.structs import asdict

from runner.core.errors import McpServerFailed, PlatformError
from runner.core.last_line import last_line
from runner.core.model import Handle
from runner.core.nurseries import open_services, unwrapping_groups
from runner.core.plural import plural
from runner.core.redact import Redactor
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.lifecycle.restart import Restarts
from runner.ports.agent import McpAccess
from runner.ports.mcp import Lists, McpCall, McpGrant, McpSession, ServerRefused, ServerSilent
from runner.ports.network import Credential, EgressConnection
from runner.ports.provider import Images, Process, Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.runtime.context import RunContext
from runner.runtime.exec import LogFile, emit_all
from runner.runtime.mcp_talk import MISSES, start_of_image, talk
from runner.runtime.network import open_way
from runner.runtime.sandbox_session import SandboxSession
from runner.runtime.secrets import give
from runner.spec.model import HostedServer, McpServer

GRACE = 2.0  # seconds between SIGTERM and SIGKILL; a server has lost its client by then
HEALTH = 30.0, 5.0  # seconds between looks at a server inside, and that its answer may take
MAX_LOG = 4 << 20  # bytes of a server's standard error
MAX_TOLD = 20  # warnings about what a server should not do
_TAIL = 4096  # bytes of standard error of which the last line is told
PATH = "/mcp"

Tell = Callable[[ev.Event], None]


@asynccontextmanager
async def open_mcp_servers(
    run: RunContext, workspace: Workspace, step: str, servers: Sequence[McpServer], env: Mapping[str, str]
) -> AsyncIterator[tuple[McpAccess, ...]]:
    """Start the servers for the length of the block, all at once; yield where the agent finds each. Those inside the
    agent's own ``workspace`` have ``env``.

    Raises ``McpServerFailed`` for one that does not start, and what making a workspace and listening raise.
    """
    if not servers:
        yield ()
        return
    send, receive = trio.open_memory_channel[ev.Event](math.inf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send:
            inside = _Inside(workspace=workspace, env=env)
            running = [
                _Running(run, step, one, number=at, tell=send.send_nowait, inside=inside)
                for at, one in enumerate(servers, 1)
            ]
            async with AsyncExitStack() as stack, open_services() as services:
                async with trio.open_nursery() as starting:
                    for one in running:
                        one.session = await stack.enter_async_context(one.open_bridge())
                        starting.start_soon(services.start, one.run)
                ports = [await stack.enter_async_context(workspace.listen(one.session.serve)) for one in running]
                yield tuple(map(_access, running, ports))


def _access(running: _Running, port: int) -> McpAccess:
    server = running.server
    url = f"http://127.0.0.1:{port}{PATH}"
    return McpAccess(name=server.name, url=url, timeout_seconds=server.timeout, tools=running.session.tools)


class _Running:
    """One server, from its first start to the end of the step."""

    session: McpSession

    def __init__(
        self, run: RunContext, step: str, server: McpServer, *, number: int, tell: Tell, inside: _Inside
    ) -> None:
        self._context, self._step, self.server, self._number, self._tell = run, step, server, number, tell
        self._inside = inside
        self._restarts = Restarts(run.deps.chance)
        self._started = False
        self._told = 0
        self._withheld: set[str] = set()
        self._last_words = b""

    def open_bridge(self) -> AbstractAsyncContextManager[McpSession]:
        server, secrets = self.server, self._context.secrets
        own = {name: secrets[name].reveal().rstrip(b"\r\n") for name in server.secret_names if name in secrets}
        grant = McpGrant(
            tools=server.tools,
            only_tools=server.only_tools,
            max_calls=server.max_calls,
            timeout=server.timeout,
            passed=server.passed,
            secrets=Redactor(own),
        )
        return self._context.deps.mcp.bridge(grant, self._approve, self._warn, self._record)

    def _warn(self, what: str) -> None:
        self._told += 1
        if self._told <= MAX_TOLD:
            more = ", and more of that is not told" if self._told == MAX_TOLD else ""
            text = f"MCP server `{self.server.name}`: {sanitize(what)}{more}"
            self._tell(ev.WarningIssued("mcp.unhealthy", text, self._step))

    def _record(self, call: McpCall) -> None:
        self._tell(ev.McpCallEnded(step=self._step, server=self.server.name, **asdict(call)))

    async def _approve(self, found: Lists) -> Lists:
        """Return what the agent may see of what the server lists: what was approved of it, at its first start all.

        One in the agent's own workspace tells it nothing that it could not read there.
        """
        same = found if self.server.inside else await self._context.deps.approve_mcp(self.server.key, found)
        for kind, items in found.items():
            if gone := {*items} - {*same[kind]} - self._withheld:
                self._withheld |= gone
                names = ", ".join(f"`{sanitize(name, 60)}`" for name in sorted(gone)[:5])
                text = f"{plural(len(gone), kind[:-1])} not as approved and withheld ({names})"
                self._warn(f"{text}: runner mcp approve {self.server.key}")
        if missing := [name for name in self.server.tools or () if name not in found["tools"]]:
            self._warn(f"it has no tool `{missing[0]}`")
        return same if not self.server.only_tools else {**{kind: {} for kind in same}, "tools": same["tools"]}

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Run the server, and anew when it has ended, until this is cancelled. Raises ``McpServerFailed``."""
        place = await self._place()
        while True:
            began, ready = trio.current_time(), trio.Event()
            async with trio.open_nursery() as nursery:

                async def hear(ready: trio.Event = ready) -> None:
                    await self.session.wait_ready()
                    ready.set()
                    tools = len(self.session.tools)
                    self._tell(ev.McpServerStarted(tools, self._step, self.server.name))
                    if not self._started:
                        self._started = True
                        task_status.started()

                nursery.start_soon(hear)
                how, again = await self._once(place)
                nursery.cancel_scope.cancel()
            if not self._started:
                words = f": {sanitize(last_line(self._last_words), 200)}" if self._last_words.strip() else ""
                message = f"MCP server `{self.server.name}` did not start: it {how}{words}"
                raise McpServerFailed(message, hint=f"its standard error is in `{self._log_name}` of the run's logs")
            pause = self._restarts.pause(began, trio.current_time()) if again else None
            self._tell(ev.McpServerEnded(self._context.deps.redact.text(how), pause, self._step, self.server.name))
            if pause is None:
                self.session.became(f"has ended: {how}")
                await trio.sleep_forever()
            self.session.became(f"is being started anew: {how}")
            await trio.sleep(pause)

    async def _once(self, place: _Place | _Inside | None) -> tuple[str, bool]:
        """Run the server once; return how it ended, and whether it is to be started anew."""
        if place is None:
            return await self._once_remote()
        try:
            with unwrapping_groups():
                return await place.start(self)
        except PlatformError as error:
            if not self._started:
                raise
            return error.message, True

    @property
    def _log_name(self) -> str:
        return f"mcp-{self.server.name}.stderr"

    # --- elsewhere -----------------------------------------------------------------------------------

    async def _once_remote(self) -> tuple[str, bool]:
        remote = self.server.remote
        assert remote is not None
        credential = None
        if remote.injection is not None:
            credential = Credential(remote.injection, self._context.secrets[remote.injection.secret])
        opened = self._context.deps.mcp.reach(remote.url, remote.network, credential, self._tell_connection)
        async with opened as (stdin, stdout):
            try:
                await self.session.attach(stdin, stdout)
            except ServerRefused as error:
                return str(error), True
        return "ended its session", True

    def _tell_connection(self, one: EgressConnection) -> None:
        self._tell(ev.ConnectionEnded(step=self._step, **asdict(one)))

    # --- in a sandbox --------------------------------------------------------------------------------

    async def _place(self) -> _Place | _Inside | None:
        """Make the workspace of a hosted server; its removal is the run's from here on."""
        hosted, run = self.server.hosted, self._context
        if hosted is None:
            return self._inside if self.server.inside else None
        name, provider = f"{run.workspace_id}m{self._number}", run.deps.provider(hosted.provider)
        await run.deps.room(name)
        await run.emit(ev.ResourceIntended(self._step, "workspace", name, provider.name))
        run.workspace.servers[name] = provider
        if hosted.image is not None and isinstance(provider, Images):
            await provider.pull(hosted.image, hosted.base_image or hosted.image)
        request = WorkspaceRequest(id=name, run=run.id, nonce=run.deps.nonce, limits=hosted.limits, image=hosted.image)
        handle = await run.retry(f"making the workspace of {self.server.name}", partial(provider.create, request))
        await run.emit(ev.ResourceCreated(self._step, "workspace", name))
        return _Place(provider=provider, handle=handle, hosted=hosted)

    @asynccontextmanager
    async def way(self, workspace: Workspace, hosted: HostedServer) -> AsyncIterator[Mapping[str, str]]:
        """Lead the server to the hosts of its manifest for the length of the block; yield the variables for it."""
        if not hosted.network:
            yield {}
            return
        credentials = [Credential(one, self._context.secrets[one.secret]) for one in hosted.injected]
        egress = self._context.deps.open_egress(hosted.network, self._tell_connection, credentials)
        async with open_way(egress, workspace, hosted.network) as variables:
            yield variables

    async def talk(self, process: Process, hosted: HostedServer | None = None) -> tuple[str, bool]:
        """Let the agent talk with the process until it ends, or answers no more; tell whether it is to start again."""
        how, crashed = await talk(
            process,
            attach=partial(self.session.attach, process.stdin, process.stdout),
            copy_log=partial(self._copy_log, process),
            watch=partial(self._watch, *((hosted.health_interval, hosted.health_timeout) if hosted else HEALTH)),
            restart=trio.Event(),  # nobody asks for it while a run lasts
            on_oom=lambda more: self._warn(f"out of memory: {more} of its processes killed") if hosted else None,
        )
        restart = hosted.restart if hosted is not None else "on-failure"
        return how, restart == "always" or (crashed and restart != "never")

    async def _watch(self, interval: float, patience: float) -> str:
        """Look at a server again and again; return why it is to be ended."""
        await self.session.wait_ready()
        misses = 0
        while misses < MISSES:
            await trio.sleep(interval)
            try:
                await self.session.ping(patience)
                misses = 0
            except ServerSilent as error:
                misses += 1
                self._warn(str(error))
        return f"did not answer {MISSES} looks"

    async def _copy_log(self, process: Process) -> None:
        stream, path = self._context.deps.redact.stream(), self._context.paths.logs / self._log_name
        path.parent.mkdir(parents=True, exist_ok=True)
        log = LogFile(path, MAX_LOG)
        try:
            while chunk := await process.stderr.receive_some(1 << 16):
                self._write(log, stream.feed(chunk))
        finally:
            self._write(log, stream.end())
            log.close()

    def _write(self, log: LogFile, chunk: bytes) -> None:
        log.write(chunk)
        self._last_words = (self._last_words + chunk)[-_TAIL:]


class _Inside(Struct, frozen=True, kw_only=True):
    """The agent's own workspace, where memory is counted for the agent."""

    workspace: Workspace
    env: Mapping[str, str]

    async def start(self, running: _Running) -> tuple[str, bool]:
        """Run a server in it to its end."""
        async with self.workspace.exec(running.server.inside, env=self.env, grace=GRACE) as process:
            return await running.talk(process)


class _Place(Struct, frozen=True, kw_only=True):
    """The workspace of a hosted server."""

    provider: Provider
    handle: Handle
    hosted: HostedServer

    async def start(self, running: _Running) -> tuple[str, bool]:
        """Run the server in a new sandbox to its end. Raises ``WorkspaceLost``, and what opening a sandbox raises."""
        run, hosted = running._context, self.hosted  # two halves of one thing
        sandboxes = SandboxSession(run.sandboxes.services, run.emit)
        name = hosted.base_image or hosted.image
        start = await start_of_image(self.provider, hosted.image, name, hosted.command)
        spec = SandboxSpec(toolchains=hosted.toolchains, env={**start.env, **hosted.env})
        workspace = await run.retry(
            f"starting the sandbox of {running.server.name}",
            partial(sandboxes.start, self.provider, self.handle, spec, None),
        )
        try:
            async with running.way(workspace, hosted) as leading:
                given: dict[str, str] = {}
                for one in hosted.secrets:
                    name = one.name.partition(".")[2]
                    given |= await give(workspace, name, run.secrets[one.name], as_file=one.as_file)
                env, command = {**leading, **given}, hosted.command or start.command
                async with workspace.exec(command, env=env, cwd=start.cwd or None, grace=GRACE) as process:
                    return await running.talk(process, hosted)
        finally:
            sandboxes.begin_close()
            with trio.CancelScope(shield=True):  # bounded by the provider
                await sandboxes.close()
