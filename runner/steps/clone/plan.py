"""Bring the code: a private repository of the runner's, and a checkout with a ``.git`` of its own."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from runner.plan.model import Step
from runner.spec.model import AGENTS_FILE, ContextFile, Facts, PolicySpec, RunSpec

NEEDS = (("provision",),)
_NAMED = 5  # submodules


class CloneBody(Struct, frozen=True, kw_only=True):
    """Either ``path`` or ``url``; ``commit`` is ``None`` only in an open plan.

    ``within`` is what a path may not lead out of.
    ``agents_file`` is the project's, for a tree that has none of its own.
    """

    path: Path | None
    url: str | None
    commit: str | None
    branch: str
    depth: int | None
    include_dirty: bool
    policies: tuple[PolicySpec, ...]
    agents_file: ContextFile | None
    within: Path | None = None
    submodules: bool = False
    lfs: bool = False
    untrusted: bool = False


BODY = CloneBody


def inputs(body: CloneBody) -> dict[str, object]:
    return {
        "base commit": body.commit,
        "branch": body.branch,
        "url": body.url,
        "depth": body.depth,
        "uncommitted files": body.include_dirty,
        "submodules": body.submodules,
        "LFS": body.lfs,
        AGENTS_FILE: body.agents_file.sha256 if body.agents_file else None,
    }


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    checkout = spec.checkout
    if checkout is None:
        return None
    if checkout.commit is not None and not facts.open:
        of = f" of {checkout.url}, pinned" if checkout.url else ""
        what = f"{checkout.commit[:12]} = {spec.branch}{of}, private clone"
    else:
        what = f"{checkout.commit or checkout.branch or 'HEAD'} of {checkout.url or checkout.path}, not pinned"
    if checkout.depth:
        what += f", depth {checkout.depth}"
    if checkout.include_dirty:
        what += ", with uncommitted files"
    elif (commit := facts.of(spec.name).commit) is not None and commit.dirty:
        what += ", uncommitted files left out"
    parts = facts.of(spec.name).parts
    names = ", ".join(parts.submodules[:_NAMED]) + (", ..." if len(parts.submodules) > _NAMED else "")
    if checkout.submodules:
        what += f", with submodules {names}".rstrip()
    elif names:
        what += f", submodules left empty: {names}"
    if checkout.lfs or parts.lfs:
        what += ", with files of LFS" if checkout.lfs else ", files of LFS left as pointers"
    return Step(
        id="clone",
        kind="clone",
        what=what,
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["clone"],
        origin=spec.origins["clone"],
        repeated_on_fallback=True,
        body=CloneBody(
            path=checkout.path,
            url=checkout.url,
            commit=checkout.commit,
            branch=spec.branch,
            depth=checkout.depth,
            include_dirty=checkout.include_dirty,
            policies=spec.policies,
            agents_file=None if spec.shared else facts.of(spec.name).agents_file,
            within=checkout.within,
            submodules=checkout.submodules,
            lfs=checkout.lfs,
            untrusted=spec.untrusted,
        ),
    )
