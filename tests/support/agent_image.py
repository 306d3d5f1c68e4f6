"""The image k8s-triage-agent, built for real and kept with the data of a docker daemon of its own.

The first test that wants it builds it when what it is built from has changed: from a Debian that is installed into a
folder, since tests have no registry. Its daemon has the host's network while it builds, and none when tests use it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from docker import APIClient
from docker.errors import ImageNotFound

from runner.ops.host.image import digest
from tests.support import dockerd

BASE = "debian:bookworm-slim"
CA = Path("/etc/ssl/certs/ca-certificates.crt")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-tests" / "image"
PLACE = Path(os.environ.get("RUNNER_TESTS_IMAGE") or _CACHE)


def built(place: Path = PLACE) -> bool:
    """Whether the image is there, as this checkout would build it."""
    record = place / "inputs"
    return record.exists() and record.read_text() == digest()


def name(place: Path = PLACE) -> str:
    """Of the daemon, as ``dockerd.shared`` wants it; ``data`` of a place is one daemon's at a time."""
    return f"image-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def make(place: Path) -> None:
    """Build it below ``place``, unless another process just did. Of earlier builds what is still good is used."""
    with building(place) as daemon:
        if built(place):
            return
        env = {**os.environ, "DOCKER_HOST": daemon.host}
        words = ["image", "build", "--network", "host", "--ca", str(CA)]
        subprocess.run([sys.executable, "-m", "runner", *words], check=True, env=env)
        (place / "inputs").write_text(digest())


@contextmanager
def building(place: Path) -> Iterator[dockerd.Daemon]:
    """A daemon below ``place`` that has the base and the host's network, for one process at a time."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    daemon = dockerd.Daemon(dockerd.root(name(place)), place / "data")
    with (place / "lock").open("w") as lock, bridge() as network:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if daemon.answers():  # whoever used it was killed
            daemon.stop()
        daemon.start(network)
        try:
            with daemon.client() as client:
                import_base(client)
            yield daemon
        finally:
            daemon.stop()


def import_base(client: APIClient) -> None:
    """A smallest Debian, installed by this host from where it has its own packages."""
    try:
        client.inspect_image(BASE)
    except ImageNotFound:
        repository, _, suite = BASE.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            root, tar = Path(folder, "root"), Path(folder, "tar")
            words = ["--variant=minbase", "--include=ca-certificates", suite.removesuffix("-slim"), str(root)]
            subprocess.run(["debootstrap", *words, *mirror()], check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(tar), "."], check=True)
            client.import_image_from_file(str(tar), repository=repository, tag=suite)


def mirror() -> list[str]:
    """Where this host has its packages from, if it is a Debian too."""
    if "ID=debian\n" not in Path("/etc/os-release").read_text():
        return []
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[:1]


@contextmanager
def bridge() -> Iterator[str]:
    """A daemon wants one; told to have none, it would remove another daemon's."""
    bridge = f"runner-t{os.getpid()}"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", "198.18.77.1/24", "dev", bridge], check=True)
        yield bridge
    finally:
        subprocess.run(["ip", "link", "delete", bridge], check=True)


@cache
def session() -> dockerd.Daemon:
    """The daemon that has it, until ``dockerd.leave``; building takes minutes."""
    dockerd.DOCKER.require()
    if not built():
        make(PLACE)
    lock = dockerd.hold((PLACE / "lock").open("w"))
    fcntl.flock(lock, fcntl.LOCK_SH)
    return dockerd.hold(dockerd.shared(name(), PLACE / "data"))
