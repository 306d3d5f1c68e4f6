"""Facts: the one look outside before planning, at providers, commits, and files that manifests name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
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
from runner.core.hosts import NetworkSpec
from runner.core.model import Checkout
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.manifest import repository
from runner.ops.planning.files import agents_file, context_file, incident_document, incident_files, skill_files
from runner.spec.cluster import WantedCluster
from runner.spec.facts_request import FactsRequest
from runner.spec.model import (
    AGENTS_FILE,
    CliVersion,
    ClusterFact,
    CommitFact,
    ContextFile,
    Facts,
    Lent,
    McpFact,
    Missing,
    PartsFact,
    PolicyFile,
    RunFacts,
    Wanted,
)
from runner.spec.select import BYTES
from runner.triage.incident import FILE as INCIDENT_FILE

if TYPE_CHECKING:
    from runner.plan.model import RunPlan
    from runner.ports.git import Git
    from runner.ports.provider import Images, Probe, Provider


ATTRIBUTES = ".gitattributes"
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
    wanted: Sequence[FactsRequest], settings: Settings, *, pinned: Facts | None = None, offline: bool = False
) -> Facts:
    """Gather the Facts of some runs. With ``pinned``, keep its commits, images and probes as long as they hold.

    ``offline`` Facts are open: only files beside the manifests are read.

    Failures are noted as ``missing``, and the resolver reports them at the manifest line. Raises ``StalePlan`` for a
    provider that became weaker.
    """
    found, beside = await _probe_all(wanted, settings, pinned=pinned, offline=offline)
    probes = {name: one for name, one in found.items() if one is not None and not isinstance(one, Exception)}
    look = _Look(settings=settings, probes=probes, pinned=pinned)
    runs: dict[str, RunFacts] = {}
    for want in wanted:
        missing = [*beside[want.run].missing]
        with _noting(missing, Wanted.PROVIDERS):
            for name in want.providers:
                if isinstance(error := found[name], Exception):
                    raise error
        facts = replace(beside[want.run], missing=tuple(missing))
        runs[want.run] = facts if offline else await look.at(want, facts)
    return Facts(probes, runs, offline)


class _Look(Struct, kw_only=True, dict=True):
    """The look at what the runs ask for, but providers and files; what several runs ask for is looked at once."""

    settings: Settings
    probes: Mapping[str, Probe]
    pinned: Facts | None
    checkouts: dict[tuple[Checkout, CommitFact | None], tuple[CommitFact, PolicyFile | None]] = {}
    host_parts: list[tuple[FactsRequest, Lent]] = []

    @cached_property
    def git(self) -> Git:
        from runner.git import open_git  # runs are planned that have no repository

        return open_git(self.settings)

    async def at(self, want: FactsRequest, beside: RunFacts) -> RunFacts:
        """Add the facts of a run to those of its files."""
        known = self.pinned.of(want.run) if self.pinned is not None else RunFacts()
        image, commit, policy, cluster, cli, lent = None, None, None, None, None, None
        lock_files: Mapping[str, str] = {}
        missing = [*beside.missing]
        if want.base_image is not None:
            with _noting(missing, Wanted.IMAGE):
                image = await self._image(want, known.image)
        if want.checkout is not None:
            with _noting(missing, Wanted.CHECKOUT):
                key = want.checkout, known.commit
                if key not in self.checkouts:
                    self.checkouts[key] = await _looked_at(want.checkout, self.git, known.commit)
                commit, policy = self.checkouts[key]
        parts = await self._parts(want, want.checkout, commit, missing)
        if commit is not None and want.dependency_commands:
            from runner.ops.planning.lock_files import hash_lock_files  # which most runs do without

            with _noting(missing, Wanted.DEPENDENCIES):
                lock_files = await hash_lock_files(want, commit.commit, self.git)
        if want.cluster is not None:
            with _noting(missing, Wanted.CLUSTER):
                cluster = _cluster(want.cluster, want.incident, self.settings)
        if want.toolchains or want.dependencies:
            lent = next((one for other, one in self.host_parts if _same_host_parts(other, want)), None)
            if lent is None:
                lent = await _lent(want, self.settings, missing)
                self.host_parts.append((want, lent))
        if want.agent is not None:
            with _noting(missing, Wanted.IMAGE):
                cli = await self._cli_version(want, lent.toolchains if lent is not None else (), image)
        networks: Mapping[str, NetworkSpec] = {}
        if want.tools:
            with _noting(missing, Wanted.NETWORK):
                networks = await self._networks(want, commit)
            for tool, planned in known.networks.items():
                if networks.get(tool) != planned:
                    raise StalePlan(f"`{tool}` is configured to use other hosts than was planned", hint="plan again")
        servers = await self._servers(want, known, missing)
        return replace(
            beside,
            mcp=servers,
            networks=networks,
            commit=commit,
            parts=parts,
            policy=policy,
            image=image,
            cluster=cluster,
            cli=cli,
            lent=lent,
            lock_files=lock_files,
            missing=tuple(missing),
        )

    async def _parts(
        self, want: FactsRequest, checkout: Checkout | None, commit: CommitFact | None, missing: list[Missing]
    ) -> PartsFact:
        """Find what the commit of a run only refers to."""
        if commit is None or checkout is None or not (there := _part_files(checkout)):
            return PartsFact()
        from runner.ops.planning.parts import find_parts, require_git_lfs  # which most runs do without

        with _noting(missing, Wanted.LFS):
            require_git_lfs(checkout, self.settings)
        with _noting(missing, Wanted.SUBMODULES):
            return await find_parts(want, commit.commit, self.git, self.settings, there)
        return PartsFact()

    async def _servers(self, want: FactsRequest, known: RunFacts, missing: list[Missing]) -> Mapping[str, McpFact]:
        """Find the places of the MCP servers of a run."""
        if not want.mcp_servers:
            return {}
        from runner.ops.planning.mcp_servers import place_servers  # which most runs do without

        servers, lacking = await place_servers(want.mcp_servers, self.settings, self.probes, known.mcp)
        missing += lacking
        return servers

    async def _networks(self, want: FactsRequest, commit: CommitFact | None) -> Mapping[str, NetworkSpec]:
        """Ask the tools of this host and the repository for the hosts that they use."""
        from runner.ops.planning.network_sets import LIMIT, Look, find_network_sets  # which most runs do without

        async def read(name: str) -> bytes | None:
            if want.checkout is None or commit is None:
                return None
            return await read_file_of(want.checkout, self.git, commit.commit, name, LIMIT)

        checkout = want.checkout or Checkout()
        source = str(checkout.path) if checkout.path is not None else checkout.url
        return await find_network_sets(want.tools, Look(variables=self.settings.variables, read=read, source=source))

    async def _image(self, want: FactsRequest, known: str | None) -> str | None:
        """Return what pins a run's image, or the ``known`` pin; ``None`` without a provider that has images."""
        when = "missing" if known and want.pull == "always" else want.pull
        for provider in self._with_images(want):
            try:
                return await provider.image(known or want.base_image or "", when)
            except ImageMissing as error:
                if known is None or error.passes:
                    raise
                raise StalePlan(f"the image that was planned is gone: {error.message}", hint="plan again") from error
        return None

    async def _cli_version(self, want: FactsRequest, toolchains: Sequence[str], image: str | None) -> CliVersion | None:
        """Return the version of a run's CLI: of its toolchain, else of its image or of this host."""
        import runner.agents  # most runs have no model
        from runner.core.npm_package import find_program, installed_version, pinned_version
        from runner.ports.provider import PATH, program_directory

        agent = plugins.load(runner.agents, want.agent or "").agent
        folders = [*map(program_directory, toolchains)]
        program = find_program(folders if image else [*folders, *PATH.split(":")], agent.program)
        found = installed_version(program, agent.package) if program else ""
        for provider in self._with_images(want) if image and program is None else ():
            found = found or (await provider.labels(image or "")).get(cli_label(agent.program), "")
        return CliVersion(found, pinned_version(agent.package)) if found else None

    def _with_images(self, want: FactsRequest) -> Iterator[Images]:
        """Yield the available providers of a run that make workspaces of images."""
        from runner.ports.provider import Images

        for name in want.providers:
            provider = open_provider(name, self.settings)
            if isinstance(provider, Images) and name in self.probes and self.probes[name].available:
                yield provider


