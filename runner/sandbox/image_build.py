"""Building an image: send a context to the docker daemon, and receive its output line by line.

Uses a connection of its own, not the client library's: the daemon stops building when the connection is closed, and a
library thread that waits for the next line could only be stopped with the process.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from string import Template
from typing import Any
from urllib.parse import urlencode

import h11
import trio

from runner.core.errors import (
    BaseImageMissing,
    ImageBuildFailed,
    MirrorUnreachable,
    ProviderFailed,
    RunnerError,
    UsageError,
)
from runner.core.sanitize import sanitize
from runner.sandbox.docker_api import Engine, unreachable

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
_TAIL_LINES = 40  # in which the cause of a failure is looked for

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the daemon's, around what commands say on standard error
_DEFAULT = re.compile(r"Step \S+ : ARG (\w+)=(\S+)")
_UNTRUSTED = re.compile(r"certificate|SELF_SIGNED|UNABLE_TO_(GET|VERIFY)", re.IGNORECASE)
_UNREACHED = re.compile(
    r"Temporary failure resolving|Could not (resolve|connect)|Unable to connect|[Cc]onnection (timed out|failed)"
    r"|E(NOTFOUND|AI_AGAIN|CONN\w+|TIMEDOUT|40[1347])\b|\b40[1347] "
)
_ALTERED = re.compile(r"EINTEGRITY|Hash Sum mismatch|not signed|GPG error")


@dataclass(frozen=True)
class Build:
    """``context`` is a tar with the Dockerfile at ``dockerfile``; ``arguments`` are its build arguments."""

    context: bytes
    dockerfile: str
    tag: str
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    host_network: bool = False

    @property
    def query(self) -> str:
        words = {
            "dockerfile": self.dockerfile,
            "t": self.tag,
            "buildargs": json.dumps(self.arguments),
            "labels": json.dumps(self.labels),
            "rm": "1",
            "forcerm": "1",
            **({"networkmode": "host"} if self.host_network else {}),
        }
        return urlencode(words)


async def build_image(engine: Engine, build: Build, say: Callable[[str], None]) -> str:
    """Build an image and return its id; each line of output goes to ``say``.

    Cancelling ends the build. Raises ``BaseImageMissing``, ``MirrorUnreachable``, ``ImageBuildFailed``, ``UsageError``
    for an invalid name or Dockerfile, and ``ProviderFailed`` for a daemon that is not reached or refuses.
    """
    said: deque[str] = deque(maxlen=_TAIL_LINES)
    step = image = rest = ""
    named = dict(build.arguments)
    async with aclosing(_answers(engine, build)) as answers:
        async for answer in answers:
            if error := answer.get("error"):
                raise cause_of(str(error), [*said, rest, str(error)], Template(step).safe_substitute(named))
            image = str(answer.get("aux", {}).get("ID", image))
            *lines, rest = (rest + _COLOUR.sub("", str(answer.get("stream", "")))).split("\n")
            for line in filter(None, map(str.strip, lines)):
                step = line if line.startswith("Step ") else step
                if default := _DEFAULT.match(line):
                    named.setdefault(default[1], default[2])
                said.append(line)
                say(line)
    if not image:
        raise ImageBuildFailed("the docker daemon ended the build without an image", hint="run `docker info`")
    return image


def cause_of(error: str, said: list[str], step: str) -> RunnerError:
    """Choose the error for a failed build by the last output of ``step``."""
    text = "\n".join(said)
    words = sanitize(error.strip())
    if " : FROM " in step:
        base = step.partition(" : FROM ")[2].split(" ")[0]
        return BaseImageMissing(
            f"the base image `{sanitize(base)}` is not available: {words}",
            hint="docker pull it, or name one that is here: --base IMAGE",
        )
    if _ALTERED.search(text):
        return ImageBuildFailed(
            "a package mirror serves something other than the pinned or signed bytes",
            hint="use another --npmrc or --apt-sources; only the pinned bytes are installed",
        )
    if _UNTRUSTED.search(text):
        return MirrorUnreachable(
            f"the certificate of a package mirror is not trusted by the build: {_longest(_UNTRUSTED, said)}",
            hint="name the certificate authorities of this network (PEM) with --ca FILE",
        )
    if _UNREACHED.search(text):
        return MirrorUnreachable(
            f"a package mirror cannot be reached from the build: {_longest(_UNREACHED, said)}",
            hint="name other mirrors with --apt-sources FILE and --npmrc FILE, or a proxy with HTTPS_PROXY, or build "
            "with this host's network: --network host",
        )
    return ImageBuildFailed(f"the image was not built: {words}", hint="see the lines above")


def _longest(pattern: re.Pattern[str], said: list[str]) -> str:
    return sanitize(max((line.strip() for line in said if pattern.search(line)), key=len))


async def _answers(engine: Engine, build: Build) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield each JSON object of the daemon's answer. Raises as ``build_image`` does."""
    rest = b""
    async with aclosing(_body(engine, build)) as body:
        async for chunk in body:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    yield json.loads(line)
            if len(rest) > _LINE_BYTES:
                raise ProviderFailed(f"a line of the docker daemon's answer exceeds {_LINE_BYTES >> 20} MiB")


async def _body(engine: Engine, build: Build) -> AsyncGenerator[bytes]:
    try:
        stream = await trio.open_unix_socket(engine.socket)
    except OSError as error:
        raise unreachable(engine, error) from error
    async with stream:
        http = h11.Connection(h11.CLIENT)
        headers = [("Host", "docker"), ("Content-Type", "application/x-tar")]
        headers += [("Content-Length", str(len(build.context)))]
        request = h11.Request(method="POST", target=f"/build?{build.query}", headers=headers)
        try:
            for part in (request, h11.Data(data=build.context), h11.EndOfMessage()):
                await stream.send_all(http.send(part) or b"")
            head = await _next(http, stream)
            status = head.status_code if isinstance(head, h11.Response) else 0
            refused = b""
            while isinstance(event := await _next(http, stream), h11.Data):
                if status == 200:
                    yield bytes(event.data)
                else:
                    refused += bytes(event.data)
        except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            raise ProviderFailed(f"the docker daemon at `{engine.host}` broke off the build: {error}") from error
    if status != 200:
        words = sanitize(refused.decode(errors="replace").strip().removeprefix('{"message":"').removesuffix('"}'))
        raise UsageError(f"docker refuses: {words}") if status == 400 else ProviderFailed(f"docker refuses: {words}")


async def _next(http: h11.Connection, stream: trio.SocketStream) -> object:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await stream.receive_some(_READ_BYTES))
    return event
