"""See ``plan``. All results are kept, also after the first failure."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import CheckoutDiffers, CleanUpIncomplete, RunnerError
from runner.core.model import Check, CheckKind, Mount, Outcome, Reason, failed, succeeded
from runner.core.sanitize import printable_path
from runner.core.settings import limit
from runner.events import events as ev
from runner.policy.paths import PathPolicy, matcher
from runner.ports.git import TreeEntry
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.runtime.exec import LogFile, blame, open_logs, run_command, written
from runner.runtime.file_states import Untouched
from runner.runtime.network import open_network
from runner.safefs import trees
from runner.safefs.safe_open import read_beneath
from runner.spec.model import ReportCheck, VerifySpec
from runner.steps.setup.plan import command_words
from runner.steps.verify.citations import check_citations
from runner.steps.verify.plan import VerifyBody
from runner.triage.sections import bodies_of, is_empty, known_as

STEP = "verify"
MAX_REPORT = 16 << 20  # bytes
_NAMED = 3  # files that a check names
MAX_OUTPUT = 1 << 20  # bytes of a file that a later run reads


class Results(Struct):
    checks: list[Check] = []
    no_evidence: bool = False

    def add(self, kind: CheckKind, what: str, ok: bool, found: str = "", size_bytes: int | None = None) -> None:
        self.checks.append(Check(kind=kind, what=what, ok=ok, found=found, size_bytes=size_bytes))

    def outcome(self) -> Outcome:
        total = len(self.checks)
        bad, good = ([str(check) for check in self.checks if check.ok is ok] for ok in (False, True))
        if not bad:
            return succeeded(f"{total} of {total} checks", details=tuple(good))
        reason = Reason.NO_EVIDENCE if self.no_evidence else Reason.VERIFY
        return failed(reason, f"{len(bad)} of {total} checks failed: {bad[0]}", details=(*bad, *good))


async def perform(body: VerifyBody, run: RunContext) -> Outcome:
    results = Results()
    verify = body.verify
    try:
        wanted = {verify.report.path: verify.report} if verify.report is not None else {}
        for path in body.outputs:
            wanted.setdefault(path, ReportCheck(path, 0, ()))
        for path, report in wanted.items():
            check_report(report, run, results, most=MAX_OUTPUT if path in body.outputs else MAX_REPORT)
        if verify.report is not None and "incident" in run.plan.values:
            results.checks += await check_citations(verify.report.path, run)
        if verify.needs_tree:
            await _check_tree(body, run, results)
    finally:
        run.events.pending.append(ev.ChecksFinished(STEP, tuple(results.checks)))
    return results.outcome()


def check_report(wanted: ReportCheck, run: RunContext, results: Results, *, most: int = MAX_REPORT) -> None:
    """The report that the manifest asks for is the evidence; an agent's exit status is not."""
    _, handle = run.workspace.require()
    try:
        text = read_beneath(handle.private / "output", wanted.path, most).decode(errors="replace")
    except (OSError, RunnerError) as error:
        results.no_evidence = True
        results.add(CheckKind.REPORT, f"report {wanted.path}", False, _unread(error))
        return
    size = len(text.encode())
    results.no_evidence |= size < wanted.min_bytes
    found = f"{size} bytes of at least {wanted.min_bytes}"
    results.add(CheckKind.REPORT, f"report {wanted.path}", size >= wanted.min_bytes, found, size)
    bodies = bodies_of(text)
    for title in wanted.sections:
        body = bodies.get(known_as(title))
        filled = body is not None and not is_empty(body)
        found = "" if filled or body is None else "it is empty"
        results.add(CheckKind.SECTION, f"report section `{title}`", filled, found)


def _unread(error: OSError | RunnerError) -> str:
    """Return why a report could not be read."""
    if isinstance(error, RunnerError):
        return error.message
    words = {errno.ENOENT: "none was written", errno.ELOOP: "is a link", errno.EFBIG: f"too large, {error.strerror}"}
    return words.get(error.errno or 0) or str(error.strerror)


