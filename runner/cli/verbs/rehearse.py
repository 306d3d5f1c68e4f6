"""``runner rehearse [PATH] --turns FILE``: apply with a scripted model: no key, no cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from runner.cli.output import Output
from runner.cli.verbs import apply

SUMMARY = "apply with a script in the model's place: the real CLIs, no key, no cost"
GROUP = "runs"
EXAMPLES = ("runner rehearse --turns turns.yaml",)


def add_arguments(parser: ArgumentParser) -> None:
    apply.add_common_arguments(parser)
    parser.add_argument("--turns", metavar="FILE", type=Path, required=True, help="what stands for the model says")


def main(args: Namespace, out: Output) -> int:
    if args.run_key is not None:
        args.run_key = f"rehearsal:{args.run_key}"  # an apply with this key must not find it done
    from runner.core.settings import current

    return apply.apply(args, out, current(), args.turns)
