"""``runner doctor``: test what this host can do; exit 1 when nothing here isolates a run.

``--probe`` tests what a command can do in a sandbox; exit 4 when it can do what its provider does not declare.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner import DISTRIBUTION
from runner.cli.output import Output
from runner.core.errors import UnknownPlugin, UsageError, nearest
from runner.core.plural import plural
from runner.core.sanitize import sanitize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.core.model import Feature
    from runner.core.settings import Settings
    from runner.ops.host.health import ArtifactHealth, Health
    from runner.ops.host.keys import KeyTest
    from runner.ops.host.probe import EscapeAttempt, ProbedProvider
    from runner.ports.provider import Probe

NOTHING = 1
NETWORK = "network"  # instead of a provider
_WIDEST = 1_000  # characters of a line
_VERDICTS = {"refused": "pass", "open": "FAIL", "gap": "gap", "untried": "-"}

SUMMARY = "show what this host can isolate and enforce"
GROUP = "start here"
EXAMPLES = ("runner doctor", "runner doctor --probe local", "runner doctor --probe network", "runner doctor --settings")


def add_arguments(parser: ArgumentParser) -> None:
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--settings", action="store_true", help="only the settings, with where each comes from")
    instead(
        "--probe",
        metavar="PROVIDER|network",
        nargs="?",
        const="",
        help="try the ways out of a sandbox, in a workspace that is removed again; of one provider, of all, or the ways"
        " past an allow-list of hosts",
    )
    instead("--spend", action="store_true", help="also ask each model provider something tiny, for money")
    parser.add_argument("--image", metavar="REF", help="where --probe tries them, for providers that have images")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from functools import partial

    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.core.settings import current
    from runner.ops.host.health import examine
    from runner.ops.host.keys import spend

    settings = current()
    if args.image is not None and args.probe is None:
        raise UsageError("--image is where --probe tries the ways out of a sandbox")
    if args.settings:
        rows = settings.rows()
        if args.output == "json":
            out.json([{"name": name, "value": value, "source": source} for name, value, source in rows])
        else:
            width = max(len(name) for name, _, _ in rows)
            for name, value, source in rows:
                out.line(f"{name:<{width}} {value}   ({source})")
        return 0
    if args.probe is not None:
        return _probe(args, settings, out)
    health = run_cancellable(partial(examine, settings))
    apis = {key.api for key in health.agents if key.problem is None} if args.spend else set()
    answered = run_cancellable(partial(spend, settings, apis)) if apis else []
    if args.output == "json":
        out.json({**_object(plain(health)), "able": health.able, "answered": plain(answered)})
    else:
        for line in (*_lines(health), *map(_answered, answered)):
            out.line(sanitize(line, _WIDEST))
    if not health.able:
        return NOTHING
    return 0 if all(one.problem is None for one in answered) else 4


def _probe(args: Namespace, settings: Settings, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.ops.host.probe import examine_all, examine_networks
    from runner.ops.planning.facts import provider_names, unknown_provider

    if args.probe and args.probe != NETWORK and (unknown := unknown_provider(args.probe)):
        raise UnknownPlugin(unknown.message, hint=nearest(args.probe, (*provider_names(), NETWORK)))
    if args.probe == NETWORK:
        examined = run_cancellable(examine_networks, settings, provider_names(), args.image)
    else:
        examined = run_cancellable(examine_all, settings, [args.probe] if args.probe else provider_names(), args.image)
    if args.output == "json":
        out.json([{**_object(plain(one)), "holds": one.holds} for one in examined])
    else:
        for one in examined:
            for line in _examined(one):
                out.line(line)
    nothing_was_tried = bool(args.probe) and all(one.skipped is not None for one in examined)
    return 0 if all(one.holds for one in examined) and not nothing_was_tried else 4


def _examined(one: ProbedProvider) -> Iterator[str]:
    yield f"{one.provider}, isolation {one.isolation.value}"
    if one.skipped is not None:
        yield f"    not probed: {one.skipped}"
    if one.hint is not None:
        yield f"    = hint: {one.hint}"
    yield from (sanitize(line, _WIDEST) for tried in one.tried for line in _tried(tried))


def _tried(tried: EscapeAttempt) -> Iterator[str]:
    yield f"  {_VERDICTS[tried.result.value]:<5} {tried.name:<17} {tried.about}"
    yield from (f"          {told}" for told in tried.told)
    if tried.reason is not None:
        yield f"          declared: {tried.reason}"


def _object(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _lines(health: Health) -> Iterator[str]:
    for probe in health.probes:
        yield from _provider(probe, needed=not health.able)
    if health.remedy is not None:
        yield from ("", "AppArmor, for this bubblewrap only:", "", *health.remedy.splitlines(), "")
    yield f"✓ git        {health.git}"
    for plugin in health.plugins:
        mark = "✗" if plugin.problem else "✓"
        yield f"{mark} plug-in    {plugin.room} `{plugin.name}` of {plugin.distribution}"
        if plugin.problem:
            yield f"    {plugin.problem}"
    for rival in health.rivals:
        yield f"✗ package    `{rival}` has a package `runner` too, and is installed in the same place"
        yield f"    = hint: install runner by itself: `pipx install {DISTRIBUTION}`"
    if health.artifacts is not None:
        yield from _artifacts(health.artifacts)
    if health.proxies:
        yield f"✓ proxy      {', '.join(health.proxies)}"
    yield f"✓ image      {health.image}" if health.image else "- image      none for triage: `runner image build`"
    for key in health.agents:
        found = f"key in {key.variable}" if key.problem is None else key.problem
        cli = "CLI found" if key.agent in health.clis else "no CLI"
        mark = "✓" if key.problem is None and key.agent in health.clis else "-"
        yield f"{mark} {key.agent:<10} {key.model:<20} {cli}; {found}"
    isolates = [probe.provider for probe in health.probes if probe.available and probe.isolation]
    yield ""
    yield f"runs are isolated here by: {', '.join(isolates) or 'nothing, see the hints'}"


def _artifacts(store: ArtifactHealth) -> Iterator[str]:
    waiting = f"; {plural(store.unsent, 'run')} not sent yet: `runner recover`" if store.unsent else ""
    yield f"{'✗' if store.problem else '✓'} artifacts  {store.problem or store.url}{waiting}"
    if store.hint:
        yield f"    = hint: {store.hint}"


def _provider(probe: Probe, *, needed: bool) -> Iterator[str]:
    """Describe a provider: what other hosts could do better, and apart from it what is so by design."""
    mark = "✓" if probe.available else "✗" if needed else "-"
    versions = " ".join(f"{name} {version}" for name, version in sorted(probe.versions.items()))
    yield f"{mark} {probe.provider:<10} isolation {probe.isolation.value:<10} {versions}".rstrip()
    if probe.reason:
        yield f"    {probe.reason}"
    if probe.hint:
        yield f"    = hint: {probe.hint}"
    if not probe.available:
        return
    if probe.makes:
        yield f"    workspaces are {probe.makes}"
    lacking: dict[str, list[str]] = {}
    for feature, why in sorted(probe.missing.items()):
        if feature in probe.watched:
            yield f"    {feature.value}: {probe.watch_words(feature)} ({why})"
        elif not _by_design(probe, feature):
            lacking.setdefault(why, []).append(feature.value)
    yield from (f"    NOT ENFORCED: {', '.join(features)} ({why})" for why, features in lacking.items())
    if probe.ends_whole:
        yield "    memory: what exceeds the limit ends its sandbox whole, not one process of it"
    ways: dict[str, list[str]] = {}
    for way, why in sorted(probe.escapes.items()):
        ways.setdefault(why, []).append(way)
    yield from (f"    known to be open: {', '.join(names)} ({why})" for why, names in ways.items())
    designed = [feature.value for feature in sorted(probe.missing) if _by_design(probe, feature)]
    if designed:
        yield f"    by design without: {', '.join(designed)}"


def _by_design(probe: Probe, feature: Feature) -> bool:
    """Tell whether no host would differ: limits that are no border, and borders of a provider without any."""
    from runner.core.model import Feature

    limits = (Feature.CPU, Feature.MEMORY, Feature.PIDS)
    return feature in (Feature.BASE_IMAGE, Feature.WARM_POOL) or not (probe.isolation or feature in limits)


def _answered(one: KeyTest) -> str:
    from runner.report.format import duration, usage

    found = one.problem or f"answered in {duration(one.seconds)}: {usage(one.usage)}"
    return f"{'✗' if one.problem else '✓'} {one.api.value:<10} {one.model:<20} {found}"
