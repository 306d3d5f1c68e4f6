"""Sandbox providers: what the engine asks of them, and what they may rely on.

A *workspace* is a set of directories that outlives every process; its ``Handle`` is serialisable. A *sandbox* runs
commands on a workspace. Order of calls: ``probe`` at any time; ``create`` once for a workspace; ``open`` any number of
times, one sandbox after the other; ``destroy`` at the end, any number of times. A provider never becomes weaker than
its ``probe`` said: it refuses what it cannot enforce.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from runner.core.model import (
    DEFAULT_PROJECT,
    Exit,
    Feature,
    Handle,
    Isolation,
    IsolationClass,
    Limits,
    Mount,
    Pull,
    StopStage,
)

if TYPE_CHECKING:
    import trio

PullReport = Callable[[int, int], Awaitable[None]]

PATH = "/usr/local/bin:/usr/bin:/bin"  # follows the toolchains in every command's PATH
PROGRAM_DIRECTORIES = ("bin", ".bin")
IN_HOME = "~/"  # begins the target of a dependency that lies in the home
STOP_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
KILL_GRACE = 5.0  # a process in uninterruptible sleep must not hold the run

_WATCHED = {
    Feature.DISK: "watched from outside, and what goes beyond it is ended",
    Feature.PROTECTED_PATHS: "checked before anything is published, not prevented",
}


class Probe(Struct, frozen=True, kw_only=True):
    """Health and capabilities of a provider on this host.

    ``missing`` maps each feature that it cannot enforce here to the reason, in words for a person. ``watched`` are the
    missing features that the run itself looks after, as ``watch_words`` says, but cannot prevent from being broken.
    ``escapes`` are the ways out of a sandbox that are known to be open here, by name, with the reason.
    ``reason`` and ``hint`` say why the provider is unavailable, and the one command that would change that.
    A provider with ``needs_image`` makes workspaces only from an image. With ``ends_whole`` memory over the limit ends
    a sandbox, and not one process of it. One that ``protects_at_start`` cannot protect another path once a sandbox has
    started, so its warm workspaces are those of one set of protected paths. ``place`` is where it makes them, if it may
    be somewhere else for another process of this host, and ``makes`` what its sandboxes are, if settings decide that.
    """

    provider: str
    available: bool
    isolation: IsolationClass
    missing: Mapping[Feature, str] = {}
    versions: Mapping[str, str] = {}
    reason: str | None = None
    hint: str | None = None
    needs_image: bool = False
    watched: frozenset[Feature] = frozenset()
    escapes: Mapping[str, str] = {}
    ends_whole: bool = False
    protects_at_start: bool = False
    place: str = ""
    makes: str = ""

    def enforces(self, feature: Feature) -> bool:
        return feature not in self.missing

    def watch_words(self, feature: Feature) -> str:
        """Return what the run does about a ``watched`` feature."""
        return _WATCHED[feature]

    def on_shared_disk(self) -> Probe:
        """The probe for a workspace that shares its disk: an adopted tree, or one of a shared project."""
        missing = {**self.missing, Feature.DISK: "others write to the same disk"}
        return replace(self, missing=missing, watched=self.watched - {Feature.DISK})


class WorkspaceRequest(Struct, frozen=True, kw_only=True):
    """A workspace to make. The caller chooses ``id`` and stores it before the call (intent first).

    ``shared``: commands see the whole directory of their ``project``, with the trees of all its workspaces; all
    workspaces of a project are shared, or none is. ``tree`` is an existing directory to *adopt* as the workspace's
    tree in place: an absolute path through no link, owned by a user that commands may run as. An adopted tree keeps its
    owner, is left by ``destroy``, and is never ``shared``. ``image`` is the id of the root file system that commands
    see, for a provider that needs one.
    """

    id: str
    run: str
    nonce: str
    limits: Limits = Limits()
    project: str = DEFAULT_PROJECT
    shared: bool = False
    tree: Path | None = None
    image: str | None = None


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """The shape of one sandbox, computed when it is opened, after the clone.

    The workspace's tree is at ``/workspace``, its home at ``/home/agent``. A shared workspace has its project at
    ``/workspace`` and its tree at ``/workspace/workspaces/ID``; with ``tree`` or a read-only tree it sees that tree
    alone, at ``/workspace``.

    ``tree`` replaces the workspace's tree by another host directory (verify: the clean checkout). Without
    ``tree_writable`` writes to the tree go to a layer that is discarded with the sandbox; with ``fresh_home`` the home
    starts empty and is discarded too. ``protected`` are paths relative to the tree: existing ones are read-only and
    cannot be moved, missing ones cannot be created. ``dependencies`` are host directories mounted in the tree, each at
    its target relative to the tree or, after ``~/``, to the home, where nothing else may be; writes to them are
    discarded too. ``home`` replaces the home by another host directory, which gets all writes.
    """

    mounts: tuple[Mount, ...] = ()
    protected: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    tree: Mount | None = None
    tree_writable: bool = True
    fresh_home: bool = False
    dependencies: tuple[Mount, ...] = ()
    home: Path | None = None

    @property
    def pinned_paths(self) -> tuple[str, ...]:
        """The paths of the tree that commands can neither move nor create: protected ones and dependencies."""
        return (*self.protected, *(f"{m.target}/" for m in self.dependencies if not m.target.startswith(IN_HOME)))

    @property
    def pinned_in_home(self) -> tuple[str, ...]:
        """The paths of the home that commands can neither move nor create."""
        found = (m.target.removeprefix(IN_HOME) for m in self.dependencies if m.target.startswith(IN_HOME))
        return tuple(f"{path}/" for path in found)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command: ``env``, and a ``PATH`` that begins with the toolchains' programs."""
        return {"PATH": ":".join((*map(program_directory, self.toolchains), PATH)), **self.env}


