"""What a sandbox provider owes the engine.

A *workspace* is a directory with a recipe and outlives every process; its ``Handle`` is serialisable.
A *sandbox* is one opening of a workspace. Order of calls: ``probe`` whenever; ``create`` once a
workspace; ``open`` as often as wanted, one opening after the other; ``destroy`` at the end, any number
of times. A provider never becomes weaker than its ``probe`` said: what it cannot do, it refuses.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from runner.core.model import DEFAULT_PROJECT, Exit, Feature, Handle, Isolation, IsolationClass, Limits, Mount, Rung

if TYPE_CHECKING:
    import trio

PATH = "/usr/local/bin:/usr/bin:/bin"  # where every command finds others, behind its toolchains
BINS = ("bin", ".bin")  # what a directory of programs is called
STOP_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
KILL_GRACE = 5.0  # a process in uninterruptible sleep must not hold the run


@dataclass(frozen=True)
class Probe:
    """A provider as found on this host.

    ``missing`` maps each feature that it cannot enforce here to the reason, in words for a person.
    ``reason`` and ``hint`` say why it is unavailable, and the one command that would change it. With ``needs_image``
    it makes workspaces of an image only. Of the missing ones a run itself watches those that are ``soft``: it ends the
    step that goes beyond, which is less than keeping it from that.
    """

    provider: str
    available: bool
    isolation: IsolationClass
    missing: Mapping[Feature, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    hint: str | None = None
    needs_image: bool = False
    soft: frozenset[Feature] = frozenset()

    def enforces(self, feature: Feature) -> bool:
        return feature not in self.missing

    def among_others(self) -> Probe:
        """As it holds for a workspace whose files are not alone on their disk: adopted, or of a shared project."""
        missing = {**self.missing, Feature.DISK: "others write to the same disk"}
        return replace(self, missing=missing, soft=self.soft - {Feature.DISK})


@dataclass(frozen=True)
class WorkspaceRequest:
    """A workspace to make. ``id`` is decided by the caller and durable before the call (intent first).

    ``shared``: commands see the directory of their ``project`` whole, with the trees of all its workspaces; a project
    has either such workspaces or others at a time. ``tree`` is a directory that is there already and becomes the
    workspace's in place: absolute, reached through no link, of a user that commands may run as. It is *adopted*: it
    keeps its owner, ``destroy`` leaves it, and it is never ``shared``. ``image`` is the id of the system that commands
    see, for a provider that needs one.
    """

    id: str
    run: str
    nonce: str
    limits: Limits = field(default_factory=Limits)
    project: str = DEFAULT_PROJECT
    shared: bool = False
    tree: Path | None = None
    image: str | None = None


@dataclass(frozen=True)
class Opening:
    """The shape of one sandbox: computed when it is opened, after the clone.

    The workspace's own tree is at ``/workspace`` (read-only with ``tree_writable`` false: writes then
    go to a throw-away layer that no later opening sees), its home at ``/home/agent``. Of a shared workspace the
    project is at ``/workspace`` and the tree at ``/workspace/workspaces/ID``, unless ``tree`` or ``tree_writable``
    ask for another tree than its own: that one is seen alone. With
    ``fresh_home`` the home is empty and is thrown away too. ``protected`` are paths relative to the
    tree: present ones are read-only and cannot be moved, missing ones cannot be created. ``tree``
    replaces the handle's tree by another host directory (verify: the clean checkout). ``dependencies`` are directories
    of the host that the tree shows, each at its target, which is relative to it and where nothing else may be. What is
    written there goes to a throw-away layer as well.
    """

    mounts: tuple[Mount, ...] = ()
    protected: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tree: Mount | None = None
    tree_writable: bool = True
    fresh_home: bool = False
    dependencies: tuple[Mount, ...] = ()

    @property
    def held(self) -> tuple[str, ...]:
        """The paths of the tree that commands can neither move nor create, and where nothing that they write stays."""
        return (*self.protected, *(f"{mount.target}/" for mount in self.dependencies))

    @property
    def environment(self) -> dict[str, str]:
        """What every command of it gets: ``env``, and a ``PATH`` with the programs of each toolchain first."""
        return {"PATH": ":".join((*map(programs_in, self.toolchains), PATH)), **self.env}


def programs_in(toolchain: str) -> str:
    """The directory in which a toolchain has its programs: ``bin`` below it, or itself if that is what it is."""
    path = toolchain.rstrip("/")
    return path if path.rpartition("/")[2] in BINS else f"{path}/bin"


@dataclass(frozen=True)
class ExecResult:
    """A finished command and what it printed, each stream cut at the bound given to ``run``."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    cut: bool = False


