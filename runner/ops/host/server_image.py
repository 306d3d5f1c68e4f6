"""The image ``plan-runner``: this version of the runner with its extras, whose command is a server.

What it depends on is pinned, with the bytes, in ``runners/server/requirements.lock``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from runner import DISTRIBUTION, __version__
from runner.core.errors import UsageError
from runner.core.sanitize import sanitize
from runner.core.settings import Settings, shipped
from runner.ops.host.recipe import (
    ImageRecipe,
    build_context,
    file_mode,
    machine_of_daemon,
    pack,
    read_input,
    require_names,
)

TAG = f"{DISTRIBUTION}:{__version__}"
DOCKERFILE = "server/Dockerfile"
_MAX_WHEEL = 64 << 20  # bytes
_EXAMPLE = f"plan_runner-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
_WHEEL = re.compile(
    r"plan_runner-(?P<version>[\w.!+]+)-py3-none-manylinux_2_28_(?P<machine>x86_64|aarch64)\.whl", re.ASCII
)


def context(recipe: ImageRecipe, wheel: Path | None) -> bytes:
    """Return the build context as tar: the recipe, and a wheel or what an index calls it. Raises ``UsageError``."""
    runners = shipped("runners")
    paths = [path for path in sorted((runners / "server").iterdir()) if path.is_file()]
    files = {
        path.relative_to(runners).as_posix(): (path.read_bytes(), file_mode(path))
        for path in (*paths, runners / "image" / "build.sh")
    }
    if wheel is None:
        _require_released()
        wanted = f"{DISTRIBUTION}=={__version__}"
    else:
        _machine_of(wheel)
        files[f"wheel/{wheel.name}"] = (read_input(wheel, _MAX_WHEEL), 0o644)
        wanted = f"./{wheel.name}"
    return pack(recipe, files | {"wheel/wheel.txt": (f"{wanted}\n".encode(), 0o644)})


def _machine_of(wheel: Path) -> str:
    """Return the machine of a wheel of this version. Raises ``UsageError`` for any other file."""
    found = _WHEEL.fullmatch(wheel.name)
    if found is None:
        raise UsageError(
            f"`{sanitize(wheel.name)}` is no wheel of {DISTRIBUTION}",
            hint=f"name a file such as {_EXAMPLE}; in a checkout `make wheels` makes it",
        )
    if found["version"] != __version__:
        raise UsageError(
            f"`{wheel.name}` is version {found['version']}, and this runner is {__version__}",
            hint="build with a runner of the same version, which knows what that needs",
        )
    return found["machine"]


def _require_released() -> None:
    """Raise ``UsageError`` for a runner that no index has given."""
    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = "none"
    if origin is not None:
        raise UsageError(
            "this runner was not installed from a package index, which the image would get it from",
            hint=f"make wheels; runner image build --server --wheel dist/{_EXAMPLE}",
        )


async def build(settings: Settings, recipe: ImageRecipe, wheel: Path | None, say: Callable[[str], None]) -> str:
    """Build the image and return its id. Raises ``UsageError``, and what ``build_context`` raises."""
    require_names(recipe)
    sent = context(recipe, wheel)
    machine = await machine_of_daemon(settings)
    if wheel is not None and (ours := _machine_of(wheel)) != machine:
        raise UsageError(f"`{wheel.name}` is for {ours}, and the docker daemon runs on {machine}")
    labels = {
        "org.opencontainers.image.title": DISTRIBUTION,
        "org.opencontainers.image.version": __version__,
        f"{DISTRIBUTION}.inputs": hashlib.sha256(context(ImageRecipe(recipe.tag), wheel)).hexdigest(),
    }
    return await build_context(settings, recipe, sent, DOCKERFILE, labels, stage=f"{DISTRIBUTION}.stage", say=say)
