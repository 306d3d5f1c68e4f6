"""``runner runs list``: list runs, how each ended, and why."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.runs.history import RunList, RunSummary

SUMMARY = "runs, newest first: those of this repository, or all where there is none"
LINES = 25  # without `--limit`, for people
_HEADER = ("RUN", "NAME", "STATUS", "AGE", "TIME", "COST", "WHY")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also those of other repositories")
    parser.add_argument("--name", metavar="NAME", help="only runs of this name; `*` stands for anything")
    parser.add_argument(
        "--status",
        metavar="STATUS",
        help="running, succeeded, failed, timed-out, cancelled, skipped, unknown (recovered), lost (its runner died)",
    )
    parser.add_argument("--since", metavar="WHEN", help="begun since then: 90m, 2d, or 2026-11-30 (UTC)")
    parser.add_argument("--limit", metavar="N", type=int, help=f"the newest N (default: {LINES} as text, all as json)")
    parser.add_argument(
        "--output", choices=("text", "json"), default="text", help="json: times in UTC as ISO 8601 has them"
    )


def show(args: Namespace, settings: Settings, out: Output) -> None:
    from runner.cli.requests import repository_of_here
    from runner.core.clock import now_microseconds
    from runner.core.errors import UsageError, nearest
    from runner.core.sanitize import excerpt
    from runner.ops.runs.history import STATES, RunFilter, filter_runs, filter_runs_at_once

    now = now_microseconds()
    if args.status is not None and args.status not in STATES:
        raise UsageError(f"`{excerpt(args.status)}` is not a status of a run", hint=nearest(args.status, STATES))
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"`--limit` is {args.limit}", hint="leave it out, or write 1 or more")
    limit = args.limit or (LINES if args.output == "text" else None)
    since = None if args.since is None else _moment(args.since, now)
    within = None if args.all else repository_of_here()
    wanted = RunFilter(name=args.name, state=args.status, since=since, within=within, limit=limit)
    listing = filter_runs_at_once(settings, wanted)
    if listing is None:
        import trio

        listing = trio.run(filter_runs, settings, wanted)
    if args.output == "json":
        out.json([_plain(listed) for listed in listing.runs])
    else:
        _print(listing, now, out)


def _moment(text: str, now: int) -> int:
    """Parse a time to microseconds since the epoch. Raises ``UsageError``."""
    from datetime import UTC, datetime

    from runner.core.errors import UsageError
    from runner.core.sanitize import excerpt
    from runner.core.settings import parse_duration

    try:
        return now - int(parse_duration(text) * 1e6)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        hint = "write how long ago, such as 90m or 2d, or a day or time such as 2026-11-30T08:00Z"
        raise UsageError(f"`--since` is `{excerpt(text)}`", hint=hint) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e6)


def _plain(listed: RunSummary) -> dict[str, object]:
    from datetime import UTC, datetime

    from runner.core.codec import plain

    def moment(microseconds: int | None) -> str | None:
        if microseconds is None:
            return None
        return datetime.fromtimestamp(microseconds // 1_000_000, UTC).isoformat().replace("+00:00", "Z")

    row = listed.row
    seconds = None if row.ended is None else (row.ended - row.created) / 1e6
    times = {"created": moment(row.created), "ended": moment(row.ended), "seconds": seconds}
    why = {"reason": listed.reason, "message": listed.message or None, "cost_usd": listed.cost_usd}
    stored = {name: value for name, value in plain(row).items() if name != "runner"}  # an id that nothing shows
    return {**stored, **times, **why}


def _print(listing: RunList, now: int, out: Output) -> None:
    more = [f"{listing.more} more: --limit {listing.more + len(listing.runs)}"] if listing.more else []
    more += [f"{listing.elsewhere} of other repositories: --all"] if listing.elsewhere else []
    if listing.runs or not more:
        out.table(_HEADER, [_cells(listed, now) for listed in listing.runs], nothing="no runs")
    for line in more:
        out.line(line)


def _cells(listed: RunSummary, now: int) -> tuple[str, ...]:
    from runner.report.format import age, cost, duration

    row = listed.row
    spent = "" if listed.cost_usd is None else cost(listed.cost_usd)
    notes = [listed.message] if listed.message else []
    notes += [f"resumes {row.resumes}"] if row.resumes else []
    notes += ["a rehearsal"] if row.rehearsal is not None else []
    took = duration(((row.ended or now) - row.created) / 1e6)
    return (row.id, row.name, listed.state, age((now - row.created) / 1e6), took, spent, "; ".join(notes))