async def _check_tree(body: VerifyBody, run: RunContext, results: Results) -> None:
    assert run.results.snapshot is not None  # the snapshot step is a need
    paths, git = run.paths, run.deps.git
    name = paths.checkout.name
    await run.emit(ev.ResourceIntended(STEP, "checkout", name, str(paths.checkout)))
    paths.checkout.mkdir(parents=True)
    entries = await git.materialise(paths.repository, run.results.snapshot.commit, paths.checkout)
    if trees.can_chown():
        _, handle = run.workspace.require()
        await trio.to_thread.run_sync(trees.chown_tree, paths.checkout, handle.uid)
    check_files(body.verify, entries, results)
    spec = replace(
        run.with_layers(body.mount_plan),
        tree=Mount(paths.checkout, "/workspace"),
        tree_writable=False,
        fresh_home=True,
    )
    workspace = await run.open_as(spec)
    network = open_network(run, workspace, STEP, body.network)
    with open_logs(paths.logs, STEP) as logs, Untouched(workspace.tree, entries) as own:
        async with network as proxied:
            env = {**run.variables(workspace.paths), **proxied}
            await _run_commands(body.verify, run, workspace, logs, results, env=env, own=own)
    await run.sandboxes.close()
    different = await git.compare(paths.repository, run.results.snapshot.commit, paths.checkout)
    if different:
        raise CheckoutDiffers(f"verifying changed its own tree in {len(different)} places")
    await discard_checkout(run, STEP)


def check_files(verify: VerifySpec, entries: Sequence[TreeEntry], results: Results) -> None:
    """Required patterns each match something in the clean checkout, forbidden ones nothing."""
    paths = [entry.path.decode("utf-8", "surrogateescape") for entry in entries]
    for pattern in verify.required:
        rule = PathPolicy((pattern,), (), 0)  # exactly as written, which a forbidden pattern is not
        results.add(CheckKind.REQUIRED, f"required file `{pattern}`", any(rule.judge(p).allowed for p in paths))
    for pattern in verify.forbidden:
        anyhow = matcher((pattern,))
        hit = next((p for p in paths if anyhow.match(p, directory=False)), None)
        results.add(CheckKind.FORBIDDEN, f"forbidden file `{pattern}`", hit is None, printable_path(hit) if hit else "")


async def _run_commands(
    verify: VerifySpec,
    run: RunContext,
    workspace: Workspace,
    logs: tuple[LogFile, LogFile],
    results: Results,
    *,
    env: Mapping[str, str],
    own: Untouched,
) -> None:
    """Run the commands in one tree: files that one makes are there for the next.

    None may change the commit's own files; after a command that did, there is nothing left to judge.
    """
    for argv in verify.setup:
        since = written(logs)
        exit = await run_command(run, workspace, argv, logs, env=env)
        changed = await _changed(run, workspace, own)
        ok = exit.ok and not changed
        results.add(CheckKind.SETUP, f"`{command_words(argv)}`", ok, changed or str(exit))
        if not ok:
            blame(run, STEP, logs, since)
            return
    changed = ""
    for check in verify.commands:
        words = f"`{command_words(check.argv)}`"
        seconds = check.timeout_seconds or math.inf
        if changed:
            results.add(CheckKind.COMMAND, words, False, "not run, because the clean checkout was changed")
            continue
        since = written(logs)
        try:
            exit = await run_command(run, workspace, check.argv, logs, env=env, seconds=seconds)
            wanted = "" if check.exit == 0 else f", wanted {check.exit}"
            ok, found = exit.code == check.exit, f"{exit}{wanted}"
        except trio.TooSlowError:
            ok, found = False, f"timed out after {limit(seconds)}"
        changed = await _changed(run, workspace, own)
        ok = ok and not changed
        results.add(CheckKind.COMMAND, words, ok, changed or found)
        if not ok:
            blame(run, STEP, logs, since)


async def _changed(run: RunContext, workspace: Workspace, own: Untouched) -> str:
    """The commit's own files that are not what they were, in words."""
    assert run.results.snapshot is not None  # it is what was checked out
    await workspace.refresh()
    if not await trio.to_thread.run_sync(own.written):
        return ""
    found = await run.deps.git.compare(run.paths.repository, run.results.snapshot.commit, own.tree)
    paths = [printable_path(path.decode("utf-8", "surrogateescape")) for path, how in found.items() if how != "extra"]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"changed {', '.join(paths[:_NAMED])}{more} of the clean checkout" if paths else ""


async def discard_checkout(run: RunContext, step: str) -> None:
    """Remove the clean checkout and check that it is gone."""
    path: Path = run.paths.checkout
    left = await trio.to_thread.run_sync(trees.remove, path)
    if left:
        raise CleanUpIncomplete(f"the clean checkout was not removed: {left[0]}", hint=f"remove `{path}` yourself")
    await run.emit(ev.ResourceRemoved(step, "checkout", path.name))
