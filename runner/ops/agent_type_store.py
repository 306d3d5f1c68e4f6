"""Agent types of a server, kept in the store for all its hosts, or in a folder that people edit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import msgspec
import trio
from msgspec.structs import replace

from runner.core.codec import decode, encode, plain
from runner.core.errors import (
    AgentTypeChanged,
    AgentTypeExists,
    BadConfig,
    Place,
    Rejected,
    RunnerError,
    StoreFailed,
    UnknownAgentType,
)
from runner.core.ids import is_name
from runner.core.sanitize import excerpt
from runner.manifest import text
from runner.manifest.text import Tree
from runner.ops.agent_types import AgentType, WorkspaceConfig, check_config, config_faults
from runner.ports.store import EntryRow, Store

KIND = "agent-type"
_SUFFIX = ".yaml"
_NAMES = "use small letters, digits and `-`"
_FAULT = re.compile(r"(?P<what>.*?)(?: `(?P<field>[^`]*)`)?(?: - at `\$(?P<path>.*)`)?", re.DOTALL)


class AgentTypes(Protocol):
    """The agent types of a server, by name. A ``version`` is that of the configuration that is changed."""

    async def all(self) -> list[AgentType]: ...

    async def get(self, name: str) -> AgentType:
        """Return one. Raises ``UnknownAgentType``."""

    async def create(self, name: str, workspace: WorkspaceConfig) -> AgentType:
        """Make one. Raises ``Rejected`` or the one thing that is wrong with it, and ``AgentTypeExists``."""

    async def put_config(self, name: str, workspace: WorkspaceConfig, *, version: str) -> AgentType:
        """Change the workspaces that are made from now on. Raises ``AgentTypeChanged``, and as the others do."""

    async def delete(self, name: str) -> None:
        """Remove one; its workspaces stay. Raises ``UnknownAgentType``."""


class StoredAgentTypes:
    """Agent types in the store, which several servers may share."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def all(self) -> list[AgentType]:
        found = [_stored(row.body) for row in await self._store.entries(KIND)]
        return sorted(found, key=lambda one: one.name)

    async def get(self, name: str) -> AgentType:
        return _stored((await self._row(name)).body)

    async def create(self, name: str, workspace: WorkspaceConfig) -> AgentType:
        made = _checked(name, workspace)
        if await self._store.put_entry(EntryRow(kind=KIND, name=name, body=encode(made).decode())) is None:
            raise _exists(name)
        return made

    async def put_config(self, name: str, workspace: WorkspaceConfig, *, version: str) -> AgentType:
        row = await self._row(name)
        after = _changed(_stored(row.body), workspace, version)
        if await self._store.put_entry(replace(row, body=encode(after).decode())) is None:
            raise _stale(name)
        return after

    async def delete(self, name: str) -> None:
        row = await self._row(name)
        await self._store.remove_entry(KIND, row.name)

    async def _row(self, name: str) -> EntryRow:
        for row in await self._store.entries(KIND, name=name) if is_name(name) else ():
            return row
        raise _unknown(name)


