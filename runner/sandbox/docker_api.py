"""Calls to a docker daemon: each in a thread, with a time limit, and with the runner's errors."""

from __future__ import annotations

import re
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import trio

from runner.core.errors import ImageMissing, ProviderBusy, ProviderFailed
from runner.core.settings import Settings, without_secrets
from runner.sandbox.registry_credentials import RegistryLogin

if TYPE_CHECKING:
    import ssl

    from docker import APIClient

TIMEOUT = 10.0  # seconds
TRANSFER = 900.0  # seconds for the files of a workspace

_IMAGE = re.compile(r"(?:such image: |find image )([^\s]+?)(?:: |$)")  # as docker and podman name a missing one

_T = TypeVar("_T")
_USUAL = Path("/var/run/docker.sock")
_START_FACTOR = 6
_BETWEEN_LOOKS = 0.05  # seconds
_TCP_PORT = 2375
_OLDEST = "1.41"  # version of the API, to ask for the daemon's
_CHUNK = 1 << 20
_KEPT = 4  # idle connections
_CALLS = 20  # at a time; an abandoned call may count until its own timeout


class Engine:
    """A docker daemon at ``host``, as in ``DOCKER_HOST``.

    ``timeout`` is in seconds, for calls that the daemon answers from memory; others get six times as much.
    ``certificates`` is a folder as in ``DOCKER_CERT_PATH``; ``environment`` is for ssh, if the host is reached by it.
    ``login`` is for the registries that the daemon pulls from.
    """

    def __init__(
        self,
        host: str,
        timeout: float = TIMEOUT,
        certificates: Path | None = None,
        environment: Mapping[str, str] | None = None,
        login: RegistryLogin | None = None,
    ) -> None:
        self.host = host
        self.login = login or RegistryLogin()
        self._environment = environment or {}
        self._version: str | None = None  # of the API, if the daemon is not on a socket of this host
        self.timeout = timeout
        self._certificates = certificates
        self._limiter = trio.CapacityLimiter(_CALLS)
        self._idle: list[APIClient] = []  # each with a connection by ssh, which takes long to make
        weakref.finalize(self, _close_all, self._idle)

    async def dial(self) -> tuple[trio.abc.Stream, Callable[[], None]]:
        """Open a connection to the daemon, and return it with what closes it at once. Raises ``OSError``."""
        where = self._place()
        if where.scheme == "ssh":
            from runner.sandbox import ssh_transport

            return ssh_transport.dial(self.host, self._environment)
        if where.scheme == "unix":
            plain: trio.SocketStream = await trio.open_unix_socket(self.socket)
        else:
            plain = await trio.open_tcp_stream(where.hostname or "", where.port or _TCP_PORT)
        if self._certificates is None or where.scheme == "unix":
            return plain, plain.socket.close
        stream = trio.SSLStream(plain, _trust(self._certificates), server_hostname=where.hostname)
        return stream, plain.socket.close

    @classmethod
    def of(cls, settings: Settings) -> Engine:
        reach = {**settings.reach, **settings.person}
        return cls(
            settings.docker_host,
            certificates=settings.docker_certificates,
            environment=reach,
            login=RegistryLogin(settings.docker_folder, settings.variables),
        )

    def _place(self) -> SplitResult:
        """Take the address apart. Raises ``ProviderFailed`` for one of no daemon, and for one with a password."""
        try:
            place = urlsplit(self.host)
            if place.scheme == "unix" or (place.scheme in ("tcp", "ssh") and place.hostname and not place.password):
                return place
        except ValueError:
            pass
        raise ProviderFailed(
            f"`DOCKER_HOST` is `{without_secrets(self.host)}`: no address of a docker daemon",
            hint="write it as unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST, without a password",
        )

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket. Raises ``ProviderFailed`` for a daemon that is reached in another way."""
        try:
            scheme, _, path, *_ = urlsplit(self.host)
        except ValueError:
            scheme = path = ""
        if scheme != "unix" or not path:
            raise ProviderFailed(
                f"`DOCKER_HOST` is `{without_secrets(self.host)}`: the daemon must be on this host, "
                "whose directories it mounts",
                hint="unset DOCKER_HOST, or run runner where that daemon runs",
            )
        return Path(path)

    async def about(self) -> Mapping[str, Any]:
        """Return what ``docker info`` shows."""
        return await self._call(lambda client: client.info(), self.timeout)

    async def image(self, name: str) -> Mapping[str, Any]:
        """Return what ``docker image inspect`` shows. Raises ``ImageMissing``."""
        return await self._call(lambda client: client.inspect_image(name), self.timeout)

    async def tag(self, image: str, name: str) -> None:
        """Give an image a name, with a tag if it is to have another than ``latest``."""
        await self._call(lambda client: client.tag(image, name), self.timeout)

    async def files(self, image: str, path: str, limit: int) -> bytes:
        """Return a tar of what an image has at ``path``, cut off above ``limit`` bytes; empty when there is nothing.

        Makes a container, which never starts, and removes it. Raises ``ImageMissing``.
        """
        label = {"runner.looking": secrets.token_hex(8)}

        def read(client: APIClient) -> bytes:
            from docker.errors import NotFound

            found = b""
            try:
                for chunk in client.get_archive(container, path)[0]:
                    found += chunk
                    if len(found) > limit:
                        break
            except NotFound:
                pass
            return found

        config = {"Image": image, "Cmd": ["-"], "Labels": label}
        try:
            container = await self.make(f"runner-looking-{label['runner.looking']}", config)
            return await self._call(read, _START_FACTOR * self.timeout)
        finally:
            with trio.CancelScope(shield=True):
                await self.remove(label)

    async def prune_images(self, label: str) -> None:
        """Remove unnamed images that carry ``label``, and the layers that they were made from."""
        await self._call(
            lambda client: client.prune_images({"dangling": True, "label": [label]}), _START_FACTOR * self.timeout
        )

    async def make(self, name: str, config: Mapping[str, Any]) -> str:
        """Make a container for ``start``, and return its id.

        A container that is made after the caller gave up is removed at once. Raises ``ProviderFailed`` also when the
        daemon does not know the id that it returned, or returns that of another container.
        """
        waited_for = True

        def make(client: APIClient) -> str:
            made = str(client.create_container_from_config(dict(config), name)["Id"])
            if not waited_for:
                _remove(client, made)
                return made
            found = client.inspect_container(made)
            if found["Name"] != f"/{name}" or not found["Config"]["Labels"].items() >= config["Labels"].items():
                raise ProviderFailed(f"docker answers with a container of another name, `{found['Name']}`")
            return made

        try:
            return await self._call(make, _START_FACTOR * self.timeout)
        finally:
            waited_for = False

    async def start(self, container: str) -> Mapping[str, Any]:
        """Start a container, and return what ``docker inspect`` then shows. One that does not start is left."""

        def start(client: APIClient) -> Mapping[str, Any]:
            client.start(container)
            inspected: Mapping[str, Any] = client.inspect_container(container)
            return inspected

        return await self._call(start, _START_FACTOR * self.timeout)

    async def was_killed_for_memory(self, container: str) -> bool:
        """Wait until a container has ended, and return whether it was killed for exceeding its memory limit."""
        while True:
            state = (await self._call(lambda client: client.inspect_container(container), self.timeout))["State"]
            if not state["Running"]:
                return bool(state["OOMKilled"])
            await trio.sleep(_BETWEEN_LOOKS)

    async def remove(self, labels: Mapping[str, str]) -> None:
        """Kill and remove the containers that carry all of these labels, with their anonymous volumes."""
        wanted = _filter(labels)

        def remove(client: APIClient) -> None:
            for container in client.containers(all=True, filters=wanted):
                if _carries(container, labels):
                    _remove(client, container["Id"])

        await self._call(remove, self.timeout)

    async def kill(self, container: str) -> None:
        """Kill a container and wait until it has ended; one that is gone is no error."""

        def kill(client: APIClient) -> None:
            from docker.errors import APIError, NotFound

            try:
                client.kill(container)
            except NotFound:
                return
            except APIError as error:  # it is not running, which podman may know before it shows it
                known = error.status_code == 409 or "state improper" in str(error)
                if not known and client.inspect_container(container)["State"]["Running"]:
                    raise
            client.wait(container)

        await self._call(kill, self.timeout)

    async def commit(self, container: str, labels: Mapping[str, str]) -> str:
        """Make an image of a container that never started, and return its id."""

        changes = [f"LABEL {name}={value}" for name, value in labels.items()]  # podman reads no other labels

        def commit(client: APIClient) -> str:
            return str(client.commit(container, changes="\n".join(changes))["Id"])

        return await self._call(commit, _START_FACTOR * self.timeout)

    async def remove_images(self, labels: Mapping[str, str]) -> None:
        """Remove the unnamed images that carry all of these labels."""
        wanted = _filter(
            {name: word for name, word in labels.items() if name.endswith("workspace")}
        )  # podman: one only

        def remove(client: APIClient) -> None:
            for image in client.images(filters=wanted):
                if _carries(image, labels):
                    client.remove_image(image["Id"], force=True)

        await self._call(remove, _START_FACTOR * self.timeout)

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        await self._call(lambda client: client.create_volume(name, labels=dict(labels)), self.timeout)

    async def volumes(self, labels: Mapping[str, str]) -> list[str]:
        """List the names of the volumes that carry all of these labels."""
        wanted = _filter(labels)
        found = await self._call(lambda client: client.volumes(filters=wanted), self.timeout)
        return [str(volume["Name"]) for volume in found["Volumes"] or () if _carries(volume, labels)]

    async def place_of_volume(self, name: str) -> str:
        """Return where the daemon has the files of a volume, as it sees its own host."""
        return str((await self._call(lambda client: client.inspect_volume(name), self.timeout))["Mountpoint"])

    async def remove_volume(self, name: str) -> None:
        """Remove a volume that no container uses; one that is gone is no error."""

        def remove(client: APIClient) -> None:
            from docker.errors import NotFound

            with suppress(NotFound):
                client.remove_volume(name)

        await self._call(remove, _START_FACTOR * self.timeout)

    async def put(self, container: str, path: str, archive: Callable[[], Iterator[bytes]]) -> None:
        """Unpack the archive of these pieces below ``path`` of a container, its volumes included.

        They are made in a thread, and sent as they come.
        """

        def put(client: APIClient) -> None:
            client.put_archive(container, path, archive())

        await self._call(put, TRANSFER)

    async def get(self, container: str, path: str, read: Callable[[IO[bytes], Callable[[], None]], None]) -> None:
        """Let ``read`` read the archive of what a container has at ``path``.

        Its second argument raises once nobody waits for the call any more.
        """
        waited_for = True

        def check() -> None:
            if not waited_for:
                raise ProviderFailed("the transfer was given up")

        def get(client: APIClient) -> None:
            chunks = _Chunks(client.get_archive(container, path, chunk_size=_CHUNK)[0])
            read(cast(IO[bytes], chunks), check)

        try:
            await self._call(get, TRANSFER)
        finally:
            waited_for = False

    async def _call(self, act: Callable[[APIClient], _T], seconds: float) -> _T:
        with trio.move_on_after(seconds):
            return await trio.to_thread.run_sync(self._act, act, limiter=self._limiter, abandon_on_cancel=True)
        raise ProviderFailed(
            f"the docker daemon at `{without_secrets(self.host)}` has not answered within {seconds:.0f}s"
        )

    def _act(self, act: Callable[[APIClient], _T]) -> _T:
        from http.client import HTTPException

        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException

        try:
            with self._lent_client() as client:
                return act(client)
        except ImageNotFound as error:
            said = _IMAGE.search(_text(error))
            name = said[1] if said else _text(error)
            raise ImageMissing(f"docker has no image `{name}`", hint="docker pull it, or build it") from error
        except APIError as error:
            failure = ProviderBusy if error.is_server_error() else ProviderFailed
            raise failure(f"docker refuses: {_text(error)}") from error
        except (OSError, HTTPException, DockerException, RequestException) as error:
            raise unreachable(self, error) from error

    @contextmanager
    def _lent_client(self) -> Iterator[APIClient]:
        """Lend a client, which is kept for the next call if the daemon is reached by ssh and nothing went wrong."""
        client = self._idle.pop() if self._idle else self._client(self.timeout * _START_FACTOR)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        if self.host.startswith("ssh:") and len(self._idle) < _KEPT:
            self._idle.append(client)
        else:
            client.close()

    def _client(self, timeout: float) -> APIClient:
        self._place()
        if self.host.startswith("unix:"):
            return self._connected(_ping(self.socket, self.timeout), timeout)
        if self._version is None:
            with closing(self._connected(_OLDEST, timeout)) as client:
                self._version = str(client.version(api_version=False)["ApiVersion"])
        return self._connected(self._version, timeout)

    def _connected(self, version: str | None, timeout: float) -> APIClient:
        """Make a client that asks nothing before its first call."""
        from docker import APIClient
        from docker.tls import TLSConfig

        if self.host.startswith("ssh:"):
            from runner.sandbox.ssh_transport import SshAdapter

            client = APIClient("tcp://docker:1", version=version, timeout=timeout)
            client.mount("http://", SshAdapter(self.host, self._environment, timeout))
            return client
        host, tls = self.host, None
        if (folder := self._certificates) is not None:
            host = host.replace("tcp://", "https://", 1)
            own = (str(folder / "cert.pem"), str(folder / "key.pem"))
            tls = TLSConfig(client_cert=own, ca_cert=str(folder / "ca.pem"), verify=True)
        client = APIClient(host, version=version, timeout=timeout, tls=tls)
        client.trust_env = False  # or a bundle of certificates that the environment names would replace the folder's
        return client


class _Chunks(RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk, self._at = b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, left = [], size
        while left:
            if self._at == len(self._chunk):
                self._chunk, self._at = next(self._chunks, b""), 0
            if not (part := self._chunk[self._at : self._at + left if left > 0 else None]):
                break
            parts.append(part)
            self._at += len(part)
            left -= len(part)
        return b"".join(parts)


def _filter(labels: Mapping[str, str]) -> dict[str, list[str]]:
    assert labels  # without any, everything would be found
    return {"label": [f"{label}={value}" for label, value in labels.items()]}


def _close_all(clients: list[APIClient]) -> None:
    for client in clients:
        client.close()


def _carries(found: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Tell whether something that the daemon listed has the labels that were asked for; it may know no such filter."""
    return (found.get("Labels") or {}).items() >= labels.items()


