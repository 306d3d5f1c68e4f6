"""Verbs on a server: what ``--server`` or ``RUNNER_SERVER`` names does the work, and this host only asks and shows."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from runner.cli.output import Output
    from runner.client import Client
    from runner.client.values import NewRuns, Run
    from runner.core.settings import Settings

HELP = "do it on the runner server at this URL (RUNNER_SERVER; the token is in RUNNER_TOKEN)"
OF_RUNS = ("list", "show", "logs", "cancel")
# What other verbs work on is the store and the workspaces of this host. These are about files, or this machine itself.
_HERE = (
    "apply", "completion", "convert", "doctor", "image", "init", "network", "plan", "policy", "runs", "schema", "serve",
    "token", "validate",
)  # fmt: skip
_ID = 12  # characters of the id of a run
_NEWEST = 1000  # runs among which the beginning of an id is looked for


def add_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help=HELP)


def refuse_elsewhere(args: Namespace) -> None:
    """Raise ``UsageError`` for a verb that would silently work on this host while a server is named."""
    if args.verb in _HERE:
        return
    from runner.core.settings import current

    if server_of(args, current()) is not None:
        message = f"`runner {args.verb}` does not work on a server"
        raise UsageError(message, hint="leave --server out, unset RUNNER_SERVER, and call it on the server's own host")


def server_of(args: Namespace, settings: Settings) -> str | None:
    """Return the URL of the server that is to do it."""
    named: str | None = getattr(args, "server", None)
    return named or settings.server


def open_client(url: str, settings: Settings) -> Client:
    from runner.client import Client

    if not settings.server_token:
        hint = "on the server: runner token create NAME --scope admin"
        raise UsageError("the token for the server is missing: RUNNER_TOKEN", hint=hint)
    return Client(url, settings.server_token, reach=settings.reach)


def refuse_options(args: Namespace, names: Mapping[str, object]) -> None:
    """Raise ``UsageError`` for an option that a server does not take; ``names`` have their defaults."""
    for name, default in names.items():
        if getattr(args, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"`{option}` does not work on a server", hint="leave it out")


def wanted_runs(args: Namespace, settings: Settings) -> NewRuns:
    """Return what to plan or start: the server's own runs, or those of the manifests that are named."""
    from runner.client.values import NewRuns
    from runner.ops.planning.task import read_task

    refuse_options(args, {"untrusted": False, "max_cost": None, "record_network": False})
    task = read_task(args.task, args.task_file, args.task_from, settings, sys.stdin.buffer.read)
    return NewRuns(run=args.run, task=task, manifests=None if args.path is None else _files(args.path))


def _files(path: Path) -> dict[str, str]:
    """Read a manifest, or all files of a folder, to send them. Raises ``UsageError``."""
    from pathlib import Path

    from runner.manifest.text import read
    from runner.ops.planning.uploads import MOST_FILES

    if not path.is_dir():
        return {path.name: _text(read(path, str(path)), path)}
    found = sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    if len(found) > MOST_FILES:
        hint = "name a folder with the manifests and what they name"
        raise UsageError(f"`{path}` has {len(found)} files, and a server takes {MOST_FILES}", hint=hint)
    return {str(file.relative_to(path)): _text(read(file, str(file)), file) for file in found}


def _text(raw: bytes, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"`{path}` is not UTF-8, and cannot be sent", hint="move it out of the folder") from error


def plan(args: Namespace, settings: Settings, url: str, out: Output) -> int:
    from runner.client import requests
    from runner.core.codec import plain

    refuse_options(args, {"offline": False, "save": None, "against": None, "exit_code": False, "summary": False})
    if args.output in ("mermaid", "dot"):
        raise UsageError(f"`--output {args.output}` does not work on a server", hint="text, json or html")
    wanted = wanted_runs(args, settings)
    planned = requests.planned(wanted)
    with open_client(url, settings) as client:
        if args.output == "json":
            made = client.send(requests.make_plan(planned))
            out.json(plain(made))
            return 2 if made.missing else 0
        out.verbatim(client.send(requests.show_plan(planned, args.output)) + "\n")
    return 0