def program_directory(toolchain: str) -> str:
    """Return the directory of a toolchain's programs: its ``bin``, or the toolchain itself if it is a ``bin``."""
    path = toolchain.rstrip("/")
    return path if path.rpartition("/")[2] in PROGRAM_DIRECTORIES else f"{path}/bin"


class ExecResult(Struct, frozen=True):
    """A finished command and its output, each stream truncated at the ``keep_bytes`` of ``run``."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    cut: bool = False


class Reader(Protocol):
    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive at most ``max_bytes``; empty at end of file."""


class Writer(Protocol):
    async def send_all(self, data: bytes) -> None: ...
    async def aclose(self) -> None: ...


class Connection(Reader, Writer, Protocol):
    """The host's end of a connection that was made inside a workspace.

    ``aclose`` closes both directions; data sent before it still arrives. All methods raise
    ``trio.BrokenResourceError`` when the other side is gone, but ``receive_some`` at end of file returns nothing.
    """

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The kernel's socket that the connection is, if it is one: bytes may be moved there as well."""

    async def send_eof(self) -> None:
        """Close the sending direction only."""


class Process(Protocol):
    """A running command. Read both streams or it will block; ``wait`` needs no end of file.

    Output from before the end of the block around ``exec`` can still be read after it, up to end of file.
    """

    @property
    def stdin(self) -> Writer: ...
    @property
    def stdout(self) -> Reader: ...
    @property
    def stderr(self) -> Reader: ...

    @property
    def oom_kills(self) -> int:
        """The number of processes that the kernel killed for lack of memory since the command began.

        Counts the whole sandbox; valid once ``wait`` has returned, final when the block around ``exec`` ends.
        ``Exit.oom`` says that the main process was among them.
        """

    async def count(self) -> None:
        """Bring ``oom_kills`` up to date while the command runs."""

    async def wait(self) -> Exit:
        """Wait for the main process. Its descendants may live until the block around ``exec`` ends.

        Raises ``ProviderFailed`` when the command could not be started, unless ``exec`` did, and ``WorkspaceLost``.
        """


