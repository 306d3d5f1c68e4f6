"""How a workspace looks to the commands of a run; the same value in plan, execution and read-back."""

from __future__ import annotations

from dataclasses import dataclass

from runner.spec.model import Facts, RunSpec


@dataclass(frozen=True)
class Shape:
    """``protected`` are relative to the tree; ``inputs`` are the incident's top entries when they lie in the tree."""

    protected: tuple[str, ...]
    toolchains: tuple[str, ...]
    incident: bool
    inputs: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """The mounts, for a person."""
        read_only = (*(["/incident"] if self.incident else []), *self.inputs, *self.protected, *self.toolchains)
        return ("/workspace rw", "/output rw", *(f"{path} ro" for path in read_only))


def shape_of(spec: RunSpec, facts: Facts) -> Shape:
    """The shape for setup, agent and hooks. Without a repository the incident's files lie in the tree, read-only."""
    names = facts.files.get(f"{spec.name}/incident", {}) if spec.checkout is None else {}
    inputs = tuple(sorted({name.split("/", 1)[0] for name in names}))
    return Shape(spec.protected, spec.toolchains, spec.incident is not None, inputs)
