"""Deliver what a run published as a branch, a patch, a push or an archive. Runs never deliver by themselves.

Only a published snapshot is delivered. Work that broke policy is never delivered; work that is unverified, or of a run
that failed, only on request. A branch has one commit of the runner on top of the base, or the agent's own commits where
those have the same tree. Nothing is recorded in the run. Cancelling leaves the target as it was, except that a remote
may have received a push.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp

import trio

from runner.artifacts.export import ExportResult, Opener, export
from runner.artifacts.run_files import read_account
from runner.artifacts.stored_plan import read_plan
from runner.core.errors import (
    BadPlanFile,
    CommitsDiffer,
    NothingPublished,
    PatchChanged,
    PushTimedOut,
    RunUnfinished,
    Unverified,
    UsageError,
    Withheld,
)
from runner.core.home import SCRATCH
from runner.core.model import Status
from runner.core.settings import Settings
from runner.events.events import SnapshotPublished
from runner.events.record import RunRecord
from runner.git.common import in_thread
from runner.git.deliver import ApplyResult, DeliveredBranch, PushResult, open_delivery
from runner.git.source import find_repository
from runner.ops.runs.history import StoredRun, patch_of
from runner.ops.runs.page import PAGE, read_page
from runner.ops.runs.secret_values import make_redactor
from runner.report import markdown
from runner.report.html.run import render_run
from runner.safefs import trees
from runner.safefs.safe_open import open_beneath
from runner.steps.clone.plan import CloneBody

PUSH_SECONDS = 300.0


async def make_branch(
    stored: StoredRun,
    settings: Settings,
    *,
    into: Path | None,
    name: str | None,
    unverified: bool,
    commits: bool = False,
) -> DeliveredBranch:
    """Do ``Delivery.branch``, by default in the repository that the run was cloned from, under the run's own branch
    name.

    With ``commits`` the branch has the agent's own. Raises ``CommitsDiffer`` when those are not all of the work.
    """
    snapshot, repository = _published(stored, unverified=unverified)
    commit = _own_commits(stored, snapshot) if commits else snapshot.commit
    delivery = open_delivery(settings)
    place = into or _source_or_refuse(stored)
    return await delivery.branch(repository, commit, into=place, name=name or branch_of(stored, snapshot))


async def apply_patch(
    stored: StoredRun, settings: Settings, *, into: Path | None, check: bool, unverified: bool
) -> ApplyResult:
    """Do ``Delivery.apply``. Raises ``PatchChanged`` when the patch is not the one that the run wrote."""
    snapshot, _ = _published(stored, unverified=unverified)
    delivery = open_delivery(settings)
    place = into or _source_or_refuse(stored)
    if not snapshot.changed:
        return ApplyResult(place, (), present=True)
    patch = patch_of(stored)
    await in_thread(_check_patch, stored, patch)
    with _scratch(settings, stored) as scratch:
        return await delivery.apply(patch, snapshot.base, into=place, scratch=scratch, check=check)


async def push(
    stored: StoredRun,
    settings: Settings,
    *,
    to: str,
    branch: str | None,
    unverified: bool,
    seconds: float = PUSH_SECONDS,
) -> PushResult:
    """Do ``Delivery.push``. Raises ``PushTimedOut`` after ``seconds``."""
    snapshot, repository = _published(stored, unverified=unverified)
    delivery = open_delivery(settings)
    url = await delivery.remote_url(to, repository=source_of(stored))
    with trio.move_on_after(seconds):
        return await delivery.push(
            repository,
            snapshot.commit,
            url=url,
            branch=branch or branch_of(stored, snapshot),
            explicit=branch is not None,
            person=settings.person,
        )
    raise PushTimedOut(
        f"`{url}` took more than {seconds:g}s", hint="push again: it says so if the work had arrived after all"
    )


async def export_run(stored: StoredRun, settings: Settings, *, to: Path | None) -> ExportResult:
    """Export the run's files, by default to an archive of its name in the current directory."""
    name, at = f"run-{stored.record.id}", stored.record.started // 1_000_000
    place = (to or Path(f"{name}.tar.gz")).absolute()  # a worker thread may have a working directory of its own
    redactor, added = make_redactor(settings), {"report.md": _markdown(stored)} | _log(stored)
    page = render_run(await read_page(stored, settings, archived=True))
    added[PAGE] = partial(BytesIO, page.encode())
    return await trio.to_thread.run_sync(
        partial(export, stored.directory, place, name=name, at=at, redactor=redactor, added=added)
    )


def _markdown(stored: StoredRun) -> Opener:
    text = markdown.render([read_account(stored.record, stored.directory)])
    return partial(BytesIO, text.encode(errors="backslashreplace"))


