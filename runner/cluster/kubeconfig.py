"""Read kubeconfig files as data: the cluster that a context means, and how to reach it. Nothing is run here: a program
that prints the credential is only named, and only by a kubeconfig of the operator's own.

A kubeconfig may come from anywhere, and sends what it names to a server that it names too. So a file that it refers to
is accepted only by these rules, links followed: it is a regular file of the operator's or of root's, which nobody else
can write; a token lies beside the kubeconfig or below, or where Kubernetes puts the one of a service account;
certificates and keys, of which nothing secret is sent, may also lie in another directory of the operator's. Settings
that would trust any server, or act as somebody else, are refused.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from base64 import b64decode, b64encode
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from runner.cluster.credential_plugin import (
    MAX_TOKEN,
    Credential,
    CredentialPlugin,
    cluster_info,
    is_token,
    read_plugin,
)
from runner.core.errors import (
    BadEncoding,
    BadKubeconfig,
    KubeconfigRefused,
    OverBudget,
    RunnerError,
    UnknownContext,
    nearest,
)
from runner.core.sanitize import excerpt, sanitize
from runner.core.settings import Confidential
from runner.manifest.text import parse

MAX_FILE = 1 << 20  # bytes of a kubeconfig, and of each file that it names
_MAX_NAME = 253  # characters of a context's name
_MAX_SERVER = 2048  # characters of a URL
_MAX_LISTED = 20  # contexts that are named
_MAX_PATH = 400  # characters of a path that is named
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_HOST_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_HOST_LABEL}(?:\.{_HOST_LABEL})*\.?")
_STATIC_HINT = "use a kubeconfig with an `exec` plug-in, or with a token: `runner triage --reader-manifest` says how"
_OWN_HINT = "name one that is nobody else's, such as ~/.kube/config, or use a token: `runner triage --reader-manifest`"
_FLATTEN_HINT = "run `kubectl config view --minify --flatten > FILE`, which puts certificates into the file itself"
_KINDS = (("cluster", "clusters"), ("user", "users"), ("context", "contexts"))


class ClusterTarget(Confidential, frozen=True, kw_only=True):
    """A cluster and how to reach it. ``exposed`` says what others can do with the kubeconfig; empty for nothing."""

    context: str
    server: str
    namespace: str
    exposed: str
    server_name: str | None
    authorities: bytes | None = None
    certificate: tuple[bytes, bytes] | None = None  # and its key, PEM
    token: str = ""
    token_file: TokenFile | None = None
    basic: tuple[str, str] | None = None
    plug_in: CredentialPlugin | None = None  # what gives the credential, when nothing else does

    def certificates(self, own: tuple[bytes, bytes] | None) -> ssl.SSLContext | None:
        """Return the TLS context with the server's authorities and one's ``own`` certificate; ``None`` for the host's
        certificates.

        Raises ``BadKubeconfig``.
        """
        if self.server.startswith("http:") or (self.authorities is None and own is None):
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which clusters' own authorities often do not satisfy
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.authorities is None:
            context.load_default_certs()
        else:
            try:
                context.load_verify_locations(cadata=self.authorities.decode("ascii"))
            except (ssl.SSLError, UnicodeDecodeError) as error:
                raise BadKubeconfig(f"the authority of context `{self.context}` is not a certificate") from error
        if own is not None:
            _load_client_certificate(context, b"\n".join(own), self.context)
        return context

    def credential(self) -> Credential:
        """Return the credential in the kubeconfig itself. Raises ``BadKubeconfig`` and ``KubeconfigRefused`` about a
        token's file.
        """
        return Credential(self.authorization(), self.certificate)

    def authorization(self) -> bytes:
        """Return the header's value, or nothing; raises as ``credential``."""
        if self.server.startswith("http:"):
            return b""
        if self.token_file is not None:
            return b"Bearer " + self.token_file.read().encode()
        if self.token:
            return b"Bearer " + self.token.encode()
        return b"Basic " + b64encode(":".join(self.basic).encode()) if self.basic is not None else b""


class TokenFile:
    """A token in a file that may change at any time. ``beside`` is the directory of the kubeconfig that names it."""

    def __init__(self, name: str, beside: Path) -> None:
        self._name = name
        self._beside = beside
        self._seen: tuple[int, ...] = ()
        self._text = ""

    def read(self) -> str:
        """Return its text as of now. Raises ``BadKubeconfig`` and ``KubeconfigRefused``."""
        descriptor = _open_reference(self._name, self._beside, is_sent=True)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            seen = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._text = _token(file.read(MAX_TOKEN + 1).decode("ascii", "replace").strip(), self._name)
                self._seen = seen
        return self._text