class Reader(Protocol):
    async def receive_some(self, max_bytes: int) -> bytes:
        """At most ``max_bytes``; empty at end of file."""


class Writer(Protocol):
    async def send_all(self, data: bytes) -> None: ...
    async def aclose(self) -> None: ...


class Connection(Reader, Writer, Protocol):
    """A connection that was made inside a workspace, seen from here.

    ``aclose`` is the end of both directions; what was sent before it arrives. All but ``receive_some`` at its end
    raise ``trio.BrokenResourceError`` when the other side is gone.
    """

    async def send_eof(self) -> None:
        """Send no more; receiving goes on."""


class Process(Protocol):
    """A running command. Read both streams or it will block; ``wait`` needs no end of file.

    What was printed before the block around ``exec`` ended can be read after it, and then end of file.
    """

    @property
    def stdin(self) -> Writer: ...
    @property
    def stdout(self) -> Reader: ...
    @property
    def stderr(self) -> Reader: ...

    @property
    def oom_kills(self) -> int:
        """How many processes the kernel has killed for want of memory since the command began.

        Counted over the whole sandbox; known once ``wait`` has returned, final when the block around ``exec`` ends.
        ``Exit.oom`` says that the main process was among them.
        """

    async def wait(self) -> Exit:
        """How the main process ended. Its descendants may live until the block around ``exec`` ends.

        Raises ``ProviderFailed`` for what could not be started, unless ``exec`` has, and ``WorkspaceLost``.
        """


