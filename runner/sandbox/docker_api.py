"""Calls to a docker daemon: each in a thread, with a time limit, and with the runner's errors."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import trio

from runner.core.errors import ImageMissing, ProviderBusy, ProviderFailed
from runner.core.settings import without_secrets

if TYPE_CHECKING:
    from docker import APIClient

TIMEOUT = 10.0  # seconds

_T = TypeVar("_T")
_USUAL = Path("/var/run/docker.sock")
_START_FACTOR = 6
_BETWEEN_LOOKS = 0.05  # seconds
_CALLS = 20  # at a time; an abandoned call may count until its own timeout


class Engine:
    """A docker daemon at ``host``, as in ``DOCKER_HOST``.

    ``timeout`` is in seconds, for calls that the daemon answers from memory; others get six times as much.
    """

    def __init__(self, host: str, timeout: float = TIMEOUT) -> None:
        self.host = host
        self.timeout = timeout
        self._limiter = trio.CapacityLimiter(_CALLS)

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
        assert labels  # without any, it would remove every container

        def remove(client: APIClient) -> None:
            wanted = [f"{label}={value}" for label, value in labels.items()]
            for container in client.containers(all=True, filters={"label": wanted}):
                _remove(client, container["Id"])

        await self._call(remove, self.timeout)

    async def _call(self, act: Callable[[APIClient], _T], seconds: float) -> _T:
        with trio.move_on_after(seconds):
            return await trio.to_thread.run_sync(self._act, act, limiter=self._limiter, abandon_on_cancel=True)
        raise ProviderFailed(f"the docker daemon at `{self.host}` has not answered within {seconds:.0f}s")

    def _act(self, act: Callable[[APIClient], _T]) -> _T:
        from http.client import HTTPException

        from docker import APIClient
        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException

        try:
            version = _ping(self.socket, self.timeout)
            with closing(APIClient(f"unix://{self.socket}", version, self.timeout * _START_FACTOR)) as client:
                return act(client)
        except ImageNotFound as error:
            name = _text(error).rpartition("such image: ")[2]  # some say it twice
            raise ImageMissing(
                f"docker has no image `{name}`", hint="docker pull it, or build it: runner pulls nothing"
            ) from error
        except APIError as error:
            failure = ProviderBusy if error.is_server_error() else ProviderFailed
            raise failure(f"docker refuses: {_text(error)}") from error
        except (OSError, HTTPException, DockerException, RequestException) as error:
            raise unreachable(self, error) from error


def unreachable(engine: Engine, error: Exception) -> ProviderFailed:
    """Build the error for a daemon that could not be reached; with a socket it counts as busy, and is retried."""
    why = getattr(error, "strerror", None) or str(error)
    failure, hint = ProviderFailed, "sudo systemctl start docker"
    if engine.socket != _USUAL:
        hint = "start the daemon that listens there, or name another with DOCKER_HOST or `docker context use`"
    if isinstance(error, PermissionError):
        hint = "run as root; the group that the socket belongs to is enough for `runner image` only"
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