def read_target(
    files: str,
    context: str | None,
    namespace: str | None,
    reach: Mapping[str, str],
    *,
    foreign: Mapping[Path, str] | None = None,
) -> ClusterTarget:
    """Resolve a context, or the current one; several files are merged as kubectl does: the first entry of a name wins.

    A kubeconfig in one of the ``foreign`` directories, each with a description, may name no program; with an empty
    description it may. Raises ``BadKubeconfig``, ``UnknownContext`` and ``KubeconfigRefused``, none of which repeats
    what may be secret.
    """
    merged = _MergedKubeconfig(files)
    name = context or merged.current
    if not name:
        names = sorted(merged.of("contexts"))
        known = ", ".join([*map(excerpt, names[:_MAX_LISTED]), *["..."] * (len(names) > _MAX_LISTED)]) or "none"
        raise UnknownContext(
            f"`{excerpt(files, _MAX_PATH)}` has no current context", hint=f"name one of its contexts: {known}"
        )
    if len(name) > _MAX_NAME:
        raise BadKubeconfig(f"the name of context `{excerpt(name)}` has more than {_MAX_NAME} characters")
    chosen, _ = merged.entry("context", name)
    cluster, cluster_folder = merged.entry("cluster", _text(chosen, "cluster"))
    user_name = _text(chosen, "user")
    user, user_folder = merged.entry("user", user_name) if user_name else ({}, Path())
    _check_user(user, user_name)
    server = _server(cluster, name, reach)
    authorities = _read_pem(cluster, "certificate-authority", cluster_folder)
    where = namespace or _text(chosen, "namespace") or "default"
    if not _NAMESPACE.fullmatch(where):
        raise UnknownContext(f"`{excerpt(where)}` is not the name of a namespace")
    is_plain = server.startswith("http:")
    target = ClusterTarget(
        context=name,
        server=server,
        namespace=where,
        exposed=merged.exposed,
        server_name=_server_name(cluster, name),
        authorities=authorities,
        certificate=None if is_plain else _certificate(user, user_folder),
        token=_token(_text(user, "token"), "token") if user.get("token") and not user.get("tokenFile") else "",
        token_file=TokenFile(_text(user, "tokenFile"), user_folder) if user.get("tokenFile") else None,
        basic=(_text(user, "username"), _text(user, "password")) if user.get("username") else None,
    )
    target.certificates(target.credential().certificate)
    has_own = is_plain or target.authorization() or target.certificate is not None  # which kubectl prefers, too
    if has_own or not user.get("exec"):
        return target
    merged.refuse_programs(user_name, foreign or {})
    told = cluster_info(cluster, b64encode(authorities or b"").decode())
    return replace(target, plug_in=read_plugin(user["exec"], user_name, user_folder, told))


def in_cluster_target(variables: Mapping[str, str], namespace: str | None) -> ClusterTarget:
    """Return the cluster whose pod this process runs in, with the account of that pod. Raises ``BadKubeconfig``."""
    account = Path(_SERVICE_ACCOUNT)
    host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        authorities = (account / "ca.crt").read_bytes()
        where = namespace or (account / "namespace").read_text().strip()
    except OSError as error:
        raise BadKubeconfig(
            f"this pod has no service account: {error}", hint="name a kubeconfig: KUBECONFIG"
        ) from error
    return ClusterTarget(
        context="in-cluster",
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=where,
        exposed="",
        server_name=None,
        authorities=authorities,
        token_file=TokenFile(str(account / "token"), account),
    )


