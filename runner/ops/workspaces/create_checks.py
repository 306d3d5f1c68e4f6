"""Checks before a workspace outside of runs is made, and the provider and limits that it gets. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from runner.core.errors import BadDirectory, IsolationTooWeak, ProviderUnavailable, UsageError
from runner.core.ids import IMAGE_HINT, is_image
from runner.core.model import Feature, Limits
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.manifest.load import defaults
from runner.ops.planning.facts import unknown_provider
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.provider import Images, Probe, Provider
from runner.ports.store import WorkspaceRow
from runner.steps.provision.run import enforceable


class ChosenProvider(Struct, frozen=True):
    """A provider, its probe here, and what pins the image to use, if any."""

    provider: Provider
    probe: Probe
    image: str | None


def require_isolation(probe: Probe) -> None:
    """Raise ``IsolationTooWeak`` for a provider whose commands can do what the user of the runner can."""
    if not probe.isolation:
        hint = "use `local`, `docker` or `gvisor`"
        raise IsolationTooWeak(f"`{probe.provider}` does not isolate what runs in its workspaces", hint=hint)


def limits_of(settings: Settings, probe: Probe, given: Limits) -> tuple[Limits, Limits | None]:
    """Return the given limits, with defaults for others, that the provider enforces, and the defaults that it cannot.

    Raises ``ProviderUnavailable`` for a given one that it cannot.
    """
    if enforceable(given, probe) != given:
        raise ProviderUnavailable(
            f"`{probe.provider}` cannot enforce the limits that are asked for", hint="leave them out"
        )
    pids = _shipped("resource_limits")["pids"]
    defaults = Limits(settings.default_cpus, settings.default_memory, settings.default_disk, pids)
    pairs = zip(astuple(given), astuple(defaults), strict=True)
    wanted = Limits(*(default if want is None else want for want, default in pairs))
    kept = enforceable(wanted, probe)
    rest = [want if have is None else None for want, have in zip(astuple(wanted), astuple(kept), strict=True)]
    return kept, Limits(*rest) if any(rest) else None


async def choose_provider(
    env: WorkspaceEnv, name: str | None, image: str | None, *, adopting: bool, without: Collection[str] = ()
) -> ChosenProvider:
    """Choose the provider ``name``, or the first of the chain that fits, ``without`` those that have failed.

    Raises ``ProviderUnavailable``, and ``ImageMissing`` when the only one that fits lacks the image.
    """
    if image is not None and not is_image(image):
        raise UsageError(f"`{sanitize(image)}` is not the name of an image", hint=f"write {IMAGE_HINT}")
    names = [name] if name else env.settings.providers or _shipped("providers")
    refused, hints = [], []
    for each in names:
        if error := unknown_provider(each):
            raise error
        if each in without:
            refused.append(f"`{each}`: it has failed before")
            continue
        provider = env.deps.provider(each)
        probe = await provider.probe()
        why = _unfit(probe, image, adopting=adopting)
        if why is None:
            pin = await provider.image(image) if image is not None and isinstance(provider, Images) else None
            return ChosenProvider(provider, probe, pin)
        refused.append(f"`{each}`: {why}")
        hints += [probe.hint] if probe.hint else []
    hint = hints[0] if hints else "name another with --provider; see `runner doctor`"
    raise ProviderUnavailable(f"no provider could make the workspace: {'; '.join(refused)}", hint=hint)


def _unfit(probe: Probe, image: str | None, *, adopting: bool) -> str | None:
    if not probe.available:
        return probe.reason or "not available"
    if adopting and not probe.enforces(Feature.PROTECTED_PATHS):
        return "it cannot keep commands from changing `.git`"
    if image is None:
        return "name one with --image: it makes workspaces from an image" if probe.needs_image else None
    return None if probe.enforces(Feature.BASE_IMAGE) else f"it has no images: {probe.missing[Feature.BASE_IMAGE]}"


def _shipped(field: str) -> Any:
    """Return the default of a workspace field in manifests."""
    spec: Any = defaults()["AgentType"].data["spec"]
    return spec["workspace"][field]


def adoptable(settings: Settings, path: Path, rows: Sequence[WorkspaceRow]) -> Path:
    """Return the real path of a directory that may become a workspace in place. Raises ``BadDirectory``."""
    real, told, home = Path(os.path.realpath(path)), sanitize(str(path)), Path(os.path.realpath(settings.home))
    if not os.path.isdir(real):
        what = "is not a directory" if os.path.exists(real) else "does not exist"
        raise BadDirectory(f"`{told}` {what}", hint="name a directory; without one, the workspace starts empty")
    if real.is_relative_to(home) or home.is_relative_to(real):
        what = "is in" if real.is_relative_to(home) else "contains"
        raise BadDirectory(f"`{told}` {what} RUNNER_HOME, `{home}`", hint="set RUNNER_HOME to another place")
    for row in rows:
        if row.path is not None and _overlap(real, Path(row.path)):
            hint = f"runner workspace show {row.id}"
            raise BadDirectory(f"`{told}` overlaps with `{row.path}`, which is a workspace", hint=hint)
    if not os.path.lexists(real / ".git"):
        _check_no_repository(real, told)
    return real


def _check_no_repository(real: Path, told: str) -> None:
    if os.path.isfile(real / "HEAD") and os.path.isdir(real / "objects"):
        raise BadDirectory(f"`{told}` is a bare repository", hint="name a work tree")
    for folder in real.parents:
        if os.path.lexists(folder / ".git"):
            hint = f"name `{folder}`, or a directory that is in no repository"
            raise BadDirectory(f"`{told}` is a part of the repository at `{folder}`", hint=hint)


def _overlap(one: Path, other: Path) -> bool:
    """Tell whether two directories are the same, or one contains the other, under any names."""

    def chain(path: Path) -> set[tuple[int, int]]:
        return {(found.st_dev, found.st_ino) for folder in (path, *path.parents) for found in status_of(folder)}

    return any(
        (found.st_dev, found.st_ino) in chain(outer)
        for inner, outer in ((one, other), (other, one))
        for found in status_of(inner)
    )


def status_of(path: Path) -> Iterator[os.stat_result]:
    """Yield the stat result, or nothing if the path cannot be read."""
    try:
        yield path.stat()
    except OSError:
        return
