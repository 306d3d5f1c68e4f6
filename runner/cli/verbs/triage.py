"""``runner triage -w DIR [PROMPT]``: let an agent investigate an incident in a sandbox and write a report."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NoReturn

from runner.cli.output import Output
from runner.core.errors import Rejected, UsageError
from runner.core.home import run_directory
from runner.core.sanitize import excerpt

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from runner.core.settings import Settings
    from runner.events.record import RunRecord
    from runner.ops.planning.make_plan import PlanResult
    from runner.ops.runs.start import StartedRuns
    from runner.ops.triage.request import TriageRequest
    from runner.ports.sink import Sink

SUMMARY = "investigate an incident with an agent, read only, and write a report"
GROUP = "on call"
EXAMPLES = (
    "runner triage -w ./INC-4821 --check",
    "runner triage -w ./INC-4821 --context prod-eu 'checkout pods restart'",
    "runner triage -w ./INC-4822 --alert alert.json",
)

_KEY = "a key on a command line can be read by every process of this host"
_REFUSED = {
    "--network": "a workspace has no network: its model and its cluster are reached through the runner",
    "--user": "commands run as a user of the workspace's own, never as one of this host",
    "--skills-dir": "the skill is the one that is installed with the runner",
    "--anthropic-key": f"{_KEY}: set ANTHROPIC_API_KEY",
    "--openai-key": f"{_KEY}: set OPENAI_API_KEY",
    "--gemini-key": f"{_KEY}: set GEMINI_API_KEY",
}


class _Refuse(Action):
    """Refuse an option of the triage document that is not supported, and say why."""

    def __call__(self, parser: object, namespace: object, values: object, option: str | None = None) -> NoReturn:
        raise UsageError(f"`{option}` is not supported", hint=_REFUSED[str(option)])


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="what is asked; - reads standard input")
    place = "the incident's directory (default, with --alert or --resource: a new one, ./triage/NAME-TIME)"
    add("-w", "--workspace", metavar="DIR", help=place)
    add("-a", "--agent", metavar="NAME", help="claude, codex, gemini or goose (default: claude)")
    add("-m", "--model", metavar="NAME", help="the agent's model (claude: sonnet)")
    add("-t", "--allowed-tools", dest="tools", metavar="LIST", help="the only tools that the CLI has, with commas")
    add("-s", "--system-prompt-file", dest="system_prompt", metavar="FILE", help="instead of the built-in one")
    add("-i", "--image", metavar="REF", help="the image of the container (default: k8s-triage-agent)")
    add("--provider", metavar="NAME", help="where it runs (default: docker, and local where that is not for you)")
    toolchain = "a directory with the CLIs (default: where they are found)"
    add("--toolchain", dest="toolchains", metavar="DIR", action="append", default=[], help=toolchain)
    add("--timeout", metavar="SECONDS", help="how long the whole run may take (default: 600)")
    add("--memory", metavar="SIZE", help="how much memory it has (default: 2g)")
    add("--cpus", metavar="N", help="how many processors it has")
    add("--max-turns", metavar="N", help="how many answers the model may give")
    add("--kubeconfig", metavar="FILE", help="the cluster, read only (default: KUBECONFIG, then ~/.kube/config)")
    add("--files-only", action="store_true", help="look at no cluster, only at the incident's files")
    add("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    add("--namespace", metavar="NAME", help="where it looks first")
    add("--resource", metavar="KIND/NAME", help="what a new incident is about, with --namespace")
    alert = "what a new incident is about, as Alertmanager, Grafana, PagerDuty, Opsgenie or Datadog posts it; - reads"
    add("--alert", metavar="FILE", help=f"{alert} standard input")
    add("--output-dir", metavar="DIR", help="where output and log go besides (default: DIR/output)")
    add("--output-file", metavar="NAME", help="the log's name there")
    add("-o", "--output-format", "--output", dest="format", metavar="FORM", help="text, json or jsonl (stream-json)")
    add("-v", "--verbose", action="store_true", help="show the agent's output as it is")
    add("-q", "--quiet", action="store_true", help="do not show what the agent says")
    add("-d", "--debug", action="store_true", help="keep the agent's own session and the list of its commands")
    add("--turns", metavar="FILE", type=Path, help="rehearse: a script in the model's place, no key, no cost")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--print", action="store_true", help="print the manifest that would be applied, and start nothing")
    instead("--check", action="store_true", help="test key, cluster, rights and image in 5 s, and start nothing")
    words = "print an account that may only read, with how its kubeconfig is made; of --namespace, or of all"
    instead("--reader-manifest", action="store_true", help=words)
    instead("--open", action="store_true", help="open its page in a browser at the end, or print where the page is")
    for option in _REFUSED:
        add(option, action=_Refuse, help=SUPPRESS)


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.clock import now_microseconds
    from runner.core.settings import current
    from runner.ops.triage.incident_directory import new_incident_file
    from runner.ops.triage.manifest import account_manifest, manifest_of, store_manifest
    from runner.ops.triage.options import read_request
    from runner.ops.triage.place import choose_place

    if args.reader_manifest:
        out.verbatim(account_manifest(args.namespace))
        return 0
    settings = current()
    if args.workspace is None and len(args.prompt) == 1 and Path(args.prompt[0]).is_dir():
        (word,) = args.prompt
        raise UsageError(
            f"`{excerpt(word)}` is a directory, and no `-w` says so", hint=f"did you mean -w {quote(word)}?"
        )
    triage = read_request(vars(args), settings, sys.stdin.buffer.read, now=now_microseconds())
    triage = trio.run(choose_place, triage, settings)
    text = manifest_of(triage)
    if args.print:
        with new_incident_file(triage) as wrote:
            out.verbatim(text)
        if wrote:
            out.complain(f"{triage.directory / 'incident.json'} is new: the manifest is about it")
        return 0
    if args.check:
        return _check(triage, settings, out)
    with new_incident_file(triage) as wrote:
        record = _carry_out(triage, store_manifest(text, settings), args, settings, out, wrote=wrote)
    if triage.output_dir is not None or triage.output_file is not None:
        from runner.core.sanitize import sanitize
        from runner.ops.runs.output_copy import copy_output

        for left in copy_output(run_directory(settings.home, record.id), record):
            out.complain(sanitize(f"not copied: {left}", 1_000))
    if args.open:
        _open(record, settings, out)
    return record.exit_code or 0


def _open(record: RunRecord, settings: Settings, out: Output) -> None:
    """Write the page of a run into its directory, and show it where there is a browser."""
    import webbrowser

    from runner.artifacts.layout import write
    from runner.cli.verbs._show import page
    from runner.core.sanitize import sanitize
    from runner.ops.runs.history import locate
    from runner.ops.runs.page import PAGE

    place = run_directory(settings.home, record.id) / PAGE
    write(place, page(locate(settings, record), settings).rstrip("\n"))
    if not settings.has_browser or not webbrowser.open(place.as_uri()):
        out.complain(sanitize(f"page: {place}", 1_000))


def _check(triage: TriageRequest, settings: Settings, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.core.sanitize import sanitize
    from runner.ops.runs.secret_values import make_redactor
    from runner.ops.triage.preflight import preflight

    out.clean = make_redactor(settings).text
    found = run_cancellable(preflight, triage, settings)
    if triage.form == "text":
        for one in found:
            mark = {True: "✓", False: "✗", None: "!"}[one.good]
            out.line(sanitize(f"{mark} {one.what:<9} {one.text}", 1_000))
            if one.hint and not one.good:
                out.line(sanitize(f"    = hint: {one.hint}", 1_000))
    else:
        out.json(plain(found))
    return 3 if any(one.good is False for one in found) else 0


def _carry_out(
    triage: TriageRequest, manifest: Path, args: Namespace, settings: Settings, out: Output, *, wrote: bool
) -> RunRecord:
    from functools import partial

    from runner.cli.signals import run_cancellable
    from runner.cli.verbs.apply import rehearsal
    from runner.core.errors import ClusterDenied, ClusterUnreachable, CredentialFailed
    from runner.ops.planning.clusters import files_instead
    from runner.ops.runs.secret_values import make_redactor
    from runner.ops.runs.start import start_runs
    from runner.ops.triage.manifest import manifest_of, store_manifest
    from runner.ops.triage.plan import plan_triage

    redactor = make_redactor(settings)
    out.clean = redactor.text
    gateway = rehearsal(args.turns) if args.turns is not None else None
    start = partial(start_runs, settings=settings, gateway=gateway, redactor=redactor)
    follow = partial(_follow, triage=triage, settings=settings, out=out, quiet=args.quiet, wrote=wrote)

    async def whole() -> RunRecord:
        planned = await plan_triage(triage, manifest, settings)
        out.findings(planned.warnings)
        try:
            return await follow(planned, start)
        except (Rejected, ClusterUnreachable, ClusterDenied, CredentialFailed) as error:
            instead, away = files_instead(triage, planned, error)
        known = {warning.message for warning in planned.warnings}
        planned = await plan_triage(instead, store_manifest(manifest_of(instead), settings), settings)
        out.findings([away, *(warning for warning in planned.warnings if warning.message not in known)])
        return await follow(planned, partial(start, warnings=[away]))

    try:
        record = run_cancellable(whole)
    except Rejected as error:
        last = error.findings[-1]
        last.hint = "; ".join((*filter(None, (last.hint,)), "`runner triage --check` shows all that is missing"))
        raise
    if triage.form == "json":
        from runner.report.json import record_document

        out.json(record_document(record))
    return record


async def _follow(
    planned: PlanResult,
    start: Callable[..., AbstractAsyncContextManager[StartedRuns]],
    *,
    triage: TriageRequest,
    settings: Settings,
    out: Output,
    quiet: bool,
    wrote: bool,
) -> RunRecord:
    """Execute a triage while showing it, on the screen or as JSON Lines."""
    from msgspec.structs import replace

    from runner.cli.live_view import open_screen
    from runner.cli.plain_view import open_console
    from runner.cli.signals import stop_at_signals
    from runner.events.events import Recorded, RunStarted
    from runner.ops.runs.header import header_of
    from runner.ops.triage.place import flags_of
    from runner.report import triage as face
    from runner.report.triage import shown_path

    async def started(*sinks: Sink) -> RunRecord:
        async with start(planned, sinks=sinks) as runs, stop_at_signals(runs.cancel):
            (record,) = await runs.wait()
        return record

    if triage.form != "text":
        async with open_console(out, "jsonl", planned.plan.runs, settings) as sink:
            return await started(*([sink] if triage.form == "jsonl" else []))
    (run,) = planned.plan.runs
    copied = () if triage.output_dir is None else ("--output-dir", str(triage.output_dir))
    header = replace(header_of(run), flags=flags_of(run, settings) + copied)
    headers = {run.name: header}
    async with open_screen(out, headers, settings, face=face, quiet=quiet, raw=triage.verbose) as screen:

        def tell(recorded: Recorded) -> None:
            if wrote and isinstance(recorded.event, RunStarted):
                place = shown_path(triage.directory / "incident.json", Path.cwd())
                screen.lines([f"incident   {place} is new"])

        record = await started(screen, tell)
    screen.finish(record)
    return record
