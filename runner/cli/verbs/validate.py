"""``runner validate [PATH]``: report every finding in manifests, and explain each kind of finding."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.requests import WHERE, manifests_of, nearest_manifests
from runner.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.core.errors import RunnerError

SUMMARY = "check manifests; touches nothing else"
GROUP = "manifests and policy"
EXAMPLES = ("runner validate", "runner validate --explain manifest.unknown-field")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=nearest_manifests(), help=WHERE)
    parser.add_argument("--output", choices=("text", "json", "sarif", "github"), default="text")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--explain", metavar="CODE", help="say what a finding means, with an example; `list` for all")


def main(args: Namespace, out: Output) -> int:
    if args.explain is not None:
        from runner.report.rules import explain, listing

        out.line(listing() if args.explain == "list" else explain(args.explain))
        return 0
    from runner.core.errors import Rejected
    from runner.core.settings import current
    from runner.ops.planning.validate import validate

    args.path = manifests_of(args)
    documents, findings = validate(args.path, current())
    if args.strict:
        for finding in findings:
            finding.harden()
    failed = any(finding.severity == "error" for finding in findings)
    _show(findings, len(documents), args, out)
    return Rejected(findings).exit_code if failed else 0


def _show(findings: Sequence[RunnerError], documents: int, args: Namespace, out: Output) -> None:
    match args.output:
        case "json":
            from runner.report.diagnostics import as_json

            out.json({"documents": documents, "findings": [as_json(finding) for finding in findings]})
        case "sarif":
            from runner.report.sarif import as_sarif

            out.json(as_sarif(findings, str(args.path)))
        case "github":
            from runner.report.github import commands

            out.commands(commands(findings))
        case _:
            out.findings(findings)
            if all(finding.severity == "warning" for finding in findings):
                out.line(f"{plural(documents, 'document')} fine")
