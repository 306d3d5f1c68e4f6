"""``runner runs network``: the hosts that commands of a run reached, and those that were refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.events.record import HostUse, RunRecord

FORMS = ("text", "json")


def show(record: RunRecord, form: str, out: Output) -> None:
    from runner.core.codec import plain
    from runner.core.sanitize import sanitize
    from runner.report.text import WIDEST, uses_of

    uses = uses_of(record)
    if form == "json":
        out.json(plain(uses))
        return
    for line in _lines(uses):
        out.line(sanitize(line, WIDEST))


def _lines(uses: list[HostUse]) -> Iterator[str]:
    from runner.report.text import traffic

    if not uses:
        yield "no connection, and none was refused"
    for one in uses:
        yield f"{one.connections:>6}  {one.place or '(others)':<40}  {traffic(one):<32}  {one.origin}".rstrip()
