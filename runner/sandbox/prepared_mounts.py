"""The host's directories of a sandbox, staged to be mounted: the tree, perhaps under a layer, and the private ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import trio
from msgspec import Struct

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.home import WORKSPACES
from runner.core.model import Handle
from runner.ports.provider import IN_HOME, Paths, SandboxSpec
from runner.safefs import trees
from runner.safefs.safe_open import DIRECTORY, open_directory, open_linkless
from runner.sandbox.mounts import MountSource, MountStage
from runner.sandbox.protected_paths import Guard, open_guards


class PreparedMounts(Struct, frozen=True, kw_only=True):
    """Staged sources of the mounts that every sandbox has. ``tree_fd`` is the open tree.

    ``project`` is set when commands see it whole; ``tree_path`` is the tree's path on this host. ``home_guards`` keep
    the dependencies in the home in place.
    """

    stage: MountStage
    project: MountSource | None
    tree: MountSource
    tree_path: str
    tree_fd: int
    home: MountSource
    home_guards: Sequence[Guard]
    tmp: MountSource
    output: MountSource
    runner: MountSource
    scratch: Path
    uid: int

    def add(self, source: Path) -> MountSource:
        """Stage another file or directory. Raises ``ProtectedLink``, and ``ProviderFailed`` for a missing one."""
        try:
            return self.stage.add(open_linkless(source))
        except OSError as error:
            raise ProviderFailed(f"`{source}` cannot be mounted: {error.strerror}") from error

    def add_overlay(self, source: Path) -> MountSource:
        """Stage another directory under a layer that takes every write and is discarded. Raises as ``add``."""
        lower = self.add(source)
        layer = _make_layer(Path(mkdtemp(prefix="layer-", dir=self.scratch)), source, self.uid)
        try:
            return self.stage.overlay_inside(lower, self.add(layer))
        except OSError as error:
            raise ProviderFailed(f"`{source}` cannot be mounted: {error.strerror}") from error


def paths_on_host(prepared: PreparedMounts, spec: SandboxSpec) -> Paths:
    """Return the paths for commands that see this host's own files. Raises ``ProviderFailed`` for other mounts."""
    sources = {mount.target: prepared.add(mount.source).path for mount in spec.mounts}
    paths = Paths(
        workspace=prepared.tree_path,
        output=sources.pop("/output", prepared.output.path),
        incident=sources.pop("/incident", "/incident"),
        runner=prepared.runner.path,
        home=prepared.home.path,
        skills=sources.pop("/skills", "/skills"),
        kube=sources.pop("/root/.kube", "/root/.kube"),
    )
    if sources:
        raise ProviderFailed(f"a provider without mounts cannot mount `{min(sources)}`")
    return paths


@asynccontextmanager
async def prepare_mounts(
    handle: Handle, spec: SandboxSpec, opening_stage: AbstractContextManager[MountStage]
) -> AsyncIterator[PreparedMounts]:
    """Stage the sources of a sandbox; layers and scratch directories are gone when the block ends.

    ``opening_stage`` is entered and left here.
    Raises ``WorkspaceLost`` when the workspace is not there, ``ProviderFailed`` when the host refuses.
    """
    scratch = handle.private / "scratch"
    try:
        await trio.to_thread.run_sync(_prepare, handle, scratch)
    except FileNotFoundError as error:
        raise WorkspaceLost(f"workspace `{handle.id}` is gone: `{error.filename}`") from error
    except OSError as error:
        raise ProviderFailed(f"workspace `{handle.id}` cannot be opened: {error}") from error
    try:
        with opening_stage as stage:
            add = partial(_add, stage)
            tree = await _open_tree(handle, spec, scratch, stage)
            tree_fd = stage.open(tree)
            whole = handle.project_tree if spec.tree is None and spec.tree_writable else None
            project = add(whole) if whole else None
            home = spec.home or (scratch if spec.fresh_home else handle.private) / "home"
            try:
                with _open_home_guards(home, spec.pinned_in_home, handle.uid) as home_guards:
                    yield PreparedMounts(
                        stage=stage,
                        project=project,
                        tree=tree,
                        tree_path=f"{project.path}/{WORKSPACES}/{handle.id}" if project else tree.path,
                        tree_fd=tree_fd,
                        home=add(home),
                        home_guards=home_guards,
                        tmp=add(handle.private / "tmp"),
                        output=add(handle.private / "output"),
                        runner=add(handle.private / "runner"),
                        scratch=scratch,
                        uid=handle.uid,
                    )
            finally:
                os.close(tree_fd)
    finally:
        with trio.CancelScope(shield=True):
            left = await trio.to_thread.run_sync(trees.remove, scratch)
    if left:
        raise ProviderFailed(f"scratch files of workspace `{handle.id}` remain: {left[0]}")


