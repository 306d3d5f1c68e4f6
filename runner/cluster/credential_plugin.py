"""Exec credential plug-ins: programs of this host that print the credential of a cluster, run as kubectl runs them.

A kubeconfig names a command, arguments and variables; ``KUBERNETES_EXEC_INFO`` tells the program about the cluster,
and it answers with an ``ExecCredential`` on standard output (``client.authentication.k8s.io``, v1 and v1beta1).
Stricter than kubectl are the limits: a program has no terminal, ``TIMEOUT`` seconds and ``MAX_OUTPUT`` bytes, and runs
again at most once in ``ASK_INTERVAL`` seconds, since an agent could ask without end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import trio

from runner.core.capture import Captured, capture
from runner.core.errors import BadEncoding, BadKubeconfig, CredentialFailed, KubeconfigRefused, OverBudget, RunnerError
from runner.core.sanitize import excerpt, sanitize
from runner.manifest.text import parse

TIMEOUT = 60.0  # a person may have to log in with a browser
MAX_OUTPUT = 1 << 20  # bytes of an answer
RENEW_EARLY = 10.0  # seconds before its end that a credential is renewed
ASK_INTERVAL = 10.0  # seconds until a program is asked again
MAX_TOKEN = 64 << 10
_GROUP = "client.authentication.k8s.io"
_VERSIONS = (f"{_GROUP}/v1", f"{_GROUP}/v1beta1")
_MODES = ("Never", "IfAvailable", "Always")
_EXTENSION = f"{_GROUP}/exec"
_TAIL = 2 << 10  # bytes of stderr
_MAX_MESSAGE = 300  # characters of it, and of an install hint, that are shown


@dataclass(frozen=True)
class CredentialPlugin:
    """A program as a kubeconfig names it for ``user``: ``written`` there, and the ``command`` that this means."""

    user: str
    written: str
    command: str
    args: tuple[str, ...] = field(repr=False)
    env: tuple[tuple[str, str], ...] = field(repr=False)
    version: str
    hint: str
    info: str = field(repr=False)

    @property
    def name(self) -> str:
        return excerpt(self.written)

    @property
    def sha256(self) -> str:
        """The digest of the command, its arguments and variables; the last two may hold a credential."""
        return hashlib.sha256(json.dumps([self.written, self.args, self.env]).encode()).hexdigest()

    def program(self, env: Mapping[str, str]) -> str:
        """Return its path, found as kubectl does. Raises ``CredentialFailed`` with the hint of the kubeconfig."""
        found = shutil.which(self.command, path=env.get("PATH", ""))
        if found is None or not os.path.isabs(found):
            hint = sanitize(" ".join(self.hint.split()), _MAX_MESSAGE) or "install it, or name another `--kubeconfig`"
            raise CredentialFailed(f"{self} does not exist, or is not a program", hint=hint)
        return found

    def __str__(self) -> str:
        return f"credential plug-in `{self.name}` of user `{excerpt(self.user)}`"


@dataclass(frozen=True)
class Credential:
    """The credential for a cluster: the value of a header, a client certificate with its key, or both. ``ends`` is in
    seconds since the epoch.
    """

    authorization: bytes = field(default=b"", repr=False)
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    ends: float = math.inf

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The parts that nobody else may see."""
        kind, _, word = self.authorization.partition(b" ")
        password = b64decode(word).partition(b":")[2:] if kind == b"Basic" else ()
        return tuple(filter(None, (word, *password, *(self.certificate or ())[1:])))


