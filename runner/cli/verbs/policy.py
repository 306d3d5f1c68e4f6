"""``runner policy check|scan|explain``: show what may be in a workspace, and which line decides. Starts nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.requests import FOLDER, nearest_manifests
from runner.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.ops.planning.policy import PathExplanation, PathVerdict, PolicyLayer
    from runner.runtime.tree_scan import ScanResult

SUMMARY = "what may be in a workspace: check, scan, explain"
GROUP = "manifests and policy"
EXAMPLES = (
    "runner policy check src/total.py .env",
    "runner policy scan --policy house",
    "runner policy explain .env --run fix",
)
BROKEN = 3


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    check = verbs.add_parser("check", help="whether files may be there", allow_abbrev=False)
    check.add_argument("paths", metavar="PATH", nargs="+", help="a file, relative to a workspace's root")
    scan = verbs.add_parser("scan", help="everything in a directory that breaks policy", allow_abbrev=False)
    scan.add_argument("directory", metavar="DIR", nargs="?", type=Path, default=Path(), help="default: this one")
    explain = verbs.add_parser("explain", help="which line decides about a file", allow_abbrev=False)
    explain.add_argument("path", metavar="PATH", help="a file, relative to a workspace's root")
    for verb in (check, scan, explain):
        whose = verb.add_mutually_exclusive_group()
        whose.add_argument("--run", metavar="NAME", help="the policies of this run")
        whose.add_argument("--policy", metavar="NAME", help="this policy (default: the built-in one)")
        verb.add_argument("--manifests", metavar="PATH", type=Path, default=nearest_manifests(), help=FOLDER)
        verb.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.settings import current
    from runner.ops.planning import policy

    directory = args.directory if args.what == "scan" else Path()
    source = policy.PolicySource(args.manifests, directory, args.run, args.policy)
    layers, warnings = trio.run(policy.layers_of, source, current())
    out.findings(warnings)
    match args.what:
        case "check":
            rulings = [policy.explain(path, layers).ruling for path in args.paths]
            _show_rulings(rulings, args.output, out)
            return 0 if all(ruling.allowed for ruling in rulings) else BROKEN
        case "explain":
            explained = policy.explain(args.path, layers)
            _show_explained(explained, args.output, out)
            return 0 if explained.ruling.allowed else BROKEN
        case _:
            found = trio.run(policy.scan_directory, directory, layers)
            _show_scan(found, layers, args.output, out)
            return BROKEN if found.violations else 0


def _show_rulings(rulings: Sequence[PathVerdict], form: str, out: Output) -> None:
    from runner.core.codec import plain

    if form == "json":
        out.json(plain(rulings))
        return
    width = max(len(ruling.path) for ruling in rulings)
    rules = max(len(ruling.rule) for ruling in rulings)
    for ruling in rulings:
        _line(out, f"{_mark(ruling)} {ruling.path:<{width}}  {ruling.rule:<{rules}}  {ruling.origin}")


def _show_explained(explained: PathExplanation, form: str, out: Output) -> None:
    from runner.core.codec import plain

    if form == "json":
        out.json(plain(explained))
        return
    ruling = explained.ruling
    _line(out, f"{ruling.path} is {'allowed' if ruling.allowed else 'not allowed'}")
    _line(out, f"  by rule   {ruling.rule}")
    _line(out, f"  of policy {ruling.policy}")
    _line(out, f"  written   {ruling.origin}")
    if len(explained.policies) > 1:
        for each in explained.policies:
            _line(out, f"{_mark(each)} {each.policy}: {each.rule}   {each.origin}")


def _show_scan(found: ScanResult, layers: Sequence[PolicyLayer], form: str, out: Output) -> None:
    from runner.ops.planning.policy import origin_of

    if form == "json":
        from msgspec.structs import asdict

        violations = [{**asdict(violation), "origin": origin_of(violation, layers)} for violation in found.violations]
        counts = {"files": found.files, "bytes": found.bytes, "truncated": found.truncated}
        out.json({**counts, "violations": violations})
        return
    for violation in found.violations:
        _line(out, f"✗ {violation}   {origin_of(violation, layers)}")
    count = len(found.violations)
    out.line(f"{plural(found.files, 'file')}, {plural(count, 'violation') if count else 'no violations'}")


def _line(out: Output, text: str) -> None:
    """Escape patterns and names, which others chose, for a terminal."""
    from runner.core.sanitize import escape_unprintable

    out.line(escape_unprintable(text))


def _mark(ruling: PathVerdict) -> str:
    return "✓" if ruling.allowed else "✗"
