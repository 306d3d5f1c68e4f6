"""Commands that install a repository's dependencies from its lock files, tried in a sandbox as a run would run them.

What they make is kept, so that the first run finds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import asdict, replace

from runner.core.errors import PlatformError, first_leaf
from runner.core.home import SCRATCH
from runner.core.hosts import NetworkSpec
from runner.core.model import DEFAULT_PROJECT, Handle, Mount
from runner.core.settings import Settings
from runner.events.events import ConnectionEnded
from runner.git import source
from runner.ops.init.survey import REQUIREMENTS, Survey, is_ignored
from runner.ops.planning.network_sets import LIMIT, Look, find_network_sets
from runner.ops.workspaces.workspace_lease import HeldWorkspace
from runner.ports.network import EgressConnection
from runner.ports.provider import IN_HOME, ExecResult, Provider, SandboxSpec
from runner.runtime.dependency_layers import NotKept, Owner, installation_spec, lay_out, layer_of
from runner.runtime.disk_watch import outgrown, size_of, too_large
from runner.runtime.mount_plan import MountPlan
from runner.runtime.network import network_variables
from runner.safefs import trees
from runner.safefs.safe_open import read_beneath
from runner.spec.model import MAX_LOCK_FILE, DependencySpec, Lent
from runner.steps.setup.plan import command_words

_MOST = 8 << 20  # bytes of what a command prints

_CONFIGURATION = (".npmrc", ".cargo/config.toml")


class Install(Struct, frozen=True):
    """A command that installs, the programs that run it (``tools``), and the set of hosts that it needs."""

    command: DependencySpec
    tools: tuple[str, ...]
    network: str

    @property
    def words(self) -> str:
        return command_words(self.command.argv)


def _install(words: str, files: Sequence[str], keep: str, network: str, *tools: str) -> Install:
    return Install(DependencySpec(("sh", "-c", words), tuple(files), (keep,)), tools, network)


_CARGO = "mkdir -p src && touch src/lib.rs && cargo fetch --locked"
_KNOWN = {  # by language; the first file says that a command fits
    "node": (
        _install("npm ci", ("package-lock.json", "package.json"), "node_modules", "npm", "node"),
        _install(
            "pnpm install --frozen-lockfile", ("pnpm-lock.yaml", "package.json"), "node_modules", "npm", "node", "pnpm"
        ),
        _install(
            "yarn install --frozen-lockfile", ("yarn.lock", "package.json"), "node_modules", "npm", "node", "yarn"
        ),
    ),
    "python": (
        _install(
            "uv sync --frozen --no-install-project", ("uv.lock", "pyproject.toml"), ".venv", "uv", "python3", "uv"
        ),
    ),
    "go": (_install("go mod download", ("go.sum", "go.mod"), "~/go/pkg/mod", "go", "go"),),
    "rust": (_install(_CARGO, ("Cargo.lock", "Cargo.toml"), "~/.cargo/registry", "cargo", "cargo"),),
}


class InstallFailed(Exception):
    """A command has installed nothing that can be kept; the text says why, ``output`` is what it printed."""

    def __init__(self, why: str, output: bytes = b"") -> None:
        super().__init__(why)
        self.output = output


def find_installs(seen: Survey) -> Iterator[Install]:
    """Yield a command for each language with a lock file whose dependencies are not installed in the repository."""
    place = source.find_repository(seen.top)
    for language in seen.languages:
        known = (one for one in _KNOWN.get(language, ()) if (seen.top / one.command.files[0]).is_file())
        found = next(known, _pip(seen) if language == "python" else None)
        if found is None:
            continue
        (keep,) = found.command.keep
        if keep not in seen.dependencies and (keep.startswith(IN_HOME) or is_ignored(place, keep)):
            more = tuple(name for name in _CONFIGURATION if (seen.top / name).is_file())
            yield replace(found, command=replace(found.command, files=(*found.command.files, *more)))


def _pip(seen: Survey) -> Install | None:
    """Return what makes an environment of the requirements, with pytest if only the tests name it."""
    files = [name for name in REQUIREMENTS if (seen.top / name).is_file()]
    known = any("pytest" in (seen.top / name).read_text(errors="replace") for name in files)
    asked = [f"-r {name}" for name in files] + ["pytest"] * ("pytest" in seen.ways[0].words and not known)
    words = f"python3 -m venv .venv && .venv/bin/pip install {' '.join(asked)}"
    return _install(words, files, ".venv", "pip", "python3") if files else None


async def install(
    installs: Sequence[Install],
    lent: Lent,
    checkout: Path,
    held: HeldWorkspace,
    *,
    top: Path,
    place: tuple[Provider, Handle],
) -> tuple[Mount, ...]:
    """Make the layers of all commands, unless they are kept, and return their mounts. Raises ``InstallFailed``.

    ``place`` is the workspace ``held``, whose journal has the connections, and ``checkout`` the commit's files.
    """
    _, handle = place
    env = held.env
    network = await _network([one.network for one in installs], top, checkout, env.settings)
    mount_plan = MountPlan(protected=(), toolchains=lent.toolchains, incident=False, environment=lent.environment)
    found: list[Mount] = []
    for one in installs:
        try:
            files = {name: read_beneath(checkout, name, MAX_LOCK_FILE) for name in one.command.files}
        except OSError as error:
            raise InstallFailed("its files are not all in HEAD") from error
        layer = layer_of(
            env.settings.home,
            one.command,
            owner=Owner(project=DEFAULT_PROJECT, source=str(top), untrusted=False),
            files=[sha256(content).hexdigest() for content in files.values()],
            image=None,
            mount_plan=mount_plan,
            network=network,
            credentials=(),
        )
        record, lock = await layer.lock()
        installation = env.settings.home / SCRATCH / f"{handle.id}-dependencies"
        try:
            if record is None:
                await trio.to_thread.run_sync(lay_out, installation, files, handle.uid)
                await _run(one, installation_spec(mount_plan, installation), network, held, place)
                await trio.to_thread.run_sync(layer.keep, installation, one.command.keep, "runner init")
        except NotKept as why:
            raise InstallFailed(f"it made nothing that can be kept: {why}") from why
        finally:
            os.close(lock)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(trees.remove, installation)
        found += layer.mounts(one.command.keep)
    return tuple(found)


async def _run(
    one: Install, spec: SandboxSpec, network: NetworkSpec, held: HeldWorkspace, place: tuple[Provider, Handle]
) -> None:
    """Run a command within the disk limit of a workspace."""
    provider, handle = place
    connections: list[EgressConnection] = []
    assert spec.tree is not None  # where it installs
    measure, most = partial(size_of, (spec.tree.source.parent,)), held.env.settings.default_disk
    ended: ExecResult | None = None
    failure: BaseException | None = None
    size = 0
    try:
        async with (
            provider.open(handle, spec) as workspace,
            held.env.deps.open_egress(network, connections.append) as egress,
            workspace.listen(egress.serve) as port,
            trio.open_nursery() as nursery,
        ):

            async def watch() -> None:
                nonlocal size
                size = await outgrown(measure, most)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            variables = await network_variables(workspace, egress, port, network)
            ended = await workspace.run(one.command.argv, env=variables, keep_bytes=_MOST)
            nursery.cancel_scope.cancel()
    except* PlatformError as group:
        failure = first_leaf(group)
    finally:
        with trio.CancelScope(shield=True):
            await held.write(*(ConnectionEnded(step="dependencies", **asdict(one)) for one in connections))
    if failure is not None:
        raise failure
    size = size or await measure()
    if ended is None or size > most:
        raise InstallFailed(too_large(size, most))
    if not ended.exit.ok:
        raise InstallFailed(f"it {ended.exit}", ended.stdout + b"\n" + ended.stderr)


async def _network(tools: Sequence[str], top: Path, checkout: Path, settings: Settings) -> NetworkSpec:
    """Return the hosts of tools, as a manifest that names them has them."""

    async def read(name: str) -> bytes | None:
        try:
            return await trio.to_thread.run_sync(read_beneath, checkout, name, LIMIT)
        except FileNotFoundError:
            return None

    sets = await find_network_sets(tools, Look(variables=settings.variables, read=read, source=str(top)))
    rules = {(rule.host, rule.port, rule.private): rule for one in sets.values() for rule in one.rules}
    environment = {name: value for one in sets.values() for name, value in one.environment.items()}
    return NetworkSpec(tuple(rules.values()), environment=environment)