async def _probe_all(
    wanted: Sequence[FactsRequest], settings: Settings, *, pinned: Facts | None, offline: bool
) -> tuple[dict[str, Probe | RunnerError | OSError | None], dict[str, RunFacts]]:
    """Probe all providers of the runs at once, and read the files beside the manifests meanwhile."""
    import trio  # callers that only need names do without

    hosts = (name for want in wanted for server in want.mcp_servers for name in server.providers)
    names = dict.fromkeys([*(name for want in wanted for name in want.providers), *hosts])
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
        beside = _Beside()  # while probes wait for programs and daemons; in a thread it would only slow them down
        files = {want.run: beside.read(want) for want in wanted}
    return found, files


class _Beside(Struct):
    """Reads the files that manifests name; ``bytes`` are those that the incidents of all runs may still have."""

    bytes: int = BYTES

    def _count(self, incident: Mapping[str, ContextFile]) -> None:
        """Count the incident of each run against a common limit. Raises ``OverBudget``."""
        if INCIDENT_FILE in incident:
            self.bytes -= incident[INCIDENT_FILE].size
        if self.bytes < 0:
            message = f"the {INCIDENT_FILE} of all runs together are larger than {BYTES >> 20} MiB"
            raise OverBudget(message, hint="keep logs in files of their own, or plan fewer runs at once")

    def read(self, want: FactsRequest) -> RunFacts:
        missing: list[Missing] = []
        facts, skills = RunFacts(), dict[str, ContextFile]()
        if want.script is not None:
            with _noting(missing, Wanted.SCRIPT, want.script_name):
                facts = replace(facts, script=context_file(want.script))
        if want.incident is not None:
            with _noting(missing, Wanted.INCIDENT, want.incident.name):
                files, left_out = incident_files(want.incident)
                facts = replace(facts, incident_files=files, left_out=left_out)
                self._count(files)
                facts = replace(facts, incident=incident_document(files))
        for skill in want.skills:
            with _noting(missing, Wanted.SKILL, skill):
                skills |= skill_files(skill)
        if want.project is not None:
            with _noting(missing, Wanted.AGENTS_FILE, AGENTS_FILE):
                facts = replace(facts, agents_file=agents_file(want.project))
        return replace(facts, skills=skills, missing=tuple(missing))


