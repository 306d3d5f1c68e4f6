"""Arguments that plan and apply share, and the request made of them."""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.planning.make_plan import Request

WHERE = "file or folder; - reads standard input (default: the .runner of here, or above here in the repository)"
FOLDER = "file or folder (default: the .runner of here, or above here in the repository)"


def add_request_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--run", metavar="NAME", help="only this run, and those that it needs")
    parser.add_argument("--untrusted", action="store_true", help="manifests from a fork: nothing of this host")
    parser.add_argument(
        "--task", metavar="KEY=VALUE", action="append", default=[], help="a field of the task, over everything else"
    )
    parser.add_argument("--task-file", metavar="FILE", help="the task as JSON or YAML; - reads standard input")
    parser.add_argument("--max-cost", metavar="USD", help="what the models of all runs may cost together at most")
    parser.add_argument(
        "--record-network",
        action="store_true",
        help="let every step reach every public host, as far as policies let it: `runner network learn` lists them",
    )
    parser.add_argument("--task-from", choices=("github", "gitlab"), help="the task as this CI says it")


def add_quiet_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not show what setup, agents and checks print, unless they fail"
    )


def way_up() -> list[Path]:
    """Return this directory and those above it, up to the top of its repository; only this one without a repository.

    Paths are relative to here, as they are shown. Directories must belong to the owner of this one, or to us: anybody
    could have put manifests into others.
    """
    way = [Path()]
    try:
        owners = {os.geteuid(), os.stat(way[0]).st_uid}
        while not os.path.lexists(way[-1] / ".git"):
            above = way[-1] / ".."
            if os.stat(above).st_uid not in owners or os.path.samefile(way[-1], above):
                return way[:1]
            way.append(above)
    except OSError:  # nothing is found where we may not look, or from a directory that was removed
        return way[:1]
    return way


def repository_of_here() -> Path | None:
    """Return the top of the current repository."""
    top = way_up()[-1]
    return top.resolve() if os.path.lexists(top / ".git") else None


def nearest_manifests() -> Path:
    """Return the ``.runner`` of this directory, else the nearest above it in the repository; relative to here."""
    places = [up / ".runner" for up in way_up()]
    return next((place for place in places if place.is_dir()), places[0])


def manifests_of(args: Namespace) -> Path:
    """Return the path of the manifests; ``-`` is standard input. Raises ``UsageError`` when the task is that as
    well.
    """
    from runner.core.errors import UsageError
    from runner.manifest import STDIN

    if args.path is None:
        return nearest_manifests()
    if str(args.path) != "-":
        return Path(args.path)
    if getattr(args, "task_file", None) == "-":
        raise UsageError("both the manifests and the task would be standard input", hint="put one of them into a file")
    return STDIN


def request_of(args: Namespace, settings: Settings, *, offline: bool = False) -> Request:
    """Build the request. Raises ``Rejected`` and ``UsageError`` for an invalid task."""
    from runner.ops.planning.make_plan import Request
    from runner.ops.planning.task import read_task

    task = read_task(args.task, args.task_file, args.task_from, settings, sys.stdin.buffer.read)
    return Request(
        only=args.run,
        task=task,
        offline=offline,
        untrusted=args.untrusted,
        max_cost=_dollars(args.max_cost),
        record_network=args.record_network,
    )


def _dollars(text: str | None) -> float | None:
    """Parse a sum of money. Raises ``UsageError``."""
    from runner.core.errors import UsageError
    from runner.core.sanitize import excerpt

    if text is None:
        return None
    try:
        found = float(text.removeprefix("$"))
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise UsageError(f"--max-cost: `{excerpt(text)}` is not a sum in dollars", hint="write one such as 10 or 0.50")
    return found
