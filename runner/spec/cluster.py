"""Cluster of a run: its kubeconfig, the API server, and the features that providers need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from runner.core.errors import KubeconfigExposed, RunnerError, UnknownContext, Untrusted
from runner.core.model import Feature
from runner.core.settings import Settings
from runner.spec.model import ClusterFact, ClusterSpec, Demand
from runner.spec.select import Selected

KEYS = ("incident", "kubeconfig")


class WantedCluster(Struct, frozen=True):
    """A kubeconfig, or several with ``:`` between them, and what a manifest that lies in ``beside`` says with it."""

    kubeconfig: str
    context: str | None
    namespace: str | None
    beside: Path


def wanted_cluster(selected: Selected, settings: Settings) -> WantedCluster | None:
    incident = selected.spec.incident
    if incident is None or incident.kubeconfig is None:
        return None
    home = settings.reach.get("HOME", "/")
    beside = selected.run.directory.absolute()
    places = (
        os.path.join(home, path[2:]) if path.startswith("~/") else os.path.join(beside, path)
        for path in incident.kubeconfig.split(":")
        if path
    )
    return WantedCluster(":".join(places), incident.context, incident.namespace, beside)


def cluster_of(selected: Selected, want: WantedCluster | None, found: ClusterFact | None) -> ClusterSpec | None:
    """The cluster of a run; of one that was not looked at no more than the manifest says."""
    incident = selected.spec.incident
    if want is None or incident is None:
        return None
    fact = found or ClusterFact(context=want.context or "", server="", namespace=want.namespace or "")
    plug_in = {"plug_in": fact.plug_in, "plug_in_sha256": fact.plug_in_sha256}
    return ClusterSpec(
        kubeconfig=want.kubeconfig,
        context=fact.context,
        server=fact.server,
        namespace=fact.namespace,
        access=incident.access,
        **plug_in,
    )


def keys_of(selected: Selected, error: RunnerError | None) -> tuple[str, str]:
    """The field that what is wrong with a cluster is said at."""
    is_context = isinstance(error, UnknownContext) and selected.run.wrote("incident", "context")
    return ("incident", "context") if is_context else KEYS


def cluster_faults(selected: Selected, fact: ClusterFact | None) -> Iterator[RunnerError]:
    if fact is not None and fact.exposed:
        yield KubeconfigExposed(fact.exposed, at=selected.run.place(*KEYS), hint="run `chmod 600` on it")


def untrusted_cluster(selected: Selected) -> Iterator[RunnerError]:
    if selected.spec.incident is not None and selected.spec.incident.kubeconfig is not None:
        message = "an untrusted manifest may not read a cluster with your kubeconfig"
        yield Untrusted(message, at=selected.run.place(*KEYS), hint="apply it without --untrusted")


def cluster_demands(selected: Selected) -> Iterator[Demand]:
    if selected.spec.incident is not None and selected.spec.incident.kubeconfig is not None:
        yield Demand(Feature.RELAY, "the way to the cluster", selected.run.place(*KEYS), True)
