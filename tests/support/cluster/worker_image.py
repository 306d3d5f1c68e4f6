"""The image of workers, for the real cluster: this host's Python, the wheel, and the packages that its extras take."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from docker import APIClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import dockerd
from tests.support.wheel import built_wheel

IMAGE = "runner-tests-worker:1"
_EXTRAS = ("kubernetes", "postgres", "s3")
_SITE = "opt/site"
_PROGRAM = '#!/bin/sh\nexec python3 -m runner "$@"\n'


def make(client: APIClient) -> None:
    """Build it, for a daemon."""
    buffer = io.BytesIO(dockerd.root_file_system())
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=buffer, mode="a") as tar:
        known = {*tar.getnames()}
        for library in sorted({*dockerd.libraries(_modules())}):
            if (name := dockerd.resolved(library)) not in known and "site-packages" not in library:
                tar.add(os.path.realpath(library), name)
        tar.add(built_wheel(Path(folder)), _SITE)
        for one in _packages():
            for file in one.files or ():
                if not {"..", "__pycache__"} & {*file.parts}:
                    tar.add(str(file.locate()), f"{_SITE}/{file}")
        program = tarfile.TarInfo("usr/local/bin/runner")
        program.mode, program.size = 0o755, len(_PROGRAM)
        tar.addfile(program, io.BytesIO(_PROGRAM.encode()))
    repository, _, tag = IMAGE.partition(":")
    env = [f"ENV PATH={dockerd.PATH}", f"ENV PYTHONPATH=/{_SITE}"]
    client.import_image_from_data(buffer.getvalue(), repository=repository, tag=tag, changes=env)


def _modules() -> list[str]:
    """The packages' modules that are programs of the machine."""
    return [str(file.locate()) for one in _packages() for file in one.files or () if file.name.endswith(".so")]


def _packages() -> Iterator[Distribution]:
    """Every distribution that the wheel needs with its extras, but itself."""
    waiting, seen = [("plan-runner", _EXTRAS)], set[str]()
    while waiting:
        name, extras = waiting.pop()
        found = distribution(name)
        if name != "plan-runner":
            yield found
        for line in found.requires or ():
            wanted = Requirement(line)
            if (known := canonicalize_name(wanted.name)) in seen or not _applies(wanted, extras):
                continue
            seen.add(known)
            waiting.append((wanted.name, tuple(wanted.extras)))


def _applies(wanted: Requirement, extras: tuple[str, ...]) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
