"""Registered servers: manifests below the home, one a file, that its server hosts beside those it was started with.

A registration is there as soon as its file is, and ends with it, whether a server runs meanwhile or not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from runner.core.errors import (
    McpServerExists,
    NothingToRun,
    Place,
    Rejected,
    RunnerError,
    StoreFailed,
    UnknownMcpServer,
    Untrusted,
)
from runner.core.plural import plural
from runner.core.sanitize import excerpt
from runner.manifest.load import API_VERSION, Document, load
from runner.spec.document_faults import document_faults

FOLDER = "mcp-servers"  # in the home
_SUFFIX = ".runner.yaml"


def load_registered(home: Path) -> tuple[list[Document], list[RunnerError]]:
    """Return what is registered, and what is wrong in it."""
    folder = home / FOLDER
    return load(folder) if any(folder.glob(f"[!.]*{_SUFFIX}")) else ([], [])


def register(home: Path, name: str, spec: Mapping[str, Any], *, trusted: bool) -> None:
    """Register a server. One who is not ``trusted`` may name nothing of this host.

    Raises ``Rejected`` with everything that is wrong, and ``McpServerExists``.
    """
    document = {"apiVersion": API_VERSION, "kind": "McpServer", "metadata": {"name": name}, "spec": spec}
    folder = home / FOLDER
    half = folder / f".{token_hex(8)}{_SUFFIX}"
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        half.write_text(json.dumps(document, indent=2))
        try:
            documents, found = load(half)
            for one in documents:
                found += document_faults(one)
                found += [] if trusted else _of_this_host(one)
            if any(error.severity == "error" for error in found):
                raise Rejected(_placed(error, str(half)) for error in found)
            os.link(half, folder / f"{name}{_SUFFIX}")
        except FileExistsError as error:
            raise exists(name) from error
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        raise StoreFailed(f"`{folder}` cannot be written: {error.strerror}", hint="free some space") from error


def register_file(home: Path, path: Path) -> str:
    """Register the server of a manifest, as its owner may, and return its name. Raises as ``register`` does."""
    documents, found = load(path)
    servers = [one for one in documents if one.kind == "McpServer"]
    if not found and len(servers) != 1:
        hint = "write one document of kind `McpServer`"
        found.append(NothingToRun(f"`{excerpt(str(path))}` holds {plural(len(servers), 'server')}", hint=hint))
    if any(error.severity == "error" for error in found):
        raise Rejected(found)
    (server,) = servers
    spec = {name: _from_here(value, server.directory.absolute()) for name, value in server.written.items()}
    register(home, server.name, spec, trusted=True)
    return server.name


def _from_here(value: Any, directory: Path) -> Any:
    """Return a part of a manifest whose places of secrets do not depend on where it is."""
    if isinstance(value, list):
        return [_from_here(one, directory) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: _from_here(one, directory) for name, one in value.items()}
    source = found.get("from")
    if isinstance(source, dict) and isinstance(file := source.get("file"), str) and not file.startswith("~/"):
        found["from"] = {"file": str(directory / file)}
    return found


def deregister(home: Path, name: str) -> None:
    """End a registration. Raises ``UnknownMcpServer``."""
    for file in (home / FOLDER).glob(f"[!.]*{_SUFFIX}"):
        if file.name == f"{name}{_SUFFIX}":
            file.unlink(missing_ok=True)
            return
    raise UnknownMcpServer(f"no server `{excerpt(name)}` is registered", hint="runner mcp hosted list")


def exists(name: str) -> McpServerExists:
    return McpServerExists(f"there is a server `{name}` already", hint="choose another name")


def _of_this_host(document: Document) -> Iterator[RunnerError]:
    """Find what only somebody on this host may write: its directories, secrets, and the network that it is in."""
    hint = "runner mcp register FILE, on the host of the server"
    spec: Any = document.spec
    hosts, inject = getattr(spec.network, "allow", ()), getattr(spec.network, "inject", None)
    named = [(("toolchains",), spec.toolchains), (("secrets",), spec.secrets), (("network", "inject"), inject)]
    private = [one for one in hosts if not isinstance(one, str)]
    for keys, value in (*named, (("network", "allow"), private)):
        if value:
            text = f"`{'.'.join(keys)}` names something of the server's host, which nobody may from elsewhere"
            yield Untrusted(text, at=document.place(*keys), hint=hint)


def _placed(finding: RunnerError, file: str) -> RunnerError:
    """Return a finding with places that whoever sent the server can find."""

    def known(place: Place) -> Place:
        return place._replace(file="server") if place.file == file else place

    finding.at = known(finding.at) if finding.at else None
    finding.also = tuple(map(known, finding.also))
    finding.message = finding.message.replace(file, "server")
    return finding
