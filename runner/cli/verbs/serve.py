"""``runner serve``: answer for runs and workspaces over HTTP."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from runner.cli.output import Output

SUMMARY = "answer over HTTP for workspaces, their tools, and runs"
GROUP = "server"
EXAMPLES = (
    "runner serve",
    "runner serve --listen 127.0.0.1:8700 --manifests .runner",
    "runner serve --listen 0.0.0.0:8700 --certificate server.pem --key server.key --host runner.example.org",
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="WHERE",
        help="unix:PATH, ADDRESS:PORT, or systemd; a socket in RUNNER_HOME for its owner only",
    )
    parser.add_argument(
        "--host", metavar="NAME", action="append", default=[], help="a name that clients have for it; may be repeated"
    )
    parser.add_argument(
        "--manifests", metavar="PATH", type=Path, help="file or folder of the runs that clients may start; none"
    )
    words = "make each run a Job of the cluster that workspaces are made in"
    parser.add_argument("--on", metavar="kubernetes[:CONTEXT]", help=words)
    parser.add_argument(
        "--mcp-servers", metavar="PATH", type=Path, help="file or folder of the MCP servers that it hosts; none"
    )
    parser.add_argument(
        "--agent-types", metavar="FOLDER", type=Path, help="where its agent types are, a file for each; in the store"
    )
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="certificates for TLS, in PEM")
    parser.add_argument("--key", metavar="FILE", type=Path, help="the key of the certificate, in PEM")
    parser.add_argument(
        "--behind-proxy", action="store_true", help="other machines reach it through a proxy that ends TLS"
    )
    parser.add_argument("--oidc-issuer", metavar="URL", help="take the tokens of an OpenID Connect issuer too")
    parser.add_argument("--oidc-audience", metavar="NAME", help="what its tokens must be for")
    parser.add_argument(
        "--oidc-grant",
        metavar=("SCOPE", "CLAIM=VALUE"),
        nargs="+",
        action="append",
        default=[],
        help="what its tokens with all of these claims may do; may be repeated",
    )
    parser.add_argument(
        "--login-issuer", metavar="URL", help="let people log in at the page by an OpenID Connect issuer"
    )
    parser.add_argument("--login-client", metavar="ID", help="the client that this server is there")
    parser.add_argument("--login-secret", metavar="FILE", type=Path, help="a file with that client's secret; none")
    parser.add_argument(
        "--login-grant",
        metavar=("SCOPE", "CLAIM=VALUE"),
        nargs="+",
        action="append",
        default=[],
        help="what people with all of these claims may do; may be repeated",
    )
    parser.add_argument("--rate", metavar="REQUESTS", type=int, default=200, help="of a token a second; 200")
    parser.add_argument(
        "--drain", metavar="SECONDS", type=float, default=30.0, help="what requests get when it is told to end; 30"
    )


def main(args: Namespace, out: Output) -> int:
    from importlib.util import find_spec

    import trio

    from runner.cli.places import place_of
    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.core.errors import ServerMissing, UsageError
    from runner.core.settings import current

    if find_spec("starlette") is None or find_spec("hypercorn") is None:
        raise ServerMissing("the server is not installed", hint="pip install 'plan-runner[server]'")
    from runner.server.oidc import read_options
    from runner.server.page.oidc_login import LoginOptions, read_secret
    from runner.server.serve import SOCKET, ServerOptions, serve

    if args.rate < 1:
        raise UsageError(f"`--rate {args.rate}` lets nothing through", hint="a whole number from 1")
    settings = current() if args.on is None else place_of(args.on, current())
    login = read_options(args.login_issuer, args.login_client, args.login_grant, words="login client")
    if login is None and args.login_secret is not None:
        raise UsageError("a secret is of a client", hint="--login-issuer URL --login-client ID")
    options = ServerOptions(
        listen=args.listen or f"unix:{settings.home / SOCKET}",
        hosts=tuple(args.host),
        certificate=args.certificate,
        key=args.key,
        behind_proxy=args.behind_proxy,
        manifests=args.manifests,
        mcp_servers=args.mcp_servers,
        agent_types=args.agent_types,
        jobs=args.on is not None,
        drain_seconds=args.drain,
        oidc=read_options(args.oidc_issuer, args.oidc_audience, args.oidc_grant),
        login=None if login is None else LoginOptions(login, read_secret(args.login_secret)),
        rate=args.rate,
    )

    async def whole() -> None:
        stopping, scope = trio.Event(), trio.CancelScope()

        def stop() -> None:
            if stopping.is_set():
                scope.cancel()
            stopping.set()

        with scope:
            async with stop_at_signals(stop):
                await serve(
                    settings,
                    options,
                    ready=lambda url: out.line(f"listening on {url}"),
                    advise=lambda advice: out.findings([advice]),
                    stopping=stopping,
                )

    run_cancellable(whole)
    return 0
