"""``runner mcp register``, ``hosted`` and ``approve``: MCP servers that a server of this host hosts, or has hosted."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.verbs._workspace import line, moment, run_with_env
from runner.core.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from runner.core.settings import Settings
    from runner.ops.mcp.records import Approved, HostedRecord
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv


def add_arguments(verbs: _SubParsersAction[ArgumentParser]) -> None:
    summary = "MCP servers that `runner serve` hosts: list, logs, restart"
    hosted = verbs.add_parser("hosted", help=summary, description=summary, allow_abbrev=False)
    each = hosted.add_subparsers(dest="do", metavar="WHAT", required=True)
    listing = each.add_parser("list", help="each server, by name", allow_abbrev=False)
    listing.add_argument("--output", choices=("text", "json"), default="text")
    for name, summary in (
        ("logs", "show what a server has written to its standard error, and when it ended"),
        ("restart", "end a server and start it anew"),
    ):
        verb = each.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verb.add_argument("name", metavar="NAME", help="that of its manifest")
    summary = "host the server of a manifest whenever a server of this host runs"
    register = verbs.add_parser("register", help=summary, description=summary, allow_abbrev=False)
    register.add_argument("file", metavar="FILE", type=Path, help="the manifest, of which a copy is kept")
    summary = "end a registered server for good; its files are saved"
    deregister = verbs.add_parser("deregister", help=summary, description=summary, allow_abbrev=False)
    deregister.add_argument("name", metavar="NAME", help="that of its manifest")
    summary = "show how a hosted server differs from what was approved, and approve it"
    approve = verbs.add_parser("approve", help=summary, description=summary, allow_abbrev=False)
    approve.add_argument("name", metavar="NAME", help="that of its manifest")
    approve.add_argument("--yes", action="store_true", help="approve what is shown")


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    if args.what in ("register", "deregister"):
        _register(args, current(), out)
        return 0

    async def work(env: WorkspaceEnv) -> None:
        await _perform(args, env, out)

    run_with_env(current(), out, work)
    return 0


def _register(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.ops.host.state import make_home
    from runner.ops.mcp.registrations import deregister, register_file

    if args.what == "register":
        make_home(settings)
        line(out, f"{register_file(settings.home, args.file)} is registered")
    else:
        deregister(settings.home, args.name)
        line(out, f"{args.name} is not registered any more")


async def _perform(args: Namespace, env: WorkspaceEnv, out: Output) -> None:
    from runner.core.codec import plain
    from runner.ops.mcp import records

    home = records.home_of(env.settings)
    match args.what, getattr(args, "do", ""):
        case "approve", _:
            await _approve(args, env, out)
        case _, "logs":
            out.raw(await _log(env, await records.find_hosted(env.store, args.name, home)))
        case _, "restart":
            await records.ask_restart(env.store, args.name, home)
            line(out, f"{args.name} is to be started anew")
        case _:
            found = [_alive(one, env, home) for one in await records.list_hosted(env.store, home)]
            if args.output == "json":
                out.json([plain(one) for one in found])
                return
            rows = [(one.name, one.state, moment(one.since), "; ".join(_notes(one))) for one in found]
            out.table(("SERVER", "STATE", "SINCE", "NOTES"), rows, nothing="no servers")


def _notes(record: HostedRecord) -> list[str]:
    changed = f"changed: runner mcp approve {record.name}" if record.pending else ""
    return [note for note in (record.detail, changed) if note]


def _alive(record: HostedRecord, env: WorkspaceEnv, home: str) -> HostedRecord:
    """Return a record as it is: a host of this home that was killed wrote no end of its servers."""
    from msgspec.structs import replace

    from runner.artifacts.run_lock import is_locked

    runs = record.state in ("starting", "ready", "unhealthy", "waiting") and record.workspace is not None
    if runs and record.home == home and not is_locked(env.lock(record.workspace or "")):
        return replace(record, state="stopped", detail="its host has died")
    return record


async def _log(env: WorkspaceEnv, record: HostedRecord) -> bytes:
    """Return what a server has written. Raises ``UsageError`` when its workspace is gone, or was a run's."""
    import trio

    from runner.core.sanitize import escape_unprintable
    from runner.ops.mcp.hosting import LOG

    if record.workspace is None or not env.folder(record.workspace).is_dir():
        hint = "a gateway's is there as long as its client; that of a server of a run is in the run's directory"
        raise UsageError(f"there is no log of `{record.name}`", hint=hint)

    def read() -> bytes:
        log = env.folder(record.workspace or "") / LOG
        found = [path.read_bytes() for path in (log.with_suffix(".old"), log) if path.is_file()]
        lines = b"".join(found).decode(errors="replace").splitlines()
        return "".join(f"{escape_unprintable(one)}\n" for one in lines).encode()

    return await trio.to_thread.run_sync(read)


async def _approve(args: Namespace, env: WorkspaceEnv, out: Output) -> None:
    """Show the differences, and approve them. Raises ``UsageError`` without consent."""
    from difflib import unified_diff

    from runner.core.sanitize import escape_unprintable
    from runner.ops.mcp import records

    record = await records.find_hosted(env.store, args.name, records.home_of(env.settings))
    if not record.pending:
        line(out, f"{args.name} is as it was approved")
        return
    before, after = _lines(record.approved), _lines(record.seen)
    for each in unified_diff(before, after, "approved", "now", lineterm="", n=1):
        out.line(escape_unprintable(each))
    if not args.yes:
        raise UsageError(f"`{args.name}` has changed", hint=f"runner mcp approve {args.name} --yes")
    await records.approve(env.store, record)
    line(out, f"{args.name} is approved as it is now")


def _lines(approved: Approved) -> list[str]:
    found = [f"image: {approved.image or 'none'}", f"command: {shlex.join(approved.command or ())}"]
    for kind in ("tools", "prompts", "resources", "templates"):
        for name, one in sorted((getattr(approved, kind) or {}).items()):
            found += [f"{kind[:-1]} {name}", *json.dumps(one, indent=2, ensure_ascii=False).splitlines()]
    return found
