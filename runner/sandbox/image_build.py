"""Building an image: send a context to the docker daemon, and receive its output line by line."""

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

from runner.core.errors import (
    BaseImageMissing,
    ImageBuildFailed,
    MirrorUnreachable,
    ProviderFailed,
    RunnerError,
    UsageError,
)
from runner.core.sanitize import sanitize
from runner.sandbox.daemon_stream import call
from runner.sandbox.docker_api import Engine

_TAIL_LINES = 40  # in which the cause of a failure is looked for

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the daemon's, around what commands say on standard error
_DEFAULT = re.compile(r"Step \S+ : ARG (\w+)=(\S+)")
_UNTRUSTED = re.compile(r"certificate|SELF_SIGNED|UNABLE_TO_(GET|VERIFY)", re.IGNORECASE)
_UNREACHED = re.compile(
    r"Temporary failure (resolving|in name resolution)|Could not (resolve|connect)|Unable to connect"
    r"|[Cc]onnection (timed out|failed)"
    r"|E(NOTFOUND|AI_AGAIN|CONN\w+|TIMEDOUT|40[1347])\b|\b40[1347] "
)
_ALTERED = re.compile(r"EINTEGRITY|Hash Sum mismatch|not signed|GPG error|DO NOT MATCH THE HASHES")


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
            hint="use another --npmrc, --pip-conf or --apt-sources; only the pinned bytes are installed",
        )
    if _UNTRUSTED.search(text):
        return MirrorUnreachable(
            f"the certificate of a package mirror is not trusted by the build: {_longest(_UNTRUSTED, said)}",
            hint="name the certificate authorities of this network (PEM) with --ca FILE",
        )
    if _UNREACHED.search(text):
        return MirrorUnreachable(
            f"a package mirror cannot be reached from the build: {_longest(_UNREACHED, said)}",
            hint="name other mirrors with --apt-sources FILE, --npmrc FILE or --pip-conf FILE, or a proxy with "
            "HTTPS_PROXY, or build with this host's network: --network host",
        )
    return ImageBuildFailed(f"the image was not built: {words}", hint="see the lines above")


def _longest(pattern: re.Pattern[str], said: list[str]) -> str:
    return sanitize(max((line.strip() for line in said if pattern.search(line)), key=len))


async def _answers(engine: Engine, build: Build) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield each JSON object of the daemon's answer. Raises as ``build_image`` does."""
    headers = (("Content-Type", "application/x-tar"),)
    async with call(engine, "POST", f"/build?{build.query}", headers, build.context) as answer:
        if answer.status != 200:
            words = await answer.refusal()
            raise (UsageError if answer.status == 400 else ProviderFailed)(f"docker refuses: {words}")
        async with aclosing(answer.objects()) as objects:
            async for found in objects:
                yield found
