"""See ``plan``. Runs whatever became of the work; what it keeps is the condition for removing anything."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.errors import PlatformError
from runner.core.model import Outcome, Reason, SavedWork, failed, succeeded
from runner.events import events as ev
from runner.ports.git import Change, Snapshot
from runner.runtime.agents_file import changed
from runner.runtime.context import RunContext
from runner.runtime.incident_files import Delivery, mark_rehearsed
from runner.runtime.policy_scan import commit_tree, scan_tree
from runner.runtime.secrets import redact_files, shown_by
from runner.safefs import trees
from runner.steps.save.plan import SaveBody

STEP = "save"
MAX_NAMED = 100  # files that a `SavedWork` names


async def perform(body: SaveBody, run: RunContext) -> Outcome:
    if run.workspace.handle is None:
        return succeeded("nothing to save")
    await run.sandboxes.end_processes()
    provider, handle = run.workspace.require()
    await provider.retrieve(handle)
    outputs, warnings = await trio.to_thread.run_sync(_deliver_output, body, run)
    warnings += await trio.to_thread.run_sync(changed, run)
    scan = run.results.scan or await scan_tree(run, STEP, body.policies)
    if scan.truncated:
        text = "the scan did not finish, so nothing of this tree is given out; it is kept unchanged"
        return failed(Reason.POLICY, text, details=tuple(str(v) for v in scan.violations[:10]))
    if run.results.snapshot is None:
        snapshot, changes = await _unpublished(body, run)
    else:
        snapshot = run.results.snapshot
        changes = await run.deps.git.changes(run.paths.repository, run.workspace.base, snapshot.commit)
    saved_work = replace(await _saved_work(run, snapshot, changes), outputs=outputs)
    if run.unchecked:
        warnings += (f"what was saved could not be searched for secrets: {', '.join(run.unchecked)}",)
    if saved_work.patch is not None:
        shown = await shown_by(run.deps.redact, run.paths.directory, saved_work.patch)
        warnings += tuple(f"{saved_work.patch} shows secret {name}, which the repository had before" for name in shown)
    run.results.saved_work = saved_work
    await run.emit(ev.WorkSaved(saved_work))
    what = f"{saved_work.changed} changed, patch {saved_work.patch_bytes} bytes" if saved_work.patch else "no change"
    if saved_work.withheld:
        what += f"; withheld without {len(saved_work.left_out)} offending"
    return succeeded(what, warnings=warnings)


async def _unpublished(body: SaveBody, run: RunContext) -> tuple[Snapshot, Sequence[Change]]:
    """A commit of the work that no snapshot step got to, or that policy kept from being published."""
    message = f"unpublished work of run {run.id}"
    snapshot, changes, violations = await commit_tree(run, STEP, body.policies, message)
    if violations:  # they are excluded from now on
        snapshot, changes, _ = await commit_tree(run, STEP, body.policies, message)
    return snapshot, changes


async def _saved_work(run: RunContext, snapshot: Snapshot, changes: Sequence[Change]) -> SavedWork:
    git, repository = run.deps.git, run.paths.repository
    withheld = bool(run.results.offending) or (run.results.snapshot is None and bool(run.unchecked))
    left_out = tuple(sorted(path.decode("utf-8", "backslashreplace") for path in run.results.offending))[:100]
    if not changes:
        return SavedWork(
            commit=snapshot.commit,
            patch=None,
            patch_sha256=None,
            patch_bytes=0,
            changed=0,
            withheld=withheld,
            left_out=left_out,
        )
    name = "withheld.patch" if withheld else "work.patch"
    path = run.paths.directory / name
    path.unlink(missing_ok=True)
    try:
        size = await git.patch(repository, run.workspace.base, snapshot.commit, path)
    except PlatformError:
        path.unlink(missing_ok=True)  # half of it is worth nothing, and the disk may be full
        raise
    sha256 = await trio.to_thread.run_sync(_sha256, path)
    return SavedWork(
        commit=snapshot.commit,
        patch=name,
        patch_sha256=sha256,
        patch_bytes=size,
        changed=len(changes),
        withheld=withheld,
        left_out=left_out,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _deliver_output(body: SaveBody, run: RunContext) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy what the agent put into ``/output`` out of its reach, and to the incident; where it is, and warnings.

    The incident gets the archive of the agent's session and the list of its commands as well, where there are such.
    The report of an earlier run stays there under another name, and that of a rehearsal says first what it is.

    Links and special files stay behind.
    """
    _, handle = run.workspace.require()
    kept = delivered = run.paths.directory / "output"
    skipped = trees.copy_out(handle.private / "output", kept)
    warnings = tuple(redact_files(run.deps.redact, kept))
    if run.rehearsal is not None and body.report:
        mark_rehearsed(kept / body.report, run.rehearsal)
    names = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    delivery = Delivery(body.incident, body.member) if body.incident is not None else None
    if delivery is not None:
        skipped += delivery.put_logs(run.paths.logs)
        skipped += delivery.put_output(kept, body.report)
        delivered = delivery.output
    warnings += tuple(f"output left behind: {what}" for what in map(run.deps.redact.text, skipped))
    return tuple(str(delivered / name) for name in names[:MAX_NAMED]), warnings
