"""``runner runs branch|apply|push|export``: deliver what a run published."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.core.plural import plural

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.runs.history import StoredRun

VERBS = ("branch", "apply", "push", "export")


def add_arguments(add: Callable[[str, str], ArgumentParser]) -> None:
    """Add the four verbs; ``add`` makes a parser from name and summary."""
    branch = add("branch", "its snapshot as a new branch of a repository")
    branch.add_argument("--into", metavar="PATH", type=Path, help="a repository; the one it was cloned from")
    branch.add_argument("--name", metavar="BRANCH", help="the branch of the manifest, or runner/RUN")
    branch.add_argument("--commits", action="store_true", help="the agent's own commits, not all of the work as one")
    apply = add("apply", "its patch onto the work tree of a checkout: all of it, or nothing")
    apply.add_argument("--into", metavar="PATH", type=Path, help="a checkout; the one it was cloned from")
    apply.add_argument("--check", action="store_true", help="only say whether it would go")
    push = add("push", "its snapshot to a branch of a remote, never over the commits of others")
    push.add_argument("--to", metavar="URL|REMOTE", required=True, help="a URL, or a remote of that repository")
    push.add_argument("--branch", metavar="BRANCH", help="the branch of the manifest, or runner/RUN")
    export = add("export", "its evidence for a ticket: an archive or folder, without secrets, with checksums")
    export.add_argument("--to", metavar="FILE.tar.gz|DIR", type=Path, help="a new place (default: run-RUN.tar.gz)")
    for parser in (branch, apply, push):
        parser.add_argument("--unverified", action="store_true", help="also of a run that failed or verified nothing")
    for parser in (branch, apply, push, export):
        parser.add_argument("--output", choices=("text", "json"), default="text")


def deliver(stored: StoredRun, args: Namespace, settings: Settings, out: Output) -> None:
    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.core.sanitize import sanitize

    does = {"branch": _branch, "apply": _apply, "push": _push, "export": _export}[args.what]
    value, text = run_cancellable(partial(does, stored, args, settings))
    if args.output == "json":
        out.json({"run": stored.record.id, "status": stored.record.status.value, **plain(value)})
        return
    out.line(sanitize(text, 1000))
    if stored.record.exit_code:
        out.line(f"note: the run itself ended {stored.record.status.value}")


async def _branch(stored: StoredRun, args: Namespace, settings: Settings) -> tuple[object, str]:
    from runner.ops.runs.deliver import make_branch

    done = await make_branch(
        stored, settings, into=args.into, name=args.name, commits=args.commits, unverified=args.unverified
    )
    word = "is now" if done.made else "was already"
    return done, f"branch {done.branch} of {done.repository} {word} at {done.commit[:12]}"


async def _apply(stored: StoredRun, args: Namespace, settings: Settings) -> tuple[object, str]:
    from runner.ops.runs.deliver import apply_patch

    done = await apply_patch(stored, settings, into=args.into, check=args.check, unverified=args.unverified)
    if done.present:
        return done, f"nothing to do: {done.checkout} has all of the work"
    count = plural(len(done.paths), "file")
    return done, f"{count} of {done.checkout} {'would change' if args.check else 'changed, not committed'}"


async def _push(stored: StoredRun, args: Namespace, settings: Settings) -> tuple[object, str]:
    from runner.ops.runs.deliver import push

    done = await push(stored, settings, to=args.to, branch=args.branch, unverified=args.unverified)
    moved = f"{done.before[:12]} -> {done.commit[:12]}" if done.before else f"new, at {done.commit[:12]}"
    return done, f"branch {done.branch} of {done.url}: {moved if done.moved else f'was already at {done.commit[:12]}'}"


async def _export(stored: StoredRun, args: Namespace, settings: Settings) -> tuple[object, str]:
    from runner.ops.runs.deliver import export_run

    done = await export_run(stored, settings, to=args.to)
    cleaned = f"; secrets taken out of {', '.join(done.redacted[:5])}" if done.redacted else ""
    left = f"; left out: {', '.join(one.name for one in done.left_out[:5])}" if done.left_out else ""
    return done, f"{done.files} files, {done.size} bytes in {done.to}{cleaned}{left}"