def read_plugin(entry: Any, user: str, folder: os.PathLike[str], cluster: Mapping[str, Any]) -> CredentialPlugin:
    """Read the program of a user's ``exec``. ``folder`` is that of the kubeconfig, ``cluster`` what the program may
    know.

    Raises ``BadKubeconfig`` for what kubectl refuses too, and ``KubeconfigRefused`` when it must ask a person.
    """
    if not isinstance(entry, dict):
        raise _bad(user, "is not a program")
    version, written = _text(entry, "apiVersion", user), _text(entry, "command", user)
    if version not in _VERSIONS:
        hint = f"`apiVersion` is {_VERSIONS[0]} or {_VERSIONS[1]}; a newer version of the program writes it"
        raise _bad(user, f"has the apiVersion `{excerpt(version)}`", hint)
    if not written:
        raise _bad(user, "has no `command`")
    mode = _text(entry, "interactiveMode", user) or ("" if version == _VERSIONS[0] else "IfAvailable")
    if mode not in _MODES:
        said = f"has the interactiveMode `{excerpt(mode)}`" if mode else "has no `interactiveMode`"
        raise _bad(user, said, f"write one of {', '.join(_MODES)}")
    if mode == "Always":
        message = f"the credential plug-in `{excerpt(written)}` of user `{excerpt(user)}` must ask a person"
        hint = "write `interactiveMode: IfAvailable` and log in before, or use a token: `kubectl create token`"
        raise KubeconfigRefused(f"{message}, and has no terminal here", hint=hint)
    args = entry.get("args") or []
    if not isinstance(args, list) or not all(_is_word(word) for word in args):
        raise _bad(user, "has `args` that are not texts")
    known = {"cluster": cluster} if entry.get("provideClusterInfo") is True else {}
    info = {"kind": "ExecCredential", "apiVersion": version, "spec": {**known, "interactive": False}}
    command = os.path.join(folder, written) if os.sep in written else written
    hint = _text(entry, "installHint", user)
    env = _variables(entry.get("env") or [], user)
    return CredentialPlugin(
        user=user,
        written=written,
        command=command,
        args=tuple(args),
        env=env,
        version=version,
        hint=hint,
        info=json.dumps(info, ensure_ascii=False),
    )


def cluster_info(cluster: Mapping[str, Any], authorities: str) -> dict[str, Any]:
    """Return what a program may be told of its cluster; ``authorities`` in base64."""
    names = ("server", "tls-server-name", "proxy-url")
    told = {name: cluster[name] for name in names if cluster.get(name)}
    told |= {"certificate-authority-data": authorities} if authorities else {}
    told |= {"disable-compression": True} if cluster.get("disable-compression") is True else {}
    found = cluster.get("extensions") or []
    extensions = found if isinstance(found, list) else []
    config = (one.get("extension") for one in extensions if isinstance(one, dict) and one.get("name") == _EXTENSION)
    return {**told, "config": next(config, None)}


class Credentials:
    """The credential of one plug-in, requested when it is needed, and again before it expires.

    ``learn`` is called for each new one before it is used; ``now`` is in seconds since the epoch.
    """

    def __init__(
        self,
        plug_in: CredentialPlugin,
        env: Mapping[str, str],
        learn: Callable[[Credential], None],
        now: Callable[[], float],
    ) -> None:
        self._plug_in = plug_in
        self._env = env
        self._learn = learn
        self._now = now
        self._lock = trio.Lock()
        self._held: Credential | RunnerError | None = None
        self._asked = -math.inf

    async def get(self, refused: Credential | None = None) -> Credential:
        """Return the credential, another one if the cluster has ``refused`` it and there is one. Raises
        ``CredentialFailed``.

        Cancelling ends the program, and the next call starts it again.
        """
        async with self._lock:
            if self._is_stale(refused) and trio.current_time() - self._asked >= ASK_INTERVAL:
                try:
                    held = await self._new()
                    self._learn(held)
                    self._held = held
                except CredentialFailed as error:
                    self._held = error
                self._asked = trio.current_time()
            if isinstance(self._held, Credential):
                return self._held
            assert self._held is not None  # the first time is never too soon
            raise self._held

    def _is_stale(self, refused: Credential | None) -> bool:
        held = self._held
        return not isinstance(held, Credential) or held is refused or self._now() >= held.ends - RENEW_EARLY

    async def _new(self) -> Credential:
        plug_in = self._plug_in
        program = plug_in.program(self._env)
        env = {**self._env, **dict(plug_in.env), "KUBERNETES_EXEC_INFO": plug_in.info}
        try:
            with trio.move_on_after(TIMEOUT) as patience:
                done = await capture([program, *plug_in.args], env, most=MAX_OUTPUT, tail=_TAIL)
        except OSError as error:
            raise CredentialFailed(f"{plug_in} cannot be started: {error.strerror}") from None
        if patience.cancelled_caught:
            hint = "log in first: it has no terminal here, so it cannot ask"
            raise CredentialFailed(f"{plug_in} took more than {TIMEOUT:g} s", hint=hint)
        return _read_answer(done, plug_in)


