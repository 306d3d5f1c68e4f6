"""Delivery: what a run published, into the user's hands. Always a command of its own, never a part of a run.

Only a snapshot that was published is delivered: work that broke policy stays where it is, and so does work that nothing
has verified, or of a run that did not succeed, unless it is asked for in so many words. A branch has the runner's
commit of the work on top of the base, or the agent's own commits when they come to the same. Nothing of this is
recorded in the run, which has ended; cancelling a delivery leaves its target as it was, but for a push, of which the
remote may have heard.
"""

from __future__ import annotations

import json
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
from runner.core.errors import (
    CommitsDiffer,
    NothingPublished,
    PatchChanged,
    PushTimedOut,
    RunUnfinished,
    Unverified,
    UsageError,
    Withheld,
)
from runner.core.model import Status
from runner.core.settings import Settings
from runner.events.events import SnapshotPublished
from runner.events.record import RunRecord
from runner.git.common import in_thread
from runner.git.deliver import ApplyResult, DeliveredBranch, PushResult, open_delivery
from runner.git.source import find_repository
from runner.ops.runs.history import StoredRun, patch_of
from runner.ops.runs.secret_values import make_redactor
from runner.report import markdown
from runner.safefs import trees
from runner.safefs.safe_open import open_beneath

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
    """See ``Delivery.branch``; by default in the repository that the run was cloned from, under the run's own name.

    With ``commits`` it is made of the agent's own. Raises ``CommitsDiffer`` when they are not all of the work.
    """
    snapshot, repository = _published(stored, settings, unverified=unverified)
    commit = _own_commits(stored, snapshot) if commits else snapshot.commit
    delivery = open_delivery(settings)
    place = into or _source_or_refuse(stored)
    return await delivery.branch(repository, commit, into=place, name=name or branch_of(stored, snapshot))


async def apply_patch(
    stored: StoredRun, settings: Settings, *, into: Path | None, check: bool, unverified: bool
) -> ApplyResult:
    """See ``Delivery.apply``. Raises ``PatchChanged`` when the patch is not the one that the run wrote."""
    snapshot, _ = _published(stored, settings, unverified=unverified)
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
    """See ``Delivery.push``; bounded by ``seconds``, after which it raises ``PushTimedOut``."""
    snapshot, repository = _published(stored, settings, unverified=unverified)
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
    """See ``export``; by default to an archive of the run's name here."""
    name, at = f"run-{stored.record.id}", stored.record.started // 1_000_000
    place = (to or Path(f"{name}.tar.gz")).absolute()  # a worker thread may have a working directory of its own
    redactor, added = make_redactor(settings), {"report.md": _markdown(stored)} | _log(stored)
    return await trio.to_thread.run_sync(
        partial(export, stored.directory, place, name=name, at=at, redactor=redactor, added=added)
    )


def _markdown(stored: StoredRun) -> Opener:
    text = markdown.render([read_account(stored.record, stored.directory)])
    return partial(BytesIO, text.encode(errors="backslashreplace"))


def _log(stored: StoredRun) -> dict[str, Opener]:
    """The log that lies with the incident, if it is still there."""
    log = Path(stored.record.log) if stored.record.log is not None else None
    if log is None or log.is_relative_to(stored.directory) or not log.is_file():
        return {}
    return {f"incident/{log.name}": lambda: open(open_beneath(log.parent, log.name), "rb")}


def branch_of(stored: StoredRun, snapshot: SnapshotPublished) -> str:
    """The branch that the manifest asks for, else one of the run's own."""
    return snapshot.branch or f"runner/{stored.record.id}"


def source_of(stored: StoredRun) -> Path | None:
    """The local repository that a run was cloned from, as its plan says; ``None`` for a URL, or no repository.

    Raises ``Untrusted`` when a stranger's manifest named it, and by now it leads elsewhere.
    """
    try:
        steps = json.loads((stored.directory / "plan.json").read_text(encoding="utf-8"))["runs"][0]["steps"]
    except FileNotFoundError:
        return None
    body = next((step["body"] for step in steps if step["kind"] == "clone"), None)
    if body is None or body["path"] is None:
        return None
    path = Path(body["path"])
    if (within := body.get("within")) is not None:
        find_repository(path, Path(within))
    return path


def _source_or_refuse(stored: StoredRun) -> Path:
    source = source_of(stored)
    if source is None:
        raise UsageError(
            f"run `{stored.record.id}` was not cloned from a repository here", hint="name one: --into PATH"
        )
    return source


def _published(stored: StoredRun, settings: Settings, *, unverified: bool) -> tuple[SnapshotPublished, Path]:
    """What a run published, and the private repository that has it.

    Raises ``Unverified`` when the run did not succeed or verified nothing, unless that is meant by ``unverified``.
    """
    record = stored.record
    if record.ended is None:
        lost = record.status is Status.LOST
        hint = "its runner has died: run `runner recover`" if lost else "wait for its end"
        raise RunUnfinished(f"run `{record.id}` has not ended", hint=hint)
    if record.violations or (record.saved_work is not None and record.saved_work.withheld):
        raise _withheld(stored)
    repository = settings.home / "snapshots" / f"{record.id}.git"
    if record.snapshot is None:
        raise NothingPublished(f"run `{record.id}` published no snapshot", hint=f"runner runs show {record.id}")
    if not repository.is_dir():
        raise NothingPublished(f"the repository of run `{record.id}` is not there any more: `{repository}`")
    if not unverified and (why := _doubt(record)):
        raise Unverified(
            f"run `{record.id}` {why}, so its work is not delivered",
            hint=f"look at it (runner runs show {record.id}), and deliver it all the same with --unverified",
        )
    return record.snapshot, repository


def _doubt(record: RunRecord) -> str | None:
    """Why nobody knows that the work of a run is as it should be."""
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
        f"the work without them: {stored.directory / saved_work.patch}"
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
            raise PatchChanged(f"`{patch}` is not the patch that the run wrote", hint="take the work as a branch")


@contextmanager
def _scratch(settings: Settings, stored: StoredRun) -> Iterator[Path]:
    """A directory for copies, of nobody else; removed afterwards."""
    folder = settings.home / "tmp"
    folder.mkdir(exist_ok=True, mode=0o700)
    scratch = Path(mkdtemp(prefix=f"{stored.record.id}-apply-", dir=folder))
    try:
        yield scratch
    finally:
        trees.remove(scratch)
