"""``runner pool``: keep workspaces that are started before they are needed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.requests import FOLDER, nearest_manifests
from runner.cli.verbs._workspace import line, run_with_env

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.core.model import SlotState
    from runner.core.settings import Settings
    from runner.ops.pool.pool import PoolState, PoolStatus
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv

SUMMARY = "workspaces that run before anybody needs them: warm, status, resize, drain"
GROUP = "workspaces"
EXAMPLES = ("runner pool warm --size 2", "runner pool status", "runner pool resize 4", "runner pool drain")


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    told = "keep the pools that manifests ask for, until it is stopped"
    warm = verbs.add_parser("warm", help=told, description=told, allow_abbrev=False)
    warm.add_argument("path", nargs="?", type=Path, default=nearest_manifests(), help=FOLDER)
    warm.add_argument("--size", metavar="N", type=int, help="slots of each pool, whatever the manifests say")
    verbs.add_parser("status", help="the pools, and how often they had what was asked for", allow_abbrev=False)
    resize = verbs.add_parser("resize", help="change how many slots there should be", allow_abbrev=False)
    resize.add_argument("size", metavar="N", type=int, help="slots of each pool")
    drain = verbs.add_parser("drain", help="end all slots, and make no others", allow_abbrev=False)
    for verb in (resize, drain):
        verb.add_argument("--pool", metavar="POOL", help="only this one, by its name or the beginning of it")
    for verb in verbs.choices.values():
        verb.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current
    from runner.ops.pool import pool

    settings = current()
    match args.what:
        case "warm":
            _warm(args, settings, out)
        case "status":
            _print(run_with_env(settings, out, pool.status), args.output, out)
        case _:
            size = args.size if args.what == "resize" else 0
            _print(run_with_env(settings, out, lambda found: pool.resize(found, size, args.pool)), args.output, out)
    return 0


def _warm(args: Namespace, settings: Settings, out: Output) -> None:
    import trio

    from runner.core.errors import UsageError
    from runner.ops.planning.make_plan import make_plan
    from runner.ops.pool.pool import open_pool, pools_of, status

    if args.size is not None and not 0 < args.size <= 1_000:
        raise UsageError(f"a pool cannot have {args.size} slots", hint="give a number from 1 to 1000")

    async def keep(env: WorkspaceEnv) -> None:
        planned = await make_plan(args.path, settings)
        out.findings(planned.warnings)
        async with open_pool(env, pools_of(planned, args.size), lambda error: out.findings([error])):
            _print(await status(env), args.output, out)
            await trio.sleep_forever()

    with suppress(KeyboardInterrupt):  # how it ends
        run_with_env(settings, out, keep)


def _print(found: PoolStatus, form: str, out: Output) -> None:
    if form == "json":
        from runner.core.codec import plain

        out.json(plain(found))
        return
    line(out, "kept warm" if found.kept else "no process keeps the pools now: start one with `runner pool warm`")
    for pool in found.pools:
        line(out, _line(pool, kept=found.kept))
    for what, count in found.counts.items():
        line(out, f"{count:>6} {what}" if what == "hit" else f"{count:>6} missed: {what}")


def _line(pool: PoolState, *, kept: bool) -> str:
    from runner.report.format import limits

    key = pool.key
    words = [key.image or "no image", limits(key.limits), f"network {key.network}", *key.toolchains]
    return f"{pool.name}  {counts(pool.slots, pool.size) if kept else _left(pool)}  {key.provider}  {'  '.join(words)}"


def counts(slots: Mapping[SlotState, int], size: int) -> str:
    """Say how many slots a pool of ``size`` has in each state; a shrinking one has more than its size."""
    from runner.core.model import SlotState

    ready = slots[SlotState.READY]
    others = [f", {n} {state}" for state, n in slots.items() if n and state is not SlotState.READY]
    return (f"{ready} of {size} ready" if ready <= size else f"{ready} ready, {size} wanted") + "".join(others)


def _left(pool: PoolState) -> str:
    left = sum(pool.slots.values())
    return f"{left} left, which `runner recover` removes" if left else f"0 of {pool.size} ready"
