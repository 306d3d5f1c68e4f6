"""Configurations of MCP clients: an entry for a server is added to each, and everything else stays as it is."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from msgspec import Struct

from runner.core.errors import UsageError
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.planning.files import read_file

_NOT_OURS = (  # variables of others that runs need, beside the settings
    "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CODEX_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY", "RUNNER_TOKEN",
    "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH",
    "SSH_AUTH_SOCK", "GIT_SSH_COMMAND", "KUBECONFIG", "XDG_STATE_HOME",
)  # fmt: skip
MOST = 64 << 20  # bytes of a configuration
Document = dict[str, Any]


class Installed(Struct, frozen=True):
    """A configuration with its entry; ``changed`` unless it had that already."""

    path: Path
    entry: str
    changed: bool


class _Form(Struct, frozen=True):
    """A format: ``write`` returns a text with an entry added, whose key and name are given."""

    read: Callable[[str], Any]
    write: Callable[[str, str, str, Document], str]


class _Client(Struct, frozen=True):
    """A client: its file below what a variable or ``HOME`` names, the key of its servers, and how it writes one."""

    key: str
    place: Callable[[Mapping[str, str]], Path]
    entry: Callable[[str, list[str]], Document]
    form: _Form


def _home(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("HOME") or "/root")


def _claude(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("CLAUDE_CONFIG_DIR") or _home(variables)) / ".claude.json"


def _codex(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("CODEX_HOME") or _home(variables) / ".codex") / "config.toml"


def _gemini(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("GEMINI_CLI_HOME") or _home(variables)) / ".gemini" / "settings.json"


def _goose(variables: Mapping[str, str]) -> Path:
    if root := variables.get("GOOSE_PATH_ROOT"):
        return Path(root) / "config" / "config.yaml"
    return Path(variables.get("XDG_CONFIG_HOME") or _home(variables) / ".config") / "goose" / "config.yaml"


def _vscode(variables: Mapping[str, str]) -> Path:
    return Path(".vscode", "mcp.json")  # of the project


def _plain(name: str, command: list[str]) -> Document:
    return {"command": command[0], "args": command[1:]}


def _of_goose(name: str, command: list[str]) -> Document:
    return {
        "enabled": True, "type": "stdio", "name": name, "cmd": command[0], "args": command[1:], "envs": {},
        "timeout": 600,
    }  # fmt: skip


def _json(text: str, key: str, name: str, entry: Document) -> str:
    document = json.loads(text or "{}")
    document.setdefault(key, {})[name] = entry
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _toml(text: str, key: str, name: str, entry: Document) -> str:
    """Append a table: strings of JSON, and lists of them, are those of TOML."""
    lines = [f"{field} = {json.dumps(value)}" for field, value in entry.items()]
    before = text if text.endswith("\n") or not text else f"{text}\n"
    gap = "\n" if before else ""
    return "\n".join([f"{before}{gap}[{key}.{json.dumps(name)}]", *lines, ""])


def _yaml(text: str, key: str, name: str, entry: Document) -> str:
    from ruamel.yaml import YAML

    yaml = YAML()
    document = yaml.load(text) or {}
    document.setdefault(key, {})[name] = entry
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _read_yaml(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(text)


_JSON = _Form(json.loads, _json)
CLIENTS = {
    "claude": _Client("mcpServers", _claude, lambda *one: {"type": "stdio", **_plain(*one)}, _JSON),
    "codex": _Client("mcp_servers", _codex, _plain, _Form(tomllib.loads, _toml)),
    "gemini": _Client("mcpServers", _gemini, _plain, _JSON),
    "goose": _Client("extensions", _goose, _of_goose, _Form(_read_yaml, _yaml)),
    "vscode": _Client("servers", _vscode, lambda *one: {"type": "stdio", **_plain(*one)}, _JSON),
}


def install(client: str, name: str, command: list[str], settings: Settings) -> Installed:
    """Add a server to a client's configuration; one that is there already stays.

    Raises ``UsageError`` for a configuration that cannot be read, or that has another server of this name.
    """
    from ruamel.yaml.error import YAMLError

    its = CLIENTS[client]
    path = Path(os.path.realpath(its.place(settings.variables)))
    entry = its.entry(name, command)
    if client == "codex":  # which else starts it with next to nothing of its environment
        entry |= {"env_vars": [*(one for one, _, _ in settings.rows()), *_NOT_OURS], "startup_timeout_sec": 60}
    shown = f"{its.key}.{name}"
    text = ""
    try:
        if path.exists():
            text = read_file(path, MOST).decode()
        document = its.form.read(text) if text.strip() else {}
    except (OSError, ValueError, YAMLError) as error:
        hint = f"add it yourself, as `{shown}`: {json.dumps(entry)}"
        raise UsageError(f"`{path}` cannot be read: {excerpt(str(error))}", hint=hint) from error
    servers = document.get(its.key, {}) if isinstance(document, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"`{path}` is not a configuration of {client}", hint="start the client once, and look there")
    if name in servers:
        if servers[name] == entry:
            return Installed(path, shown, changed=False)
        hint = "remove it there, or choose another with --name"
        raise UsageError(f"`{path}` has another `{shown}`", hint=hint)
    _replace(path, its.form.write(text, its.key, name, entry))
    return Installed(path, shown, changed=True)


def _replace(path: Path, text: str) -> None:
    """Write a file all at once, with the mode that it had; a new one is for its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
            out.write(text)
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