def apply(args: Namespace, settings: Settings, url: str, out: Output) -> int:
    """Start runs on the server and follow them. What ends this command ends the following, never the runs."""
    from msgspec.structs import replace

    from runner.client import requests

    refuse_options(args, {"junit": None, "summary": None})
    with open_client(url, settings) as client:
        wanted = replace(wanted_runs(args, settings), key=args.run_key)
        started = client.send(requests.start_runs(wanted)).runs
        codes = []
        try:
            for run in started:
                if args.output == "text":
                    out.line(f"{run.name}  run {run.id} on {url}" + ("  (it was there)" if run.attached else ""))
                codes.append(_follow(client, run.id, args, out))
                if args.output == "text":
                    out.verbatim(client.send(requests.get_report(run.id)) + "\n")
        except KeyboardInterrupt:
            ids = " ".join(run.id for run in started)
            out.complain(f"no longer following; it goes on: runner runs cancel {ids}")
            raise
    return max(codes, default=0)


def _follow(client: Client, run: str, args: Namespace, out: Output) -> int:
    """Show the events of a run to its end, and return its exit code."""
    code = 0
    for event in client.follow(run):
        if args.output == "jsonl":
            out.line(json.dumps(event, ensure_ascii=False))
        elif event["type"] == "StepEnded" and not args.quiet:
            out.line(f"  {event['step']:<12}  {event['outcome']['status']}")
        code = int(event.get("exit_code") or 0) if event["type"] == "RunEnded" else code
    return code


def runs(args: Namespace, settings: Settings, url: str, out: Output) -> int:
    from runner.client import requests
    from runner.client.values import RunListing
    from runner.core.codec import plain

    if args.what not in OF_RUNS:
        raise UsageError(f"`runner runs {args.what}` does not work on a server", hint=f"valid: {', '.join(OF_RUNS)}")
    with open_client(url, settings) as client:
        if args.what == "list":
            refuse_options(args, {"since": None})
            given = {name: value for name, value in (("state", args.status), ("name", args.name)) if value}
            found = client.send(requests.list_runs(RunListing(limit=args.limit or 25, **given)))
            if args.output == "json":
                out.json([plain(run) for run in found.runs])
            else:
                rows = [
                    (
                        run.id,
                        f"{run.project}/{run.name}",
                        run.state,
                        run.created_at,
                        f"waits: {run.waits}" if run.waits else "",
                    )
                    for run in found.runs
                ]
                out.table(("RUN", "NAME", "STATUS", "CREATED", "WHY"), rows, nothing="no runs")
            return 0
        id = _found(client, args.run)
        match args.what:
            case "show" if args.output == "json":
                out.json(client.send(requests.get_record(id)))
            case "show":
                refuse_options(args, {"output": "text"})
                out.verbatim(client.send(requests.get_report(id)) + "\n")
            case "logs":
                refuse_options(args, {"follow": False, "raw": False})
                out.verbatim(client.send(requests.get_logs(id, args.step)))
            case _:
                client.send(requests.cancel_run(id))
                out.line(f"run {id} ends")
    return 0


def _found(client: Client, text: str) -> str:
    """Return the id of the run that a person means. Raises ``UsageError``."""
    from runner.client import requests
    from runner.client.values import RunListing
    from runner.core.sanitize import excerpt

    if len(text) == _ID:
        return text
    newest: list[Run] = client.send(requests.list_runs(RunListing(limit=1 if text == "last" else _NEWEST))).runs
    meant = [run.id for run in newest if text == "last" or run.id.startswith(text)]
    if len(meant) != 1:
        raise UsageError(f"`{excerpt(text)}` means {len(meant)} of the server's runs", hint="write the whole id")
    return meant[0]
