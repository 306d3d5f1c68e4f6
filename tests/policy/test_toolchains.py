from __future__ import annotations

import pytest

from runner.policy.toolchains import check_toolchain, is_installed, is_language


@pytest.mark.parametrize(
    "path", ["/opt/node", "/usr", "/usr/local/go", "/etc/java", "/home/dev/go", "/tmp/sdk", "/devtools"]
)
def test_an_ordinary_directory_can_be_shown(path: str) -> None:
    assert check_toolchain(path) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/", "`/dev`"),
        ("/home", "`/home/agent`"),
        ("/home/agent", "`/home/agent`"),
        ("/proc", "`/proc`"),
        ("/proc/1/root", "`/proc`"),
        ("/dev/shm", "`/dev`"),
        ("/sys/", "`/sys`"),
        ("/run/docker", "`/run`"),
        ("/etc", "`/etc`"),
        ("/tmp", "`/tmp`"),
        ("/workspace/x", "`/workspace`"),
        ("/usr/../proc", "`..`"),
    ],
)
def test_what_a_workspace_has_of_its_own_is_no_toolchain(path: str, words: str) -> None:
    assert words in (check_toolchain(path) or "")


def test_languages_and_what_package_managers_install_are_known() -> None:
    assert (is_language("ruby"), is_language("/opt/ruby"), is_language("vim")) == (True, False, False)
    assert (is_installed("web/node_modules"), is_installed("node_modules/web")) == (True, False)
    assert check_toolchain("/opt/../etc") == "has a `..` part"
