"""Calls to a docker daemon: each in a thread, bounded in time, and with errors of ours."""

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

PATIENCE = 10.0  # seconds

_T = TypeVar("_T")
_USUAL = Path("/var/run/docker.sock")
_START_FACTOR = 6
_BETWEEN_LOOKS = 0.05  # seconds
_CALLS = 20  # at a time; what was given up may hold a place for as long as its patience


class Engine:
    """A daemon at ``host``, as in ``DOCKER_HOST``.

    ``patience`` is how long it may take, in seconds, for what it answers from memory; starting is given more.
    """

    def __init__(self, host: str, patience: float = PATIENCE) -> None:
        self.host = host
        self.patience = patience
        self._limiter = trio.CapacityLimiter(_CALLS)

    @property
    def socket(self) -> Path:
        """Raises ``ProviderFailed`` for a daemon that is reached in another way than by a socket of this host."""
        try:
            scheme, _, path, *_ = urlsplit(self.host)
        except ValueError:
            scheme = path = ""
        if scheme != "unix" or not path:
            raise ProviderFailed(
                f"`DOCKER_HOST` is `{without_secrets(self.host)}`: a daemon must be on this host, "
                "whose directories it is to show",
                hint="unset DOCKER_HOST, or run runner where that daemon runs",
            )
        return Path(path)

    async def about(self) -> Mapping[str, Any]:
        """What ``docker info`` says."""
        return await self._call(lambda client: client.info(), self.patience)

    async def image(self, name: str) -> Mapping[str, Any]:
        """What ``docker image inspect`` says. Raises ``ImageMissing``."""
        return await self._call(lambda client: client.inspect_image(name), self.patience)

    async def files(self, image: str, path: str, limit: int) -> bytes:
        """The tar of what an image has at ``path``, cut off above ``limit`` bytes; empty when it has nothing there.

        For that a container is made, which never starts, and removed. Raises ``ImageMissing``.
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
            return await self._call(read, _START_FACTOR * self.patience)
        finally:
            with trio.CancelScope(shield=True):
                await self.remove(label)

    async def forget_stages(self, label: str) -> None:
        """Remove the images without a name that carry ``label``, and what they were made from."""
        await self._call(
            lambda client: client.prune_images({"dangling": True, "label": [label]}), _START_FACTOR * self.patience
        )

    async def make(self, name: str, config: Mapping[str, Any]) -> str:
        """Make a container, which ``start`` starts; its id.

        One that is made when nobody waits for it any more is removed at once. Raises ``ProviderFailed`` also when the
        daemon does not know what it says it has made, or gives the id of another's.
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
            return await self._call(make, _START_FACTOR * self.patience)
        finally:
            waited_for = False

    async def start(self, container: str) -> Mapping[str, Any]:
        """Start a container; what ``docker inspect`` says of it then. One that does not start is left."""

        def start(client: APIClient) -> Mapping[str, Any]:
            client.start(container)
            inspected: Mapping[str, Any] = client.inspect_container(container)
            return inspected

        return await self._call(start, _START_FACTOR * self.patience)

    async def was_killed_for_memory(self, container: str) -> bool:
        """Whether a container, which is waited for until it has ended, was killed for taking too much memory."""
        while True:
            state = (await self._call(lambda client: client.inspect_container(container), self.patience))["State"]
            if not state["Running"]:
                return bool(state["OOMKilled"])
            await trio.sleep(_BETWEEN_LOOKS)

    async def remove(self, labels: Mapping[str, str]) -> None:
        """Kill and remove the containers that carry all of these labels, with the volumes that are theirs alone."""
        assert labels  # without any, it would be all

        def remove(client: APIClient) -> None:
            wanted = [f"{label}={value}" for label, value in labels.items()]
            for container in client.containers(all=True, filters={"label": wanted}):
                _remove(client, container["Id"])

        await self._call(remove, self.patience)

    async def _call(self, act: Callable[[APIClient], _T], patience: float) -> _T:
        with trio.move_on_after(patience):
            return await trio.to_thread.run_sync(self._act, act, limiter=self._limiter, abandon_on_cancel=True)
        raise ProviderFailed(f"the docker daemon at `{self.host}` has not answered within {patience:.0f}s")

    def _act(self, act: Callable[[APIClient], _T]) -> _T:
        from http.client import HTTPException

        from docker import APIClient
        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException

        try:
            version = _ping(self.socket, self.patience)
            timeout = self.patience * _START_FACTOR
            with closing(APIClient(f"unix://{self.socket}", version, timeout)) as client:
                return act(client)
        except ImageNotFound as error:
            name = _words(error).rpartition("such image: ")[2]  # some say it twice
            raise ImageMissing(
                f"docker has no image `{name}`", hint="docker pull it, or build it: runner pulls nothing"
            ) from error
        except APIError as error:
            failure = ProviderBusy if error.is_server_error() else ProviderFailed
            raise failure(f"docker refuses: {_words(error)}") from error
        except (OSError, HTTPException, DockerException, RequestException) as error:
            raise unreachable(self, error) from error


def unreachable(engine: Engine, error: Exception) -> ProviderFailed:
    """What to say of a daemon that could not be spoken to; busy is one whose socket is there."""
    why = getattr(error, "strerror", None) or str(error)
    failure, hint = ProviderFailed, "sudo systemctl start docker"
    if engine.socket != _USUAL:
        hint = "start the daemon that listens there, or name another with DOCKER_HOST or `docker context use`"
    if isinstance(error, PermissionError):
        hint = "run as root; the group that the socket belongs to is enough for `runner image` only"
    elif engine.socket.is_socket():
        failure = ProviderBusy
    elif engine.socket.exists():
        why, hint = "that is no socket", "set DOCKER_HOST to the socket of a docker daemon, unix:///PATH"
    return failure(f"the docker daemon at `{without_secrets(engine.host)}` cannot be reached: {why}", hint=hint)


def _ping(daemon: Path, patience: float) -> str | None:
    """The version of the API that a daemon speaks, if it says so; the client by itself asks for much more than that.

    Raises ``OSError`` when nobody listens there, which the client would wrap in many words, and leak a socket.
    """
    from http.client import HTTPConnection

    with closing(HTTPConnection("docker")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(patience)
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


def _words(error: Any) -> str:
    return str(error.explanation or error).strip()
