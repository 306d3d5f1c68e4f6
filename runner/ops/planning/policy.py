"""Explain policies of a run, a folder or a repository: their verdicts on paths, and the line of each rule."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.errors import Rejected, RunnerError, UnknownCommit, UnknownReference, UsageError, nearest
from runner.core.model import Checkout, Violation
from runner.core.sanitize import printable_path
from runner.core.settings import Settings
from runner.git import open_git
from runner.manifest.load import DEFAULTS, Document, defaults, load
from runner.ops.planning.facts import gather, policy_file
from runner.policy.paths import PathPolicy, compose
from runner.runtime.tree_scan import ScanResult, scan
from runner.spec.facts_request import facts_request
from runner.spec.model import PolicyFile, PolicySpec
from runner.spec.policies import policies_of
from runner.spec.repository import NAME, OwnPolicy
from runner.spec.select import Selected, repository_root, select

BUILT_IN = "built-in"
BUILT_IN_DEFAULT = "built-in default"

_FIELDS = ("allowed_paths", "forbidden_patterns", "max_file_size")
_OWN_FIELDS = ("allowedPaths", "forbiddenPatterns", "maxFileSize")


@dataclass(frozen=True)
class PolicySource:
    """Choice of policies: those of one run, one policy of the folder ``manifests``, or neither.

    Without a run, the policy in the HEAD of ``directory``'s repository applies as well.
    """

    manifests: Path
    directory: Path
    run: str | None = None
    policy: str | None = None


@dataclass(frozen=True)
class PolicyLayer:
    """A policy that applies. ``lines`` has the manifest line of each of its rules."""

    name: str
    origin: str
    policy: PathPolicy
    lines: Mapping[str, str]


@dataclass(frozen=True)
class PathVerdict:
    """A verdict on a path with the policy that decided and the line of its rule."""

    path: str
    allowed: bool
    rule: str
    policy: str
    origin: str


@dataclass(frozen=True)
class PathExplanation:
    """The verdict on a path, and what each policy says by itself."""

    ruling: PathVerdict
    policies: tuple[PathVerdict, ...]


async def layers_of(source: PolicySource, settings: Settings) -> tuple[list[PolicyLayer], list[RunnerError]]:
    """Return the policies that apply, and warnings about them.

    Raises ``Rejected`` for errors in the manifests or the repository's own policy, and what git raises.
    """
    documents, file = await (_of_run if source.run is not None else _of_folder)(source, settings)
    specs, own, findings = policies_of(documents, file, untrusted=False)
    _reject(findings)
    by_name = {document.name: document for document in documents}
    return [_layer(spec, own if spec.name == NAME else None, by_name) for spec in specs], findings


def explain(path: str, layers: Sequence[PolicyLayer]) -> PathExplanation:
    """Judge the path of a file, relative to a workspace's root, and name the rule that decides."""
    verdict = compose([layer.policy for layer in layers]).judge(path)
    each = tuple(_ruling(path, layer) for layer in layers)
    decided = next(ruling for ruling in each if ruling.rule == verdict.rule)
    return PathExplanation(decided, each)


async def scan_directory(directory: Path, layers: Sequence[PolicyLayer]) -> ScanResult:
    """Scan a directory for everything that breaks policy, except the ``.git`` at its top.

    Raises ``UsageError`` for what is not a directory. Can be cancelled.
    """
    policy = compose([layer.policy for layer in layers])

    def stopping() -> bool:
        trio.from_thread.check_cancelled()
        return False

    def look() -> ScanResult:
        real = Path(os.path.realpath(directory))  # ``resolve`` raises for links in a circle
        return scan(real, policy, should_stop=stopping)

    try:
        return await trio.to_thread.run_sync(look)
    except OSError as error:
        raise UsageError(f"`{printable_path(str(directory))}` cannot be scanned: {error.strerror}") from error