def _cluster(cluster: WantedCluster, incident: Path | None, settings: Settings) -> ClusterFact:
    """Read the target of a run's kubeconfig."""
    from runner.cluster.kubeconfig import read_target  # with all that TLS takes, which most runs do without
    from runner.ops.planning.clusters import foreign_places

    foreign = foreign_places(cluster.beside, incident, settings)
    found = read_target(cluster.kubeconfig, cluster.context, cluster.namespace, settings.reach, foreign=foreign)
    fact = ClusterFact(context=found.context, server=found.server, namespace=found.namespace, exposed=found.exposed)
    if found.plug_in is None:
        return fact
    found.plug_in.program(settings.variables)  # raises when it is not there
    return replace(fact, plug_in=found.plug_in.name, plug_in_sha256=found.plug_in.sha256)


@contextmanager
def _noting(missing: list[Missing], what: Wanted, name: str = "") -> Iterator[None]:
    """Note the error of the block, so that all errors are reported together; ``name`` is of a file or skill."""
    try:
        yield
    except StalePlan:
        raise
    except RunnerError as error:
        missing.append(Missing(what, error, name))
    except (OSError, ValueError) as error:
        unread = BadValue(f"`{name}` cannot be read: {getattr(error, 'strerror', None) or error}")
        missing.append(Missing(what, unread, name))


def _same_host_parts(one: FactsRequest, other: FactsRequest) -> bool:
    """Tell whether two runs, such as members of a matrix, see the same of this host."""
    parts = ((want.toolchains, want.dependencies, want.dependency_commands, want.checkout) for want in (one, other))
    return next(parts) == next(parts)


async def _lent(want: FactsRequest, settings: Settings, missing: list[Missing]) -> Lent:
    """Find what a run's commands see of this host."""
    from runner.ops.planning.host_paths import lend_dependencies, lend_toolchains  # which most runs do without

    checkout, found = want.checkout or Checkout(), Lent()
    with _noting(missing, Wanted.TOOLCHAINS):
        made = [path for one in want.dependency_commands for path in one.keep]
        found = await lend_toolchains(want.toolchains, settings.variables, checkout.path, made)
    with _noting(missing, Wanted.DEPENDENCIES):
        return lend_dependencies(want.dependencies, checkout, found)
    return found


def with_kept_layers(runs: Iterable[RunPlan], facts: Facts, settings: Settings) -> Iterator[RunPlan]:
    """Yield runs that say which of their dependencies are kept on this host."""
    for run in runs:
        name = first_available(run.providers, facts)
        if name is None or all(step.kind != "dependencies" for step in run.steps):
            yield run
            continue
        from runner.steps.dependencies.layers import tell_kept  # and with it all that a running step has

        yield tell_kept(run, settings.home, needs_image=facts.probes[name].needs_image)


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


def _part_files(checkout: Checkout) -> list[str]:
    """List the files of a commit that tell of parts outside of it: of a work tree those that it has now."""
    both = [".gitmodules", ATTRIBUTES]
    if checkout.path is None:
        return both
    from runner.git import source  # as the look at the commit did

    local = source.find_repository(checkout.path, checkout.within)
    return both if local.bare else [name for name in both if (local.top / name).exists()]


async def policy_file(checkout: Checkout, git: Git, commit: str) -> PolicyFile | None:
    """Read the policy in a commit; changes in the work tree do not count."""
    content = await read_file_of(checkout, git, commit, repository.FILE, repository.FILE_BYTES)
    return None if content is None else PolicyFile(commit, content)


async def read_file_of(checkout: Checkout, git: Git, commit: str, name: str, limit: int) -> bytes | None:
    """Read a file of a commit; ``None`` if it has no such path. Raises what git raises."""
    if checkout.url is not None:
        return await git.read_url(checkout.url, commit, name, depth=checkout.depth, limit=limit)
    assert checkout.path is not None
    return await git.read_file(checkout.path, commit, name, limit=limit, within=checkout.within)


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
