"""Server defaults and places: the only reader of the environment.

Precedence is flag over manifest over environment over built-in for ``WORKSPACE_*``, and flag over
environment over built-in for ``RUNNER_*``.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from runner.core.errors import UsageError
from runner.core.home import STATE_FILE
from runner.core.ids import IMAGE_HINT, is_image
from runner.core.patterns import pattern
from runner.core.sanitize import sanitize

# Compiled at their first use: most commands are started without any of them.
_SIZE = r"(\d{1,15})([KMGT]?)(i?[bB]?)"
_CPU = r"(\d{1,6}(?:\.\d{1,3})?)(m?)"
_DURATION = r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?"
_TOKEN = pattern(
    r"([A-Za-z0-9.-]+(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?)=(?:env:([A-Za-z_]\w*)|file:(/.+))", re.ASCII
)

_MODELS = {  # of each API: the variables that may hold its key, and where it is
    "anthropic": (("ANTHROPIC_API_KEY",), "https://api.anthropic.com"),
    "openai": (("OPENAI_API_KEY", "CODEX_API_KEY"), "https://api.openai.com/v1"),
    "gemini": (("GEMINI_API_KEY", "GOOGLE_API_KEY"), "https://generativelanguage.googleapis.com"),
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_CERTIFICATES = ("SSL_CERT_FILE", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
_PERSON = ("GIT_CONFIG_GLOBAL", "GIT_SSH_COMMAND", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
_REACH = ("HOME", "SSH_AUTH_SOCK", *_CERTIFICATES, *_PROXIES, *(name.upper() for name in _PROXIES))


def parse_size(text: str) -> int:
    """Bytes of ``512M``, ``4G``, ``2g`` or a bare number; units are powers of 1024. Raises ``ValueError``."""
    found = re.fullmatch(_SIZE, text.upper().replace("IB", "B"))
    if not found or int(found[1]) == 0:
        raise ValueError("a size such as 512M or 4G")
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]]
    if size >= 1 << 63:
        raise ValueError("a size below 8 million T")
    return size


def parse_memory(text: str) -> int:
    """Bytes that a sandbox may be limited to. Raises ``ValueError``."""
    if parse_size(text) < 16 << 20:  # less than the programs that make a sandbox need
        raise ValueError("a size of at least 16M such as 512M or 4G")
    return parse_size(text)


def parse_disk(text: str) -> int:
    """Bytes that a workspace's disk may have. Raises ``ValueError``."""
    if not 8 << 20 <= parse_size(text) <= 2 << 40:  # of a smaller one too much is the file system's own
        raise ValueError("a size from 8M to 2T such as 512M or 10G")
    return parse_size(text)


def parse_cpus(text: str) -> float:
    """Processors of ``2``, ``0.5`` or ``500m``. Raises ``ValueError``."""
    found = re.fullmatch(_CPU, text)
    cpus = float(found[1]) / (1000 if found[2] else 1) if found else 0.0
    if not cpus:
        raise ValueError("a number of processors such as 2 or 500m")
    if cpus < 0.01:  # the least that the kernel can be told
        raise ValueError("a number of processors from 10m on such as 2 or 500m")
    return cpus


def limit(seconds: float) -> str:
    """A time as people write it: ``14s``, ``2m05s``, ``1h30m``; what ``parse_duration`` reads."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if minutes else f"{hours}h"


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``5m``, ``1h30m``, ``30d`` or a bare number of seconds. Raises ``ValueError``."""
    found = re.fullmatch(_DURATION, text + "s" if text.isascii() and text.isdigit() else text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not total:
        raise ValueError("a duration such as 90s, 5m or 1h30m")
    return total


def size_text(count: int) -> str:
    """``4G``, ``512M``: what ``parse_size`` reads as just this number of bytes."""
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return str(count)


def duration_text(seconds: float) -> str:
    """``30d``, ``1h30m``: what ``parse_duration`` reads as just this many seconds."""
    rest, parts = round(seconds), []
    for unit, of in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, of)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts)


