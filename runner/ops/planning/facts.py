"""Facts: the one look outside before planning, at providers, commits, and files that manifests name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

import runner.providers
from runner.core import plugins
from runner.core.errors import (
    BadValue,
    ImageMissing,
    NoRepository,
    OverBudget,
    RunnerError,
    StalePlan,
    UnknownCommit,
    UnknownPlugin,
    nearest,
)
from runner.core.model import Checkout
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.manifest import repository
from runner.ops.planning.files import agents_file, context_file, incident_document, incident_files, skill_files
from runner.spec.facts_request import FactsRequest
from runner.spec.model import AGENTS_FILE, CliVersion, ClusterFact, CommitFact, ContextFile, Facts, Lent, PolicyFile
from runner.spec.select import BYTES
from runner.triage.incident import FILE as INCIDENT_FILE

if TYPE_CHECKING:
    from runner.ports.git import Git
    from runner.ports.provider import Probe, Provider


_LABEL = "k8s-triage-agent."  # of an image that ``runner image build`` has made, before the name of a tool


def provider_names() -> list[str]:
    """List the providers that a manifest may name."""
    return plugins.known(runner.providers)


def usable_providers() -> list[str]:
    """List the providers that can be opened; of other distributions, those that can be imported."""
    return plugins.importable(runner.providers)


def unknown_provider(name: str) -> UnknownPlugin | None:
    """Return the error of a name that no provider has; ``None`` for a provider's."""
    if plugins.exists(runner.providers, name):
        return None
    return UnknownPlugin(f"`{sanitize(name)}` is not a provider", hint=nearest(name, provider_names()))


def uses_images(name: str) -> bool:
    """Tell whether a provider makes workspaces of images, without importing a built-in one."""
    return bool(plugins.fact(runner.providers, name, "USES_IMAGES", False))


def open_provider(name: str, settings: Settings) -> Provider:
    """Open a provider by its name in a manifest. Raises ``UnknownPlugin``."""
    if error := unknown_provider(name):
        raise error
    provider: Provider = plugins.load(runner.providers, name).provider(settings)
    return provider


async def gather(
    wanted: Sequence[FactsRequest], settings: Settings, git: Git, *, pinned: Facts | None = None, offline: bool = False
) -> Facts:
    """Gather the Facts of some runs. With ``pinned``, keep its commits, images and probes as long as they hold.

    ``offline`` Facts are open: only files beside the manifests are read.

    Failures are noted in ``missing``, and the resolver reports them at the manifest line. Raises ``StalePlan`` for a
    provider that became weaker.
    """
    images: dict[str, str] = {}
    commits: dict[str, CommitFact] = {}
    seen: dict[tuple[Checkout, CommitFact | None], tuple[CommitFact, PolicyFile | None]] = {}
    policies: dict[str, PolicyFile] = {}
    clusters: dict[str, ClusterFact] = {}
    clis: dict[str, CliVersion] = {}
    lent: dict[str, Lent] = {}
    missing: dict[str, RunnerError] = {}
    beside = _Beside(missing)
    found = await _probe_all(wanted, settings, beside, pinned=pinned, offline=offline)
    probes = {name: one for name, one in found.items() if one is not None and not isinstance(one, Exception)}
    for want in wanted:
        with _noting(missing, f"{want.run}/providers"):
            for name in want.providers:
                if isinstance(error := found[name], Exception):
                    raise error
        if want.base_image is not None and not offline:
            with _noting(missing, f"{want.run}/image"):
                images.update(await _image(want, settings, probes, pinned))
        if want.checkout is not None and not offline:
            with _noting(missing, f"{want.run}/checkout"):
                known = pinned.commits.get(want.run) if pinned is not None else None
                if (want.checkout, known) not in seen:
                    seen[want.checkout, known] = await _looked_at(want.checkout, git, known)
                commits[want.run], file = seen[want.checkout, known]
                if file is not None:
                    policies[want.run] = file
        with _noting(missing, f"{want.run}/cluster"):
            clusters.update(_cluster(want, settings, offline=offline))
        if not offline and (want.toolchains or want.dependencies):
            alike = (lent[w.run] for w in wanted if w.run in lent and _same_host_parts(w, want))
            lent[want.run] = next(alike, None) or await _lent(want, settings, missing)
        with _noting(missing, f"{want.run}/image"):
            toolchains = lent.get(want.run, Lent()).toolchains
            clis |= {} if offline else await _cli_version(want, settings, toolchains, images.get(want.run), probes)
    return Facts(
        probes=probes,
        commits=commits,
        files=beside.files,
        incidents=beside.incidents,
        missing=missing,
        open=offline,
        policies=policies,
        images=images,
        clusters=clusters,
        left_out=beside.left_out,
        clis=clis,
        lent=lent,
    )


