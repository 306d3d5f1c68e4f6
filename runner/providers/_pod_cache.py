"""Toolchains that pods take from a volume of the cluster, to which each is sent once.

A file there is the stream that a pod would be sent, under its SHA-256, by which the guest knows it again. Only the
first container of a pod sees the volume, and no command of a workspace runs in that one.
"""

from __future__ import annotations

from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

import trio

from runner.core.errors import VolumeFailed
from runner.providers._pod_sandbox import PodSandbox
from runner.sandbox import pod
from runner.sandbox.mirrored import Volume
from runner.sandbox.tar_trees import Source, pack_trees, stamps

_ABSENT, NOT_KEPT, _CHANGED = 7, 8, 9  # exit codes of the guest


async def take_or_send(sandbox: PodSandbox, volume: Volume) -> int:
    """Have a new pod take a toolchain from the cache, or send it to both. Returns the guest's exit code, ``NOT_KEPT``
    when only the pod has it. Raises ``VolumeFailed`` when the cache has something else.
    """
    digest = await trio.to_thread.run_sync(_digest, volume)
    words = [pod.CACHE_PLACE, digest, pod.FILES_PLACE]
    code = await sandbox.run_first(pod.FIRST, ["cached", *words], tuple)
    if code == _CHANGED:
        message = f"the cache had something else than toolchain `{volume.target}` for {sandbox.what}, and was rid of it"
        raise VolumeFailed(message, hint="find out who else writes to the claim of RUNNER_KUBERNETES_CACHE_CLAIM")
    if code == _ABSENT:
        sources = [Source(volume.name, volume.source, 0)]
        return await sandbox.run_first(pod.FIRST, ["keep", *words], partial(pack_trees, sources))
    return code


def _digest(volume: Volume) -> str:
    """Return the digest of the stream of a toolchain, which is only read again when it has changed."""
    state = sha256(repr(sorted(stamps(volume.source).items())).encode(errors="surrogateescape")).digest()
    return _digest_in_state(volume.name, volume.source, state)


@lru_cache
def _digest_in_state(name: str, source: Path, state: bytes) -> str:
    hash = sha256()
    for piece in pack_trees([Source(name, source, 0)]):
        hash.update(piece)
    return hash.hexdigest()
