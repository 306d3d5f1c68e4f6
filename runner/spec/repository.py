"""A repository's own policy among the others: in place of the built-in defaults, never looser than a ``Policy``."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import BadValue, DefaultsDropped, NetworkIgnored, Place, RunnerError
from runner.core.hosts import NetworkSpec
from runner.core.model import IsolationClass
from runner.core.sanitize import excerpt
from runner.manifest import repository
from runner.manifest.load import DEFAULTS
from runner.manifest.network import STEPS, WHOLE
from runner.manifest.repository import RepositoryPolicy
from runner.manifest.text import Tree
from runner.policy.paths import check_pattern
from runner.spec.model import PolicyFile, PolicySpec

NAME = "repository"


class OwnPolicy(Struct, frozen=True):
    """The policy file of a trusted commit, with the places of what is written in it."""

    written: RepositoryPolicy
    tree: Tree
    commit: str

    def line(self, *keys: str | int) -> str:
        """``file:line`` of a value that is written."""
        place = self.tree.place(*keys)
        return f"{place.file}:{place.line}"


def read_own(file: PolicyFile) -> tuple[OwnPolicy | None, list[RunnerError]]:
    """Read a repository's policy file, or list its faults."""
    written, tree, found = repository.read(file.content)
    if written is None or tree is None:
        return None, found
    for key, patterns in (
        ("allowedPaths", written.allowedPaths),
        ("forbiddenPatterns", written.forbiddenPatterns),
    ):
        for position, pattern in enumerate(patterns or ()):
            if complaint := check_pattern(pattern):
                found.append(BadValue(f"`{excerpt(pattern)}` {complaint}", at=tree.place(key, position)))
    if found:
        return None, found
    return OwnPolicy(written, tree, file.commit), found


def with_own(
    policies: Sequence[PolicySpec], own: OwnPolicy, *, untrusted: bool
) -> tuple[tuple[PolicySpec, ...], list[RunnerError]]:
    """All policies that hold, given those that hold without the repository's own.

    Alone with the built-in defaults it takes their place, field by field, and what it leaves out of the
    forbidden patterns is a warning. Beside a ``Policy``, and when ``untrusted``, it only adds to what is
    forbidden and takes from what is allowed.
    """
    written = own.written
    allowed = None if written.allowedPaths is None else tuple(written.allowedPaths)
    forbidden = None if written.forbiddenPatterns is None else tuple(written.forbiddenPatterns)
    mine = PolicySpec(
        name=NAME,
        origin=f"{repository.FILE} at {own.commit[:12]}",
        allowed_paths=("**",) if allowed is None else allowed,
        forbidden_patterns=forbidden or (),
        max_file_size=written.maxFileSize or min(policy.max_file_size for policy in policies),
        providers=None,
        min_isolation=IsolationClass.NONE,
        network=None if written.allowNetwork is not False else dict.fromkeys(STEPS, _network(own, open=False)),
    )
    if untrusted or any(policy.origin != DEFAULTS for policy in policies):
        return (*policies, mine), []
    (built_in,) = policies
    if forbidden is None:
        mine = replace(mine, forbidden_patterns=built_in.forbidden_patterns)
    if allowed is None:
        mine = replace(mine, allowed_paths=built_in.allowed_paths)
    mine = replace(mine, providers=built_in.providers, min_isolation=built_in.min_isolation, secrets=built_in.secrets)
    return (mine,), _dropped(built_in, mine, own)


def with_network(
    networks: dict[str, NetworkSpec],
    own: OwnPolicy | None,
    policies: Sequence[PolicySpec],
    *,
    why_not: str,
) -> tuple[dict[str, NetworkSpec], Place | None, list[RunnerError]]:
    """Add every public host if the repository's own policy allows a network and no ``Policy`` forbids it.

    ``why_not`` says why nothing is added in any case. What is not added is a warning; of what is, return the place.
    """
    if own is None or not own.written.allowNetwork:
        return networks, None, []
    added = _network(own, open=True)
    for policy in policies:
        if policy.network is not None and any(added.excess(policy.network[step]) for step in WHOLE):
            why_not = why_not or f"policy `{policy.name}` does not allow every public host"
    at = own.tree.place("allowNetwork")
    if why_not:
        return networks, None, [NetworkIgnored(f"this allows nothing: {why_not}", at=at, hint="leave it out")]
    return {step: added if step in WHOLE else network for step, network in networks.items()}, at, []


def _network(own: OwnPolicy, *, open: bool) -> NetworkSpec:
    return NetworkSpec(open=open, origin=own.line("allowNetwork"))


def _dropped(built_in: PolicySpec, mine: PolicySpec, own: OwnPolicy) -> list[RunnerError]:
    gone = [pattern for pattern in built_in.forbidden_patterns if pattern not in mine.forbidden_patterns]
    if not gone:
        return []
    return [dropped(gone, at=own.tree.place("forbiddenPatterns"))]


def dropped(gone: Sequence[str], *, at: Place) -> DefaultsDropped:
    """The warning that a list replaces the built-in one and leaves these patterns out."""
    more = f" and {len(gone) - 1} more default{'s' * (len(gone) > 2)} are" if len(gone) > 1 else ", a default, is"
    return DefaultsDropped(f"`{gone[0]}`{more} not in this list", at=at)
