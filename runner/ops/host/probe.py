"""Probe sandboxes: try in a workspace of each provider what a command can really do there.

The workspace is an ordinary one, so ``runner gc`` finds and removes what a killed ``doctor --probe`` leaves.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from functools import partial

import trio
from msgspec import Struct
from msgspec.structs import replace

import runner.providers
from runner.core import plugins
from runner.core.errors import PlatformError, RunnerError, UsageError
from runner.core.ids import IMAGE_HINT, is_image
from runner.core.model import Feature, Handle, IsolationClass
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold, open_workspace_env
from runner.ops.workspaces.workspaces import WorkspaceOptions, create, destroy
from runner.ports.network import EgressConnection
from runner.ports.provider import Provider, SandboxSpec, Workspace
from runner.sandbox.escapes import ESCAPES, Escape, breaches, open_bait
from runner.sandbox.network_escapes import NETWORK_ESCAPES, asked_of, open_network_bait

EACH = 10.0  # seconds for one probe
ALL = 120.0  # for all of one provider
NETWORK_EACH = 300.0  # seconds for one that makes many connections
FLOOD = 300  # connections
TTL = 600.0  # seconds until `runner gc` removes what was left


class EscapeResult(StrEnum):
    """``GAP`` is a way out that the provider declares; ``UNTRIED`` is neither good nor bad."""

    REFUSED = "refused"
    OPEN = "open"
    GAP = "gap"
    UNTRIED = "untried"


class EscapeAttempt(Struct, frozen=True, kw_only=True):
    """Result of one probe: ``told`` says what it could do, or why it was not tried; ``reason`` why a gap is
    declared.
    """

    name: str
    about: str
    result: EscapeResult
    told: tuple[str, ...] = ()
    reason: str | None = None


class ProbedProvider(Struct, frozen=True, kw_only=True):
    """A provider with its results, or the reason why it was skipped."""

    provider: str
    isolation: IsolationClass
    tried: tuple[EscapeAttempt, ...] = ()
    skipped: str | None = None
    hint: str | None = None

    @property
    def holds(self) -> bool:
        return all(tried.result is not EscapeResult.OPEN for tried in self.tried)


async def examine_all(settings: Settings, names: Sequence[str], image: str | None) -> list[ProbedProvider]:
    """Probe providers one after the other, those with images in ``image``. Raises ``UnknownPlugin``, ``UsageError``.

    Bounded in time. Leaves nothing, also when it is cancelled.
    """
    if image is not None and not is_image(image):
        raise UsageError(f"`{sanitize(image)}` is not the name of an image", hint=f"write {IMAGE_HINT}")
    async with open_workspace_env(replace(settings, workspace_ttl=TTL)) as env:
        return [await _examine(env, name, image, _tried) for name in names]


async def examine_networks(
    settings: Settings, names: Sequence[str], image: str | None, *, many: int = FLOOD
) -> list[ProbedProvider]:
    """Probe the networks of providers as ``examine_all`` does the rest; ``many`` connections are a flood."""
    async with open_workspace_env(replace(settings, workspace_ttl=TTL)) as env:
        return [await _examine(env, name, image, partial(_tried_by_network, many=many)) for name in names]


_Try = Callable[[WorkspaceEnv, str, str | None], Awaitable[tuple[EscapeAttempt, ...]]]


async def _examine(env: WorkspaceEnv, name: str, image: str | None, attempt: _Try) -> ProbedProvider:
    probe = await open_provider(name, env.settings).probe()
    examined = ProbedProvider(provider=name, isolation=probe.isolation)
    if not probe.available:
        return replace(examined, skipped=probe.reason or "not available", hint=probe.hint)
    lacks = [probe.missing[one] for one in (Feature.NETWORK_NONE, Feature.RELAY) if not probe.enforces(one)]
    if attempt is not _tried and lacks:
        return replace(examined, skipped=f"it cannot close a network: {lacks[0]}")
    if probe.needs_image and image is None:
        what = name if attempt is _tried else "network"
        hint = f"runner doctor --probe {what} --image REF, for one that has sh and python3"
        return replace(examined, skipped="it makes workspaces from an image, and none is named", hint=hint)
    try:
        return replace(examined, tried=await attempt(env, name, image if probe.needs_image else None))
    except PlatformError as error:
        return replace(examined, skipped=error.message, hint=error.hint)


async def _tried(env: WorkspaceEnv, name: str, image: str | None) -> tuple[EscapeAttempt, ...]:
    tried: list[EscapeAttempt] = []
    probe = await open_provider(name, env.settings).probe()
    declared = getattr(plugins.load(runner.providers, name), "GAPS", {})
    gaps = {**declared, **probe.escapes}  # not observed where the host itself refuses it
    async with open_scratch(env, WorkspaceOptions(provider=name, image=image)) as workspace:
        with open_bait(env.settings.home) as bait, trio.move_on_after(ALL):
            for escape in ESCAPES:
                tried.append((await _try(workspace, escape, bait, gaps.get(escape.name)))[0])
    late = (
        EscapeAttempt(name=escape.name, about=escape.about, result=EscapeResult.UNTRIED, told=("no time was left",))
        for escape in ESCAPES[len(tried) :]
    )
    return (*tried, *late)


async def _tried_by_network(env: WorkspaceEnv, name: str, image: str | None, *, many: int) -> tuple[EscapeAttempt, ...]:
    from runner.network.proxy import open_egress  # with all that HTTP takes

    tried: list[EscapeAttempt] = []
    options = WorkspaceOptions(provider=name, image=image)
    async with open_scratch(env, options) as workspace:
        with open_network_bait(_own_addresses(), many=many) as bait:
            for escape in NETWORK_ESCAPES:
                told: list[EgressConnection] = []
                egress = open_egress(bait.allowed, told.append, reach={}, resolve=bait.resolve)
                async with egress as session, workspace.listen(session.serve) as port:
                    proxied = {**bait.variables, "PROBE_PROXY": str(port)}
                    one, out = await _try(workspace, escape, proxied, None, seconds=NETWORK_EACH)
                if missed := asked_of(out) - sum(each.count for each in told):
                    bait.reached.append(f"{missed} connections to the proxy are not recorded")
                if one.result is EscapeResult.REFUSED and bait.reached:
                    one = replace(one, result=EscapeResult.OPEN, told=tuple(dict.fromkeys(bait.reached)))
                bait.reached.clear()
                tried.append(one)
    return tuple(tried)


def _own_addresses() -> list[str]:
    """Return the addresses by which this host is known to others; nothing is sent to find out."""
    found = []
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as end:
            end.connect((somewhere, 9))
            found.append(end.getsockname()[0])
    return found


@asynccontextmanager
async def open_scratch(env: WorkspaceEnv, options: WorkspaceOptions) -> AsyncIterator[Workspace]:
    async with (
        make_scratch(env, options, "doctor") as (_, provider, handle),
        provider.open(handle, SandboxSpec()) as workspace,
    ):
        yield workspace


@asynccontextmanager
async def make_scratch(
    env: WorkspaceEnv, options: WorkspaceOptions, doing: str
) -> AsyncIterator[tuple[HeldWorkspace, Provider, Handle]]:
    """Make a workspace for the block and destroy it afterwards; ``doing`` names the holder of its lease."""
    row = await create(env, options)
    try:
        async with hold(env, row, doing) as held:
            yield (held, *await held.handle())
    finally:
        with trio.CancelScope(shield=True):
            await destroy(env, row.id, discard=True)


async def _try(
    workspace: Workspace, escape: Escape, bait: Mapping[str, str], gap: str | None, *, seconds: float = EACH
) -> tuple[EscapeAttempt, bytes]:
    """Run an escape; return its result, and what it printed."""
    tried = EscapeAttempt(name=escape.name, about=escape.about, result=EscapeResult.REFUSED)
    try:
        with trio.fail_after(seconds):
            ended = await workspace.run(escape.argv, env=bait)
            lives = (await workspace.run(["true"])).exit.code is not None  # an image may have no such program
    except trio.TooSlowError:
        return replace(tried, result=EscapeResult.UNTRIED, told=(f"it did not end within {seconds:g}s",)), b""
    except RunnerError as error:
        found: list[str] | None = [f"ends the sandbox: {error.message}"]
        out = b""
    else:
        out = ended.stdout
        found = breaches(ended.stdout) if lives else ["ends the sandbox"]
        if found is None:
            words = ended.stderr.decode(errors="replace").splitlines()[-1:]
            return replace(tried, result=EscapeResult.UNTRIED, told=(f"the probe {ended.exit}", *words)), out
    if not found:
        return tried, out
    result = EscapeResult.OPEN if gap is None else EscapeResult.GAP
    return replace(tried, result=result, told=tuple(found), reason=gap), out
