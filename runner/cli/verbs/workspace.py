"""``runner workspace``: make, use, stop and remove workspaces that outlive runs."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.output import Output
from runner.cli.verbs._workspace import line, moment, run_with_env
from runner.core.plural import plural

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.workspaces.leases import LeaseState
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv
    from runner.ops.workspaces.workspaces import RemovedWorkspace
    from runner.ports.store import WorkspaceRow

SUMMARY = "places that outlive runs: create, list, show, find, exec, snapshot, stop, resume, destroy, delete"
GROUP = "workspaces"
EXAMPLES = (
    "runner workspace create . --persistent",
    "runner workspace list",
    "runner workspace show 3f9c",
    "runner workspace find src",
    "runner workspace exec 3f9c -- make test",
    "runner workspace snapshot 3f9c",
    "runner workspace stop 3f9c",
    "runner workspace resume 3f9c",
    "runner workspace destroy 3f9c",
    "runner workspace delete 3f9c",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    def add(name: str, summary: str, *, output: bool = True) -> ArgumentParser:
        verb: ArgumentParser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if output:
            verb.add_argument("--output", choices=("text", "json"), default="text")
        return verb

    def add_one(name: str, summary: str, *, output: bool = True) -> ArgumentParser:
        verb = add(name, summary, output=output)
        verb.add_argument("id", metavar="ID", help="an id, or its beginning")
        return verb

    create = add("create", "make one: empty, from a directory in place, or from a repository")
    create.add_argument("path", metavar="PATH", nargs="?", type=_place, help="a directory that becomes it in place")
    create.add_argument("--url", metavar="URL", help="a repository to clone, its newest commit only")
    create.add_argument("--snapshot", metavar="COMMIT", help="a snapshot, with whose files it begins")
    create.add_argument("--branch", metavar="BRANCH", help="of the URL; its default branch")
    create.add_argument("--project", metavar="NAME", help="a project, whose isolation and protected paths it gets")
    create.add_argument("--provider", metavar="NAME", help="exactly this one, with no fallback")
    create.add_argument("--image", metavar="REF", help="the system that its commands see, for a provider with images")
    create.add_argument(
        "--tool",
        metavar="NAME",
        dest="tools",
        action="append",
        help="a tool that may be called in it; may be repeated; all",
    )
    create.add_argument("--persistent", action="store_true", help="never expires")
    add("list", "every workspace, newest first")
    add_one("show", "one workspace, and who has it")
    find = add("find", "the workspace that a path is in")
    find.add_argument("path", metavar="PATH", type=_place, help="a file or directory, there or not")
    run = add_one("exec", "run a command in it: ID -- COMMAND [ARGUMENT...]", output=False)
    run.add_argument("command", metavar="COMMAND", nargs=REMAINDER, help="after `--`")
    add_one("snapshot", "save its files as they are; it goes on")
    add_one("stop", "end what runs in it; its files stay")
    add_one("resume", "let a stopped one be used again")
    for name, summary in (
        ("destroy", "save what is unsaved, and remove it"),
        ("delete", "forget or sweep it, unsaved"),
    ):
        add_one(name, summary).add_argument("--discard", action="store_true", help="give unsaved work up")


def _place(text: str) -> Path:
    """Return the directory; an empty text, as of an unset variable, is refused rather than meaning the current one."""
    if not text:
        raise ArgumentTypeError("an empty PATH names no directory")
    return Path(text)


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    settings = current()
    match args.what:
        case "exec":
            return _exec(args, settings, out)
        case "list":
            _list(args, settings, out)
        case "find":
            _find(args, settings, out)
        case "show":
            _show(args, settings, out)
        case "snapshot":
            _take_snapshot(args, settings, out)
        case "destroy" | "delete":
            _remove(args, settings, out)
        case _:
            _change(args, settings, out)
    return 0


def _exec(args: Namespace, settings: Settings, out: Output) -> int:
    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.cli.streams import descriptor_streams
    from runner.core.errors import UsageError
    from runner.ops.workspaces.exec import CommandCancellation, execute
    from runner.ops.workspaces.workspace_lease import open_workspace_env

    argv = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not argv:
        raise UsageError("there is no command", hint=f"runner workspace exec {args.id} -- COMMAND")

    async def whole() -> int:
        control = CommandCancellation()
        opening = open_workspace_env(settings, lambda advice: out.findings([advice]))
        async with opening as env, stop_at_signals(control.stop):
            return await execute(env, args.id, argv, descriptor_streams(0, 1, 2), control)

    return run_cancellable(whole)


def _list(args: Namespace, settings: Settings, out: Output) -> None:
    import trio

    from runner.ops.workspaces.workspaces import list_workspaces

    found = trio.run(list_workspaces, settings)
    if args.output == "json":
        out.json([_plain_leased(one.row, one.lease, settings) for one in found])
        return
    heads = ("WORKSPACE", "CREATED", "STATUS", "PROVIDER", "FROM", "LEASE")
    out.table(heads, [_cells(one.row, one.lease) for one in found], nothing="no workspaces")


def _cells(row: WorkspaceRow, lease: LeaseState | None) -> tuple[str, ...]:
    used = f"{lease.holder}, {lease.state}" if lease and row.run is None else ""
    return row.id, moment(row.created), row.status, row.provider, _from(row), used


def _find(args: Namespace, settings: Settings, out: Output) -> None:
    import trio

    from runner.ops.workspaces.workspaces import find_by_path

    found = trio.run(find_by_path, settings, args.path)
    _show_leased(found.row, found.lease, args.output, settings, out)


def _show(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.ops.workspaces.leases import lease_of

    async def look(env: WorkspaceEnv) -> tuple[WorkspaceRow, LeaseState | None]:
        row = await env.store.workspace(args.id)
        return row, await lease_of(env, row.id)

    row, lease = run_with_env(settings, out, look)
    _show_leased(row, lease, args.output, settings, out)


def _show_leased(row: WorkspaceRow, lease: LeaseState | None, form: str, settings: Settings, out: Output) -> None:
    if form == "json":
        out.json(_plain_leased(row, lease, settings))
        return
    _print(row, form, settings, out)
    line(
        out, f"lease      {lease.holder}, {lease.state}, until {moment(lease.expires)}" if lease else "lease      free"
    )


def _change(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.ops.workspaces import workspaces

    async def change(env: WorkspaceEnv) -> WorkspaceRow:
        if args.what == "create":
            fields = workspaces.WorkspaceOptions.__struct_fields__
            options = {name: value for name, value in vars(args).items() if name in fields}
            options["tools"] = None if args.tools is None else tuple(args.tools)
            if args.snapshot is not None:
                options |= await _of_snapshot(env, args, options)
            return await workspaces.create(env, workspaces.WorkspaceOptions(**options))
        return await (workspaces.stop if args.what == "stop" else workspaces.resume)(env, args.id)

    _print(run_with_env(settings, out, change), args.output, settings, out)


async def _of_snapshot(env: WorkspaceEnv, args: Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Return what a new workspace has of a snapshot, unless something else is wanted."""
    from runner.core.errors import UsageError
    from runner.core.model import DEFAULT_PROJECT
    from runner.ops.workspaces.snapshots import find_snapshot

    if args.path is not None or args.url is not None or args.branch is not None:
        raise UsageError("a snapshot has its own files", hint="leave PATH, --url and --branch out")
    found = await find_snapshot(env, args.snapshot)
    project = None if found.project == DEFAULT_PROJECT else found.project
    return {"snapshot": found, "project": args.project or project, "tools": given["tools"] or found.tools}