def _trust(certificates: Path) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return context


def unreachable(engine: Engine, error: Exception) -> ProviderFailed:
    """Build the error for a daemon that could not be reached; with a socket it counts as busy, and is retried."""
    why = getattr(error, "strerror", None) or str(error)
    failure, hint = ProviderFailed, "sudo systemctl start docker"
    if not engine.host.startswith("unix:"):
        why = str(getattr(error.args[0] if error.args else None, "reason", why))
        hint = "check DOCKER_HOST and DOCKER_CERT_PATH, or choose another with `docker context use`"
        if engine.host.startswith("ssh:"):
            hint = f"ssh must get there without asking: ssh -o BatchMode=yes {engine.host} docker version"
        return ProviderBusy(
            f"the docker daemon at `{without_secrets(engine.host)}` cannot be reached: {why}", hint=hint
        )
    if engine.socket != _USUAL:
        hint = "start the daemon that listens there, or name another with DOCKER_HOST or `docker context use`"
    if isinstance(error, PermissionError):
        hint = "join the group that the socket belongs to, usually `docker`, and log in again"
    elif engine.socket.is_socket():
        failure = ProviderBusy
    elif engine.socket.exists():
        why, hint = "it is not a socket", "set DOCKER_HOST to the socket of a docker daemon, unix:///PATH"
    return failure(f"the docker daemon at `{without_secrets(engine.host)}` cannot be reached: {why}", hint=hint)


def _ping(daemon: Path, timeout: float) -> str | None:
    """Return the daemon's API version, if it says; the client library would ask for much more.

    Raises ``OSError`` when nobody listens there, which the client library would hide, leaking a socket.
    """
    from http.client import HTTPConnection

    with closing(HTTPConnection("docker")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        connection.sock.connect(str(daemon))
        connection.request("GET", "/_ping")
        return connection.getresponse().getheader("Api-Version")


def _remove(client: APIClient, container: str) -> None:
    from docker.errors import APIError, NotFound

    try:
        client.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # somebody else is removing it
            raise


def _text(error: Any) -> str:
    return str(error.explanation or error).strip()
