"""``runner lease``: show who holds which workspace, and end that."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.verbs._workspace import line, moment, run_with_env

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.workspaces.leases import LeaseState
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv

SUMMARY = "who has which workspace: list, show, release, break"
GROUP = "workspaces"
EXAMPLES = ("runner lease list", "runner lease show 3f9c", "runner lease release 3f9c", "runner lease break 3f9c --yes")


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    listing = verbs.add_parser("list", help="every lease, the oldest first", allow_abbrev=False)
    listing.add_argument("--output", choices=("text", "json"), default="text")
    for name, summary in (
        ("show", "the lease of one workspace"),
        ("release", "end the lease of a holder that is dead"),
        ("break", "end a lease by force, and all that runs under it"),
    ):
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verb.add_argument("workspace", metavar="WORKSPACE", help="an id, or its beginning")
        if name == "show":
            verb.add_argument("--output", choices=("text", "json"), default="text")
        if name == "break":
            verb.add_argument("--yes", action="store_true", help="what runs there may be killed")


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current
    from runner.ops.workspaces import leases

    settings = current()
    match args.what:
        case "list":
            _show(run_with_env(settings, out, leases.list_leases), args.output, out)
        case "show":
            _show_one(args, settings, out)
        case "release":
            line(out, run_with_env(settings, out, lambda env: leases.release(env, args.workspace)))
        case _:
            does = partial(leases.break_lease, text=args.workspace, sure=args.yes)
            line(out, run_with_env(settings, out, does))
    return 0


def _show(states: list[LeaseState], form: str, out: Output) -> None:
    from runner.core.codec import plain

    if form == "json":
        out.json(plain(states))
        return
    rows = [(one.workspace, one.holder, one.state, moment(one.expires), moment(one.refreshed)) for one in states]
    out.table(("WORKSPACE", "HOLDER", "STATE", "UNTIL", "REFRESHED"), rows, nothing="no leases")


def _show_one(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.core.codec import plain
    from runner.ops.workspaces.leases import lease_of

    async def look(env: WorkspaceEnv) -> tuple[str, LeaseState | None]:
        row = await env.store.workspace(args.workspace)
        return row.id, await lease_of(env, row.id)

    id, state = run_with_env(settings, out, look)
    if args.output == "json":
        out.json(None if state is None else plain(state))
        return
    if state is None:
        line(out, f"workspace {id} is free")
        return
    line(out, f"lease      {state.id}, number {state.fence}")
    line(out, f"holder     {state.holder}, {state.state}")
    for name, at in (("acquired", state.acquired), ("refreshed", state.refreshed), ("expires", state.expires)):
        line(out, f"{name:<10} {moment(at)}")