async def _probe_all(
    wanted: Sequence[FactsRequest], settings: Settings, beside: _Beside, *, pinned: Facts | None, offline: bool
) -> dict[str, Probe | RunnerError | OSError | None]:
    """Probe all providers of the runs at once, and read the files beside the manifests meanwhile."""
    import trio  # callers that only need names do without

    names = dict.fromkeys(name for want in wanted for name in want.providers)
    found: dict[str, Probe | RunnerError | OSError | None] = dict.fromkeys(names)

    async def probe(name: str) -> None:
        try:
            provider = open_provider(name, settings)
            found[name] = None if offline else require_not_weaker(await provider.probe(), pinned)
        except (RunnerError, OSError) as error:
            found[name] = error

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(probe, name)
        await trio.lowlevel.checkpoint()
        beside.read(wanted)  # while probes wait for programs and daemons; in a thread it would only slow them down
    return found


class _Beside(Struct):
    """Files that manifests name, by run and kind; ``missing`` gets the reason for those that cannot be read."""

    missing: dict[str, RunnerError]
    files: dict[str, dict[str, ContextFile]] = {}
    incidents: dict[str, dict[str, object]] = {}
    left_out: dict[str, str] = {}
    bytes: int = BYTES

    def _count(self, incident: Mapping[str, ContextFile]) -> None:
        """Count the incident of each run against a common limit. Raises ``OverBudget``."""
        if INCIDENT_FILE in incident:
            self.bytes -= incident[INCIDENT_FILE].size
        if self.bytes < 0:
            message = f"the {INCIDENT_FILE} of all runs together are larger than {BYTES >> 20} MiB"
            raise OverBudget(message, hint="keep logs in files of their own, or plan fewer runs at once")

    def read(self, wanted: Sequence[FactsRequest]) -> None:
        for want in wanted:
            if want.script is not None:
                with _noting(self.missing, f"{want.run}/script", want.script_name):
                    self.files[f"{want.run}/script"] = {want.script_name: context_file(want.script)}
            if want.incident is not None:
                with _noting(self.missing, f"{want.run}/incident", want.incident.name):
                    found, self.left_out[want.run] = incident_files(want.incident)
                    self.files[f"{want.run}/incident"] = found
                    self._count(found)
                    self.incidents[want.run] = incident_document(found)
            skills: dict[str, ContextFile] = {}
            for skill in want.skills:
                with _noting(self.missing, f"{want.run}/skills/{skill}", skill):
                    skills |= skill_files(skill)
            if skills:
                self.files[f"{want.run}/skills"] = skills
            if want.project is not None:
                with _noting(self.missing, f"{want.run}/agents", AGENTS_FILE):
                    self.files[f"{want.run}/agents"] = agents_file(want.project)


def _cluster(want: FactsRequest, settings: Settings, *, offline: bool) -> dict[str, ClusterFact]:
    """Read the target of a run's kubeconfig, by run."""
    if want.cluster is None or offline:
        return {}
    from runner.cluster.kubeconfig import read_target  # with all that TLS takes, which most runs do without
    from runner.ops.planning.clusters import foreign_places

    cluster = want.cluster
    foreign = foreign_places(cluster.beside, want.incident, settings)
    found = read_target(cluster.kubeconfig, cluster.context, cluster.namespace, settings.reach, foreign=foreign)
    fact = ClusterFact(found.context, found.server, found.namespace, found.exposed)
    if found.plug_in is None:
        return {want.run: fact}
    found.plug_in.program(settings.variables)  # raises when it is not there
    return {want.run: replace(fact, plug_in=found.plug_in.name, plug_in_sha256=found.plug_in.sha256)}


@contextmanager
def _noting(missing: dict[str, RunnerError], key: str, file: str = "") -> Iterator[None]:
    """Note the error of the block, so that all errors are reported together."""
    try:
        yield
    except StalePlan:
        raise
    except RunnerError as error:
        missing[key] = error
    except (OSError, ValueError) as error:
        missing[key] = BadValue(f"`{file}` cannot be read: {getattr(error, 'strerror', None) or error}")


def _same_host_parts(one: FactsRequest, other: FactsRequest) -> bool:
    """Tell whether two runs, such as members of a matrix, see the same of this host."""
    parts = ((want.toolchains, want.dependencies, want.checkout) for want in (one, other))
    return next(parts) == next(parts)


async def _lent(want: FactsRequest, settings: Settings, missing: dict[str, RunnerError]) -> Lent:
    """Find what a run's commands see of this host."""
    from runner.ops.planning.host_paths import lend_dependencies, lend_toolchains  # which most runs do without

    checkout, found = want.checkout or Checkout(), Lent()
    with _noting(missing, f"{want.run}/toolchain"):
        found = await lend_toolchains(want.toolchains, settings.variables, checkout.path)
    with _noting(missing, f"{want.run}/dependencies"):
        return lend_dependencies(want.dependencies, checkout, found)
    return found