class Confidential(Struct, frozen=True):
    """A value that holds secrets, so that its text, which logs and tracebacks show, does not hold its fields."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class Token(Confidential, frozen=True):
    """The secret for one https server (``host``, with its port if the URL has one), or the file that has it."""

    host: str
    place: str
    path: Path | None
    text: str

    def read(self, limit: int) -> str:
        """Return its text, cut above ``limit`` bytes. Raises ``OSError`` and ``UnicodeDecodeError``."""
        if self.path is None:
            return self.text
        with self.path.open("rb") as file:
            return file.read(limit + 1).decode()


class ModelKey(Confidential, frozen=True):
    """The key of one model provider: the variables that may hold it, the first of them that is set, and its text."""

    variables: tuple[str, ...]
    variable: str
    text: str


class Settings(Confidential, frozen=True, kw_only=True):
    """Settings of a server or a person's machine; ``sources`` says where each value came from."""

    home: Path
    database_url: str | None  # may hold a password; see ``store_url``
    database_password_command: str | None  # prints the password of ``database_url``
    telemetry: str  # where the events of runs are told of: ``none``, or ``otlp`` by OpenTelemetry
    traceparent: str  # the span of whoever started this process, as W3C writes it
    artifacts: str | None  # the URL of where the files of runs are copied to, for every host
    default_cpus: float
    default_memory: int
    default_disk: int
    max_workspaces: int
    warm_pool_size: int  # of each pool for agents that take the default providers
    providers: tuple[str, ...] | None
    workspace_ttl: float  # seconds after a workspace's last use
    workspace_max_age: float | None  # seconds after it was made
    run_retention: float  # seconds after a run's end
    docker_host: str  # where the docker daemon is, as its own clients read it
    docker_certificates: Path | None  # the folder of ca.pem, cert.pem and key.pem for a daemon over TLS
    docker_folder: Path  # where docker's own client keeps its configuration
    kubernetes_context: str | None  # of the kubeconfig; its current one by default
    kubernetes_namespace: str | None  # that workspaces are made in; none without it
    kubernetes_runtime_class: str | None
    kubernetes_storage_class: str | None  # of the volumes that limit a workspace's disk
    kubernetes_cache: str | None  # the claim that keeps toolchains
    kubernetes_sandboxes: str  # `pods`, or `agent-sandbox`
    worker_image: str | None  # of Jobs that carry out runs
    worker_secret: str  # the Secret with the environment of these
    worker_priority: str | None  # their PriorityClass
    worker_kubeconfig: str | None  # the Secret with the kubeconfig of incidents
    pod: tuple[str, str] | None  # name and uid of the Job's pod that this process runs in
    mirror_limit: int  # bytes on disk of all mirrors of servers' repositories together
    dependencies_limit: int  # and of all dependencies that commands have made
    sources: Mapping[str, str]
    untrusted_policy: Path | None  # the policy that manifests of a fork are held to, and may reach what it names
    git_credentials: str  # what servers get that are reached by https: ``none``, ``netrc``, or where a token is
    git_token: Token | None
    environment: Mapping[str, str]
    model_keys: Mapping[str, ModelKey]  # by API; they never enter a workspace
    model_urls: Mapping[str, str]  # where each API is, as it is written; see ``model_url``
    reach: Mapping[str, str]  # how the network and its servers are reached from here; never handed to a workspace
    person: Mapping[str, str]  # where git and ssh find what is the user's; only for what the user pushes
    variables: Mapping[str, str]  # all of them; only for where the values of secrets come from
    ci: Mapping[str, str]  # what a CI says of the job; never handed on to a process
    server: str | None  # that runs are started on and asked for, instead of this host
    server_token: str
    has_browser: bool  # a page can be shown to the person here

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read every server default from the environment; nothing else does. Raises ``UsageError``."""
        read = _Reader(env)
        context, certificates = (None, _docker_certificates(env)) if env.get("DOCKER_HOST") else _docker_context(read)
        return cls(
            home=read("RUNNER_HOME", _home, Path(_state_home(env)).absolute()),
            database_url=read("RUNNER_DATABASE_URL", _database_url, None),
            database_password_command=read("RUNNER_DATABASE_PASSWORD_COMMAND", lambda text: text, None),
            telemetry=read("RUNNER_TELEMETRY", _choice("none", "otlp"), "none"),
            traceparent=env.get("TRACEPARENT", ""),
            artifacts=read("RUNNER_ARTIFACTS", _artifacts_url, None),
            default_cpus=read("WORKSPACE_DEFAULT_CPU", parse_cpus, 2.0),
            default_memory=read("WORKSPACE_DEFAULT_MEMORY", parse_memory, 4 << 30),
            default_disk=read("WORKSPACE_DEFAULT_DISK", parse_disk, 10 << 30),
            max_workspaces=read("WORKSPACE_MAX", _positive, 10),
            warm_pool_size=read("WARM_POOL_SIZE", _pool_size, 0),
            providers=read("WORKSPACE_PROVIDERS", _words, None),
            workspace_ttl=read("WORKSPACE_TTL", parse_duration, 30 * 86_400.0),
            workspace_max_age=read("WORKSPACE_MAX_AGE", parse_duration, None),
            run_retention=read("RUN_RETENTION", parse_duration, 30 * 86_400.0),
            docker_host=read("DOCKER_HOST", lambda t: t, context or "unix:///var/run/docker.sock"),
            docker_certificates=certificates,
            docker_folder=_docker_folder(env),
            kubernetes_context=read("RUNNER_KUBERNETES_CONTEXT", lambda text: text, None),
            kubernetes_namespace=read("RUNNER_KUBERNETES_NAMESPACE", kubernetes_name, None),
            kubernetes_runtime_class=read("RUNNER_KUBERNETES_RUNTIME_CLASS", kubernetes_name, None),
            kubernetes_storage_class=read("RUNNER_KUBERNETES_STORAGE_CLASS", kubernetes_name, None),
            kubernetes_cache=read("RUNNER_KUBERNETES_CACHE_CLAIM", kubernetes_name, None),
            kubernetes_sandboxes=read("RUNNER_KUBERNETES_SANDBOXES", _choice("pods", "agent-sandbox"), "pods"),
            worker_image=read("RUNNER_WORKER_IMAGE", _image, None),
            worker_secret=read("RUNNER_WORKER_SECRET", kubernetes_name, "runner-worker"),
            worker_priority=read("RUNNER_WORKER_PRIORITY_CLASS", kubernetes_name, None),
            worker_kubeconfig=read("RUNNER_WORKER_KUBECONFIG", kubernetes_name, None),
            pod=_pod(env),
            mirror_limit=read("RUNNER_MIRROR_LIMIT", parse_size, 10 << 30),
            dependencies_limit=read("RUNNER_DEPENDENCIES_LIMIT", parse_size, 10 << 30),
            untrusted_policy=read("RUNNER_UNTRUSTED_POLICY", _home, None),
            git_credentials=read("RUNNER_GIT_CREDENTIALS", _credentials, "none"),
            git_token=_token(env),
            model_keys={api: _model_key(env, names) for api, (names, _) in _MODELS.items()},
            model_urls={api: read(_url_name(api), lambda text: text, url) for api, (_, url) in _MODELS.items()},
            sources=read.sources,
            environment={name: env[name] for name in ("PATH", "LANG", "TERM", "NO_COLOR", "CI") if name in env},
            reach={name: env[name] for name in _REACH if env.get(name)},
            person={name: env[name] for name in (*_PERSON, *_REACH, "PATH") if env.get(name)},
            variables=dict(env),
            ci={name: value for name, value in env.items() if name.startswith(("GITHUB_", "CI_"))},
            server=read("RUNNER_SERVER", lambda text: text, None),
            server_token=env.get("RUNNER_TOKEN", ""),
            has_browser=any(env.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")),
        )

    @property
    def store_url(self) -> str:
        """The URL of the store: by default a file of ``home``."""
        if self.database_url is None:
            return f"sqlite://{self.home / STATE_FILE}"
        if self.database_password_command is None or not self.database_url.startswith("postgres"):
            return self.database_url
        from urllib.parse import quote

        joined = "&" if "?" in self.database_url else "?"
        return f"{self.database_url}{joined}password_command={quote(self.database_password_command, safe='')}"

    def model_url(self, api: str) -> str:
        """Return the URL of an API. Raises ``UsageError`` for an invalid one, and so only for who needs it."""
        url = self.model_urls[api]
        if not _is_model_url(url):
            hint = "write an https URL without user and query, or an http one of this host"
            raise UsageError(f"`{_url_name(api)}` is `{without_secrets(url)}`", hint=hint)
        return url

    def own_model_url(self, api: str) -> str | None:
        """Return the URL of an API from the environment, without a slash at its end; raises like ``model_url``."""
        return self.model_url(api).rstrip("/") if self.sources[_url_name(api)] == "environment" else None

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Every setting as name, value and source; the value as it can be written again."""
        values = {
            "RUNNER_HOME": self.home,
            "RUNNER_DATABASE_URL": without_secrets(self.database_url or self.store_url),
            "RUNNER_DATABASE_PASSWORD_COMMAND": _program(self.database_password_command),
            "RUNNER_ARTIFACTS": without_secrets(self.artifacts or "(none)"),
            "RUNNER_TELEMETRY": self.telemetry,
            "WORKSPACE_DEFAULT_CPU": f"{self.default_cpus:g}",
            "WORKSPACE_DEFAULT_MEMORY": size_text(self.default_memory),
            "WORKSPACE_DEFAULT_DISK": size_text(self.default_disk),
            "WORKSPACE_MAX": self.max_workspaces,
            "WARM_POOL_SIZE": self.warm_pool_size,
            "RUNNER_MIRROR_LIMIT": size_text(self.mirror_limit),
            "RUNNER_DEPENDENCIES_LIMIT": size_text(self.dependencies_limit),
            "RUNNER_GIT_CREDENTIALS": self._shown_credentials(),
            "RUNNER_UNTRUSTED_POLICY": self.untrusted_policy or "(none)",
            "WORKSPACE_PROVIDERS": ", ".join(self.providers) if self.providers else "(manifests/defaults)",
            "WORKSPACE_TTL": duration_text(self.workspace_ttl),
            "WORKSPACE_MAX_AGE": duration_text(self.workspace_max_age) if self.workspace_max_age else "(none)",
            "RUN_RETENTION": duration_text(self.run_retention),
            "DOCKER_HOST": without_secrets(self.docker_host),
            "RUNNER_KUBERNETES_CONTEXT": self.kubernetes_context or "(current)",
            "RUNNER_KUBERNETES_NAMESPACE": self.kubernetes_namespace or "(none)",
            "RUNNER_KUBERNETES_RUNTIME_CLASS": self.kubernetes_runtime_class or "(none)",
            "RUNNER_KUBERNETES_STORAGE_CLASS": self.kubernetes_storage_class or "(none)",
            "RUNNER_KUBERNETES_CACHE_CLAIM": self.kubernetes_cache or "(none)",
            "RUNNER_KUBERNETES_SANDBOXES": self.kubernetes_sandboxes,
            "RUNNER_WORKER_IMAGE": self.worker_image or "(none)",
            "RUNNER_WORKER_SECRET": self.worker_secret,
            "RUNNER_WORKER_PRIORITY_CLASS": self.worker_priority or "(none)",
            "RUNNER_WORKER_KUBECONFIG": self.worker_kubeconfig or "(none)",
            "RUNNER_SERVER": without_secrets(self.server or "(none)"),
            **{_url_name(api): without_secrets(url) for api, url in self.model_urls.items()},
        }
        return tuple((name, str(value), self.sources[name]) for name, value in values.items())

    def _shown_credentials(self) -> str:
        """Return the value for people; what names no variable may be a token."""
        host, way, name = self.git_credentials.partition("=env:")
        return self.git_credentials if not way or self.variables.get(name) else f"{host}{way}..."


