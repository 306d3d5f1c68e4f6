"""The view that commands of a run have of a workspace; the same value in plan, execution and read-back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.core.model import Feature, Mount
from runner.plan.model import BUILT_IN, PlannedMount
from runner.ports.provider import SandboxSpec
from runner.spec.model import Facts, RunSpec

_OUTPUT = PlannedMount("/output", True, BUILT_IN)


class MountPlan(Struct, frozen=True, kw_only=True):
    """Paths that commands see. ``protected`` are relative to the tree; ``inputs`` are the incident's top entries when
    they lie in the tree.

    ``skills`` are the names in ``/skills``. With ``cluster`` commands have a directory for the kubeconfig, which the
    host writes. ``environment`` and ``dependencies`` are those of ``SandboxSpec``.
    """

    protected: tuple[str, ...]
    toolchains: tuple[str, ...]
    incident: bool
    inputs: tuple[str, ...] = ()
    skills: tuple[str, ...] = ()
    cluster: bool = False
    environment: Mapping[str, str] = {}
    dependencies: tuple[Mount, ...] = ()

    @property
    def sandbox_spec(self) -> SandboxSpec:
        """Return a sandbox spec with the protected paths, toolchains and dependencies."""
        return SandboxSpec(
            mounts=(),
            protected=self.protected,
            toolchains=self.toolchains,
            env=self.environment,
            dependencies=self.dependencies,
        )

    def mounts(self, private: Path) -> tuple[Mount, ...]:
        """List the read-only mounts out of a workspace's private directory."""
        wanted = (
            (self.incident, "incident", "/incident"),
            (bool(self.skills), "skills", "/skills"),
            (self.cluster, "kube", "/root/.kube"),
        )
        return tuple(Mount(private / name, target) for shown, name, target in wanted if shown)


def add_layers(spec: SandboxSpec, layers: Sequence[Mount]) -> SandboxSpec:
    """Add mounts of layers to a sandbox spec; programs of virtual environments among them come first."""
    programs = [f"/workspace/{one.target}/bin" for one in layers if (one.source / "pyvenv.cfg").is_file()]
    env = {**spec.env, "PATH": ":".join((*programs, spec.environment["PATH"]))} if programs else spec.env
    return replace(spec, dependencies=(*spec.dependencies, *layers), env=env)


def mount_plan_of(spec: RunSpec, facts: Facts) -> MountPlan:
    """Build the mount plan of setup, agent and hooks. Without a repository the incident's files lie in the tree,
    read-only."""
    files = (facts.of(spec.name).incident_files or {}) if spec.checkout is None else {}
    inputs = tuple(sorted({name.split("/", 1)[0] for name, file in files.items() if file.whole}))
    protected, has_incident, has_cluster = tuple(spec.protected), spec.incident is not None, spec.cluster is not None
    lent = spec.lent
    return MountPlan(
        protected=protected,
        toolchains=lent.toolchains,
        incident=has_incident,
        inputs=inputs,
        skills=spec.skills,
        cluster=has_cluster,
        environment=lent.environment,
        dependencies=lent.dependencies,
    )


def planned_mounts(mount_plan: MountPlan, spec: RunSpec) -> tuple[PlannedMount, ...]:
    """List the paths that commands see, each with the manifest line that asked for it."""
    incident = ("/incident", *mount_plan.inputs) if mount_plan.incident else mount_plan.inputs
    return (
        PlannedMount("/workspace", True, spec.origins["project"] if spec.shared else BUILT_IN),
        _OUTPUT,
        *(PlannedMount(path, False, spec.origins["incident"]) for path in incident),
        *(PlannedMount(f"/skills/{name}", False, spec.origins["skills"]) for name in mount_plan.skills),
        *((PlannedMount("/root/.kube", False, spec.origins["cluster"]),) if mount_plan.cluster else ()),
        *(PlannedMount(path, False, spec.protected[path]) for path in mount_plan.protected),
        *(PlannedMount(path, False, spec.origins[Feature.DEPENDENCIES]) for path in _dependencies(mount_plan, spec)),
        *(PlannedMount(path, False, _asked(spec)) for path in mount_plan.toolchains),
    )


def _dependencies(mount_plan: MountPlan, spec: RunSpec) -> list[str]:
    made = [path for one in spec.dependencies for path in one.keep]
    return [*(mount.target for mount in mount_plan.dependencies), *made]


def _asked(spec: RunSpec) -> str:
    """Return the manifest line that toolchains are mounted for; dependencies bring those that they link to."""
    return spec.origins.get(Feature.TOOLCHAINS) or spec.origins[Feature.DEPENDENCIES]
