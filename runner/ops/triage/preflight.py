"""Preflight of a triage: check key, place to work, cluster and rights at once, without spending money."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import trio
from msgspec.structs import replace

import runner.agents
from runner.cluster.clusters import Clusters
from runner.core import plugins
from runner.core.errors import ImageMissing, ProviderUnavailable, Rejected, RunnerError, nearest
from runner.core.npm_package import installable, installed_version, pinned_version
from runner.core.settings import Settings
from runner.gateway.gateway import usable_key
from runner.manifest.load import defaults
from runner.ops.planning.agent_programs import install_hint
from runner.ops.planning.clusters import foreign_places
from runner.ops.planning.facts import open_provider
from runner.ops.planning.refusals import outside_of, refusals
from runner.ops.triage.manifest import manifest_of
from runner.ops.triage.place import program_of
from runner.ops.triage.plan import plan_triage
from runner.ops.triage.request import NOWHERE, TriageRequest
from runner.ports.agent import ModelAgent
from runner.ports.cluster import ClusterGrant, ClusterPermissions
from runner.ports.provider import Images
from runner.triage.permissions import MINIMUM

PATIENCE = 5.0  # seconds for everything together

_LONGEST_LIST = 4 << 20  # bytes


@dataclass(frozen=True)
class PreflightCheck:
    """One thing that a triage needs. ``good`` is ``None`` when it is missing but not required."""

    what: str
    good: bool | None
    text: str
    hint: str | None = None


_Check = Callable[[], Awaitable[list[PreflightCheck]]]


async def preflight(triage: TriageRequest, settings: Settings) -> list[PreflightCheck]:
    """Check everything that a triage needs, in a fixed order, within ``PATIENCE``."""
    checks: dict[str, _Check] = {
        "incident": partial(_incident, triage),
        "key": partial(_key, triage, settings),
        "place": partial(_place, triage, settings),
        "cluster": partial(_cluster, triage, settings),
        "plan": partial(_plan, triage, settings),
    }
    found = {name: [PreflightCheck(name, False, f"no answer in {PATIENCE:g}s")] for name in checks}

    async def one(name: str) -> None:
        try:
            found[name] = await checks[name]()
        except RunnerError as error:
            found[name] = [PreflightCheck(name, False, error.message, error.hint)]

    with trio.move_on_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for name in checks:
                nursery.start_soon(one, name)
    told = [checked.text for name in checks if name != "plan" for checked in found[name] if not checked.good]
    found["plan"] = [one for one in found["plan"] if not any(one.text in text or text in one.text for text in told)]
    return [checked for name in checks for checked in found[name]]


async def _plan(triage: TriageRequest, settings: Settings) -> list[PreflightCheck]:
    """Return what planning would refuse or warn of.

    A missing incident directory is skipped, and so is what the other checks examine.
    """
    with TemporaryDirectory() as folder:
        if not triage.directory.is_dir():
            triage = replace(triage, directory=Path(folder))
        manifest = Path(folder) / "triage.runner.yaml"
        manifest.write_text(manifest_of(replace(triage, new_incident=None)), encoding="utf-8")
        try:
            planned = await plan_triage(triage, manifest, settings)
            missing = await refusals(planned, planned.plan.runs, settings, outside_of(settings))
            findings = (*planned.warnings, *missing)
        except Rejected as error:
            findings = tuple(one for one in error.findings if not isinstance(one, (ImageMissing, ProviderUnavailable)))
    return [
        PreflightCheck("plan", None if one.severity == "warning" else False, one.message, one.hint) for one in findings
    ]


async def _incident(triage: TriageRequest) -> list[PreflightCheck]:
    await trio.lowlevel.checkpoint()
    if triage.directory == NOWHERE:
        return []
    if not triage.directory.exists() and triage.new_incident is None:
        hint = "--namespace NAMESPACE --resource KIND/NAME, or --alert FILE, and a run writes it"
        return [PreflightCheck("incident", None, f"{triage.directory} is not there yet", hint)]
    if not triage.directory.exists():
        return [PreflightCheck("incident", True, f"{triage.directory} would be written")]
    known = (triage.directory / "incident.json").exists()
    lacks = "" if known else " has no incident.json"
    return [PreflightCheck("incident", True if known else None, f"{triage.directory}{lacks}")]


async def _key(triage: TriageRequest, settings: Settings) -> list[PreflightCheck]:
    """Check the key by listing models, which is free and needs a valid key."""
    from runner.network.upstream import UpstreamFailed, check_remote, open_remote

    agent = plugins.load(runner.agents, triage.agent).agent
    assert isinstance(agent, ModelAgent)  # as whoever made a triage has checked
    key, base = settings.model_keys[agent.api.value], settings.model_urls[agent.api.value]
    api = import_module(f"runner.gateway.apis.{agent.api.value}").api
    header = api.auth(usable_key(key))
    check_remote(base, settings.reach)
    start = trio.current_time()
    try:
        async with (
            open_remote(base, settings.reach) as upstream,
            upstream.send("GET", api.models, [header, *api.headers], b"") as answer,
        ):
            status, body = answer.status, b""
            async for chunk in answer.body:
                body += chunk
                if len(body) > _LONGEST_LIST:
                    break
    except UpstreamFailed as error:
        hint = f"look at `RUNNER_{agent.api.value.upper()}_URL`, `HTTPS_PROXY` and `SSL_CERT_FILE`"
        return [PreflightCheck("key", False, f"{urlsplit(base).hostname} cannot be reached: {error}", hint)]
    took = trio.current_time() - start
    if status in (401, 403):
        return [PreflightCheck("key", False, f"{key.variable} is refused by {urlsplit(base).hostname} ({status})")]
    if status >= 400:
        return [
            PreflightCheck(
                "key", None, f"{urlsplit(base).hostname} answers {status}, which says nothing about {key.variable}"
            )
        ]
    accepted = PreflightCheck("key", True, f"{key.variable} is accepted by {urlsplit(base).hostname} in {took:.1f}s")
    return [accepted, *_model(triage, body, str(urlsplit(base).hostname))]


def _model(triage: TriageRequest, body: bytes, host: str) -> list[PreflightCheck]:
    """Look the model up in a list of models; nothing when there is no list, or it is incomplete."""
    from runner.gateway.api import inner, json_of, model_matches, objects

    found = inner(json_of(body))
    if found.get("has_more") or found.get("nextPageToken"):
        return []
    listed = (str(entry.get("id") or entry.get("name")) for entry in objects(found.get("data") or found.get("models")))
    names = sorted({name.removeprefix("models/") for name in listed})
    model = triage.model or str(defaults()[f"AgentType {triage.agent}"].written["model"])
    if not names:
        return []
    if any(model_matches(model, name) for name in names):
        return [PreflightCheck("model", True, f"{model} is offered by {host}")]
    return [
        PreflightCheck("model", False, f"`{model}` is not one of {len(names)} models of {host}", nearest(model, names))
    ]


async def _place(triage: TriageRequest, settings: Settings) -> list[PreflightCheck]:
    name = triage.providers[0]
    provider = open_provider(name, settings)
    probe = await provider.probe()
    if not probe.available:
        return [PreflightCheck("provider", False, f"{name}: {probe.reason}", probe.hint)]
    found = [PreflightCheck("provider", True, f"{name}, isolation {probe.isolation.value}")]
    if triage.image is not None and isinstance(provider, Images):
        own = triage.has_own_image
        try:
            image = await provider.image(triage.image, "never" if own else "missing")
        except ImageMissing as error:
            hint = "runner image build" if own else error.hint
            return [*found, PreflightCheck("image", False, error.message, hint)]
        return [*found, PreflightCheck("image", True, f"{triage.image} {image[:19]}")]
    return [*found, _program(triage)]


def _program(triage: TriageRequest) -> PreflightCheck:
    where = program_of(triage)
    if where is None:
        return PreflightCheck("agent", False, f"`{triage.agent}` is not on this host", install_hint(triage.agent))
    package = plugins.load(runner.agents, triage.agent).agent.package
    version, pin = installed_version(where, package), pinned_version(package)
    if pin and version not in ("", pin):
        return PreflightCheck(
            "agent", None, f"{where} {version}", f"install the tested one: npm install {installable(package)}"
        )
    return PreflightCheck("agent", True, f"{where} {version}".rstrip())


async def _cluster(triage: TriageRequest, settings: Settings) -> list[PreflightCheck]:
    """Check reach and rights, through the path that commands will use."""
    if triage.kubeconfig is None:
        hint = "--kubeconfig FILE, KUBECONFIG, or ~/.kube/config"
        return [PreflightCheck("cluster", None, "none: the files of the incident are all there is", hint)]
    from runner.cluster.kubeconfig import read_target

    foreign = foreign_places(settings.home, triage.directory, settings)
    target = read_target(triage.kubeconfig, triage.context, triage.namespace, settings.reach, foreign=foreign)
    clusters = Clusters(settings)
    program = target.plug_in.sha256 if target.plug_in is not None else ""
    grant = ClusterGrant(
        kubeconfig=triage.kubeconfig,
        context=target.context,
        server=target.server,
        namespace=target.namespace,
        plug_in_sha256=program,
    )
    await clusters.check(grant)
    where = f"{target.context} {target.server}"
    async with clusters.open(grant, lambda request: None) as session:
        rights = await session.permissions()
    return [PreflightCheck("cluster", True, f"{where} answers; read only"), rights_told(rights)]


def rights_told(rights: ClusterPermissions) -> PreflightCheck:
    """Report rights: good with all of them, bad where one of the minimum is known to be missing."""
    names = ("pods", "logs", "events", "deployments", "services", "configmaps", "nodes")
    has = [name for name in names if getattr(rights, name)]
    lacks = [name for name in names if getattr(rights, name) is False]
    text = f"{' '.join(has) or ('none' if lacks else 'not known')} in {rights.namespace}"
    good = True if len(has) == len(names) else None
    told = (text, *(f"no {name}" for name in lacks), *rights.warnings)
    return PreflightCheck("rights", False if {*lacks} & {*MINIMUM} else good, "; ".join(told))
