"""A running pod: its state as the cluster tells it, programs in its containers, and the channel to its guest.

The channel is a program in the container that carries files, which waits there for the guest to dial. When it is lost
with the API server or the kubelet, the next one takes its place: the guest goes on, and dials again.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import trio

from runner.cluster import agent_sandbox
from runner.cluster.objects import PATIENCE, ClusterObjects, Object
from runner.cluster.websocket import ExecRefused, ExecStream
from runner.core.errors import (
    Escaped,
    ImageMissing,
    OutOfMemory,
    PlatformError,
    ProviderFailed,
    VolumeFailed,
    WorkspaceLost,
)
from runner.core.nurseries import open_services, unwrapping_groups
from runner.core.sanitize import sanitize
from runner.network.upstream import UpstreamFailed
from runner.ports.provider import KILL_GRACE
from runner.sandbox.container import CHANNEL, GUEST, SOCKET
from runner.sandbox.pod import FILES, FIRST, SANDBOX

GONE_SECONDS = 60.0  # for a kubelet to end a pod
START_SECONDS = 300.0  # for a place on a node, and for the image to come there
CLOSED_SECONDS = 10.0  # for a network that learns of a pod's policy late
PULL_SECONDS = 30.0  # for an image to come after a first refusal: a node has tried again by then
_KUBELET = 10250
_PAUSE, _LONG_PAUSE = 0.1, 1.0
_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff")  # for now: a registry may be away for a while
_NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
_NEVER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_NO_CONTAINER = "container not found"  # as kubelets say it
_TRANSIENT = (ExecRefused, UpstreamFailed, trio.BrokenResourceError)


class PodSandbox:
    """One pod. ``what`` names the workspace in messages; ``kind`` says whether it belongs to a Sandbox of its name."""

    def __init__(self, objects: ClusterObjects, name: str, what: str, kind: str = "pods") -> None:
        self._objects = objects
        self.name = name
        self.what = what
        self._kind = kind
        self._pod: Object = {}
        self._changed = trio.Event()
        self._is_gone = False
        self.has_started = False
        self._not_pulled = math.inf  # since when its node has refused the image
        self._ran: set[str] = set()  # containers that have run a program, which nodes tell of a second late
        self._is_ending = False
        self._bridge: BridgeStream | None = None
        self._dialled: BridgeStream | None = None  # the first channel, until somebody wants it

    @property
    def _path(self) -> str:
        return self._objects.path("pods", self.name)

    @property
    def host(self) -> str:
        return str(self._status.get("hostIP", ""))

    @property
    def node(self) -> str:
        return str(self._pod.get("spec", {}).get("nodeName", "")) or "none"

    @property
    def has_node(self) -> bool:
        return "nodeName" in (self._pod.get("spec") or {})

    @property
    def has_volume(self) -> bool:
        """Tell whether its files are on a volume of its own, and not on the disk of its node."""
        return any("ephemeral" in volume for volume in self._pod.get("spec", {}).get("volumes") or ())

    @property
    def _status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._pod.get("status") or {}
        return found

    async def make(self, body: Object) -> None:
        """Make it, or the Sandbox that it belongs to. Raises ``ProviderFailed``."""
        if self._kind == agent_sandbox.KIND:
            self.look(await agent_sandbox.make_pod(self._objects, body))
        else:
            self.look(await self._objects.create(self._objects.path("pods"), body, again=True))

    # --- its state ---

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the state of the pod for the length of the block, also while that is cancelled and cleans up."""
        scope = trio.CancelScope(shield=True)

        async def follow() -> None:
            with scope:
                await self._watch()

        async with open_services() as services:
            services.start_soon(follow)
            try:
                yield
            finally:
                scope.cancel()

    async def _watch(self) -> None:
        while not self._pod:  # it is not made yet
            await self._changed.wait()
        while not self._is_gone:
            with suppress(ProviderFailed):  # the server does not answer: nothing is known to have changed
                async with aclosing(self._objects.watch(self._objects.path("pods"), self.name)) as seen:
                    async for found in seen:
                        self.look(found)
            await trio.sleep(_PAUSE)

    def look(self, pod: Object | None) -> None:
        """Note what the cluster says of the pod: ``None`` once it is gone, as when another one has its name."""
        if pod is not None and self._pod and self._pod["metadata"]["uid"] != pod["metadata"]["uid"]:
            pod = None
        self._pod, self._is_gone = pod or self._pod, pod is None
        is_refused = any(self._waiting_of(one).get("reason") in _NOT_PULLED for one in (FIRST, FILES, SANDBOX))
        if not is_refused:
            self._not_pulled = math.inf
        elif self._not_pulled == math.inf:
            self._not_pulled = trio.current_time()
        if self._bridge is not None and self.why_lost() is not None:
            self._bridge.cut()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _state_of(self, container: str) -> Mapping[str, Any]:
        kind = "initContainerStatuses" if container == FIRST else "containerStatuses"
        found = (one for one in self._status.get(kind) or () if one.get("name") == container)
        for one in found:
            state: Mapping[str, Any] = one.get("state") or {}
            return state
        return {}

    def _waiting_of(self, container: str) -> Mapping[str, Any]:
        return self._state_of(container).get("waiting") or {}

    def image_of(self, container: str) -> str:
        """Return what the node calls the image of a container that it has started."""
        kind = "initContainerStatuses" if container == FIRST else "containerStatuses"
        return next((str(one["imageID"]) for one in self._status.get(kind) or () if one.get("name") == container), "")

    def is_running(self, container: str) -> bool:
        is_told = "running" in self._state_of(container)
        return (is_told or (container in self._ran and not self.has_ended(container))) and not self._is_gone

    def has_ended(self, container: str) -> bool:
        """Tell whether a container is known to have ended."""
        return self._is_gone or "terminated" in self._state_of(container)

    def why_lost(self) -> PlatformError | None:
        """Return why commands cannot run any more; ``None`` while they may."""
        ended = self._state_of(SANDBOX).get("terminated")
        reason, said = str(self._status.get("reason") or ""), sanitize(str(self._status.get("message") or ""))
        if reason == "Evicted":
            return WorkspaceLost(f"the pod of {self.what} was evicted from node {self.node}: {said}")
        if reason or (self._status.get("phase") == "Failed" and not ended):
            return WorkspaceLost(f"the pod of {self.what} has failed: {reason or 'no message'}: {said}")
        if ended and ended.get("reason") == "OOMKilled":
            return OutOfMemory(f"{self.what} ran out of memory, and its sandbox was killed whole")
        if self._is_deleted:
            return WorkspaceLost(f"somebody deleted pod `{self.name}` of {self.what}")
        if ended:
            return WorkspaceLost(f"the guest of {self.what} has ended: {ended.get('reason')}")
        if self.has_started and self._lacks_node():
            return WorkspaceLost(f"node {self.node}, which runs {self.what}, does not answer")
        return None

    @property
    def _is_deleted(self) -> bool:
        return self._is_gone or "deletionTimestamp" in (self._pod.get("metadata") or {})

    def _lacks_node(self) -> bool:
        """Tell whether the cluster takes the node for lost: nothing in the pod has changed, and it is not ready."""
        ready = [one for one in self._status.get("conditions") or () if one.get("type") == "Ready"]
        return (
            bool(ready)
            and ready[0].get("status") != "True"
            and all("running" in self._state_of(container) for container in (FILES, SANDBOX))
        )

    async def wait_for(self, container: str) -> None:
        """Wait until a container runs. Raises ``ImageMissing`` and ``ProviderFailed`` with what is in its way."""
        with trio.move_on_after(START_SECONDS):
            while not self.is_running(container):
                self._check_start(container)
                await self._changed.wait()
            return
        raise self._not_started()

    def _not_started(self) -> ProviderFailed:
        return ProviderFailed(f"the pod of {self.what} has not started in {START_SECONDS:.0f}s: {self.why_waiting()}")

    def _check_start(self, container: str, pull_seconds: float = 0.0) -> None:
        if lost := self.why_lost():
            raise ProviderFailed(f"the pod of {self.what} does not start: {lost.message}") from lost
        for one in (FIRST, FILES, SANDBOX):
            waiting = self._waiting_of(one)
            reason, said = str(waiting.get("reason", "")), sanitize(str(waiting.get("message", "")))
            is_late = trio.current_time() >= self._not_pulled + pull_seconds
            if reason in _NO_IMAGE or (reason in _NOT_PULLED and is_late):
                raise ImageMissing(f"node {self.node} cannot pull the image of {self.what}: {reason}: {said}")
            if reason in _NEVER:
                raise ProviderFailed(f"the pod of {self.what} does not start: {reason}: {said}")
        why = self.why_waiting()
        if any(f'persistentvolumeclaim "{name}" not found' in why for name in self._claims):
            hint = "make the claim that RUNNER_KUBERNETES_CACHE_CLAIM names"
            raise VolumeFailed(f"the pod of {self.what} does not start: {why}", hint=hint)
        if self.has_ended(container):
            raise ProviderFailed(f"the pod of {self.what} does not start: container `{container}` has ended")

    @property
    def _claims(self) -> list[str]:
        volumes = (self._pod.get("spec") or {}).get("volumes") or ()
        return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]

    def why_waiting(self) -> str:
        conditions = self._status.get("conditions") or ()
        said = [str(one["message"]) for one in conditions if one.get("status") == "False" and one.get("message")]
        return sanitize("; ".join(said)) or "nobody says why"

    def started(self) -> None:
        """From now on a pod that is not ready has lost its node."""
        self.has_started = True

    async def wait_lost(self) -> None:
        """Wait until commands cannot run any more."""
        while self.why_lost() is None:
            await self._changed.wait()

    async def wait_ended(self, container: str, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            while not self.has_ended(container):
                await self._changed.wait()
        return self.has_ended(container)

    # --- programs in it ---

    async def run(
        self,
        container: str,
        words: Sequence[str],
        stdin: Callable[[], Iterable[bytes]] = tuple,
        receive: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> int:
        """Run the guest's program, which may be repeated, and return its exit code.

        Raises ``ProviderFailed`` when it cannot be run, ``WorkspaceLost``, also for a container that ends meanwhile.
        """
        deadline = trio.current_time() + PATIENCE
        while True:
            if (not self._is_ending or self.has_ended(container)) and (lost := self.why_lost()):
                raise lost
            try:
                return await self._run_once(container, words, stdin, receive)
            except _TRANSIENT as error:
                why = sanitize(str(error)) or "the connection was lost"
                if _NO_CONTAINER in why and self._is_deleted and (lost := self.why_lost()):
                    raise lost from error  # its status says so when all of its containers have ended
                if trio.current_time() > deadline or (
                    receive is not None and isinstance(error, trio.BrokenResourceError)
                ):
                    raise ProviderFailed(f"nothing can be run in the pod of {self.what}: {why}") from error
            await trio.sleep(_PAUSE)

    async def run_first(self, container: str, words: Sequence[str], stdin: Callable[[], Iterable[bytes]]) -> int:
        """Run a program as ``run`` does as soon as a container has it: nodes tell a second late that one has started.

        Raises ``ImageMissing`` and ``ProviderFailed`` with what is in the way of its start.
        """
        pause = _PAUSE
        with trio.move_on_after(START_SECONDS):
            while not self.is_running(container):
                self._check_start(container, PULL_SECONDS)
                if self.has_node:
                    with suppress(*_TRANSIENT):
                        return await self._run_once(container, words, stdin, None)
                with trio.move_on_after(pause):
                    await self._changed.wait()
                pause = min(1.1 * pause, _LONG_PAUSE)  # a tenth of the time that it has lasted
            return await self.run(container, words, stdin)
        raise self._not_started()

    async def _run_once(
        self,
        container: str,
        words: Sequence[str],
        stdin: Callable[[], Iterable[bytes]],
        receive: Callable[[bytes], Awaitable[None]] | None,
    ) -> int:
        async with self._objects.exec(self.name, container, [GUEST, *words]) as stream, open_services() as services:
            services.start_soon(_feed, stream, iter(stdin()))
            while chunk := await stream.receive_some():
                if receive is not None:
                    await receive(chunk)
            if stream.exit_code is None:
                raise ExecRefused(0, stream.said or "its end was not told")
            self._note_that_it_ran(container)
            return stream.exit_code

    def _note_that_it_ran(self, container: str) -> None:
        self._ran.add(container)
        self._wake()

    async def wait_dialled(self) -> None:
        """Wait until the guest has dialled, of which its node tells a second late; ``connect`` returns that channel.

        Raises ``ImageMissing`` and ``ProviderFailed`` with what is in the way of its start.
        """
        pause = _PAUSE
        with trio.move_on_after(START_SECONDS):
            while True:
                self._check_start(SANDBOX)
                if self.has_node:
                    with suppress(*_TRANSIENT):
                        if await self._dial():
                            return
                with trio.move_on_after(pause):
                    await self._changed.wait()
                pause = min(1.1 * pause, _LONG_PAUSE)
        raise self._not_started()

    async def _dial(self) -> bool:
        """Open a channel, and tell whether the guest has come."""
        channel = await self._bridge_to_guest()
        try:
            with unwrapping_groups():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch_start)
                    has_come = await channel.has_come()
                    nursery.cancel_scope.cancel()
        except BaseException:
            await channel.aclose()
            raise
        if not has_come:
            await channel.aclose()
            return False
        self._note_that_it_ran(SANDBOX)
        self._dialled = channel
        return True

    async def _watch_start(self) -> None:
        while True:
            self._check_start(SANDBOX)
            await self._changed.wait()

    async def _bridge_to_guest(self) -> BridgeStream:
        stack, words = AsyncExitStack(), [GUEST, "bridge", f"{CHANNEL}/{SOCKET}"]
        try:
            stream = await stack.enter_async_context(self._objects.exec(self.name, FILES, words))
        except BaseException:
            await stack.aclose()
            raise
        self._note_that_it_ran(FILES)
        self._bridge = BridgeStream(stream, stack)
        return self._bridge

    async def connect(self) -> trio.abc.Stream:
        """Return a new channel to the guest. Raises ``WorkspaceLost`` when there will be none."""
        if self._dialled is not None:
            channel, self._dialled = self._dialled, None
            return channel
        deadline = trio.current_time() + PATIENCE
        while True:
            if lost := self.why_lost():
                raise lost
            try:
                return await self._bridge_to_guest()
            except _TRANSIENT as error:
                if trio.current_time() > deadline:
                    why = sanitize(str(error)) or "the connection was lost"
                    raise WorkspaceLost(f"the guest of {self.what} cannot be reached: {why}") from error
            await trio.sleep(_PAUSE)

    async def check_closed(self) -> None:
        """Check from inside that the network is closed, as soon as that can be. Raises ``ProviderFailed``."""
        while not (self.host and FILES in self._ran) and not self.is_running(SANDBOX):
            self._check_start(SANDBOX)
            await self._changed.wait()
        words = ["reach", *([_address(self.host, _KUBELET)] if self.host else [])]
        is_open = await self.run_first(FILES, words, tuple) != 0
        deadline = trio.current_time() + CLOSED_SECONDS
        while is_open:
            if trio.current_time() > deadline:
                raise ProviderFailed(
                    f"pods of namespace `{self._objects.namespace}` reach their node or the API server: the cluster"
                    " takes a NetworkPolicy and does not enforce it",
                    hint="use a cluster whose network plug-in enforces it, such as Calico or Cilium",
                )
            await trio.sleep(_PAUSE)
            is_open = await self.run(FILES, words) != 0

    # --- its end ---

    def kill(self) -> None:
        """Begin to end all commands; ``end`` tells whether that succeeded."""
        trio.lowlevel.spawn_system_task(self._kill)

    async def _kill(self) -> None:
        with suppress(PlatformError):
            await self.end()

    async def end(self) -> bool:
        """End the guest with everything that it runs; tell whether that is known to have happened."""
        self._is_ending = True
        with trio.move_on_after(2 * KILL_GRACE), suppress(*_TRANSIENT):
            while not self.has_ended(SANDBOX) and self.is_running(FILES):
                async with self._objects.exec(self.name, FILES, [GUEST, "end", f"{CHANNEL}/{SOCKET}"]) as stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.finish()
                if await self.wait_ended(SANDBOX, KILL_GRACE):
                    break
        return self.has_ended(SANDBOX)

    async def delete(self, *, grace: int = 1) -> None:
        """Delete the pod, and wait until nothing of it runs. Raises ``Escaped``, ``ProviderFailed``.

        With a ``grace`` of 0 the cluster forgets it at once, and its node ends it later: for one in which no command
        has run, since old kubelets take a minute for one that is not ready.
        """
        self._is_ending = True
        if self._dialled is not None:
            await self._dialled.aclose()
        if self._kind == agent_sandbox.KIND:  # first, for its controller would make another pod
            await self._objects.delete(agent_sandbox.path_of(self._objects, self.name))
        await self._objects.delete(self._path, grace=grace)
        if not self._pod:  # nobody has seen it, and it may never have been made
            self.look(await self._objects.get(self._path))
        with trio.move_on_after(GONE_SECONDS):
            while not self._runs_nothing():
                await self._changed.wait()
        if not self._runs_nothing():
            raise Escaped(f"pod `{self.name}` of {self.what} may still run on node {self.node}")

    def _runs_nothing(self) -> bool:
        """Tell whether a deleted pod has ended; old kubelets leave its object for up to a minute then."""
        return self._is_gone or (self._is_deleted and self._status.get("phase") in ("Succeeded", "Failed"))


class BridgeStream(trio.abc.Stream):
    """A channel to a guest, through a program that ends with it."""

    def __init__(self, stream: ExecStream, stack: AsyncExitStack) -> None:
        self._stream = stream
        self._stack = stack
        self._receiving = trio.CancelScope()
        self._is_cut = False
        self._ahead = b""

    def cut(self) -> None:
        """End it: nobody dials any more."""
        self._is_cut = True
        self._receiving.cancel()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def has_come(self) -> bool:
        """Wait for the guest, which speaks first; tell whether it came."""
        self._ahead = await self.receive_some()
        return bool(self._ahead)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._ahead:
            await trio.lowlevel.checkpoint()
            most = max_bytes or len(self._ahead)
            found, self._ahead = self._ahead[:most], self._ahead[most:]
            return found
        with trio.CancelScope() as self._receiving:
            if not self._is_cut:
                return await self._stream.receive_some(max_bytes)
        return b""

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True), suppress(UpstreamFailed):
            await self._stack.aclose()
        await trio.lowlevel.checkpoint()


async def _feed(stream: ExecStream, pieces: Iterator[bytes]) -> None:
    with suppress(trio.BrokenResourceError):
        while (piece := await trio.to_thread.run_sync(next, pieces, None)) is not None:
            await stream.send_all(piece)


def _address(host: str, port: int) -> str:
    """Return the bytes of a socket address as the kernel of most machines takes them, in hexadecimal digits."""
    if ":" in host:
        raw = (
            socket.AF_INET6.to_bytes(2, "little")
            + port.to_bytes(2)
            + bytes(4)
            + socket.inet_pton(socket.AF_INET6, host)
        )
        return (raw + bytes(4)).hex()
    return (socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2) + socket.inet_aton(host) + bytes(8)).hex()
