"""See ``plan``. Inputs are copied, so that an incident's own files are never within an agent's reach."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from shlex import quote

import trio

from runner.core.errors import (
    PlatformError,
    ProtectedIgnored,
    ProviderBusy,
    ProviderFailed,
    ProviderUnavailable,
    WorkspaceLimit,
)
from runner.core.model import Feature, Handle, Limits, Outcome, PoolMissReason, SlotKey, succeeded
from runner.core.sanitize import excerpt
from runner.events import events as ev
from runner.ports.provider import Images, Probe, Provider, WorkspaceRequest
from runner.runtime.agents_file import place_in_project, place_in_tree
from runner.runtime.context import RunContext, read_input, write_new
from runner.safefs.safe_open import open_beneath
from runner.spec.incident import left_out
from runner.spec.model import ContextFile
from runner.steps.provision.plan import ProvisionBody

STEP = "provision"
_CHUNK = 16 << 20  # bytes


async def perform(body: ProvisionBody, run: RunContext) -> Outcome:
    """Walk the chain of providers, of which each is tried once in a run; every hop is an event with its reason."""
    while (found := await next_fit(body, run)) is not None:
        name, provider, probe = found
        run.workspace.provider_name = name
        reason = await _create(body, run, provider, probe)
        if reason is None:
            await _fill(body, run)
            if body.unprotected:
                message = f"project `{body.project}` is not isolated, so {', '.join(body.unprotected)} can be written"
                await run.emit(ev.WarningIssued(ProtectedIgnored.code, message))
            return succeeded(f"{name}, isolation {probe.isolation.value}{_warmth(run)}")
        await _refuse(run, name, reason)
    refused = "; ".join(f"`{name}`: {reason}" for name, reason in run.workspace.rejected_providers.items())
    raise ProviderUnavailable(f"no provider could make the workspace: {refused}", hint="see `runner doctor`")


def _warmth(run: RunContext) -> str:
    if run.workspace.pool_miss is not None:
        return f", made cold: {run.workspace.pool_miss.value}"
    return ", kept warm" if run.workspace.handle is not None and run.workspace.handle.slot else ""


async def next_fit(body: ProvisionBody, run: RunContext) -> tuple[str, Provider, Probe] | None:
    """The next provider of the chain that was not tried yet and is what is asked for; the others are refused."""
    for name in body.providers:
        if name in run.workspace.rejected_providers or name == run.workspace.provider_name:
            continue
        provider = run.deps.provider(name)
        ask = partial(_ask, body, run, provider)
        last = run.workspace.provider is None and name == body.providers[-1]  # without one, the run is over
        try:
            return name, provider, await (run.retry("asking the provider", ask) if last else ask())
        except PlatformError as error:
            await _refuse(run, name, error.message)
    return None


async def _ask(body: ProvisionBody, run: RunContext, provider: Provider) -> Probe:
    """Raises ``ProviderBusy`` when it is not available, though one of its chain was when the run was planned, and
    ``ProviderFailed`` when it is not what is asked for."""
    probe = run.deps.seen(provider.name) or await provider.probe()
    if not probe.available:
        raise ProviderBusy(probe.reason or "not available")
    probe = probe.on_shared_disk() if body.shared else probe
    if reason := _unfit(body, probe):
        raise ProviderFailed(reason)
    return probe


async def _refuse(run: RunContext, name: str, reason: str) -> None:
    run.workspace.rejected_providers[name] = reason
    await run.emit(ev.ProviderRejected(name, reason))


def _unfit(body: ProvisionBody, probe: Probe) -> str | None:
    if probe.isolation < body.isolation:
        return f"isolation {probe.isolation.value} is below {body.isolation.value}"
    lacking = [feature.value for feature in body.must if not (probe.enforces(feature) or feature in probe.watched)]
    return f"cannot enforce {', '.join(lacking)}" if lacking else None


async def _create(body: ProvisionBody, run: RunContext, provider: Provider, probe: Probe) -> str | None:
    """Make the workspace; why not, when it could not be made."""
    name = run.workspace_id
    limits = enforceable(body.limits, probe)
    request = WorkspaceRequest(
        id=name,
        run=run.id,
        nonce=run.deps.nonce,
        limits=limits,
        project=body.project,
        shared=body.shared,
        image=body.image,
    )
    run.workspace.attach(provider, probe, None)
    await run.emit(ev.ResourceIntended(STEP, "workspace", name, provider.name))
    try:
        await run.deps.room(name)
        handle = await _warm(body, run, provider, probe, request)
        if handle is None:
            await run.retry("pulling the image", partial(_pull, body, run, provider))
        handle = handle or await run.retry("making the workspace", partial(provider.create, request))
    except (PlatformError, WorkspaceLimit) as error:
        await run.emit(ev.ResourceRemoved(STEP, "workspace", name))
        run.workspace.reset()
        if isinstance(error, WorkspaceLimit):
            raise
        return f"{error.message}; {error.hint}" if error.hint else error.message
    run.workspace.attach(provider, probe, handle)
    await run.emit(ev.ResourceCreated(STEP, "workspace", name), ev.ProviderChosen(provider.name, probe.isolation))
    return None


async def _pull(body: ProvisionBody, run: RunContext, provider: Provider) -> None:
    """Download the image unless it is here."""
    if body.image is None or body.pull == "never" or not isinstance(provider, Images):
        return
    name = body.base_image or body.image

    async def report(received: int, expected: int) -> None:
        await run.emit(ev.ImagePullProgressed(STEP, name, received, expected))

    await provider.pull(body.image, name, report)


async def _warm(
    body: ProvisionBody, run: RunContext, provider: Provider, probe: Probe, request: WorkspaceRequest
) -> Handle | None:
    """A workspace that was kept warm, if there is one for this run."""
    if not probe.enforces(Feature.WARM_POOL) or run.resume_source is not None:
        return None  # the first sandbox of a run that goes on may be of another shape
    found = await run.deps.warm(provider, slot_key(body, provider.name, probe), request)
    if isinstance(found, Handle):
        await run.emit(ev.SlotClaimed(request.id, str(found.slot)))
        return found
    if found is not None or body.warm.size:
        run.workspace.pool_miss = found or PoolMissReason.NO_KEEPER
        await run.emit(ev.PoolMissed(request.id, run.workspace.pool_miss))
    return None


def slot_key(body: ProvisionBody, provider: str, probe: Probe) -> SlotKey:
    """The key of the slots that a run's workspace can come from."""
    warm, limits = body.warm, enforceable(body.limits, probe)
    return SlotKey(
        provider=provider,
        image=body.image,
        limits=limits,
        network=warm.network,
        toolchains=warm.toolchains,
        shared=body.shared,
        policy=warm.policy,
        protected=warm.protected if probe.protects_at_start else (),
        place=probe.place,
    )


