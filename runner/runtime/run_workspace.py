"""The workspace of a run: which provider has it, and what was put there before any command."""

from __future__ import annotations

from msgspec import Struct

from runner.core.model import Handle, PoolMissReason
from runner.ports.provider import Probe, Provider


class RunWorkspace(Struct, kw_only=True):
    """State of the workspace that a run has, or is about to have."""

    provider: Provider | None = None
    probe: Probe | None = None
    handle: Handle | None = None
    pool_miss: PoolMissReason | None = None  # why the workspace was not had warm, if it should have been
    provider_name: str | None = None  # of the chain of providers
    rejected_providers: dict[str, str] = {}  # those that were tried, or could not be, with the reason
    abandoned: dict[str, Provider] = {}  # workspaces that were fallen back from and are still there
    servers: dict[str, Provider] = {}  # workspaces of MCP servers, which are there until the run ends
    inputs: tuple[str, ...] = ()  # the incident's files, when they lie in the tree
    injected_files: dict[str, str] = {}  # files of the runner's own in the tree, with the digest of each
    protected: dict[str, str] = {}  # what was there before any command, as ``path_digests.digests`` tells it
    base: str | None = None
    has_repository: bool = False

    def attach(self, provider: Provider, probe: Probe, handle: Handle | None) -> None:
        """Set the workspace's provider, before the workspace is created, and its handle once it exists."""
        self.provider, self.probe, self.handle = provider, probe, handle

    def require(self) -> tuple[Provider, Handle]:
        assert self.provider is not None  # every step that calls this needs provision
        assert self.handle is not None
        return self.provider, self.handle

    def cloned(self, base: str) -> None:
        self.has_repository, self.base = True, base

    def reset(self) -> None:
        """Forget everything about a workspace that the run falls back from."""
        self.provider = self.probe = self.handle = self.base = self.pool_miss = None
        self.inputs, self.injected_files, self.protected = (), {}, {}
        self.has_repository = False