class _MergedKubeconfig:
    """The entries of all files by kind and name, each with the directory of its relative paths."""

    def __init__(self, files: str) -> None:
        self._entries: dict[str, dict[str, tuple[dict[str, Any], Path]]] = {kinds: {} for _, kinds in _KINDS}
        self.current = ""
        self.exposed = ""
        self._files = files
        self._folders: dict[str, Path] = {}
        paths = [path for path in files.split(":") if path]
        missing: BadKubeconfig | None = None
        found = 0
        for path in paths:
            try:
                document = self._read(path)
            except FileNotFoundError:
                missing = missing or BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` is not there", hint=_MISSING_HINT)
                continue
            found += 1
            folder = self._folders[path] = Path(os.path.realpath(path)).parent
            self.current = self.current or _text(document, "current-context")
            for one, kinds in _KINDS:
                for entry in _list(document, kinds, path):
                    body = entry.get(one)
                    entries = self._entries[kinds]
                    entries.setdefault(_text(entry, "name"), (body if isinstance(body, dict) else {}, folder))
        if not found:
            raise missing or BadKubeconfig("no kubeconfig is named", hint=_MISSING_HINT)

    def of(self, kinds: str) -> Mapping[str, tuple[dict[str, Any], Path]]:
        return self._entries[kinds]

    def entry(self, kind: str, name: str) -> tuple[dict[str, Any], Path]:
        known = self._entries[dict(_KINDS)[kind]]
        if name not in known:
            message = f"`{excerpt(self._files, _MAX_PATH)}` has no {kind} `{excerpt(name)}`"
            raise UnknownContext(message, hint=nearest(name, (sanitize(each) for each in known)))
        return known[name]

    def refuse_programs(self, user: str, foreign: Mapping[Path, str]) -> None:
        """Raise ``KubeconfigRefused`` when a file lies in a ``foreign`` directory; the nearest one counts."""
        for path, folder in self._folders.items():
            around = [root for root in foreign if folder.is_relative_to(root)]
            if around and (what := foreign[max(around, key=lambda root: len(root.parts))]):
                message = f"user `{excerpt(user)}` runs a program, and `{excerpt(path, _MAX_PATH)}` is {what}"
                raise KubeconfigRefused(f"{message}: none is run from there", hint=_OWN_HINT)

    def _read(self, path: str) -> dict[str, Any]:
        """Read one file. Raises ``FileNotFoundError``, ``BadKubeconfig`` and ``KubeconfigRefused``."""
        if os.path.islink(path):
            real = os.path.realpath(path)
            raise BadKubeconfig(
                f"`{excerpt(path, _MAX_PATH)}` is a symbolic link",
                hint=f"name the file itself: {excerpt(real, _MAX_PATH)}",
            )
        raw, mode = _read_file(path)
        if mode & 0o002:
            raise KubeconfigRefused(
                f"`{excerpt(path, _MAX_PATH)}` can be changed by anybody", hint=f"chmod 600 {excerpt(path, _MAX_PATH)}"
            )
        if mode & 0o024 and not self.exposed:
            what = "changed by its group" if mode & 0o020 else "read by others"
            self.exposed = f"`{excerpt(path, _MAX_PATH)}` can be {what}"
        try:
            trees, findings = parse(path, raw)
        except (BadEncoding, OverBudget) as error:
            raise BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` is not a kubeconfig: {error.message}") from error
        if findings or len(trees) != 1 or not isinstance(trees[0].data, dict):
            at = next((f", line {finding.at.line}" for finding in findings if finding.at), "")
            raise BadKubeconfig(
                f"`{excerpt(path, _MAX_PATH)}` is not a kubeconfig{at}", hint="`kubectl config view` should show it"
            )
        return trees[0].data


_MISSING_HINT = "name one with `--kubeconfig` or as `incident.kubeconfig`, or leave it out"


