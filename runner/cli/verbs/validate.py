"""``runner validate [PATH]``: every finding of a manifest file or folder, and nothing else."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from runner.cli.output import Output

SUMMARY = "check manifests; touches nothing else"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path(".runner"), help="file or folder (default: .runner)")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from runner.app.planning import validate
    from runner.errors import Rejected
    from runner.report.diagnostics import as_json

    documents, findings = validate(args.path)
    failed = any(finding.severity == "error" for finding in findings)
    if args.output == "json":
        out.json({"documents": len(documents), "findings": [as_json(finding) for finding in findings]})
    else:
        out.findings(findings)
        if not failed:
            out.line(f"{len(documents)} document{'s' * (len(documents) != 1)} fine")
    return Rejected(findings).exit_code if failed else 0
