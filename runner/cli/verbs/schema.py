"""``runner schema [KIND]``: print the JSON schema of a kind's documents, which needs no other file.

Also of the files that are not manifests, and the catalog that maps files to schemas.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from runner.cli.output import Output

SUMMARY = "print the JSON schema of a kind, or of every kind"
GROUP = "manifests and policy"
EXAMPLES = ("runner schema AgentType", "runner schema catalog")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        help="such as AgentType, or turns, agentgate-policy, catalog; left out, one schema for all manifests",
    )
    parser.add_argument("--draft-07", action="store_true", help="the older form that editors know best")


def main(args: Namespace, out: Output) -> int:
    from runner.core.errors import UnknownKind, nearest
    from runner.manifest import schema
    from runner.manifest.load import kinds

    if args.kind is None:
        found = schema.bundled()
    elif args.kind in kinds():
        found = schema.schemas()[schema.file_of(args.kind)]
    elif args.kind in schema.others():
        found = schema.others()[args.kind]
    elif args.kind == "catalog":
        out.json(schema.catalog())
        return 0
    else:
        raise UnknownKind(f"`{args.kind}` is not a known kind", hint=nearest(args.kind, [*kinds(), *schema.others()]))
    found = schema.with_registered(found)
    out.json(schema.as_draft_07(found) if args.draft_07 else found)
    return 0
