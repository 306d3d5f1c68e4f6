"""The image of a server, built of this checkout's wheel by a docker daemon of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import agent_image, dockerd
from tests.support.wheel import make_wheel

TAG = "plan-runner:tests"
# What a container asks its own server: a method, a path, a token, and a body or nothing.
ASK = """\
import sys, urllib.error, urllib.request
method, path, token, body = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
url = f"http://127.0.0.1:8700/api/v1{path}"
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
try:
    answer = urllib.request.urlopen(request)
except urllib.error.HTTPError as refused:
    answer = refused
print(answer.read().decode())
"""


def asking(method: str, path: str, token: str, body: object = None) -> list[str]:
    """A command for a container that asks its own server, and prints the answer."""
    return ["python3", "-c", ASK, method, path, token, "" if body is None else json.dumps(body)]


@contextmanager
def building(folder: Path) -> Iterator[dockerd.Daemon]:
    """A daemon that has it, and the host's network."""
    wheel = make_wheel(folder, platform.machine())
    with agent_image.building(folder / "docker") as daemon:
        env = {**os.environ, "DOCKER_HOST": daemon.host}
        words = ["--wheel", str(wheel), "--tag", TAG, "--network", "host", "--ca", str(agent_image.CA)]
        subprocess.run([sys.executable, "-m", "runner", "image", "build", "--server", *words], check=True, env=env)
        yield daemon


def put(daemon: dockerd.Daemon, folder: Path) -> None:
    """Give it to another daemon."""
    with building(folder) as built, built.client() as source, daemon.client() as client:
        client.load_image(b"".join(source.get_image(TAG)))
