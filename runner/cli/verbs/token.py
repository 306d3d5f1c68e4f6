"""``runner token``: make and end the tokens that clients of ``runner serve`` have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.verbs._workspace import moment

if TYPE_CHECKING:
    from runner.ports.store import Store

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
        help="admin, admin:ro, project:NAME or project:NAME:ro, which may be repeated; or session:ID, for MCP alone",
    )
    listing = verbs.add_parser("list", help="every token with its scopes", allow_abbrev=False)
    listing.add_argument("--output", choices=("text", "json"), default="text")
    summary = "end one; the next request with it is refused"
    revoke = verbs.add_parser("revoke", help=summary, description=summary, allow_abbrev=False)
    revoke.add_argument("name", metavar="NAME", help="its name")


def main(args: Namespace, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.settings import current
    from runner.ops.host.state import make_home, open_state

    settings = current()

    async def whole() -> None:
        make_home(settings)
        async with open_state(settings) as store:
            await _perform(args, store, out)

    run_cancellable(whole)
    return 0


async def _perform(args: Namespace, store: Store, out: Output) -> None:
    from runner.ops.host import tokens

    match args.what:
        case "create":
            out.line(await tokens.create_token(store, args.name, tuple(args.scope)))
        case "revoke":
            await tokens.revoke_token(store, args.name)
            out.line(f"token {args.name} is revoked")
        case _ if args.output == "json":
            found = await tokens.list_tokens(store)
            out.json([{"name": one.name, "scopes": list(one.scopes), "created": one.created} for one in found])
        case _:
            rows = [(one.name, moment(one.created), " ".join(one.scopes)) for one in await tokens.list_tokens(store)]
            out.table(("TOKEN", "CREATED", "SCOPES"), rows, nothing="no tokens")