def enforceable(limits: Limits, probe: Probe) -> Limits:
    """Defaults that this provider cannot enforce are left out; the plan said so."""
    return Limits(
        limits.cpus if probe.enforces(Feature.CPU) else None,
        limits.memory_bytes if probe.enforces(Feature.MEMORY) else None,
        limits.disk_bytes if probe.enforces(Feature.DISK) else None,
        limits.pids if probe.enforces(Feature.PIDS) else None,
    )


async def _fill(body: ProvisionBody, run: RunContext) -> None:
    provider, handle = run.workspace.require()
    lost = await trio.to_thread.run_sync(_write_inputs, body, run, handle)
    for code, message in (*body.advice, *((one.code, one.message) for one in map(left_out, lost))):
        await run.emit(ev.WarningIssued(code, message))
    if body.inputs_in_tree:
        run.workspace.inputs = tuple(name for name, file in body.incident if file.whole)
    if body.shared:
        await place_in_project(run, body.agents_file)
    else:
        await place_in_tree(run, body.agents_file)
    await provider.chown_to_workspace_user(handle)


def _write_inputs(body: ProvisionBody, run: RunContext, handle: Handle) -> list[str]:
    """Put the inputs there; large files of the incident that could not be, with the reason."""
    lost = []
    for name, wanted in body.incident:
        if not wanted.whole:
            lost += _copy(name, wanted, handle.private / "incident" / name)
            continue
        content = read_input(wanted)
        write_new(handle.private / "incident" / name, content, 0o644)
        if body.inputs_in_tree:
            write_new(handle.tree / name, content, 0o644)
    for name, wanted in body.skills:
        content = read_input(wanted)
        write_new(handle.private / "skills" / name, content, 0o755 if content.startswith(b"#!") else 0o644)
    if body.script is not None:
        write_new(handle.private / "runner" / "script", read_input(body.script), 0o755)
    elif body.files:
        write_new(handle.private / "runner" / "script", _player(body.files), 0o755)
    task = {"run": {"id": run.id, "name": run.plan.name}, **run.plan.values}
    task.pop("incident", None)
    write_new(handle.private / "runner" / "task.json", json.dumps(task, indent=2).encode(), 0o644)
    return lost


def _copy(name: str, wanted: ContextFile, to: Path) -> list[str]:
    """Copy a file of the incident as it is by now, as much as was planned; it may be a log that others write."""
    to.parent.mkdir(parents=True, exist_ok=True)
    left = wanted.size
    try:
        with (
            os.fdopen(open_beneath(wanted.path.parents[name.count("/")], name), "rb") as source,
            os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as copy,
        ):
            os.fchmod(copy.fileno(), 0o644)
            while left and (sent := os.sendfile(copy.fileno(), source.fileno(), None, min(left, _CHUNK))):
                left -= sent
                trio.from_thread.check_cancelled()
    except OSError as error:
        to.unlink(missing_ok=True)
        return [f"`{excerpt(name)}` ({error.strerror})"]
    return []


def _player(files: Iterable[tuple[str, str, bool]]) -> bytes:
    """A shell script that writes the files; quoting is the only thing that could go wrong, so it is ``shlex``'s."""
    lines = ["set -eu"]
    for path, content, executable in files:
        target = quote(f"./{path}")
        lines.append(f'mkdir -p -- "$(dirname -- {target})"')
        lines.append(f"printf %s {quote(content)} > {target}")
        lines += [f"chmod +x -- {target}"] if executable else []
        lines.append(f"echo wrote {target}")
    return "\n".join([*lines, ""]).encode()