def origin_of(violation: Violation, layers: Sequence[PolicyLayer]) -> str:
    """Return the line of the rule that a violation breaks."""
    if violation.rule == "max-file-size":
        return min(layers, key=lambda layer: layer.policy.max_file_size).lines["max-file-size"]
    return next((layer.lines[violation.rule] for layer in layers if violation.rule in layer.lines), BUILT_IN)


async def _of_run(source: PolicySource, settings: Settings) -> tuple[Sequence[Document], PolicyFile | None]:
    documents, findings = load(source.manifests)
    chosen, unresolved = select(documents, defaults())
    _reject(findings + unresolved)
    selected = _chosen(chosen, source.run or "")
    want, faults = facts_request(selected, settings)
    _reject(faults)
    if want.checkout is None:
        return selected.policies, None
    only_code = replace(want, providers=(), script=None, incident=None, toolchains=())
    facts = await gather([only_code], settings)
    found = facts.of(want.run)
    _reject([missing.error for missing in found.missing])
    return selected.policies, found.policy


def _chosen(chosen: Sequence[Selected], name: str) -> Selected:
    """Find the run of that name, or a member of the matrix if all members have the same policies."""
    members = [selected for selected in chosen if name in (selected.name, selected.group)]
    if not members:
        raise UnknownReference(
            f"there is no run `{printable_path(name)}`", hint=nearest(name, [s.name for s in chosen])
        )
    if any(member.policies != members[0].policies for member in members):
        names = ", ".join(member.name for member in members)
        raise UsageError(f"the members of `{printable_path(name)}` have different policies", hint=f"name one: {names}")
    return members[0]


async def _of_folder(source: PolicySource, settings: Settings) -> tuple[Sequence[Document], PolicyFile | None]:
    document = defaults()["Policy"]
    if source.policy is not None:
        documents, findings = load(source.manifests)
        _reject(findings)
        known = {document.name: document for document in documents if document.kind == "Policy"}
        if source.policy not in known:
            name = printable_path(source.policy)
            raise UnknownReference(f"there is no policy `{name}`", hint=nearest(source.policy, known))
        document = known[source.policy]
    return (document,), await _own_file(source.directory, settings)


async def _own_file(directory: Path, settings: Settings) -> PolicyFile | None:
    top = repository_root(directory)
    if not (top / ".git").exists():
        return None
    git = open_git(settings)
    try:
        commit = await git.resolve(top, branch=None, commit=None)
    except UnknownCommit:  # nothing is committed yet
        return None
    return await policy_file(Checkout(path=top), git, commit)


def _reject(findings: Sequence[RunnerError]) -> None:
    if any(finding.severity == "error" for finding in findings):
        raise Rejected(findings)


def _layer(spec: PolicySpec, own: OwnPolicy | None, documents: Mapping[str, Document]) -> PolicyLayer:
    """Make a layer; ``own`` is the source of the repository's own policy."""

    def place(number: int, *item: int) -> str:
        if own is not None:
            keys: tuple[str | int, ...] = (_OWN_FIELDS[number], *item)
            return own.line(*keys) if own.tree.wrote(*keys) else BUILT_IN_DEFAULT
        origin = documents[spec.name].origin(_FIELDS[number], *item)
        return BUILT_IN_DEFAULT if origin == DEFAULTS else origin

    policy = PathPolicy(spec.allowed_paths, spec.forbidden_patterns, spec.max_file_size)
    lines = {f"allowed:{pattern}": place(0, at) for at, pattern in enumerate(spec.allowed_paths)}
    lines |= {f"forbidden:{pattern}": place(1, at) for at, pattern in enumerate(spec.forbidden_patterns)}
    lines |= {"not-allowed": place(0), "max-file-size": place(2)}
    return PolicyLayer(spec.name, spec.origin, policy, lines)


def _ruling(path: str, layer: PolicyLayer) -> PathVerdict:
    verdict = layer.policy.judge(path)
    return PathVerdict(
        path=printable_path(path),
        allowed=verdict.allowed,
        rule=verdict.rule,
        policy=layer.name,
        origin=layer.lines.get(verdict.rule, BUILT_IN),
    )