async def _image(
    want: FactsRequest, settings: Settings, probes: Mapping[str, Probe], pinned: Facts | None
) -> dict[str, str]:
    """Return the id of a run's image, by run; empty when no available provider of the run has images."""
    from runner.ports.provider import Images

    assert want.base_image is not None
    known = pinned.images.get(want.run) if pinned is not None else None
    for name in want.providers:
        provider = open_provider(name, settings)
        if isinstance(provider, Images) and name in probes and probes[name].available:
            try:
                return {want.run: await provider.image(known or want.base_image)}
            except ImageMissing as error:
                if known is None:
                    raise
                raise StalePlan(f"the image that was planned is gone: {error.message}", hint="plan again") from error
    return {}


async def _cli_version(
    want: FactsRequest, settings: Settings, toolchains: Sequence[str], image: str | None, probes: Mapping[str, Probe]
) -> dict[str, CliVersion]:
    """Return the version of a run's CLI, by run: of its toolchain, else of its image or of this host."""
    if want.agent is None:
        return {}
    import runner.agents  # most runs have no model
    from runner.core.npm_package import find_program, installed_version, pinned_version
    from runner.ports.provider import PATH, Images, program_directory

    agent = plugins.load(runner.agents, want.agent).agent
    folders = [*map(program_directory, toolchains)]
    program = find_program(folders if image else [*folders, *PATH.split(":")], agent.program)
    found = installed_version(program, agent.package) if program else ""
    for name in want.providers if image and program is None else ():
        provider = open_provider(name, settings)
        if isinstance(provider, Images) and name in probes and probes[name].available:
            found = found or (await provider.labels(image or "")).get(cli_label(agent.program), "")
    return {want.run: CliVersion(found, pinned_version(agent.package))} if found else {}


def cli_label(program: str) -> str:
    """Return the image label for the version of a CLI, as ``runner image build`` writes it."""
    return f"{_LABEL}{program}"


def first_available(providers: Sequence[str], facts: Facts) -> str | None:
    """Return the first available provider of a chain."""
    return next((name for name in providers if name in facts.probes and facts.probes[name].available), None)


def require_not_weaker(found: Probe, pinned: Facts | None) -> Probe:
    """Return the planned probe if the provider still has all that the plan counts on. Raises ``StalePlan``."""
    planned = pinned.probes.get(found.provider) if pinned is not None else None
    if planned is None or not planned.available:
        return planned or found
    if not found.available:
        raise StalePlan(f"`{found.provider}` is no longer available: {found.reason}", hint=found.hint)
    lost = [feature.value for feature in found.missing if planned.enforces(feature)]
    if found.isolation < planned.isolation:
        lost.append(f"isolation {planned.isolation.value}")
    if lost:
        raise StalePlan(f"`{found.provider}` has lost what the plan counts on: {', '.join(lost)}", hint="plan again")
    return planned


async def _looked_at(checkout: Checkout, git: Git, known: CommitFact | None) -> tuple[CommitFact, PolicyFile | None]:
    """Resolve a checkout to a commit and the policy in it; a ``known`` commit must still exist."""
    try:
        commit = await (_commit_of_path if checkout.url is None else _commit_of_url)(checkout, git, known)
        return commit, await policy_file(checkout, git, commit.commit)
    except (UnknownCommit, NoRepository) as error:
        if known is None:
            raise
        raise StalePlan(f"the commit that was planned is gone: {error.message}", hint="plan again") from error


async def policy_file(checkout: Checkout, git: Git, commit: str) -> PolicyFile | None:
    """Read the policy in a commit; changes in the work tree do not count."""
    if checkout.url is not None:
        content = await git.read_url(
            checkout.url, commit, repository.FILE, depth=checkout.depth, limit=repository.FILE_BYTES
        )
    else:
        assert checkout.path is not None
        content = await git.read_file(
            checkout.path, commit, repository.FILE, limit=repository.FILE_BYTES, within=checkout.within
        )
    return None if content is None else PolicyFile(commit, content)


async def _commit_of_url(checkout: Checkout, git: Git, known: CommitFact | None) -> CommitFact:
    """Resolve a URL's commit. A known one is not checked: reading the policy fails if it is gone."""
    if known is not None:
        return known
    assert checkout.url is not None
    tip = await git.resolve_url(checkout.url, branch=checkout.branch, commit=checkout.commit)
    return CommitFact(tip.commit, tip.branch, dirty=False)


async def _commit_of_path(checkout: Checkout, git: Git, known: CommitFact | None) -> CommitFact:
    assert checkout.path is not None
    source = await git.inspect(checkout.path, within=checkout.within)
    if known is not None:
        await git.resolve(source.top, branch=None, commit=known.commit, within=checkout.within)
        return known
    commit = await git.resolve(source.top, branch=checkout.branch, commit=checkout.commit, within=checkout.within)
    return CommitFact(commit, checkout.branch or source.branch or "work", source.dirty)
