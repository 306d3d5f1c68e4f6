"""The volume of a StorageClass that holds the files of a pod: what keeps it from being there, and what it limits.

The cluster makes its claim with the pod, and removes it with the pod, so nobody here has a right to claims. Why there
is none yet is told by events.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from runner.cluster.job import is_quota
from runner.cluster.objects import ClusterObjects, Object
from runner.core.errors import ProviderFailed, VolumeFailed
from runner.core.model import Handle
from runner.core.nurseries import unwrapping_groups
from runner.core.sanitize import excerpt, sanitize
from runner.core.settings import size_text
from runner.providers._pod_disk import storage_class_of
from runner.providers._pod_sandbox import START_SECONDS, PodSandbox
from runner.sandbox import pod
from runner.sandbox.volumes import Volume

LOOK = 2.0  # seconds between looks at the events of a pod that does not start
FAILING = 60.0  # seconds for what a cluster tries again by itself
_STEP = 1 << 30  # bytes: what most clusters round the size of a volume up to
_ROOM = "=QII"
_UNBOUND = ("ProvisioningFailed", "FailedBinding")
_UNMOUNTED = ("FailedMount", "FailedAttachVolume")


@asynccontextmanager
async def watching_volume(objects: ClusterObjects, sandbox: PodSandbox, handle: Handle) -> AsyncIterator[None]:
    """Raise ``VolumeFailed`` in the block when the volume of a pod that it starts will not be there."""
    if (storage_class := storage_class_of(handle)) is None:
        yield
        return
    with unwrapping_groups():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, objects, sandbox, f"{_wanted(handle, storage_class)} for {sandbox.what}")
            yield
            nursery.cancel_scope.cancel()


async def _watch(objects: ClusterObjects, sandbox: PodSandbox, what: str) -> None:
    """Look at events until the pod's first container runs.

    They stay when what they tell of has passed: a pod that has a node has a volume, and only its mount may fail yet.
    """
    began = trio.current_time()
    failing = math.inf  # since when
    while True:
        await trio.sleep(LOOK)
        if sandbox.is_running(pod.FIRST) or sandbox.has_ended(pod.FIRST):
            return
        now, events = trio.current_time(), await _events(objects, sandbox.name)
        why = _last(events, _UNMOUNTED if sandbox.has_node else _UNBOUND)
        failing = math.inf if why is None or sandbox.has_node else min(failing, now)
        if why is not None and not sandbox.has_node and (_is_final(why) or now >= failing + FAILING):
            raise _not_there(what, why)
        if now >= began + START_SECONDS - 2 * LOOK and (why is not None or not sandbox.has_node):
            raise _not_there(what, why or sandbox.why_waiting())


async def _events(objects: ClusterObjects, name: str) -> list[Object]:
    """Return what the cluster says of a pod and its claim, the newest last."""
    found: list[Object] = []
    for about in (name, pod.claim_of(name)):
        answer = await objects.get(objects.path("events"), fieldSelector=f"involvedObject.name={about}") or {}
        found += answer.get("items") or ()
    return sorted(found, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))


def _last(events: list[Object], reasons: Sequence[str]) -> str | None:
    """Return the last that the cluster says of something that went wrong."""
    said = [one for one in events if one.get("reason") in reasons and one.get("type") == "Warning"]
    return sanitize(str(said[-1].get("message", ""))) if said else None


def _is_final(why: str) -> bool:
    return is_quota(why) or ("storageclass" in why and "not found" in why)


def _not_there(what: str, why: str) -> VolumeFailed:
    hint = "give it a smaller `disk`, or raise the quota" if is_quota(why) else "see `kubectl get storageclasses`"
    return VolumeFailed(f"the cluster gives no volume of {what}: {why}", hint=hint)


def _wanted(handle: Handle, storage_class: str) -> str:
    return f"StorageClass `{excerpt(storage_class)}` with {size_text(handle.limits.disk_bytes or 0)}"


async def look_at_volume(sandbox: PodSandbox, handle: Handle) -> Volume | None:
    """Return the volume that a pod's files are on, whose size was looked at from inside. Raises ``VolumeFailed``."""
    limit = handle.limits.disk_bytes
    if (storage_class := storage_class_of(handle)) is None or limit is None:
        return None
    told = bytearray()

    async def receive(data: bytes) -> None:
        told.extend(data)
        await trio.lowlevel.checkpoint()

    if await sandbox.run(pod.FILES, ["room", pod.FILES_PLACE], receive=receive) != 0:
        raise ProviderFailed(f"the size of the volume of {sandbox.what} cannot be read")
    size, major, minor = struct.unpack(_ROOM, told)
    if size > -(-limit // _STEP) * _STEP:
        raise VolumeFailed(
            f"{_wanted(handle, storage_class)} is a volume of {size >> 20}M for {sandbox.what}, and limits nothing",
            hint=f"write `disk: {size_text(-(-size // _STEP) * _STEP)}`, or name a StorageClass that keeps sizes",
        )
    return Volume(f"{major}:{minor}", limit)