class _Reader:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.sources: dict[str, str] = {}
        self.otherwise: dict[str, str] = {}  # where a default comes from that is not built in

    def __call__(self, name: str, parse, default):  # type: ignore[no-untyped-def]  # any value type
        text = self.env.get(name, "")
        self.sources[name] = "environment" if text else self.otherwise.get(name, "built-in")
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(f"`{name}` is `{without_secrets(text)}`", hint=f"write {error}") from None


def _docker_context(read: _Reader) -> tuple[str | None, Path | None]:
    """Return the daemon's address in docker's current context, such as Docker Desktop's, and its certificates.

    There are none for the default context, and for one that cannot be read, of which docker's own client complains.
    """
    folder = _docker_folder(read.env)
    try:
        name = read.env.get("DOCKER_CONTEXT") or json.loads((folder / "config.json").read_text())["currentContext"]
        id = sha256(name.encode()).hexdigest()
        host = json.loads((folder / "contexts" / "meta" / id / "meta.json").read_text())["Endpoints"]["docker"]["Host"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, None
    if not isinstance(host, str) or not host:
        return None, None
    read.otherwise["DOCKER_HOST"] = f"docker context {sanitize(name, 40)}"
    certificates = folder / "contexts" / "tls" / id / "docker"
    return host, certificates if certificates.is_dir() else None


def _docker_certificates(env: Mapping[str, str]) -> Path | None:
    if not env.get("DOCKER_TLS_VERIFY"):
        return None
    return Path(env["DOCKER_CERT_PATH"]) if env.get("DOCKER_CERT_PATH") else _docker_folder(env)


def _docker_folder(env: Mapping[str, str]) -> Path:
    return Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME", "/"), ".docker"))


def _home(text: str) -> Path:
    if not text.startswith("/") or not text.strip("/"):  # another store in each directory, or all of this host
        raise ValueError("an absolute path below /")
    try:
        os.stat(text)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("a path whose links do not lead in a circle") from error
    return Path(text)


def _database_url(text: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*:", text):
        raise ValueError("a URL such as sqlite:///PATH")
    return text


def kubernetes_name(text: str) -> str:
    """Return the name of a namespace, or of another object of a cluster. Raises ``ValueError``."""
    if not re.fullmatch(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", text):
        raise ValueError("a name of small letters, digits and, between them, `-`")
    return text


def _image(text: str) -> str:
    if not is_image(text):
        raise ValueError(IMAGE_HINT)
    return text


def _pod(env: Mapping[str, str]) -> tuple[str, str] | None:
    name, uid = env.get("RUNNER_POD_NAME"), env.get("RUNNER_POD_UID")
    return (name, uid) if name and uid else None


def _artifacts_url(text: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise ValueError("a URL such as file:///PATH or s3://BUCKET/PREFIX")
    return text


def _program(command: str | None) -> str:
    """Return the first word of a command, whose others may be secret."""
    return "(none)" if command is None else f"{command.split()[0]} ..." if command.split() else "''"


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return parse


def _credentials(text: str) -> str:
    if text not in ("none", "netrc") and not _TOKEN.fullmatch(text):
        raise UsageError(  # nothing of it is repeated, for a token may have been put there
            "`RUNNER_GIT_CREDENTIALS` does not say where a token is",
            hint="write none, netrc, HOST=env:NAME or HOST=file:/PATH, never the token itself",
        )
    return text


def _token(env: Mapping[str, str]) -> Token | None:
    found = _TOKEN.fullmatch(env.get("RUNNER_GIT_CREDENTIALS", ""))
    if found is None:
        return None
    host, name, path = found.groups()
    # What names no variable may be a token.
    place = f"`{path or name}`" if path or env.get(name) else "the variable that `RUNNER_GIT_CREDENTIALS` names"
    return Token(host, place, Path(path) if path else None, env.get(name, "") if name else "")


def _model_key(env: Mapping[str, str], names: tuple[str, ...]) -> ModelKey:
    name = next((name for name in names if env.get(name)), "")
    return ModelKey(names, name, env.get(name, "") if name else "")


def _url_name(api: str) -> str:
    return f"RUNNER_{api.upper()}_URL"


def without_secrets(url: str) -> str:
    """A URL that may be malformed, without what may be a password or a key in it."""
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.rpartition("//")
    shown = f"{scheme}{slashes}...@{host}" if at else url
    return re.sub(r"[?#].*", lambda found: f"{found[0][0]}...", shown, flags=re.DOTALL)


def _is_model_url(text: str) -> bool:
    from urllib.parse import urlsplit

    if not is_url(text, "http", "https"):
        return False
    parts = urlsplit(text)
    here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    return (parts.scheme == "https" or here) and not (parts.username or parts.query or parts.fragment)


def is_url(text: str, *schemes: str) -> bool:
    """Tell whether a text is a URL of one of the schemes, with a host, that can be dialled as written."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError
    except ValueError:
        return False
    fit = text.isascii() and text.isprintable() and " " not in text
    return fit and parts.scheme in schemes and bool(parts.hostname)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError("a whole number above 0")
    return int(text)


def _pool_size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 1_000:
        raise ValueError("a whole number from 0 to 1000")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _state_home(env: Mapping[str, str]) -> str:
    base = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "runner")


def current() -> Settings:
    return Settings.from_env(os.environ)  # noqa: TID251  # the one place


def shipped(folder: str) -> Path:
    """One of the folders that travel with the product (schemas, manifests, runners, skills), wheel or checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_files" / folder
    return installed if installed.is_dir() else package.parent / folder
