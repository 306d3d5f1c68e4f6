"""See ``plan``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256

import trio

from runner.core.errors import InputChanged
from runner.core.model import Outcome, Reason, failed, succeeded
from runner.runtime.context import RunContext
from runner.runtime.dependency_layers import Layer, LayerRecord, NotKept, installation_spec, lay_out, share
from runner.runtime.exec import LogFile, blame, open_logs, run_command, written
from runner.runtime.network import open_network
from runner.safefs import trees
from runner.safefs.safe_open import read_beneath
from runner.spec.model import MAX_LOCK_FILE, DependencySpec
from runner.steps.dependencies.layers import hold_until_end, layers_of
from runner.steps.dependencies.plan import DependenciesBody
from runner.steps.setup.plan import command_words

STEP = "dependencies"


async def perform(body: DependenciesBody, run: RunContext) -> Outcome:
    """Give the run each layer; make those that nobody has kept, one after the other.

    Another run that makes the same layer is waited for. A layer is locked until the run ends.
    """
    run.results.layers = ()
    probe = run.workspace.probe
    assert probe is not None  # provision is a need
    files = await trio.to_thread.run_sync(_read_files, body, run)
    found = []
    with open_logs(run.paths.logs, STEP) as logs:
        for one, layer in layers_of(body, run.plan, run.paths.home, needs_image=probe.needs_image):
            record, how = run.results.kept_layers.get(layer.path), "kept from"
            if record is None:
                run.step.awaited = f"another run makes or uses `{layer.path}`"
                record, lock = await layer.lock()
                run.step.awaited = ""
                with ExitStack() as undo:
                    undo.callback(os.close, lock)
                    if record is None:
                        made = await _make(one, layer, files, run, body=body, logs=logs)
                        if isinstance(made, Outcome):
                            return made
                        record, how = made, "made by"
                        share(lock)
                        await trio.to_thread.run_sync(run.deps.evict_layers)
                    undo.pop_all()
                run.sandboxes.services.start_soon(hold_until_end, lock)
                run.results.kept_layers[layer.path] = record
            run.results.layers += layer.mounts(one.keep)
            found.append(f"{', '.join(one.keep)} {how} {record.by}, {record.bytes >> 20} MiB")
    return succeeded("; ".join(found), details=tuple(str(m.source) for m in run.results.layers))


def _read_files(body: DependenciesBody, run: RunContext) -> dict[str, bytes]:
    """Read the files of the clone that commands get. Raises ``InputChanged``."""
    _, handle = run.workspace.require()
    found = {}
    for name, planned in body.files.items():
        try:
            found[name] = read_beneath(handle.tree, name, MAX_LOCK_FILE)
        except OSError as error:
            raise InputChanged(f"`{name}` of the clone cannot be read: {error.strerror}") from error
        if sha256(found[name]).hexdigest() != planned:
            raise InputChanged(f"`{name}` has changed since it was planned", hint="plan again")
    return found


async def _make(
    one: DependencySpec,
    layer: Layer,
    files: Mapping[str, bytes],
    run: RunContext,
    *,
    body: DependenciesBody,
    logs: tuple[LogFile, LogFile],
) -> LayerRecord | Outcome:
    """Run a command in a sandbox that has its files and nothing else, and keep what it has filled."""
    place, words = run.paths.installation, command_words(one.argv)
    _, handle = run.workspace.require()
    since = written(logs)
    try:
        await trio.to_thread.run_sync(lay_out, place, {name: files[name] for name in one.files}, handle.uid)
        workspace = await run.open_as(installation_spec(body.mount_plan, place))
        async with open_network(run, workspace, STEP, body.network) as proxied:
            exit = await run_command(run, workspace, one.argv, logs, env=proxied)
        await run.sandboxes.close()
        if not exit.ok:
            blame(run, STEP, logs, since)
            return failed(Reason.SETUP, f"`{words}` {exit}")
        return await trio.to_thread.run_sync(layer.keep, place, one.keep, f"run {run.id}")
    except NotKept as why:
        return failed(Reason.SETUP, f"`{words}` made nothing that can be kept: {why}")
    finally:
        with trio.CancelScope(shield=True):
            await run.sandboxes.close()
            await trio.to_thread.run_sync(trees.remove, place)
