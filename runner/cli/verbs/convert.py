"""``runner convert [PATH]``: convert manifests of an older version, keeping comments and order."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from runner.cli.output import Output
from runner.cli.requests import FOLDER, nearest_manifests

SUMMARY = "rewrite manifests of an older version"
GROUP = "manifests and policy"
EXAMPLES = ("runner convert --diff", "runner convert old.runner.yaml --write")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=nearest_manifests(), help=FOLDER)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", action="store_true", help="show what would change instead of the new text")
    what.add_argument("--write", action="store_true", help="write the files; none if one cannot be converted")


def main(args: Namespace, out: Output) -> int:
    from difflib import unified_diff

    from runner.core.errors import Rejected
    from runner.manifest.convert import convert, write

    conversions, findings = convert(args.path)
    if findings:
        raise Rejected(findings)
    if args.write:
        write(conversions)
    changed = [conversion for conversion in conversions if conversion.changed]
    for conversion in changed:
        if args.write:
            out.line(f"converted {conversion.path}")
        elif args.diff:
            before, after = (text.splitlines() for text in (conversion.before, conversion.after))
            for line in unified_diff(
                before, after, str(conversion.path), f"{conversion.path} (converted)", lineterm=""
            ):
                out.line(line)
        else:
            if len(changed) > 1:
                out.line(f"---   # {conversion.path}")
            out.verbatim(conversion.after)
    if not changed:
        print("nothing to convert", file=out.stderr)
    return 0