def _read_answer(done: Captured, plug_in: CredentialPlugin) -> Credential:
    """Return the credential that a program printed; errors repeat nothing of it."""
    last = sanitize(" ".join(done.err.decode(errors="replace").split())[-_MAX_MESSAGE:], _MAX_MESSAGE)
    if len(done.out) > MAX_OUTPUT:
        raise CredentialFailed(f"{plug_in} printed more than {MAX_OUTPUT >> 20} MiB")
    if done.code != 0:
        how = f"exited {done.code}" if done.code > 0 else f"was ended by signal {-done.code}"
        hint = "run it yourself to see why; most want a login first"
        raise CredentialFailed(f"{plug_in} {how}{f': {last}' if last else ' and said nothing'}", hint=hint)
    answer = _object(done.out)
    if answer is None:
        raise CredentialFailed(
            f"{plug_in} printed no ExecCredential{f', and said: {last}' if last else ''}", hint=_RUN_HINT
        )
    if answer.get("apiVersion") != plug_in.version or answer.get("kind") != "ExecCredential":
        found = excerpt(f"{answer.get('kind')} of {answer.get('apiVersion')}")
        raise CredentialFailed(
            f"{plug_in} printed `{found}`, and the kubeconfig says {plug_in.version}", hint=_RUN_HINT
        )
    status = answer.get("status")
    if not isinstance(status, dict):
        raise CredentialFailed(f"{plug_in} printed no `status`", hint=_RUN_HINT)
    token, certificate, key = (
        _field(status, name, plug_in) for name in ("token", "clientCertificateData", "clientKeyData")
    )
    if not token and not certificate and not key:
        raise CredentialFailed(f"{plug_in} printed neither a token nor a certificate", hint=_RUN_HINT)
    if bool(certificate) != bool(key):
        raise CredentialFailed(f"{plug_in} printed a certificate or its key, and not both", hint=_RUN_HINT)
    if not is_token(token):
        raise CredentialFailed(f"{plug_in} printed a token that is not one word", hint=_RUN_HINT)
    return Credential(
        b"Bearer " + token.encode() if token else b"",
        (certificate.encode(), key.encode()) if key else None,
        _parse_time(_field(status, "expirationTimestamp", plug_in), plug_in),
    )


_RUN_HINT = "run it yourself; another version of it may be needed"


def is_token(text: str) -> bool:
    return len(text) <= MAX_TOKEN and text.isascii() and (text.isprintable() and " " not in text)


def _object(out: bytes) -> dict[str, Any] | None:
    try:
        trees, findings = parse("answer", out)
    except (BadEncoding, OverBudget):
        return None
    found = trees[0].data if len(trees) == 1 and not findings else None
    return found if isinstance(found, dict) else None


def _field(status: Mapping[str, Any], name: str, plug_in: CredentialPlugin) -> str:
    value = status.get(name)
    if value is not None and not isinstance(value, str):
        raise CredentialFailed(f"{plug_in} printed a `{name}` that is not a text", hint=_RUN_HINT)
    return value or ""


def _parse_time(text: str, plug_in: CredentialPlugin) -> float:
    """Return an RFC 3339 time in seconds since the epoch; an empty one is infinite."""
    if not text:
        return math.inf
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise CredentialFailed(f"{plug_in} printed an `expirationTimestamp` that is not a time", hint=_RUN_HINT)
    return moment.timestamp()


def _variables(found: Any, user: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise _bad(user, "has an `env` that is not a list")
    pairs = [(one.get("name"), one.get("value") or "") for one in found]
    if any(not _is_word(name) or not _is_word(value) or not name or "=" in name for name, value in pairs):
        raise _bad(user, "has a variable in `env` without a name, or with a value that is not a text")
    return tuple(pairs)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _text(entry: Mapping[str, Any], key: str, user: str) -> str:
    value = entry.get(key)
    if value is not None and not _is_word(value):
        raise _bad(user, f"has a `{key}` that is not a text")
    return value or ""


def _bad(user: str, what: str, hint: str | None = None) -> BadKubeconfig:
    return BadKubeconfig(f"`exec` of user `{excerpt(user)}` {what}", hint=hint)
