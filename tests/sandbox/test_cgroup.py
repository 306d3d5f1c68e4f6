"""Control groups of hosts unlike this one, read from the kernel's texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.model import Limits
from runner.sandbox.cgroup import ControlGroups, locate

V1 = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
CONTAINER = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("mounts", "membership", "v1", "v2"),
    [
        (
            V1,
            "4:memory:/user\n2:cpu,cpuacct:/\n",
            {"memory": Path("/sys/fs/cgroup/memory/user"), "cpu": Path("/sys/fs/cgroup/cpu,cpuacct")},
            None,
        ),
        (V2, "0::/user.slice/run.scope\n", {}, Path("/sys/fs/cgroup/user.slice/run.scope")),
        (CONTAINER, "4:memory:/docker/abc\n", {"memory": Path("/sys/fs/cgroup/memory")}, None),
        ("", "", {}, None),
    ],
    ids=["version 1", "version 2", "a container on version 1", "neither"],
)
def test_our_own_group_is_found_in_each_hierarchy(
    mounts: str, membership: str, v1: dict[str, Path], v2: Path | None
) -> None:
    assert locate(mounts, membership) == (v1, v2)


def test_version_2_files_are_read_in_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    group = tmp_path / "runner-w"
    group.mkdir()
    (group / "memory.max").write_text("67108864\n")
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "pids.max").write_text("30\n")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")

    found = ControlGroups(dict.fromkeys(("memory", "cpu", "pids"), group))

    assert found.limits() == Limits(cpus=0.5, memory_bytes=64 << 20, pids=30)
    assert found.oom_kills() == 1
