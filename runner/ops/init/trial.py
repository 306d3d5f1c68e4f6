"""Trials: run the tests as a run would, in a sandbox, on a clean checkout of HEAD, without a network.

The workspace is an ordinary one, so ``runner gc`` finds and removes what a killed trial leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import InputError, PlatformError, ProviderUnavailable
from runner.core.model import Checkout, Exit, Handle, Mount
from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.events.events import ConnectionEnded
from runner.git import open_git
from runner.ops.host.probe import make_scratch
from runner.ops.init.installs import Install, InstallFailed, find_installs, install
from runner.ops.init.survey import Survey, Way, install_words
from runner.ops.planning.facts import open_provider
from runner.ops.planning.host_paths import lend_dependencies, lend_toolchains
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, open_workspace_env
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.provider import Provider, SandboxSpec, Workspace
from runner.runtime.mount_plan import add_layers
from runner.safefs import trees
from runner.spec.model import Lent

PROVIDER = "local"
EACH = 300.0  # seconds for one way; one that runs longer is taken as it is
ALL = 900.0  # for all of them
TTL = 2 * ALL  # until `runner gc` removes what was left
TAIL = 12  # lines of what a failed command printed last
_MOST = 8 << 20  # bytes of what a command prints
_NOTHING = re.compile(r"^Ran 0 tests in|no tests ran in")
_NETWORK = re.compile(
    r"Could not resolve|name resolution|EAI_AGAIN|ENOTFOUND|Name or service not known|Network is unreachable"
    r"|GOPROXY=off|No matching distribution|offline mode|attempting to make an HTTP request|ConnectionError"
)
_ABSENT = re.compile(
    r"No module named '?([\w.-]+)|Cannot find (?:module|package) '([^']+)'|cannot load such file -- (\S+)"
    r"|no required module provides package (\S+?);?\s|no matching package named `([^`]+)`"
    r"|([\w@/.-]+): (?:command )?not found"
    r"|env: \W?([\w.+-]+)\W?: No such file|exec: \"([^\"]+)\": executable file not found",
    re.MULTILINE,
)


class Trial(Struct, frozen=True, kw_only=True):
    """One way that was tried: how it ended, how long that took, and what it printed last.

    ``installs`` have made dependencies for it. Without an ``exit`` it was stopped after ``EACH`` seconds, or never
    started: then ``why`` says what is missing.
    """

    way: Way
    lent: Lent
    installs: tuple[Install, ...] = ()
    exit: Exit | None = None
    seconds: float = 0.0
    tail: tuple[str, ...] = ()
    why: str = ""

    @property
    def worked(self) -> bool:
        return self.exit is not None and self.exit.ok and not self.empty

    @property
    def empty(self) -> bool:
        """Tell whether it succeeded because it found no test."""
        return any(_NOTHING.search(line) for line in self.tail)

    @property
    def slow(self) -> bool:
        """Tell whether it was still running when its time was over."""
        return self.exit is None and not self.why


class _Place(Struct, frozen=True, kw_only=True):
    provider: Provider
    handle: Handle
    checkout: Path
    layers: tuple[Mount, ...] = ()
    installs: tuple[Install, ...] = ()


async def try_ways(seen: Survey, settings: Settings, tell: Callable[[str], None]) -> list[Trial]:
    """Try ways in turn until one works; return all that were tried. ``tell`` is told of each as it starts.

    Leaves nothing, also when it is cancelled. Raises ``ProviderUnavailable`` where
    there can be no sandbox, and what git and the provider raise.
    """
    probe = await open_provider(PROVIDER, settings).probe()
    if not probe.available:
        raise ProviderUnavailable(f"`{PROVIDER}` is not available: {probe.reason}", hint=probe.hint)
    async with open_workspace_env(replace(settings, workspace_ttl=TTL)) as env:
        return await _try_all(env, seen, tell)


async def _try_all(env: WorkspaceEnv, seen: Survey, tell: Callable[[str], None]) -> list[Trial]:
    until = trio.current_time() + ALL
    async with make_scratch(env, WorkspaceOptions(provider=PROVIDER), "init") as (held, provider, handle):
        checkout = await _check_out(seen.top, handle, env.settings)
        place = _Place(provider=provider, handle=handle, checkout=checkout)
        tried = await _try_each(seen, place, env, tell, until)
        if any(one.worked or one.slow for one in tried) or not (installs := tuple(find_installs(seen))):
            return tried
        tools = [tool for way in seen.ways for tool in way.tools] + [tool for one in installs for tool in one.tools]
        seen = replace(seen, ways=tuple(replace(way, tools=tuple(dict.fromkeys(tools))) for way in seen.ways))
        tell(f"installing with `{'; '.join(one.words for one in installs)}` in a sandbox")
        made = [path for one in installs for path in one.command.keep]
        try:
            with trio.fail_after(EACH):
                lent = await lend_toolchains(seen.ways[0].tools, env.settings.variables, seen.top, made)
                layers = await install(installs, lent, checkout, held, top=seen.top, place=(provider, handle))
            events = [recorded.event for recorded in await env.store.workspace_events(handle.id)]
            reached = [f"{one.host}:{one.port}" for one in events if isinstance(one, ConnectionEnded) and one.host]
            tell(f"installed: {plural(len(reached), 'connection')} to {', '.join(sorted(set(reached))) or 'no host'}")
        except (InstallFailed, InputError, trio.TooSlowError) as error:
            why = f"`{installs[0].words}` has not installed what it needs: {error or 'it takes too long'}"
            tail = _tail(error.output) if isinstance(error, InstallFailed) else ()
            return [*tried, Trial(way=seen.ways[0], lent=Lent(), why=why, tail=tail)]
        return [*tried, *await _try_each(seen, replace(place, layers=layers, installs=installs), env, tell, until)]


async def _try_each(
    seen: Survey, place: _Place, env: WorkspaceEnv, tell: Callable[[str], None], until: float
) -> list[Trial]:
    tried: list[Trial] = []
    for way in seen.ways:
        if trio.current_time() > until:
            break
        tell(f"trying `{'; '.join((*way.setup, way.words))}` in a sandbox")
        tried.append(await _try(way, seen, place, env.settings))
        if tried[-1].worked or tried[-1].slow:
            break
    return tried


async def _check_out(top: Path, handle: Handle, settings: Settings) -> Path:
    """Check HEAD out as a verify step does, in a directory that is removed with the workspace."""
    git = open_git(settings)
    head = await git.resolve(top, branch=None, commit=None)
    repository, checkout = handle.private / "trial.git", handle.private / "trial"
    await git.fetch(top, head, into=repository, depth=1)
    checkout.mkdir(mode=0o700)
    await git.materialise(repository, head, checkout)
    if trees.can_chown():
        await trio.to_thread.run_sync(trees.chown_tree, checkout, handle.uid)
    return checkout


async def _try(way: Way, seen: Survey, place: _Place, settings: Settings) -> Trial:
    try:
        made = [layer.target for layer in place.layers]
        lent = await lend_toolchains(way.tools, settings.variables, seen.top, made)
        lent = lend_dependencies(seen.dependencies, Checkout(path=seen.top), lent)
    except InputError as error:
        return Trial(way=way, lent=Lent(), why=error.message)
    plain = SandboxSpec(
        toolchains=lent.toolchains,
        env=lent.environment,
        tree=Mount(place.checkout, "/workspace"),
        tree_writable=False,
        fresh_home=True,
        dependencies=lent.dependencies,
    )
    began = trio.current_time()
    try:
        async with place.provider.open(place.handle, add_layers(plain, place.layers)) as workspace:
            with trio.move_on_after(EACH):
                return replace(await _run(way, lent, workspace), installs=place.installs)
    except PlatformError as error:
        return Trial(way=way, lent=lent, why=error.message)
    return Trial(way=way, lent=lent, installs=place.installs, seconds=trio.current_time() - began)


async def _run(way: Way, lent: Lent, workspace: Workspace) -> Trial:
    began = trio.current_time()
    command = ("sh", "-c", way.command) if isinstance(way.command, str) else way.command
    tried = Trial(way=way, lent=lent)
    for argv in (*(("sh", "-c", line) for line in way.setup), command):
        ended = await workspace.run(argv, keep_bytes=_MOST)
        tail = _tail(ended.stdout + b"\n" + ended.stderr)
        tried = replace(tried, exit=ended.exit, seconds=trio.current_time() - began, tail=tail)
        if not ended.exit.ok:
            break
    return tried


def _tail(output: bytes) -> tuple[str, ...]:
    lines = output.decode(errors="replace").splitlines()
    return tuple(sanitize(line.expandtabs(4), 200) for line in lines if line.strip())[-TAIL:]


def explain(tried: Trial, top: Path) -> tuple[str, str]:
    """Say why a way does not work, and what to do about it; the second may be empty."""
    if tried.why:
        return tried.why, "install it, or name another command: runner init --test COMMAND"
    if tried.empty and tried.exit is not None and tried.exit.code in (0, 5):
        return "it found no test", "name what runs them: runner init --test COMMAND"
    text = "\n".join(tried.tail)
    install = install_words(top, tried.way.language)
    hint = f"{install}" if install else ""
    if _NETWORK.search(text):
        return "it needs the network, and a workspace has none", hint
    if absent := _ABSENT.search(text):
        name = next(group for group in absent.groups() if group)
        return f"`{sanitize(name)}` is not installed in what a workspace sees", hint
    if "Read-only file system" in text:
        return "it writes into what is shown read-only", "name a command that does not: runner init --test COMMAND"
    return f"it {tried.exit}", "make it pass at HEAD, or name another command: runner init --test COMMAND"


def best(tried: Sequence[Trial]) -> Trial:
    """Return the trial that worked or was slow; else the first that started."""
    return next(
        (one for wanted in (lambda t: t.worked, lambda t: t.slow, lambda t: not t.why) for one in tried if wanted(one)),
        tried[0],
    )
