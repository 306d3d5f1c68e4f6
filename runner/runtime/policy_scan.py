"""Judge a run's tree: on disk before objects are written, and its changes before anything is published."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import trio
from msgspec.structs import replace

from runner.core.model import Outcome, Reason, Violation, failed
from runner.core.plural import plural
from runner.core.sanitize import printable_path
from runner.events import events as ev
from runner.policy.paths import PathPolicy, compose
from runner.ports.git import Change, Snapshot, SnapshotOptions
from runner.runtime.context import RunContext
from runner.runtime.path_digests import digests
from runner.runtime.secrets import leaks, output_leaks
from runner.runtime.tree_scan import ScanResult, scan
from runner.spec.model import PolicySpec

_NAMED = 3  # violations in a sentence; all of them are below it


def policy_of(specs: Sequence[PolicySpec]) -> PathPolicy:
    return compose([PathPolicy(s.allowed_paths, s.forbidden_patterns, s.max_file_size) for s in specs])


async def scan_tree(run: RunContext, step: str, specs: Sequence[PolicySpec]) -> ScanResult:
    """Scan the tree on disk, and record its violations."""
    _, handle = run.workspace.require()
    result = _with(await _scan(run, specs), await _changed(run))
    if run.workspace.has_repository:
        result = await _with_parts(run, result)
    run.results.scan, run.results.offending = result, result.offending
    shown = await output_leaks(run.deps.redact, handle.private / "output")
    result = replace(result, violations=result.violations + shown)  # no file of the tree offends by that
    run.results.scan = result
    if result.violations:
        await run.emit(ev.ViolationsFound(step, result.violations))
    return result


async def scan_checkout(run: RunContext, step: str, specs: Sequence[PolicySpec]) -> tuple[Violation, ...]:
    """Scan the tree before anything runs in it; a clean tree now says nothing about later."""
    violations = (await scan_tree(run, step, specs)).violations
    if not violations:
        run.results.scan = None
    return violations


def broken(violations: Sequence[Violation], where: str = "") -> Outcome:
    """Return the outcome of a step that found violations."""
    text = f"{plural(len(violations), 'violation')}{where}: "
    text += "; ".join(str(violation) for violation in violations[:_NAMED])
    if (more := len(violations) - _NAMED) > 0:
        text += f"; and {more} more"
    return failed(Reason.POLICY, text, details=tuple(str(v) for v in violations))


async def _scan(run: RunContext, specs: Sequence[PolicySpec]) -> ScanResult:
    _, handle = run.workspace.require()

    skipped = (".git", *run.workspace.injected_files)
    return await trio.to_thread.run_sync(
        lambda: scan(handle.tree, policy_of(specs), skip_top=skipped, should_stop=_stopping)
    )


def _stopping() -> bool:
    trio.from_thread.check_cancelled()
    return False


async def _changed(run: RunContext) -> tuple[Violation, ...]:
    """Find protected paths that have changed since before the first command."""
    _, handle = run.workspace.require()
    before = run.workspace.protected
    if not before:
        return ()
    look = partial(digests, handle.tree, before, checkpoint=trio.from_thread.check_cancelled)
    now = await trio.to_thread.run_sync(look)
    return tuple(
        Violation(path.rstrip("/"), "protected-changed", "" if now[path] else "it is gone")
        for path in before
        if now[path] != before[path]
    )


async def _with_parts(run: RunContext, result: ScanResult) -> ScanResult:
    """Judge submodules and files of LFS, which no work can change. One of LFS as it was fetched is not too large."""
    _, handle = run.workspace.require()
    changed = await run.deps.git.part_changes(run.paths.repository, handle.tree)
    whole = {printable_path(_text(path)) for path in changed.lfs_files - changed.lfs.keys()}
    kept = tuple(one for one in result.violations if one.rule != "max-file-size" or one.path not in whole)
    offending = result.offending - {path for path in changed.lfs_files if printable_path(_text(path)) in whole}
    found = [(path, "submodule-changed", how) for path, how in changed.submodules.items()]
    found += [(path, "lfs-changed", how) for path, how in changed.lfs.items()]
    return replace(
        result,
        violations=kept + tuple(Violation(printable_path(_text(path)), rule, how) for path, rule, how in found),
        offending=offending | {path for path, _, _ in found},
        outside=changed.new,
    )


def _with(result: ScanResult, more: tuple[Violation, ...]) -> ScanResult:
    return replace(
        result,
        violations=result.violations + more,
        offending=result.offending | {violation.path.encode() for violation in more},
    )


async def commit_tree(
    run: RunContext, step: str, specs: Sequence[PolicySpec], message: str
) -> tuple[Snapshot, list[Change], tuple[Violation, ...]]:
    """Commit the tree on disk without offending files; changes that break policy offend from then on."""
    _, handle = run.workspace.require()
    repository = await run.repository()
    foreign = {name.encode() for name in (*run.workspace.inputs, *run.workspace.injected_files)}
    wanted = SnapshotOptions(message, run.author(), run.results.offending | foreign)
    git = run.deps.git
    snapshot = await git.snapshot(repository, handle.tree, run.workspace.base, wanted)
    nothing = run.workspace.base is None and not snapshot.entries  # as most triages change, without asking git
    changes = [] if nothing else await git.changes(repository, run.workspace.base, snapshot.commit)
    sizes = ((_text(change.path), change.entry.size if change.entry else None) for change in changes)
    violations = policy_of(specs).judge_changes(sizes) + await leaks(run.deps.redact, handle.tree, changes)
    unusable = await judge_usable(run, snapshot, changes)
    if violations or unusable:
        named = {printable_path(_text(change.path)): change.path for change in changes}
        run.results.offending |= {named[violation.path] for violation in violations} | unusable.keys()
        violations += tuple(unusable.values())
        await run.emit(ev.ViolationsFound(step, violations))
    return snapshot, changes, violations


async def judge_usable(run: RunContext, snapshot: Snapshot, changes: Sequence[Change]) -> dict[bytes, Violation]:
    """The changed paths because of which no run could start from a snapshot.

    Some disks take them for others (all such paths when none of them changed), or they are files that git reads, and
    it refuses what they say.
    """
    changed = {change.path for change in changes}
    found = [(path, "name-collision", _text(other)) for path, other in snapshot.collisions if path in changed]
    found = found or [(path, "name-collision", _text(other)) for path, other in snapshot.collisions]
    refused = await run.deps.git.rejected_files(run.paths.repository, changes)
    found += [(path, "git-refuses", words) for path, words in refused.items()]
    return {path: Violation(printable_path(_text(path)), rule, printable_path(detail)) for path, rule, detail in found}


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
