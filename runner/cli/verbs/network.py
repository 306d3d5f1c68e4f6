"""``runner network learn RUN``: the allow-list that a run would have needed, from its record."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from runner.cli.output import Output

SUMMARY = "the allow-list that a run would have needed"
GROUP = "manifests and policy"
EXAMPLES = ("runner network learn last",)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    learn = verbs.add_parser("learn", help="print it from the run's record, for a manifest", allow_abbrev=False)
    learn.add_argument("run", metavar="RUN", help="an id, its beginning, or `last`")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.settings import current
    from runner.ops.runs.history import find_run
    from runner.report.learned_network import learned_network

    stored = trio.run(find_run, current(), args.run)
    for line in learned_network(stored.record):
        out.line(line)
    return 0
