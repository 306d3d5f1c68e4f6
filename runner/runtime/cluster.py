"""The way from a step's commands to their cluster: what they ask becomes events, and the kubeconfig that they find is
made for them. It names the user's context and namespace, leads to a port of their own loopback, has no credential.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from runner.events import events as ev
from runner.ports.cluster import ClusterGrant, ClusterRequest, ClusterSession
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext, write_new
from runner.runtime.exec import emit_all
from runner.spec.model import ClusterSpec

_FILE = "config"


def grant_of(cluster: ClusterSpec) -> ClusterGrant:
    return ClusterGrant(
        kubeconfig=cluster.kubeconfig,
        context=cluster.context,
        server=cluster.server,
        namespace=cluster.namespace,
        plug_in_sha256=cluster.plug_in_sha256,
    )


@asynccontextmanager
async def open_cluster(
    run: RunContext, workspace: Workspace, step: str, cluster: ClusterSpec | None
) -> AsyncIterator[ClusterSession | None]:
    """The way to the cluster of a run for the length of the block, or ``None`` without one.

    ``workspace`` is a sandbox whose shape has a cluster. Raises what opening a session and listening raise.
    """
    if cluster is None:
        yield None
        return
    _, handle = run.workspace.require()
    file = handle.private / "kube" / _FILE
    send, receive = trio.open_memory_channel[ev.Event](math.inf)

    def tell(request: ClusterRequest) -> None:
        send.send_nowait(_asked(request, step))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send:
            opened = run.deps.cluster.open(grant_of(cluster), tell)
            async with opened as session, workspace.listen(session.serve) as port:
                await run.emit(ev.ClusterAccessOpened(step, cluster.context, cluster.server, cluster.namespace))
                file.unlink(missing_ok=True)
                write_new(file, kubeconfig(cluster.context, cluster.namespace, port), 0o644)
                try:
                    yield session
                finally:
                    file.unlink(missing_ok=True)
                    for message, code in session.credential_errors.items():
                        send.send_nowait(ev.WarningIssued(code, message, step))


def kubeconfig(context: str, namespace: str, port: int) -> bytes:
    """JSON, which is YAML."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": context, "user": "", "namespace": namespace}}],
        "clusters": [{"name": context, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _asked(request: ClusterRequest, step: str) -> ev.ClusterRequestFinished:
    return ev.ClusterRequestFinished(
        step=step,
        verb=request.verb,
        resource=request.resource,
        namespace=request.namespace,
        status=request.status,
        seconds=request.seconds,
        refusal=request.refusal,
        count=request.count,
    )
