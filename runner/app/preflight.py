"""Whether a triage could begin now: key, place to work in, cluster and rights, asked all at once and for no money."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import trio

import runner.agents
from runner import plugins
from runner.app.facts import open_provider
from runner.app.triage import IMAGE, NOWHERE, Triage
from runner.egress.clusters import Clusters
from runner.egress.gateway import usable
from runner.errors import ImageMissing, RunnerError
from runner.ports.agent import ModelAgent
from runner.ports.cluster import ClusterGrant, Rights
from runner.ports.gateway import Api
from runner.ports.provider import PATH, Images
from runner.settings import Settings

PATIENCE = 5.0  # seconds for everything together

_MODELS = {Api.ANTHROPIC: "/v1/models", Api.OPENAI: "/models", Api.GEMINI: "/v1beta/models"}
_HEADERS = {Api.ANTHROPIC: [(b"anthropic-version", b"2023-06-01")]}


@dataclass(frozen=True)
class Checked:
    """One thing that a triage needs. ``good`` is ``None`` for what it can do without, and does not have."""

    what: str
    good: bool | None
    text: str
    hint: str | None = None


Check = Callable[[], Awaitable[list[Checked]]]


async def preflight(triage: Triage, settings: Settings) -> list[Checked]:
    """Everything that a triage needs, in a fixed order, within ``PATIENCE``."""
    checks: dict[str, Check] = {
        "incident": partial(_incident, triage),
        "key": partial(_key, triage, settings),
        "place": partial(_place, triage, settings),
        "cluster": partial(_cluster, triage, settings),
    }
    found = {name: [Checked(name, False, f"no answer in {PATIENCE:g}s")] for name in checks}

    async def one(name: str) -> None:
        try:
            found[name] = await checks[name]()
        except RunnerError as error:
            found[name] = [Checked(name, False, error.message, error.hint)]

    with trio.move_on_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for name in checks:
                nursery.start_soon(one, name)
    return [checked for name in checks for checked in found[name]]


async def _incident(triage: Triage) -> list[Checked]:
    await trio.lowlevel.checkpoint()
    if triage.directory == NOWHERE:
        return []
    if not triage.directory.exists():
        return [Checked("incident", True, f"{triage.directory} would be written")]
    known = (triage.directory / "incident.json").exists()
    lacks = "" if known else " has no incident.json"
    return [Checked("incident", True if known else None, f"{triage.directory}{lacks}")]


async def _key(triage: Triage, settings: Settings) -> list[Checked]:
    """A list of models costs nothing, and only a key that is accepted gets one."""
    from runner.egress.upstream import UpstreamFailed, check_reach, open_remote

    agent = plugins.load(runner.agents, triage.agent).agent
    assert isinstance(agent, ModelAgent)  # as whoever made a triage has checked
    key, base = settings.model_keys[agent.api.value], settings.model_urls[agent.api.value]
    header = import_module(f"runner.egress.apis.{agent.api.value}").api.auth(usable(key))
    check_reach(base, settings.reach)
    start = trio.current_time()
    try:
        async with (
            open_remote(base, settings.reach) as upstream,
            upstream.send("GET", _MODELS[agent.api], [header, *_HEADERS.get(agent.api, [])], b"") as answer,
        ):
            status = answer.status
    except UpstreamFailed as error:
        return [Checked("key", False, f"{urlsplit(base).hostname} can not be reached: {error}")]
    took = trio.current_time() - start
    if status in (401, 403):
        return [Checked("key", False, f"{key.variable} is refused by {urlsplit(base).hostname} ({status})")]
    if status >= 400:
        return [Checked("key", None, f"{urlsplit(base).hostname} answers {status}: nobody knows about {key.variable}")]
    return [Checked("key", True, f"{key.variable} is accepted by {urlsplit(base).hostname} in {took:.1f}s")]


async def _place(triage: Triage, settings: Settings) -> list[Checked]:
    name = triage.providers[0]
    provider = open_provider(name, settings)
    probe = await provider.probe()
    if not probe.available:
        return [Checked("provider", False, f"{name}: {probe.reason}", probe.hint)]
    found = [Checked("provider", True, f"{name}, isolation {probe.isolation.word}")]
    if triage.image is not None and isinstance(provider, Images):
        try:
            image = await provider.image(triage.image)
        except ImageMissing as error:
            hint = "runner image build" if triage.image == IMAGE else error.hint
            return [*found, Checked("image", False, error.message, hint)]
        return [*found, Checked("image", True, f"{triage.image} {image[:19]}")]
    return [*found, _program(triage)]


def _program(triage: Triage) -> Checked:
    agent = plugins.load(runner.agents, triage.agent).agent
    assert isinstance(agent, ModelAgent)
    folders = [*(f"{folder}/bin" for folder in triage.toolchains), *PATH.split(":")]
    where = next((place for folder in folders if os.access(place := f"{folder}/{agent.program}", os.X_OK)), None)
    if where is None:
        return Checked("agent", False, f"`{agent.program}` is nowhere", "--toolchain DIR, with the CLI in DIR/bin")
    return Checked("agent", True, str(Path(where)))


async def _cluster(triage: Triage, settings: Settings) -> list[Checked]:
    """Reach and rights, through the same way that commands will go."""
    if triage.kubeconfig is None:
        hint = "--kubeconfig FILE, KUBECONFIG, or ~/.kube/config"
        return [Checked("cluster", None, "none: the files of the incident are all there is", hint)]
    from runner.egress.kubeconfig import read_target

    target = read_target(triage.kubeconfig, triage.context, triage.namespace, settings.reach)
    clusters = Clusters(settings)
    grant = ClusterGrant(triage.kubeconfig, target.context, target.server, target.namespace)
    await clusters.reach(grant)
    where = f"{target.context} {target.server}"
    async with clusters.open(grant, lambda request: None) as session:
        rights = await session.rights()
    return [Checked("cluster", True, f"{where} answers; read only"), _rights(rights)]


def _rights(rights: Rights) -> Checked:
    names = ("pods", "logs", "events", "deployments", "services", "configmaps", "nodes")
    has = [name for name in names if getattr(rights, name)]
    lacks = [f"no {name}" for name in names if name not in has]
    text = f"{' '.join(has) or 'none'} in {rights.namespace}"
    enough = {"pods", "logs", "events"} <= {*has}
    return Checked(
        "rights", (None if lacks else True) if enough else False, "; ".join((text, *lacks, *rights.warnings))
    )