def _read_file(path: str) -> tuple[bytes, int]:
    """Return the bytes and the mode of a regular file of the operator's or of root's; never blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` cannot be read: {(error.strerror or '').lower()}") from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            hint = "name the file in it, such as `~/.kube/config`"
            raise BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` is a directory", hint=hint)
        if not stat.S_ISREG(status.st_mode):
            raise BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            hint = "use a copy of your own"
            raise KubeconfigRefused(f"`{excerpt(path, _MAX_PATH)}` belongs to another user", hint=hint)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            raw = file.read(MAX_FILE + 1)
    finally:
        os.close(descriptor)
    if len(raw) > MAX_FILE:
        raise BadKubeconfig(f"`{excerpt(path, _MAX_PATH)}` is larger than {MAX_FILE >> 20} MiB")
    return raw, status.st_mode


def _check_user(user: Mapping[str, Any], name: str) -> None:
    if user.get("auth-provider"):
        raise KubeconfigRefused(f"user `{excerpt(name)}` has an `auth-provider`, which is obsolete", hint=_STATIC_HINT)
    for key in ("as", "as-uid", "as-groups", "as-user-extra"):
        if user.get(key):
            hint = "use a kubeconfig of that account"
            raise KubeconfigRefused(f"user `{excerpt(name)}` acts as somebody else (`{key}`)", hint=hint)


def _server(cluster: Mapping[str, Any], context: str, reach: Mapping[str, str]) -> str:
    text = _text(cluster, "server")
    if cluster.get("insecure-skip-tls-verify"):
        hint = "write `certificate-authority` or `tls-server-name`"
        message = f"the cluster of context `{excerpt(context)}` is not verified (`insecure-skip-tls-verify`)"
        raise KubeconfigRefused(message, hint=hint)
    given = _text(cluster, "proxy-url")
    if given and given not in (reach.get("HTTPS_PROXY"), reach.get("https_proxy")):
        hint = "set HTTPS_PROXY where runner is started"
        raise KubeconfigRefused(f"the cluster of context `{excerpt(context)}` has a proxy of its own", hint=hint)
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise BadKubeconfig(f"the server of context `{excerpt(context)}` is not a URL") from error
    if set(text) & set("@?#") or not _is_host(parts.hostname or "") or not _PREFIX.fullmatch(parts.path):
        raise BadKubeconfig(f"the server of context `{excerpt(context)}` is not the URL of a cluster")
    if parts.scheme != "https" and (parts.scheme != "http" or parts.hostname not in _LOOPBACK):
        message = f"the server of context `{excerpt(context)}` is not reached by https"
        raise KubeconfigRefused(message, hint="only a server on this host may be http")
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > _MAX_SERVER:
        raise BadKubeconfig(f"the server of context `{excerpt(context)}` is not a plain URL")
    return text.rstrip("/")


def _server_name(cluster: Mapping[str, Any], context: str) -> str | None:
    name = _text(cluster, "tls-server-name")
    if name and not _is_host(name):
        raise BadKubeconfig(f"`tls-server-name` of context `{excerpt(context)}` is not the name of a host")
    return name or None


def _is_host(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True


def _certificate(user: Mapping[str, Any], folder: Path) -> tuple[bytes, bytes] | None:
    certificate, key = (_read_pem(user, name, folder) for name in ("client-certificate", "client-key"))
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadKubeconfig("a client certificate needs its key, and a key its certificate")
    return certificate, key


def _read_pem(entry: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """Return PEM from the kubeconfig itself, or else from a file that it names."""
    if data := _text(entry, f"{name}-data"):
        try:
            return b64decode("".join(data.split()), validate=True)
        except ValueError as error:
            raise BadKubeconfig(f"`{name}-data` is not base64") from error
    if not (path := _text(entry, name)):
        return None
    with os.fdopen(_open_reference(path, folder, is_sent=False), "rb") as file:
        return file.read(MAX_FILE)


def _open_reference(name: str, beside: Path, *, is_sent: bool) -> int:
    """Open a file that a kubeconfig may refer to; see the module's rules."""
    real = Path(os.path.realpath(beside / name))
    said = excerpt(name, _MAX_PATH)
    near = real.is_relative_to(beside) or (is_sent and real.is_relative_to(os.path.realpath(_SERVICE_ACCOUNT)))
    try:
        if not near and (is_sent or real.parent.stat().st_uid != os.geteuid()):
            hint = "copy it beside the kubeconfig, or write `token`" if is_sent else _FLATTEN_HINT
            raise KubeconfigRefused(f"the kubeconfig refers to the foreign file `{said}`", hint=hint)
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        why = (error.strerror or "").lower()
        raise BadKubeconfig(f"the kubeconfig refers to `{said}`, which cannot be read: {why}") from error
    status = os.fstat(descriptor)
    fault: RunnerError | None = None
    if not stat.S_ISREG(status.st_mode):
        fault = BadKubeconfig(f"the kubeconfig refers to `{said}`, which is not a regular file")
    elif status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        fault = KubeconfigRefused(f"the kubeconfig refers to `{said}`, which others can change")
    if fault is not None:
        os.close(descriptor)
        raise fault
    return descriptor


def _load_client_certificate(context: ssl.SSLContext, certificate: bytes, name: str) -> None:
    """Load a client certificate with its key from a file in memory: ``ssl`` reads files only."""
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=lambda: b"-")  # so that nobody is asked for one
    except ssl.SSLError as error:
        raise BadKubeconfig(f"the client certificate of context `{excerpt(name)}` or its key is invalid") from error
    finally:
        os.close(descriptor)


def _token(text: str, name: str) -> str:
    if not text or not is_token(text):
        raise BadKubeconfig(f"`{excerpt(name)}` holds no token: one word on one line")
    return text


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise BadKubeconfig(f"`{key}` of the kubeconfig is not a text")
    return value


def _list(document: Mapping[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    found = document.get(key) or []
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise BadKubeconfig(f"`{key}` of `{excerpt(path, _MAX_PATH)}` is not a list of entries")
    return found
