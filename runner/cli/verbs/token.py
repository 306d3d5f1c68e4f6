"""``runner token``: make and end the tokens that clients of ``runner serve`` have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from runner.cli.output import Output
from runner.cli.verbs._workspace import line, moment

SUMMARY = "tokens for clients of the server: create, list, revoke"
GROUP = "server"
EXAMPLES = (
    "runner token create ci --scope admin",
    "runner token create shop --scope project:shop",
    "runner token list",
    "runner token revoke ci",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "make one, and print it once: only a digest is stored"
    create = verbs.add_parser("create", help=summary, description=summary, allow_abbrev=False)
    create.add_argument("name", metavar="NAME", help="what you call it")
    create.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        required=True,
        help="admin, admin:ro, project:NAME or project:NAME:ro; may be repeated",
    )
    listing = verbs.add_parser("list", help="every token with its scopes", allow_abbrev=False)
    listing.add_argument("--output", choices=("text", "json"), default="text")
    summary = "end one; the next request with it is refused"
    revoke = verbs.add_parser("revoke", help=summary, description=summary, allow_abbrev=False)
    revoke.add_argument("name", metavar="NAME", help="its name")


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current
    from runner.ops.host import tokens

    settings = current()
    match args.what:
        case "create":
            out.line(tokens.create_token(settings, args.name, tuple(args.scope)))
        case "revoke":
            tokens.revoke_token(settings, args.name)
            out.line(f"token {args.name} is revoked")
        case _ if args.output == "json":
            found = tokens.list_tokens(settings)
            out.json([{"name": one.name, "scopes": list(one.scopes), "created": one.created} for one in found])
        case _:
            for one in tokens.list_tokens(settings):
                line(out, f"{one.name:<20} {moment(one.created)}  {' '.join(one.scopes)}")
    return 0
