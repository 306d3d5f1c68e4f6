"""Names that a shell completes when Tab is pressed, such as ids of runs.

The shell waits: only directories and texts are read, and no code for manifests or the store is imported, except for
pools and projects, which are only there. What cannot be read completes to nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.cli.requests import nearest_manifests
from runner.core.home import RUNS, WORKSPACES
from runner.core.settings import Settings

_KIND = re.compile(r"^kind:\s*(\w+)", re.M)
_NAMED = re.compile(r"^metadata:(?:\s*\{.*?|.*\n(?: .*\n)*? +)\bname:\s*['\"]?([a-z0-9-]+)", re.M)
_CONTEXTS = re.compile(r"^contexts:\s*\n((?:[ -].*\n?)*)", re.M)
_NAME = re.compile(r"^(?:- |\s+(?:- )?)name:\s*['\"]?([^\s'\"]+)", re.M)
LARGEST = 1 << 20  # bytes of a text


def runs(settings: Settings) -> Iterator[str]:
    """Yield the newest runs, after ``last``."""
    yield "last"
    yield from _newest(settings.home / RUNS)


def workspaces(settings: Settings) -> Iterator[str]:
    return _newest(settings.home / WORKSPACES)


def names(settings: Settings) -> Iterator[str]:
    """Yield names of runs in manifests."""
    return _documents("IncidentRun")


def policies(settings: Settings) -> Iterator[str]:
    return _documents("Policy")


def contexts(settings: Settings) -> Iterator[str]:
    """Yield contexts of the default kubeconfigs."""
    usual = Path(settings.variables.get("HOME", "/"), ".kube", "config")
    for file in (settings.variables.get("KUBECONFIG") or str(usual)).split(":"):
        for block in _CONTEXTS.findall(_text(Path(file))):
            yield from _NAME.findall(block)


def pools(settings: Settings) -> Iterator[str]:
    import trio

    from runner.ops.host.state import read_state

    async def read() -> list[str]:
        async with read_state(settings) as store:
            return [row.name for row in await store.pools()]

    return iter(trio.run(read))


def projects(settings: Settings) -> Iterator[str]:
    import trio

    from runner.ops.workspaces.project import list_projects

    return (row.name for row in trio.run(list_projects, settings))


KINDS: dict[str, Callable[[Settings], Iterator[str]]] = {
    each.__name__: each for each in (runs, workspaces, names, policies, contexts, pools, projects)
}


def _newest(directory: Path) -> Iterator[str]:
    found = [entry for entry in os.scandir(directory) if not entry.name.startswith(".")]
    return (entry.name for entry in sorted(found, key=lambda entry: -entry.stat(follow_symlinks=False).st_mtime))


def _documents(kind: str) -> Iterator[str]:
    folder = nearest_manifests()
    for file in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        for document in re.split(r"^---", _text(file), flags=re.M):
            if _KIND.findall(document) == [kind]:
                yield from _NAMED.findall(document)


def _text(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as stream:
        return stream.read(LARGEST)