class AgentTypeFolder:
    """Agent types in a folder: ``NAME.yaml`` holds the workspace-config of ``NAME``.

    What people write is seen by the next one who asks. A change over HTTP writes what it changes; comments, order and
    quotes of the rest stay. A file with errors is told with their places, and the others are not affected.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = trio.Lock()

    async def all(self) -> list[AgentType]:
        """List all. Raises ``Rejected`` with everything that is wrong in the folder."""
        return await trio.to_thread.run_sync(self._read_all)

    async def get(self, name: str) -> AgentType:
        return await trio.to_thread.run_sync(self._read, name)

    async def create(self, name: str, workspace: WorkspaceConfig) -> AgentType:
        made = _checked(name, workspace)
        async with self._turn:
            await trio.to_thread.run_sync(self._write, name, _merged("", workspace), True)
        return made

    async def put_config(self, name: str, workspace: WorkspaceConfig, *, version: str) -> AgentType:
        async with self._turn:
            return await trio.to_thread.run_sync(self._put_config, name, workspace, version)

    async def delete(self, name: str) -> None:
        async with self._turn:
            await trio.to_thread.run_sync(self._delete, name)

    def _read_all(self) -> list[AgentType]:
        found: list[AgentType] = []
        faults: list[RunnerError] = []
        try:
            files = sorted(self._folder.iterdir())
        except OSError as error:
            raise BadConfig(f"`{excerpt(str(self._folder))}` cannot be read: {error.strerror}") from error
        for path in files:
            if path.name.endswith(_SUFFIX) and not path.name.startswith("."):
                try:
                    found.append(self._read(path.name.removesuffix(_SUFFIX)))
                except Rejected as rejected:
                    faults += rejected.findings
                except UnknownAgentType:
                    message = f"`{excerpt(str(path))}` is not named after an agent type"
                    faults.append(BadConfig(message, hint=_NAMES))
                except RunnerError as error:
                    faults.append(error)
        if faults:
            raise Rejected(faults)
        return found

    def _read(self, name: str) -> AgentType:
        return AgentType(name=name, workspace=_config(*self._file(name)))

    def _file(self, name: str) -> tuple[str, bytes]:
        path = self._folder / f"{name}{_SUFFIX}"
        if not is_name(name) or not path.is_file():
            raise _unknown(name)
        return str(path), text.read(path, str(path))

    def _put_config(self, name: str, workspace: WorkspaceConfig, version: str) -> AgentType:
        file, raw = self._file(name)
        after = _changed(AgentType(name=name, workspace=_config(file, raw)), workspace, version)
        self._write(name, _merged(text.decode(file, raw), workspace), False)
        return after

    def _write(self, name: str, content: str, new: bool) -> None:
        """Write a file whole or not at all. Raises ``AgentTypeExists`` for a new one that is there."""
        target = Path(os.path.realpath(self._folder / f"{name}{_SUFFIX}"))
        half = target.with_name(f".{token_hex(8)}")
        try:
            half.write_text(content, encoding="utf-8")
            if new:
                os.link(half, target)
            else:
                half.chmod(target.stat().st_mode & 0o7777)
                os.replace(half, target)
        except FileExistsError as error:
            raise _exists(name) from error
        except OSError as error:
            message = f"`{excerpt(str(target))}` cannot be written: {error.strerror}"
            raise StoreFailed(message, hint="let the server's user write there, or free some space") from error
        finally:
            half.unlink(missing_ok=True)

    def _delete(self, name: str) -> None:
        self._file(name)
        path = self._folder / f"{name}{_SUFFIX}"
        try:
            path.unlink()
        except OSError as error:
            raise StoreFailed(f"`{excerpt(str(path))}` cannot be removed: {error.strerror}") from error


@lru_cache(maxsize=128)
def _stored(body: str) -> AgentType:
    return decode(body, AgentType)


def _config(file: str, raw: bytes) -> WorkspaceConfig:
    """Return what a file says. Raises what is wrong with it, at its place."""
    trees, found = text.parse(file, raw)
    if found:
        raise Rejected(found)
    if len(trees) > 1:
        raise BadConfig("there is a second document", at=trees[1].place(), hint="write a file for each agent type")
    if not trees or trees[0].data is None:
        return WorkspaceConfig()
    try:
        config = msgspec.convert(trees[0].data, WorkspaceConfig)
    except msgspec.ValidationError as error:
        raise _fault(trees[0], str(error)) from error
    faults = [*config_faults(config)]
    for keys, fault in faults:
        fault.at = trees[0].place(*keys)
    if faults:
        raise Rejected(fault for _, fault in faults)
    return config


def _fault(tree: Tree, message: str) -> BadConfig:
    """Return what msgspec says of a document, at the place that it means."""
    found = _FAULT.fullmatch(message)
    assert found is not None  # every text matches
    keys = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", found["path"] or "")]
    if found["what"].endswith("unknown field"):
        at: Place = tree.key_place(*keys, found["field"])
        return BadConfig(f"`{excerpt(found['field'])}` is no field of a workspace-config", at=at)
    what = message.partition(" - at ")[0]
    return BadConfig(f"{tree.written(*keys)} does not fit: {what[:1].lower()}{what[1:]}", at=tree.place(*keys))


def _merged(before: str, workspace: WorkspaceConfig) -> str:
    """Return the text of a file with another configuration; all that says the same stays as it is."""
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    document, indent, offset = load_yaml_guess_indent(before, yaml=yaml)
    if indent is not None:
        yaml.indent(mapping=indent, sequence=indent, offset=offset or 0)
    document = {} if document is None else document
    _merge(document, plain(workspace), plain(WorkspaceConfig()))
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _merge(written: Any, values: Mapping[str, Any], default: Mapping[str, Any]) -> None:
    for name, value in values.items():
        usual = default.get(name)
        if isinstance(value, dict) and isinstance(written.get(name), dict):
            _merge(written[name], value, usual if isinstance(usual, dict) else {})
        elif name in written and value is None:
            del written[name]
        elif isinstance(value, list) and isinstance(before := written.get(name), list):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, value, strict=False)))
            del before[same:]
            before.extend(value[same:])
        elif name in written and written[name] != value:
            written[name] = value
        elif name not in written and isinstance(value, dict) and isinstance(usual, dict):
            if less := {key: one for key, one in value.items() if one != usual.get(key)}:
                written[name] = less
        elif name not in written and value != usual:
            written[name] = value


def _checked(name: str, workspace: WorkspaceConfig) -> AgentType:
    if not is_name(name):
        raise BadConfig(f"`{excerpt(name)}` cannot name an agent type", hint=_NAMES)
    check_config(workspace)
    return AgentType(name=name, workspace=workspace)


def _changed(before: AgentType, workspace: WorkspaceConfig, version: str) -> AgentType:
    if before.version != version:
        raise _stale(before.name)
    check_config(workspace)
    return replace(before, workspace=workspace)


def _exists(name: str) -> AgentTypeExists:
    return AgentTypeExists(f"there is an agent type `{name}` already", hint="change its workspace-config")


def _stale(name: str) -> AgentTypeChanged:
    return AgentTypeChanged(f"agent type `{name}` has been changed since you read it", hint="read it again")


def _unknown(name: str) -> UnknownAgentType:
    return UnknownAgentType(f"there is no agent type `{excerpt(name)}`")
