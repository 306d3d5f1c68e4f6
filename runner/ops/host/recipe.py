"""Building of the images that this runner has a recipe for: their context, and what reaches the mirrors from here."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from runner.core.errors import ContextNotWritten, ImageBuildFailed, ProviderFailed, UsageError
from runner.core.ids import IMAGE_HINT, is_image
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.ops.planning.files import read_file
from runner.sandbox.docker_api import Engine
from runner.sandbox.image_build import Build, build_image

LONGEST = 1800.0  # seconds for a build
MAX_HOST_FILE = 4 << 20  # bytes; the authorities of a distribution are a quarter of one MiB
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")  # the daemon keeps these out of the image's history


@dataclass(frozen=True)
class ImageRecipe:
    """An image to build as ``tag``. The files say how this host reaches its package mirrors, and are not in the image.

    ``base`` is Debian or a derivative. ``host_network`` gives the build this host's network.
    """

    tag: str
    base: str | None = None
    ca: Path | None = None
    npmrc: Path | None = None
    pip_conf: Path | None = None
    apt_sources: Path | None = None
    host_network: bool = False

    @property
    def may_hold_token(self) -> bool:
        return self.npmrc is not None or self.pip_conf is not None


def file_mode(path: Path) -> int:
    """Return the mode that a shipped file has in a context."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def pack(recipe: ImageRecipe, files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Return the build context as tar, deterministically, with the host's files in ``host``. Raises ``UsageError``."""
    content = {**files, **{f"host/{name}": (text, 0o644) for name, text in _of_host(recipe)}}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("host")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name, (text, mode) in sorted(content.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), mode
            tar.addfile(entry, io.BytesIO(text))
    return buffer.getvalue()


def _of_host(recipe: ImageRecipe) -> Iterator[tuple[str, bytes]]:
    """Yield files of this host by the names that ``build.sh`` expects."""
    named = (
        ("ca.crt", recipe.ca),
        ("npmrc", recipe.npmrc),
        ("pip.conf", recipe.pip_conf),
        ("apt", recipe.apt_sources),
    )
    for name, path in named:
        if path is None:
            continue
        text = read_input(path, MAX_HOST_FILE)
        kind = (".sources" if b"Types:" in text else ".list") if name == "apt" else ""
        yield name + kind, text


def read_input(path: Path, most: int) -> bytes:
    """Read a file that the user has named. Raises ``UsageError``."""
    try:
        return read_file(path, most)
    except OSError as error:
        raise UsageError(f"`{sanitize(str(path))}` cannot be read: {error.strerror}") from error


def save_context(content: bytes, path: Path) -> None:
    """Write a build context to a new file for another builder, readable by its owner only: it may hold a token.

    Raises ``ContextNotWritten``, also for a file or link that exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError:
            path.unlink()  # half of it is worth nothing
            raise
    except FileExistsError as error:
        raise ContextNotWritten(f"`{sanitize(str(path))}` exists already", hint="name a new file") from error
    except OSError as error:
        raise ContextNotWritten(f"`{sanitize(str(path))}` cannot be written: {error.strerror}") from error


async def machine_of_daemon(settings: Settings) -> str:
    """Return the machine that images are built for, such as ``x86_64``. Raises ``ProviderFailed``."""
    return str((await Engine.of(settings).about()).get("Architecture"))


async def build_context(
    settings: Settings,
    recipe: ImageRecipe,
    content: bytes,
    dockerfile: str,
    labels: Mapping[str, str],
    *,
    stage: str,
    say: Callable[[str], None],
) -> str:
    """Build an image and return its id. Cancelling stops the build; unnamed images may remain.

    Stages that saw a file with a token have the label ``stage``, and are removed from the daemon. Raises what
    ``build_image`` raises.
    """
    engine = Engine.of(settings)
    proxies = {name: url for name, url in settings.reach.items() if name.lower() in _PROXIES}
    arguments = {**proxies, **({"BASE": recipe.base} if recipe.base else {})}
    wanted = Build(
        context=content,
        dockerfile=dockerfile,
        tag=recipe.tag,
        arguments=arguments,
        labels=labels,
        host_network=recipe.host_network,
    )
    try:
        with trio.fail_after(LONGEST):
            return await build_image(engine, wanted, say)
    except trio.TooSlowError as error:
        raise ImageBuildFailed(f"the image is not built within {LONGEST / 60:.0f} minutes") from error
    finally:
        if recipe.may_hold_token:
            with trio.CancelScope(shield=True), suppress(ProviderFailed):
                await engine.prune_images(stage)


def require_names(recipe: ImageRecipe) -> None:
    """Raise ``UsageError`` for what is no name of an image."""
    for name in (recipe.tag,) if recipe.base is None else (recipe.base, recipe.tag):
        require_name(name)


def require_name(image: str) -> None:
    if not is_image(image):
        raise UsageError(f"`{sanitize(image)}` is not the name of an image", hint=f"write {IMAGE_HINT}")
