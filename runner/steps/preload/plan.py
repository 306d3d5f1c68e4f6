"""Gather what the agent is told of the incident: the incident itself, its rights in the cluster, and a first look."""

from __future__ import annotations

from msgspec import Struct

from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import ClusterSpec, ContextFile, Facts, RunSpec
from runner.spec.preload import FILES, MAX_FILE
from runner.steps.agent.plan import pinned
from runner.triage.baseline import SECONDS

NEEDS = (("setup", "clone", "provision"),)


class PreloadBody(Struct, frozen=True, kw_only=True):
    """``files`` maps parts to files of the incident. The other parts come out of ``cluster``, if there is one."""

    parts: tuple[str, ...]
    files: tuple[tuple[str, ContextFile], ...]
    baseline_seconds: float
    mount_plan: MountPlan
    cluster: ClusterSpec | None = None
    namespace: str | None = None

    @property
    def asks(self) -> bool:
        """Tell whether commands ask the cluster."""
        return self.cluster is not None and bool({"permissions", "baseline"} & set(self.parts))


BODY = PreloadBody


def inputs(body: PreloadBody) -> dict[str, object]:
    files = {part: file.sha256 for part, file in body.files}
    asked = {"cluster": pinned(body.cluster), "namespace": body.namespace, "mounts": body.mount_plan}
    return {"preload": body.parts, "files": files, **asked}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    if not spec.preload:
        return None
    mount_plan = mount_plan_of(spec, facts)
    found = facts.of(spec.name).incident_files or {}
    small = {name: file for name, file in found.items() if file.size <= MAX_FILE}
    files = tuple((part, small[name]) for part, name in FILES.items() if part in spec.preload and name in small)
    limit = spec.timeouts["preload"]
    body = PreloadBody(
        parts=spec.preload,
        files=files,
        baseline_seconds=min(SECONDS, limit / 2),
        mount_plan=mount_plan,
        cluster=spec.cluster,
        namespace=spec.namespace,
    )
    return Step(
        id="preload",
        kind="preload",
        what=", ".join(spec.preload),
        phase="work",
        needs=needs,
        deadline_seconds=limit,
        origin=spec.origins["preload"],
        repeated_on_fallback=True,
        body=body,
        network="cluster, read only" if body.asks else "none",
        mounts=planned_mounts(mount_plan, spec) if body.asks else (),
    )