class Workspace(Protocol):
    """An open sandbox. Losing it raises ``WorkspaceLost``; a failed command is a value."""

    @property
    def paths(self) -> Paths:
        """The paths that commands inside use; the same on every provider that has mounts."""

    @property
    def tree(self) -> int:
        """A descriptor of the tree as of the last ``refresh``, valid while the sandbox is open; it may be hostile."""

    async def refresh(self) -> None:
        """Bring ``tree`` up to date with what commands have written; at once where it is the same directory."""

    @property
    def terminated(self) -> trio.Event:
        """Set once nothing runs in the sandbox and nothing ever will, if that is known before the block ends."""

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stop: Callable[[StopStage], None] | None = None,
        grace: float | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command and own its whole process tree for the length of the block.

        Leaving the block with the command still running, and cancelling, are the same: TERM to the tree, ``grace`` or
        ``STOP_GRACE`` seconds (at most one for the descendants once the main process has ended), KILL, at most
        ``KILL_GRACE`` more. If processes survive that, the provider may kill the whole sandbox and wait ``KILL_GRACE``
        again: the workspace is then lost, and this block ends normally. Survivors of that raise ``Escaped`` with their
        pids, and the control group where there is one. Descendants that a command leaves behind when it ends by itself
        are killed at once.

        ``on_stop`` is called synchronously as each stage begins, at most once a stage, and not for a stage that finds
        nothing alive. ``env`` is added to the sandbox's. No terminal, no descriptors but 0, 1 and 2.
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
        """Run a command to its end. Output beyond ``keep_bytes`` a stream is read and dropped."""

    def listen(
        self, serve: Callable[[Connection], Awaitable[None]], *, port: int = 0
    ) -> AbstractAsyncContextManager[int]:
        """Listen on the workspace's own loopback for the length of the block, and yield the port; 0 takes any.

        Where workspaces have no network of their own that loopback is the host's. ``serve`` gets each connection in a
        task of its own, which is over before the block is; the connection is closed when ``serve`` returns, and reset
        when it raises or the block ends. A broken connection or a lost workspace ends ``serve`` silently; any other
        exception takes the workspace down. Connections beyond 1024 at once are reset, or wait where the host accepts
        them itself. Nothing listens on the port before and after the block. Raises ``WorkspaceLost``, and
        ``ProviderFailed`` when the port is taken or the provider lacks ``Feature.RELAY``.
        """

    async def effective(self) -> Isolation:
        """Read the isolation back from inside. Raises ``ProviderFailed`` when it cannot be read."""


class Paths(Struct, frozen=True, kw_only=True):
    """Paths as commands inside see them.

    ``incident``, ``skills`` and ``kube`` (the directory of the kubeconfig) exist only when the sandbox mounts them.
    """

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
        """Look for health and capabilities, never recall them from a configuration. Leaves nothing running."""

    async def create(self, request: WorkspaceRequest) -> Handle:
        """Make the workspace, empty unless it is adopted. Raises ``ProviderFailed``, having left nothing behind."""

    def open(self, handle: Handle, spec: SandboxSpec) -> AbstractAsyncContextManager[Workspace]:
        """Start a sandbox on a workspace; it is gone, with every process in it, when the block ends.

        A command that is being stopped at that moment gets no more grace.

        Enter it outside the work scope: it owns the nursery of its services, which the finalize phase needs even when
        work was cancelled. Leaving is shielded and bounded.
        """

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        """Make the files that the host wrote into the workspace belong to its user; an adopted tree is left alone."""

    async def retrieve(self, handle: Handle) -> None:
        """Bring what commands wrote to this host, if the end of a sandbox could not; ends what still runs then.

        Call it before the workspace's files are looked at to keep them. At once where they never were elsewhere.
        Raises ``ProviderFailed``, and ``WorkspaceLost`` when they are gone.
        """

    async def list_owned(self, nonce: str) -> list[Handle]:
        """List this store's workspaces on this provider, running or not; workspaces of other nonces are left out."""

    async def evict(self, handle: Handle) -> None:
        """End everything that runs in the workspace of a runner that has died; its files stay. Idempotent.

        Includes processes that were started elsewhere on this host, such as from another control group, and removes
        the stand-ins for missing protected paths from the tree. Raises ``Escaped`` and ``CleanUpIncomplete``.
        """

    async def destroy(self, handle: Handle) -> None:
        """Remove the workspace, but no adopted tree, and all that runs in it. Idempotent; also when half made.

        Raises ``CleanUpIncomplete`` naming what is left. Never follows a link out of the workspace.
        """


