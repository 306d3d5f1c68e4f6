"""``runner runs logs``: show what the steps of a run print, an agent's stream in words, also while it runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from runner.core.settings import Settings
    from runner.events.events import Recorded
    from runner.ops.runs.history import StoredRun
    from runner.ops.runs.step_output import Say, StepOutput

_TICK = 0.1  # seconds between looks at what is printed
_WIDEST = 10_000  # characters of a line


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("step", nargs="?", metavar="STEP", help="only this step")
    parser.add_argument("-f", "--follow", action="store_true", help="follow a running run to its end")
    parser.add_argument("--raw", action="store_true", help="an agent's stream as its CLI wrote it, as for jq")


def show(stored: StoredRun, args: Namespace, settings: Settings, out: Output) -> None:
    from runner.core.errors import UsageError
    from runner.core.sanitize import sanitize
    from runner.ops.runs.header import header_of
    from runner.ops.runs.history import logs_of
    from runner.ops.runs.secret_values import make_redactor
    from runner.ops.runs.step_output import translator_of, words_of
    from runner.ops.runs.watch import planned

    files = logs_of(stored, args.step)
    say = None if args.raw else translator_of(header_of(planned(stored)).agent)
    if args.follow:
        if args.raw:
            raise UsageError("`--follow` and `--raw` exclude each other", hint="leave out `--raw`, or `--follow`")
        out.clean = make_redactor(settings).text
        _follow(stored, args.step, say, settings, out=out)
        return
    for file in files:
        if args.step is None:
            out.line(f"--- {file.stem} {file.suffix[1:]}")
        kind = stored.record.steps[file.stem].kind
        if say is not None and kind == "agent" and file.suffix == ".stdout":
            for line in words_of(file, say):
                out.line(sanitize(line, _WIDEST))
        else:
            print_file(file, out, log=True)


def print_file(file: Path, out: Output, *, log: bool = False) -> None:
    """Write raw bytes to a file or pipe; escape what a terminal, or a CI that reads the log, would obey."""
    from runner.core.sanitize import sanitize

    with file.open("rb") as stream:
        if not out.live and not (log and out.manners.ci_commands):
            while chunk := stream.read(1 << 20):
                out.raw(chunk)
            return
        for line in stream:
            out.line(sanitize(line.decode(errors="replace").rstrip("\r\n"), _WIDEST))


class _Follower:
    """Sink that shows what each step prints; only one ``step``, if given."""

    def __init__(self, stored: StoredRun, step: str | None, say: Say | None, out: Output) -> None:
        self._past = stored
        self._step = step
        self._say = say
        self._out = out
        self._printed: StepOutput | None = None
        self._heading = ""

    def __call__(self, recorded: Recorded) -> None:
        from runner.events import events as ev
        from runner.ops.runs.step_output import StepOutput

        match recorded.event:
            case ev.StepStarted(step=step) if self._step in (None, step):
                say = self._say if self._past.record.steps[step].kind == "agent" else None
                self._printed = StepOutput(self._past.directory, step, say, whole=True)
                self._heading = f"--- {step}" if self._step is None else ""
            case ev.StepEnded() if self._printed is not None:
                self._tell(self._printed.end())
                self._printed = None

    def tick(self) -> None:
        if self._printed is not None:
            self._tell(self._printed.lines())

    def _tell(self, lines: Iterable[str]) -> None:
        from runner.core.sanitize import sanitize

        for line in lines:
            if self._heading:
                self._out.line(self._heading)
                self._heading = ""
            self._out.line(sanitize(line, _WIDEST))


def _follow(stored: StoredRun, step: str | None, say: Say | None, settings: Settings, *, out: Output) -> None:
    """Follow a run. Cancelling, as by Ctrl-C, ends the view, never the run."""
    import trio

    from runner.cli.signals import run_cancellable
    from runner.ops.runs.watch import watch

    follower = _Follower(stored, step, say, out)

    async def tick() -> None:
        while True:
            await trio.sleep(_TICK)
            follower.tick()

    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            await watch(stored, settings, [follower])
            nursery.cancel_scope.cancel()

    run_cancellable(whole)
