"""The meaning of an image's name in a cluster: a pod of it that runs nothing, whose node says what it took."""

from __future__ import annotations

import platform
import re
import secrets

from runner.cluster.objects import ClusterObjects
from runner.core.errors import ImageMissing
from runner.core.model import Limits, Pull
from runner.core.sanitize import excerpt
from runner.guest import binary
from runner.providers._pod_sandbox import PodSandbox
from runner.sandbox import pod

_PULL = {"missing": "IfNotPresent", "always": "Always", "never": "Never"}
_DIGEST = re.compile(r"(?:docker-pullable://)?(\S+@sha256:[0-9a-f]{64})")
_ID = re.compile(r"(?:docker://)?(sha256:[0-9a-f]{64})")


async def resolve(objects: ClusterObjects, name: str, when: Pull) -> str:
    """Return ``REPOSITORY@DIGEST``, or the id of an image that no registry has. Raises ``ImageMissing``."""
    guest = f"runner-guest-{binary.find().sha256[:16]}"
    await objects.create(objects.path("configmaps"), pod.guest_map(guest, binary.find().path.read_bytes()))
    shape = pod.PodShape(
        image=name,
        pull=_PULL[when],
        uid=1_000_000,
        limits=Limits(),
        labels={**pod.PRODUCT, "runner.part": "image"},
        annotations={},
        guest=guest,
        machine=platform.machine(),
    )
    body = pod.pod(f"runner-image-{secrets.token_hex(6)}", shape, [], [], most=1 << 20)
    sandbox = PodSandbox(objects, body["metadata"]["name"], f"image `{excerpt(name)}`")
    async with sandbox.watched():
        try:
            sandbox.look(await objects.create(objects.path("pods"), body, again=True))
            await sandbox.wait_for(pod.FIRST)
            found = sandbox.image_of(pod.FIRST)
        finally:
            await sandbox.delete(grace=0)
    if known := _DIGEST.fullmatch(found) or _ID.fullmatch(found):
        return known[1]
    raise ImageMissing(f"node {sandbox.node} says of image `{excerpt(name)}` only `{excerpt(found)}`")