class ImageStart(Struct, frozen=True, kw_only=True):
    """The program of an image with its arguments, its variables, and the directory that it starts in.

    Any of them may be empty.
    """

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str = ""


@runtime_checkable
class Images(Protocol):
    """The part of a provider that has images."""

    async def image(self, name: str, when: Pull = "missing") -> str:
        """Return what a name, reference or id means for good: ``REPOSITORY@DIGEST``, else an id.

        Asks the registry ``when`` the image is missing, always or never; downloads nothing. Raises ``ImageMissing``,
        also for a registry that cannot be asked, ``CredentialHelperFailed``, ``ProviderFailed``.
        """

    async def pull(self, image: str, name: str, report: PullReport | None = None) -> None:
        """Download what ``image`` has returned for ``name``, unless it is here.

        ``report`` gets the bytes received and expected, every few seconds and at the end. Cancelling ends the download.
        Raises as ``image`` does.
        """

    async def labels(self, image: str) -> Mapping[str, str]:
        """Read the labels of an image, of which there are none before it is here. Raises ``ProviderFailed``."""

    async def start_of(self, image: str) -> ImageStart:
        """Read what an image that is here says of its program. Raises ``ImageMissing``, ``ProviderFailed``."""


@runtime_checkable
class DiskUse(Protocol):
    """The part of a provider that watches the disk of workspaces whose files are elsewhere while a sandbox is open."""

    async def disk_bytes(self, handle: Handle, here: Callable[[], Awaitable[int]]) -> int:
        """Return the bytes of all that commands have written, or what ``here`` measures when no sandbox is open."""


class SandboxHandoff(Struct, frozen=True):
    """A running sandbox on its way to another process: ``state`` is JSON, ``descriptors`` belong to the receiver."""

    state: Mapping[str, Any]
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class Slot(Protocol):
    """A running sandbox in which no command runs. ``detach`` is the last call."""

    async def ping(self) -> None:
        """Check that the sandbox answers. Raises ``WorkspaceLost``."""

    async def wait_ended(self) -> None:
        """Wait until the sandbox has ended by itself."""

    def detach(self) -> SandboxHandoff:
        """Return what another process needs to take the sandbox over; the block around the slot then leaves it running.

        ``receive`` it once that block has ended. The sandbox ends when nobody holds the descriptors any more.
        """


class WarmSlots(Protocol):
    """The part of a provider that can start a sandbox before it is known for whom; ``probe`` has
    ``Feature.WARM_POOL`` where it can.

    Order of calls: the keeper of the pool calls ``create`` and ``open_slot``, then once ``detach`` and ``assign``; the
    process that gets the slot then calls ``receive`` with the handle that ``assign`` returned.
    """

    def open_slot(
        self, handle: Handle, toolchains: Sequence[str], protected: Sequence[str]
    ) -> AbstractAsyncContextManager[Slot]:
        """Start the sandbox of an unused workspace; it is gone when the block ends. Once for each workspace.

        ``protected`` are paths that its workspaces will have protected, for a provider with ``protects_at_start``.
        Raises ``ProviderFailed``, ``WorkspaceLost``.
        """

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        """Turn a slot's workspace into the requested one, in place; it keeps the slot's limits and image.

        The slot's id then names no workspace any more. Raises ``ProviderFailed`` when the requested workspace exists
        already, having changed nothing.
        """

    def receive(self, handle: Handle, handoff: SandboxHandoff) -> None:
        """Let the next ``open`` of a workspace use the sandbox that was handed over.

        If that ``open`` asks for more than the sandbox can show, it is ended and another one started.
        """
