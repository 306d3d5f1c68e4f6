"""How a workspace looks to the commands of a run; the same value in plan, execution and read-back."""

from __future__ import annotations

from dataclasses import dataclass

from runner.model import Feature
from runner.plan.model import BUILT_IN, Mounted
from runner.spec.model import AGENTS_FILE, ContextFile, Facts, RunSpec

_OUTPUT = Mounted("/output", True, BUILT_IN)


@dataclass(frozen=True)
class Shape:
    """``protected`` are relative to the tree; ``inputs`` are the incident's top entries when they lie in the tree."""

    protected: tuple[str, ...]
    toolchains: tuple[str, ...]
    incident: bool
    inputs: tuple[str, ...] = ()


def shape_of(spec: RunSpec, facts: Facts) -> Shape:
    """The shape for setup, agent and hooks. Without a repository the incident's files lie in the tree, read-only."""
    names = facts.files.get(f"{spec.name}/incident", {}) if spec.checkout is None else {}
    inputs = tuple(sorted({name.split("/", 1)[0] for name in names}))
    return Shape(tuple(spec.protected), spec.toolchains, spec.incident is not None, inputs)


def agents_file(spec: RunSpec, facts: Facts) -> ContextFile | None:
    """The project's, if it has one."""
    return facts.files.get(f"{spec.name}/agents", {}).get(AGENTS_FILE)


def mounts_of(shape: Shape, spec: RunSpec) -> tuple[Mounted, ...]:
    """What commands see under which name, with the manifest line that asked for it."""
    incident = ("/incident", *shape.inputs) if shape.incident else shape.inputs
    return (
        Mounted("/workspace", True, spec.origins["project"] if spec.shared else BUILT_IN),
        _OUTPUT,
        *(Mounted(path, False, spec.origins["incident"]) for path in incident),
        *(Mounted(path, False, spec.protected[path]) for path in shape.protected),
        *(Mounted(path, False, spec.origins[Feature.TOOLCHAINS]) for path in shape.toolchains),
    )