def _log(stored: StoredRun) -> dict[str, Opener]:
    """Return the log beside the incident, if it still exists."""
    log = Path(stored.record.log) if stored.record.log is not None else None
    if log is None or log.is_relative_to(stored.directory) or not log.is_file():
        return {}
    return {f"incident/{log.name}": lambda: open(open_beneath(log.parent, log.name), "rb")}


def branch_of(stored: StoredRun, snapshot: SnapshotPublished) -> str:
    """Return the branch that the manifest names, else one of the run's own."""
    return snapshot.branch or f"runner/{stored.record.id}"


def source_of(stored: StoredRun) -> Path | None:
    """Return the local repository that a run was cloned from, by its plan; ``None`` for a URL or no repository.

    Raises ``Untrusted`` when a stranger's manifest named it and it now leads elsewhere.
    """
    try:
        plan = read_plan(stored.directory).run
    except BadPlanFile:
        return None
    clone = plan.body(CloneBody)
    if clone is None or clone.path is None:
        return None
    if clone.within is not None:
        find_repository(clone.path, clone.within)
    return clone.path


def _source_or_refuse(stored: StoredRun) -> Path:
    source = source_of(stored)
    if source is None:
        raise UsageError(
            f"run `{stored.record.id}` was not cloned from a repository here", hint="name one: --into PATH"
        )
    return source


def _published(stored: StoredRun, *, unverified: bool) -> tuple[SnapshotPublished, Path]:
    """Return the published snapshot and the private repository that has it.

    Raises ``Unverified`` unless the run succeeded and verified something, or ``unverified`` permits delivery.
    """
    record = stored.record
    if record.ended is None:
        lost = record.status is Status.LOST
        hint = "its runner has died: run `runner recover`" if lost else "wait for its end"
        raise RunUnfinished(f"run `{record.id}` has not ended", hint=hint)
    if record.violations or (record.saved_work is not None and record.saved_work.withheld):
        raise _withheld(stored)
    repository = stored.repository
    if record.snapshot is None:
        raise NothingPublished(f"run `{record.id}` published no snapshot", hint=f"runner runs show {record.id}")
    if not repository.is_dir():
        raise NothingPublished(f"the repository of run `{record.id}` is gone: `{repository}`")
    if not unverified and (why := _doubt(record)):
        raise Unverified(
            f"run `{record.id}` {why}, so its work is not delivered",
            hint=f"look at it (runner runs show {record.id}), and deliver it all the same with --unverified",
        )
    return record.snapshot, repository


def _doubt(record: RunRecord) -> str | None:
    """Say why the work of a run counts as unverified; ``None`` if it is verified."""
    verify = [step for step in record.steps.values() if step.kind == "verify"]
    if record.exit_code:
        return f"ended {record.status.value}"
    return None if any(step.status is Status.SUCCEEDED for step in verify) else "verified nothing"


def _own_commits(stored: StoredRun, snapshot: SnapshotPublished) -> str:
    commits, run = stored.record.commits, stored.record.id
    if commits is None:
        raise NothingPublished(f"the agent of run `{run}` made no commits", hint=f"runner runs branch {run}")
    if commits.commit is None or commits.withheld:
        raise Withheld(f"the agent's commits of run `{run}` are not delivered: {commits.withheld}")
    if commits.tree != snapshot.tree:
        raise CommitsDiffer(
            f"the agent of run `{run}` did not commit all of its work, or more than is published",
            hint=f"take all of it as one commit: runner runs branch {run}",
        )
    return commits.commit


def _withheld(stored: StoredRun) -> Withheld:
    record = stored.record
    named = "; ".join(str(violation) for violation in record.violations[:5])
    more = len(record.violations) - 5
    saved_work = record.saved_work
    rest = (
        f"take the work without them: {stored.directory / saved_work.patch}"
        if saved_work is not None and saved_work.patch
        else None
    )
    return Withheld(
        f"run `{record.id}` broke policy, so nothing of it is delivered: {named}" + (f"; {more} more" * (more > 0)),
        hint=rest or f"runner runs show {record.id}",
    )


def _check_patch(stored: StoredRun, patch: Path) -> None:
    assert stored.record.saved_work is not None  # or there was no patch
    with patch.open("rb") as file:
        if file_digest(file, "sha256").hexdigest() != stored.record.saved_work.patch_sha256:
            raise PatchChanged(
                f"`{patch}` is not the patch that the run wrote", hint="take the work by `runner runs branch`"
            )


@contextmanager
def _scratch(settings: Settings, stored: StoredRun) -> Iterator[Path]:
    """Make a private directory for the block."""
    folder = settings.home / SCRATCH
    folder.mkdir(exist_ok=True, mode=0o700)
    scratch = Path(mkdtemp(prefix=f"{stored.record.id}-apply-", dir=folder))
    try:
        yield scratch
    finally:
        trees.remove(scratch)