class Workspace(Protocol):
    """An open sandbox. Lost (``WorkspaceLost``) is an exception; a failed command is a value."""

    @property
    def paths(self) -> Paths:
        """Where things are for a command inside; the same on every provider that has mounts."""

    @property
    def tree(self) -> int:
        """A descriptor of its tree as its commands see it, to read while it is open; what is there may be hostile."""

    @property
    def still(self) -> trio.Event:
        """Set once nothing runs in it any more or ever will, if that is known before the block around it has ended."""

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_rung: Callable[[Rung], None] | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command and own its whole process tree for the length of the block.

        Leaving the block with the command still running, and cancelling, are the same: TERM to the
        tree, ``STOP_GRACE`` seconds (at most one for the others once the main process has obeyed), KILL, at
        most ``KILL_GRACE`` more. What still lives then may cost the whole sandbox, with ``KILL_GRACE`` again: the
        workspace is lost, and this block ends all the same. After that ``Escaped`` is raised and names pids, and the
        control group where there is one. Nothing of the tree survives the block otherwise. What a command leaves
        behind when it has ended gets KILL at once.

        ``on_rung`` is called as each rung begins, synchronously and at most once a rung. A rung that finds
        nothing alive is not told. ``env`` is added to the opening's. No terminal, no descriptors but 0, 1 and 2.
        """

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        keep_bytes: int = 1 << 20,
    ) -> ExecResult:
        """``exec``, fed and read to the end. Output over ``keep_bytes`` a stream is read and dropped."""

    def listen(
        self, serve: Callable[[Connection], Awaitable[None]], *, port: int = 0
    ) -> AbstractAsyncContextManager[int]:
        """Listen on the workspace's own loopback for the length of the block, and give the port; 0 takes any.

        Where workspaces have no network of their own that loopback is the host's. ``serve`` gets each connection in a
        task of its own; the connection is closed when that returns, and reset when it raises or when the block ends.
        A connection that breaks, or a lost workspace, ends ``serve`` quietly; whatever else it raises takes the
        workspace down. At most 1024 connections at once; further ones are reset. Before and after the block nothing
        listens there. Raises ``ProviderFailed`` when the port cannot be had or the provider lacks ``Feature.RELAY``,
        ``WorkspaceLost``.
        """

    async def effective(self) -> Isolation:
        """The isolation that holds, read back from inside. Raises ``ProviderFailed`` when it cannot be read."""


@dataclass(frozen=True)
class Paths:
    """Places as a command inside sees them. ``incident``, ``skills`` and ``kube``, the directory of its kubeconfig, are
    of use only when the opening mounts them."""

    workspace: str
    output: str
    incident: str
    runner: str
    home: str
    skills: str
    kube: str


class Provider(Protocol):
    name: str

    async def probe(self) -> Probe:
        """Health and capabilities as found, never remembered from a configuration. Starts nothing lasting."""

    async def create(self, request: WorkspaceRequest) -> Handle:
        """Make the workspace, empty unless it is adopted. Raises ``ProviderFailed``; then nothing of it is left."""

    def open(self, handle: Handle, opening: Opening) -> AbstractAsyncContextManager[Workspace]:
        """Start a sandbox on a workspace; it is gone, with every process in it, when the block ends.

        A command that is still being stopped then has no more grace.

        Enter it outside the work scope: it owns the nursery that its services run in, and cancelling
        work must not take down what settling needs. Leaving is shielded and bounded.
        """

    async def give(self, handle: Handle) -> None:
        """Make the files that the host wrote into the workspace belong to its user; an adopted tree is left alone."""

    async def list_owned(self, nonce: str) -> list[Handle]:
        """Every workspace of this store on this provider, dead or alive. Foreign nonces are not seen."""

    async def evict(self, handle: Handle) -> None:
        """End all that runs in the workspace, for one whose runner has died; its files stay. Idempotent.

        Also what was started from elsewhere on this host, such as another control group; and what the provider itself
        had put into the tree, as stand-ins for missing protected paths. Raises ``Escaped`` and ``CleanUpIncomplete``.
        """

    async def destroy(self, handle: Handle) -> None:
        """Remove the workspace, but no adopted tree, and all that runs in it. Idempotent; also when half made.

        Raises ``CleanUpIncomplete`` naming what is left. Never follows a link out of the workspace.
        """


@runtime_checkable
class Images(Protocol):
    """What a provider can do that has images."""

    async def image(self, name: str) -> str:
        """The id of the image that a name, a reference or an id stands for here; nothing is fetched.

        Raises ``ImageMissing``, ``ProviderFailed``.
        """

    async def labels(self, image: str) -> Mapping[str, str]:
        """What whoever built an image has written on it. Raises as ``image`` does."""


@dataclass(frozen=True)
class Passed:
    """A sandbox that runs, on its way to another process: ``words`` are JSON, ``descriptors`` are the receiver's."""

    words: Mapping[str, Any]
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class Slot(Protocol):
    """A sandbox that runs and in which nothing does. ``hand_over`` is the last thing that is asked of it."""

    async def ping(self) -> None:
        """Hear from inside. Raises ``WorkspaceLost``."""

    async def ended(self) -> None:
        """Wait until it has ended by itself."""

    def hand_over(self) -> Passed:
        """What another process takes it with: the block around the slot then ends without ending the sandbox.

        It is to be received once that block has ended, and ends when nobody has the descriptors any more.
        """


class WarmSlots(Protocol):
    """What a provider can do whose sandboxes can be started before it is known for whom. Its ``probe`` has
    ``Feature.WARM_POOL`` where it can.

    Order of calls: ``create`` and ``open_slot`` by who keeps the slot, then once ``hand_over`` and ``assign``; then
    ``receive`` by who gets it, perhaps in another process, for the handle that ``assign`` has returned.
    """

    def open_slot(self, handle: Handle, toolchains: Sequence[str]) -> AbstractAsyncContextManager[Slot]:
        """Start the sandbox of a workspace in which nothing was done yet; it is gone when the block ends.

        Raises ``ProviderFailed``, ``WorkspaceLost``. A workspace is opened so once.
        """

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        """Let a slot's workspace be the one that is asked for, in the same places; it has the slot's limits and image.

        From then on there is no workspace of the slot's id. Raises ``ProviderFailed`` when there is one of the
        request's already; then nothing has changed.
        """

    def receive(self, handle: Handle, passed: Passed) -> None:
        """Have the next ``open`` of a workspace take the sandbox that was handed over, when it asks for what that one
        can show; else that sandbox is ended, and another started."""