def _take_snapshot(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.core.codec import plain
    from runner.ops.workspaces.snapshots import Taken, take_snapshot

    taken: Taken = run_with_env(settings, out, lambda env: take_snapshot(env, args.id))
    if args.output == "json":
        out.json(plain(taken))
        return
    line(out, f"snapshot {taken.commit} of workspace {taken.workspace}: {plural(taken.changed, 'changed file')}")
    if taken.ignored:
        line(out, f"not in it: {taken.ignored} that its ignore files name")


def _remove(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.core.codec import plain
    from runner.ops.workspaces import workspaces

    does = workspaces.destroy if args.what == "destroy" else workspaces.delete
    removed: RemovedWorkspace = run_with_env(settings, out, lambda env: does(env, args.id, discard=args.discard))
    if args.output == "json":
        out.json(plain(removed))
        return
    for told in _told(removed):
        line(out, told)


def _told(removed: RemovedWorkspace) -> list[str]:
    kept = f", and {removed.tree} stays as it is" if removed.tree else ""
    lines = [f"workspace {removed.workspace} is gone{kept}"]
    if removed.saved is not None and removed.saved_work is not None:
        count = removed.saved_work.changed
        lines.append(f"saved: {plural(count, 'changed file')} in {removed.saved}, as a patch and a commit")
    if removed.ignored:
        lines.append(f"not saved: {removed.ignored} that its ignore files name")
    return lines


def _print(row: WorkspaceRow, form: str, settings: Settings, out: Output) -> None:
    if form == "json":
        out.json(_plain(row, settings))
        return
    from runner.core.model import Limits
    from runner.report.format import limits

    values = _plain(row, settings)
    line(out, f"workspace  {row.id}")
    for name in ("status", "provider", "image", "project", "tree", "url", "branch", "base", "run"):
        if values[name] is not None:
            line(out, f"{name:<10} {values[name]}")
    if row.run is None:
        line(out, f"limits     {limits(row.limits or Limits())}")
    if row.not_enforced is not None:
        line(out, f"           not enforced: {limits(row.not_enforced)} by {row.provider}")
    lasts = "until it is destroyed" if row.expires is None else f"until {moment(row.expires)}, unless it is used"
    line(out, f"lasts      {lasts if row.run is None else 'as long as its run'}")


def _plain(row: WorkspaceRow, settings: Settings) -> dict[str, Any]:
    from runner.core.codec import plain
    from runner.ops.workspaces.workspaces import tree_of

    return {**plain(row), "tree": str(tree_of(settings, row)), "adopted": row.path is not None}


def _plain_leased(row: WorkspaceRow, lease: LeaseState | None, settings: Settings) -> dict[str, Any]:
    from runner.core.codec import plain

    return {**_plain(row, settings), "lease": None if lease is None else plain(lease)}


def _from(row: WorkspaceRow) -> str:
    if row.run is not None:
        return f"run {row.run}"
    return row.path or row.url or "empty"
