"""``runner doctor``: what this host can do, found by trying; exit 4 when nothing here isolates."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.app.health import Health

SUMMARY = "show what this host can isolate and enforce"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--settings", action="store_true", help="only the settings, with where each comes from")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.health import examine
    from runner.plan.model import plain
    from runner.settings import current

    settings = current()
    if args.settings:
        rows = settings.rows()
        if args.output == "json":
            out.json([{"name": name, "value": value, "source": source} for name, value, source in rows])
        else:
            for name, value, source in rows:
                out.line(f"{name:<26} {value}   ({source})")
        return 0
    health = trio.run(examine, settings)
    if args.output == "json":
        out.json({**_object(plain(health)), "able": health.able})
    else:
        for line in _lines(health):
            out.line(line)
    return 0 if health.able else 4


def _object(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _lines(health: Health) -> Iterator[str]:
    for probe in health.probes:
        mark = "✓" if probe.available else "✗"
        versions = " ".join(f"{name} {version}" for name, version in sorted(probe.versions.items()))
        yield f"{mark} {probe.provider:<10} isolation {probe.isolation.word:<10} {versions}".rstrip()
        if probe.reason:
            yield f"    {probe.reason}"
        if probe.hint:
            yield f"    = hint: {probe.hint}"
        if probe.available:
            yield from (f"    not enforced: {feature.value} ({why})" for feature, why in sorted(probe.missing.items()))
    yield f"✓ git        {health.git}"
