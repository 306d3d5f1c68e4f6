"""Clusters for tests: a double over the tests' docker daemon, and a real one that was built from Debian's sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import dockerd
from tests.support.needs import ADMINISTRATORS_PATH

if TYPE_CHECKING:
    from tests.support.cluster.real import Cluster

ROOT = Path(__file__).parents[3]


@cache
def double_kubeconfig() -> Path:
    """The kubeconfig of the session's double."""
    words = [sys.executable, "-m", "tests.support.cluster.double", dockerd.host()]
    folder = dockerd.hold(tempfile.TemporaryDirectory(prefix="runner-tests-kubeconfig-"))
    # The test that asks first may have a PATH of its own, without `mount`.
    env = {**os.environ, "PATH": f"{dockerd.PATH}:{ADMINISTRATORS_PATH}"}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    dockerd.hold(process)  # whose input is closed, which ends it
    assert process.stdout is not None
    file = Path(folder, "config")
    file.touch(mode=0o600)
    file.write_text(process.stdout.readline())
    return file


@cache
def real_cluster() -> Cluster:
    """The session's real cluster."""
    from tests.support.cluster import real

    real.CLUSTER.require()
    return dockerd.hold(real.running())
