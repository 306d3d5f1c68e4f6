"""``runner mcp``: serve a client of the Model Context Protocol, add this server to its configuration, look at hosted
servers.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from runner.cli.output import Output
from runner.cli.verbs import _hosted
from runner.core.sanitize import excerpt, sanitize

SUMMARY = "serve agents and editors over MCP, and host servers: serve, install, gateway, register, hosted, approve"
CLIENTS = ("claude", "codex", "gemini", "goose", "vscode")
GROUP = "server"
EXAMPLES = (
    "runner mcp serve",
    "runner mcp serve --workspace 3f9c",
    "runner mcp serve --session 4be0643f-1d98-473b-97cd-ca98a65347dd",
    "runner mcp serve --agent-type worker --url https://git.example.org/shop.git",
    "runner mcp install claude",
    "runner mcp register docs.runner.yaml",
    "runner mcp deregister docs",
    "runner mcp gateway servers/",
    "runner mcp hosted list",
    "runner mcp hosted logs docs",
    "runner mcp hosted restart docs",
    "runner mcp approve docs",
    "runner mcp install vscode --name shop --agent-type worker",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "answer one client on standard input and output"
    serve = verbs.add_parser("serve", help=summary, description=summary, allow_abbrev=False)
    serve.add_argument(
        "--manifests", metavar="PATH", type=Path, help="file or folder of the runs that it may start; default: .runner"
    )
    only = serve.add_mutually_exclusive_group()
    only.add_argument("--workspace", metavar="ID", help="only the tools of this workspace")
    only.add_argument("--session", metavar="ID", help="only the tools that the agent type of this session enables")
    only.add_argument("--agent-type", metavar="NAME", help="only the tools of a new workspace of this agent type")
    serve.add_argument("--url", metavar="URL", help="the repository of the new workspace")
    serve.add_argument("--branch", metavar="BRANCH", help="its branch")
    serve.add_argument("--keep", action="store_true", help="leave the new workspace when the client has gone")
    summary = "add `runner mcp serve` to the configuration of a client"
    install = verbs.add_parser("install", help=summary, description=summary, allow_abbrev=False)
    install.add_argument("client", choices=CLIENTS, help="whose configuration; that of vscode is in this directory")
    install.add_argument("--name", metavar="NAME", default="runner", help="what the server is called there; runner")
    install.add_argument("--agent-type", metavar="NAME", help="serve only the tools of a new workspace of this type")
    install.add_argument("--gateway", metavar="PATH", type=Path, help="serve the MCP servers of this file or folder")
    install.add_argument("--manifests", metavar="PATH", type=Path, help="file or folder of the runs that it may start")
    summary = "host the servers of a file or folder for one client, as one server on standard input and output"
    gateway = verbs.add_parser("gateway", help=summary, description=summary, allow_abbrev=False)
    gateway.add_argument("path", metavar="PATH", type=Path, help="file or folder of `McpServer` manifests")
    _hosted.add_arguments(verbs)


def main(args: Namespace, out: Output) -> int:
    if args.what == "gateway":
        return _gateway(args, out)
    if args.what not in ("serve", "install"):
        return _hosted.main(args, out)
    return _serve(args, out) if args.what == "serve" else _install(args, out)


def _install(args: Namespace, out: Output) -> int:
    import shutil
    import sys

    from runner.core.errors import UnreadableManifest, UsageError
    from runner.core.ids import is_name
    from runner.core.settings import current
    from runner.ops.host.mcp_clients import install
    from runner.ops.mcp.manifests import require_servers

    if not is_name(args.name):
        raise UsageError(f"`{excerpt(args.name)}` cannot name a server", hint="use small letters, digits and `-`")
    if args.gateway is not None and (args.agent_type is not None or args.manifests is not None):
        raise UsageError("a --gateway serves MCP servers, and nothing else", hint="leave the other options out")
    if args.gateway is not None:
        require_servers(args.gateway)
    if args.manifests is not None and not args.manifests.exists():
        text = f"`{excerpt(str(args.manifests))}` cannot be read: no such file or directory"
        raise UnreadableManifest(text, hint="name the file or the folder of the runs that it may start")
    options = ["--agent-type", args.agent_type] if args.agent_type is not None else []
    options += ["--manifests", os.path.abspath(args.manifests)] if args.manifests is not None else []
    program = shutil.which(sys.argv[0])
    words = [os.path.abspath(program)] if program is not None else [sys.executable, "-m", "runner"]
    served = ["gateway", os.path.abspath(args.gateway)] if args.gateway is not None else ["serve", *options]
    done = install(args.client, args.name, [*words, "mcp", *served], current())
    out.line(sanitize(f"{done.path}: {done.entry} is {'new' if done.changed else 'there already'}", 1_000))
    return 0


def _serve(args: Namespace, out: Output) -> int:
    from importlib.util import find_spec

    import trio

    from runner.cli.requests import nearest_manifests
    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.cli.streams import descriptor_streams
    from runner.core.errors import ServerMissing, UsageError
    from runner.core.settings import current

    if find_spec("mcp") is None:
        raise ServerMissing("MCP is not installed", hint="pip install 'plan-runner[mcp]'")
    for option in ("url", "branch", "keep"):
        if getattr(args, option) and args.agent_type is None:
            raise UsageError(f"--{option} is about the workspace of an --agent-type", hint="name one")
    from runner.ops.agent_types import Task
    from runner.server.mcp.client import ClientOptions, serve_client

    manifests = args.manifests
    if manifests is None and (found := nearest_manifests()).is_dir():
        manifests = found
    options = ClientOptions(
        manifests=manifests,
        workspace=args.workspace,
        session=args.session,
        agent_type=args.agent_type,
        task=Task(repository_url=args.url, branch=args.branch),
        keep=args.keep,
    )
    streams = descriptor_streams(*_own_streams(), 2)

    async def whole() -> None:
        stopping, scope = trio.CancelScope(), trio.CancelScope()

        def stop() -> None:
            (scope if stopping.cancel_called else stopping).cancel()

        with scope:
            async with stop_at_signals(stop):
                await serve_client(
                    current(),
                    options,
                    streams.read,
                    streams.write_out,
                    stopping=stopping,
                    advise=lambda advice: out.findings([advice]),
                    say=out.complain,
                )

    run_cancellable(whole)
    return 0


def _gateway(args: Namespace, out: Output) -> int:
    import trio

    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.cli.streams import descriptor_streams
    from runner.core.settings import current
    from runner.ops.mcp.gateway import serve_gateway
    from runner.ops.workspaces.workspace_lease import open_workspace_env

    streams = descriptor_streams(*_own_streams(), 2)

    async def whole() -> None:
        stopping = trio.CancelScope()
        async with (
            open_workspace_env(current(), lambda advice: out.findings([advice])) as env,
            stop_at_signals(stopping.cancel),
        ):
            await serve_gateway(env, args.path, streams.read, streams.write_out, stopping=stopping)

    run_cancellable(whole)
    return 0


def _own_streams() -> tuple[int, int]:
    """Take standard input and output for the protocol: what else reads there finds nothing, and writes to the log."""
    taken = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return taken
