"""Hand a sandbox from the keeper of a warm pool to a run: packets and descriptors over a Unix socket.

The run sends what the workspace must be. The answer is a workspace with the descriptors of its sandbox, or a reason.
Receipt is acknowledged before anything else happens, else the keeper removes the workspace. Each end asks the kernel
that the other is of the same user; the socket is below ``RUNNER_HOME``, which only that user can enter.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from runner.core.codec import plain
from runner.core.model import Handle, Limits, PoolMissReason, SlotKey
from runner.engine.pool import Keeper
from runner.lifecycle.pool import read_key
from runner.ports.provider import Provider, SandboxHandoff, WarmSlots, WorkspaceRequest

PLACE = "pool"  # of the socket, and of the keeper's lock, below RUNNER_HOME
_NAME = "socket"
_BYTES = 1 << 16  # of a packet
_DESCRIPTORS = 4
_ARRIVED = b"arrived"
_PATIENCE = 5.0  # seconds for the other end, which has a slot to ping and a row to write
_BACKLOG = 128


@contextmanager
def listening(home: Path) -> Iterator[socket.socket]:
    """Open the keeper's socket for the block. The caller has made its directory and holds its lock."""
    with reaching(home) as path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(_BACKLOG)
        try:
            yield listener
        finally:
            Path(path).unlink(missing_ok=True)


async def serve(listener: socket.socket, keeper: Keeper, nonce: str) -> None:
    """Answer requests until cancelled."""
    arriving = trio.socket.from_stdlib_socket(listener)
    async with trio.open_nursery() as nursery:
        while True:
            connection, _ = await arriving.accept()
            nursery.start_soon(_answer, connection, keeper, nonce)


async def _answer(connection: trio.socket.SocketType, keeper: Keeper, nonce: str) -> None:
    with connection, trio.move_on_after(_PATIENCE), suppress(OSError):  # of one who breaks off
        request = _read_request(await connection.recv(_BYTES), nonce) if _is_ours(connection) else None
        if request is not None:
            miss = await keeper.claim(*request, partial(_deliver, connection))
            if miss is not None:
                await connection.send(json.dumps({"miss": miss.value}).encode())


def _read_request(packet: bytes, nonce: str) -> tuple[SlotKey, WorkspaceRequest] | None:
    """Decode a request; ``None`` for that of another version."""
    try:
        asked = json.loads(packet)
        key = read_key(asked["key"])
        request = WorkspaceRequest(
            id=asked["workspace"],
            run=asked["run"],
            nonce=nonce,
            limits=key.limits,
            project=asked["project"],
            image=key.image,
        )
    except (ValueError, KeyError, TypeError):
        return None
    return key, request


async def _deliver(connection: trio.socket.SocketType, handle: Handle, handoff: SandboxHandoff) -> bool:
    packet = json.dumps({"handle": plain(handle), "state": dict(handoff.state)}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", handoff.descriptors))] if handoff.descriptors else []
    try:
        await connection.sendmsg([packet], rights)
        return await connection.recv(len(_ARRIVED)) == _ARRIVED
    except OSError:
        return False


async def warm(
    home: Path, provider: Provider, key: SlotKey, request: WorkspaceRequest
) -> Handle | PoolMissReason | None:
    """Request a workspace from the pool of a ``RUNNER_HOME``, as ``RunDependencies.warm``."""
    found = await ask(home, key, request, cast("WarmSlots", provider).receive)
    if found is PoolMissReason.NO_KEEPER:
        await discard(provider, request)
    return found


async def discard(provider: Provider, request: WorkspaceRequest) -> None:
    """Remove a workspace that a keeper made and could not hand over before it died."""
    for handle in await provider.list_owned(request.nonce):
        if handle.id == request.id:
            await provider.destroy(handle)


async def ask(
    home: Path, key: SlotKey, request: WorkspaceRequest, receive: Callable[[Handle, SandboxHandoff], None]
) -> Handle | PoolMissReason | None:
    """Request a workspace from a warm pool; ``receive`` gets it at once. ``None`` when nobody keeps a pool.

    A keeper that does not answer is a miss, but may have made the workspace; when this is cancelled, the keeper removes
    it.
    """
    lost: PoolMissReason | None = None
    message = {"key": plain(key), "workspace": request.id, "run": request.run, "project": request.project}
    try:
        with reaching(home) as path, trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            await connection.connect(path)
            if not _is_ours(connection):
                return None
            lost = PoolMissReason.NO_KEEPER
            with trio.move_on_after(_PATIENCE):
                await connection.send(json.dumps(message).encode())
                space = socket.CMSG_SPACE(array("i").itemsize * _DESCRIPTORS)
                packet, rights, *_ = await connection.recvmsg(_BYTES, space, socket.MSG_CMSG_CLOEXEC)
                # From here to the acknowledgement nothing waits, so nothing can be cancelled.
                return _received(packet, rights, connection.fileno(), receive) if packet else lost
    except OSError:  # a keeper that has died
        pass
    return lost


def _received(
    packet: bytes,
    rights: list[tuple[int, int, bytes]],
    connection: int,
    receive: Callable[[Handle, SandboxHandoff], None],
) -> Handle | PoolMissReason:
    handoff = SandboxHandoff({}, tuple(fd for _, _, part in rights for fd in array("i", part)))
    try:
        found = json.loads(packet)
        if "miss" in found:
            return PoolMissReason(found["miss"])
        handle, handoff = _handle(found["handle"]), SandboxHandoff(found["state"], handoff.descriptors)
        os.write(connection, _ARRIVED)
        receive(handle, handoff)
    except (OSError, ValueError, KeyError, TypeError):  # it has died, or is of another version
        handoff.close()
        return PoolMissReason.NO_KEEPER
    return handle


def _handle(found: dict[str, Any]) -> Handle:
    places = {name: Path(found[name]) for name in ("tree", "private")}
    values: dict[str, Any] = {**found, **places, "limits": Limits(**found["limits"])}
    return Handle(**values)


@contextmanager
def reaching(home: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for one, however long its directory's is."""
    directory = os.open(home / PLACE, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{_NAME}"
    finally:
        os.close(directory)


def _is_ours(connection: trio.socket.SocketType) -> bool:
    words = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", words)[1] == os.geteuid())
