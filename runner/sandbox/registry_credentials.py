"""The credentials of docker's own configuration for one registry, as docker's client finds them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from runner.core.errors import CredentialHelperFailed
from runner.core.sanitize import excerpt

HUB = "docker.io"
HELPER_TIMEOUT = 20.0  # seconds; some ask a service of their own
_HUB_KEY = "https://index.docker.io/v1/"
_NONE = "credentials not found"
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKEN_USER = "<token>"
_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True)
class RegistryLogin:
    """Docker's configuration ``folder``, and the ``environment`` for credential helpers."""

    folder: Path | None = None
    environment: Mapping[str, str] | None = None

    async def header(self, registry: str) -> str:
        """Return the value of ``X-Registry-Auth`` for a registry. Raises ``CredentialHelperFailed``."""
        config = await trio.to_thread.run_sync(_read, self.folder) if self.folder is not None else {}
        key = _HUB_KEY if registry == HUB else registry
        helper = _mapping(config, "credHelpers").get(registry) or config.get("credsStore")
        found = await self._ask(str(helper), key) if helper else _written(_mapping(config, "auths"), key)
        content = {**found, "serveraddress": key} if found else {}
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode()

    async def _ask(self, helper: str, key: str) -> dict[str, str]:
        """Ask a credential helper. Raises ``CredentialHelperFailed``."""
        program = f"docker-credential-{helper}"
        place = self.folder / "config.json" if self.folder is not None else ""
        failed = f"docker's credential helper `{excerpt(program)}` for `{excerpt(key)}`"
        hint = f"run it yourself: echo {key} | {program} get; or change credHelpers and credsStore in {place}"
        if not _HELPER.fullmatch(helper):
            raise CredentialHelperFailed(f"{failed} has an impossible name", hint=hint)
        with trio.move_on_after(HELPER_TIMEOUT):
            try:
                done = await trio.run_process(
                    [program, "get"],
                    stdin=key.encode(),
                    env=dict(self.environment or {}),
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                )
            except OSError as error:
                raise CredentialHelperFailed(f"{failed} cannot be started: {error.strerror}", hint=hint) from error
            text = (done.stdout or done.stderr)[:_ANSWER_BYTES].decode(errors="replace").strip()
            if done.returncode != 0 and _NONE in text:
                return {}
            if done.returncode != 0:
                raise CredentialHelperFailed(f"{failed} failed: {excerpt(text) or done.returncode}", hint=hint)
            try:
                answer = json.loads(text)
                user, secret = str(answer["Username"]), str(answer["Secret"])
            except (ValueError, LookupError, TypeError):
                raise CredentialHelperFailed(f"{failed} answers with no credentials", hint=hint) from None
            return {"identitytoken": secret} if user == _TOKEN_USER else {"username": user, "password": secret}
        raise CredentialHelperFailed(f"{failed} has not answered within {HELPER_TIMEOUT:.0f}s", hint=hint)


def _read(folder: Path) -> Mapping[str, Any]:
    """Read ``config.json``; nobody has to have one. Raises ``CredentialHelperFailed`` for one that is no JSON."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CredentialHelperFailed(f"docker's configuration `{path}` cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _written(auths: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return what `docker login` has written for a registry, by its name or an old URL of it."""
    names = (key, f"https://{key}", f"https://{key}/", f"https://{key}/v1/", f"https://{key}/v2/")
    entry: Mapping[str, Any] = next((auths[name] for name in names if isinstance(auths.get(name), dict)), {})
    if token := entry.get("identitytoken"):
        return {"identitytoken": str(token)}
    user, _, password = _decoded(str(entry.get("auth", ""))).partition(":")
    return {"username": user, "password": password} if user else {}


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text).decode().rstrip("\0")
    except ValueError:
        return ""