@contextmanager
def _open_home_guards(home: Path, paths: Sequence[str], uid: int) -> Iterator[Sequence[Guard]]:
    """Open the guards of paths in a home, whose missing parents are made. Raises ``ProviderFailed``, and as
    ``open_guards`` does."""
    if not paths:
        yield ()
        return
    with open_directory(home) as top:
        for path in paths:
            try:
                _make_parents(top, path.rstrip("/").split("/")[:-1], uid)
            except OSError as error:
                raise ProviderFailed(f"`{IN_HOME}{path}` cannot be shown: {error.strerror}") from error
        with open_guards(top, paths) as guards:
            yield guards


def _make_parents(top: int, names: Sequence[str], uid: int) -> None:
    at = os.dup(top)
    try:
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=at)
            below = os.open(name, DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
            trees.chown(at, uid)
    finally:
        os.close(at)


def _prepare(handle: Handle, scratch: Path) -> None:
    handle.tree.lstat()
    for directory in (handle.private / "tmp", scratch):
        trees.remove(directory)
        _make(directory, handle.uid)
    _make(scratch / "home", handle.uid)


def _make(directory: Path, uid: int) -> None:
    directory.mkdir(mode=0o700)
    trees.chown(directory, uid)


def _add(stage: MountStage, source: Path) -> MountSource:
    return stage.add(open_linkless(source))


async def _open_tree(handle: Handle, spec: SandboxSpec, scratch: Path, stage: MountStage) -> MountSource:
    source = spec.tree.source if spec.tree else handle.tree
    try:
        fd = open_linkless(source)
    except OSError as error:
        raise WorkspaceLost(f"the tree of workspace `{handle.id}` is gone: `{source}`") from error
    theirs = os.fstat(fd).st_uid == handle.uid
    lower = stage.add(fd)
    if spec.tree_writable and (spec.tree is None or spec.tree.writable):
        return lower
    if theirs:  # through a layer, the files of another owner cannot be written
        try:
            layer = _make_layer(Path(mkdtemp(prefix="layer-", dir=scratch)), source, handle.uid)
            return stage.overlay(lower, _add(stage, layer))
        except OSError:
            pass  # an ordinary user, or a file system without overlays: a copy does as well, only slower
    return _add(stage, await _copy(source, scratch / "tree", handle.uid))


def _make_layer(layer: Path, lower: Path, uid: int) -> Path:
    trees.chown(layer, uid)
    for directory in (layer / "files", layer / "work"):
        _make(directory, uid)
    shutil.copymode(lower, layer / "files")
    return layer


async def _copy(source: Path, to: Path, uid: int) -> Path:
    copied = await trio.run_process(
        ["/bin/cp", "-a", "--", str(source), str(to)], env={}, capture_stderr=True, check=False
    )
    if copied.returncode != 0:
        raise ProviderFailed(f"`{source}` cannot be copied: {copied.stderr.decode(errors='replace').strip()}")
    if trees.can_chown():
        await trio.to_thread.run_sync(trees.chown_tree, to, uid)
    return to
