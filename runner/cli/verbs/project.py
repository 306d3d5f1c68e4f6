"""``runner project``: manage settings that a project's workspaces share, from commands or applied manifests."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.ports.store import ProjectRow

SUMMARY = "what the workspaces of a project have in common: create, get, list"
GROUP = "workspaces"
EXAMPLES = ("runner project create shop --protected .github/", "runner project get shop", "runner project list")


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    create = verbs.add_parser("create", help="make a project, or change one that was made so", allow_abbrev=False)
    create.add_argument("name", metavar="NAME", help="what it is called")
    create.add_argument("--root", metavar="DIR", type=Path, default=Path(), help="its directory; default: this one")
    create.add_argument(
        "--workspace-isolation", action="store_true", help="a workspace sees itself alone, not its whole project"
    )
    create.add_argument(
        "--protected", metavar="PATH", action="append", default=[], help="a path that no agent may change"
    )
    get = verbs.add_parser("get", help="one project", allow_abbrev=False)
    get.add_argument("name", metavar="NAME", help="what it is called")
    for verb in (create, get, verbs.add_parser("list", help="every project, by name", allow_abbrev=False)):
        verb.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.codec import plain
    from runner.core.settings import current
    from runner.ops.workspaces import project

    settings = current()
    match args.what:
        case "create":
            isolated, protected = args.workspace_isolation, args.protected
            wanted, advice = project.new_project(args.name, args.root, isolated=isolated, protected=protected)
            found: ProjectRow | list[ProjectRow] = trio.run(project.create_project, settings, wanted)
            out.findings(advice)
        case "get":
            found = trio.run(project.get_project, settings, args.name)
        case _:
            found = trio.run(project.list_projects, settings)
    if args.output == "json":
        out.json(plain(found))
    else:
        rows = [_cells(row) for row in (found if isinstance(found, list) else [found])]
        out.table(("PROJECT", "WORKSPACES", "ROOT", "PROTECTED", "MANIFEST"), rows, nothing="no projects")
    return 0


def _cells(row: ProjectRow) -> tuple[str, ...]:
    place = "isolated" if row.workspace_isolation else "shared"
    return row.name, place, row.root, ", ".join(row.protected_paths), row.manifest or ""
