"""Binding of a saved plan to this host: what its steps take of the host is what gathering has just found there.

Gathering judges each thing that a run asks for, as it does for manifests. A plan whose steps take anything else was
not made by the compiler, so an edited file reaches nothing that a manifest could not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from runner.core.ids import is_branch
from runner.core.sanitize import excerpt
from runner.plan.model import RunPlan
from runner.policy.protected import check_protected
from runner.runtime.mount_plan import MountPlan
from runner.spec.facts_request import FactsRequest
from runner.spec.model import ClusterSpec, ContextFile, Lent, RunFacts
from runner.steps.agent.plan import AgentBody
from runner.steps.clone.plan import CloneBody
from runner.steps.dependencies.plan import DependenciesBody
from runner.steps.provision.plan import ProvisionBody
from runner.steps.save.plan import SaveBody


class Foreign(ValueError):
    """A step takes something of the host that its run does not ask for."""


def bind(run: RunPlan, wanted: FactsRequest, found: RunFacts) -> RunPlan:
    """Return a run with the files, cluster and CLI that were found. Raises ``Foreign``."""
    if run.providers != wanted.providers or run.image != found.image or run.name != wanted.run:
        raise Foreign(f"run `{run.name}` is not what it asks for")
    host = _Host(
        wanted=wanted,
        found=found,
        lent=found.lent or Lent(),
        files={file.sha256: file for files in found.files.values() for file in files.values()},
        paths=frozenset(_paths([wanted, found])),
        run=run.name,
    )
    steps = tuple(replace(step, body=host.bound(step.body)) for step in run.steps)
    return replace(run, commit=found.commit.commit if found.commit is not None else None, steps=steps)


class _Host(Struct, frozen=True, kw_only=True):
    """All that one run may take of the host, ``files`` by hash."""

    wanted: FactsRequest
    found: RunFacts
    lent: Lent
    files: Mapping[str, ContextFile]
    paths: frozenset[Path]
    run: str

    def bound(self, value: Any) -> Any:
        """Return a value with its parts bound."""
        self._judge(value)
        match value:
            case ContextFile():
                return self.files.get(value.sha256) or self._refuse(value.path)
            case ClusterSpec():
                return self._cluster(value)
            case Path():
                return value if value in self.paths else self._refuse(value)
            case tuple():
                return tuple(map(self.bound, value))
            case AgentBody():
                return replace(self._struct(value), cli=self.found.cli)
            case Struct():
                return self._struct(value)
            case _:
                return value

    def _struct(self, value: Struct) -> Any:
        old = {name: getattr(value, name) for name in value.__struct_fields__}
        new = {name: self.bound(part) for name, part in old.items()}
        changed = {name: part for name, part in new.items() if part is not old[name]}
        return replace(value, **changed) if changed else value

    def _cluster(self, value: ClusterSpec) -> ClusterSpec:
        fact, wanted = self.found.cluster, self.wanted.cluster
        if fact is None or wanted is None:
            self._refuse(value.kubeconfig)
        bound = ClusterSpec(
            kubeconfig=wanted.kubeconfig,
            context=fact.context,
            server=fact.server,
            namespace=fact.namespace,
            access=value.access,
            plug_in=fact.plug_in,
            plug_in_sha256=fact.plug_in_sha256,
        )
        return bound if replace(value, kubeconfig=bound.kubeconfig) == bound else self._refuse(value.server)

    def _judge(self, value: object) -> None:
        """Raise ``Foreign`` for a value of a step that does not follow from what was found."""
        found, wanted, sound = self.found, self.wanted, True
        match value:
            case ProvisionBody():
                names = {name for name, _ in value.incident}, {name for name, _ in value.skills}
                sound = names == ({*(found.incident_files or {})}, {*found.skills}) and value.image == found.image
                sound = sound and value.providers == wanted.providers
            case CloneBody():
                asked = wanted.checkout
                sound = asked is not None and found.commit is not None and value.commit == found.commit.commit
                of = (value.url, value.path, value.within)
                sound = sound and asked is not None and of == (asked.url, asked.path, asked.within)
                sound = sound and is_branch(value.branch)
            case AgentBody() | SaveBody():
                sound = value.member in ("", self.run) and value.incident == wanted.incident
            case DependenciesBody():
                sound = value.commands == wanted.dependency_commands and value.untrusted == wanted.untrusted
                sound = sound and value.files == found.lock_files
            case MountPlan():
                sound = {*value.toolchains} <= {*self.lent.toolchains} and {*value.skills} <= {*wanted.skills}
                sound = sound and value.environment.items() <= self.lent.environment.items()
                sound = sound and {*value.dependencies} <= {*self.lent.dependencies}
                sound = sound and not any(map(check_protected, value.protected))
                sound = sound and {*value.inputs} <= {name.split("/", 1)[0] for name in found.incident_files or {}}
        if not sound:
            self._refuse(type(value).__name__)

    def _refuse(self, what: object) -> NoReturn:
        raise Foreign(f"run `{self.run}` takes more of this host than it asks for: {excerpt(str(what))}")


def _paths(values: Iterable[object]) -> Iterator[Path]:
    """Yield every path in some values and their parts."""
    for value in values:
        match value:
            case Path():
                yield value
            case Struct():
                yield from _paths([getattr(value, name) for name in value.__struct_fields__])
            case Mapping():
                yield from _paths(value.values())
            case tuple():
                yield from _paths(value)
