"""A directory of root that becomes a workspace: commands have it as their own, and it stays root's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.core.errors import ProviderFailed
from runner.ports.provider import Provider, SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.providers.local import LocalProvider
from runner.sandbox.docker_api import Engine
from runner.testing.place import shell
from tests.support import dockerd
from tests.support.needs import USERS

pytestmark = USERS.mark
COMMANDS = "cat kept; echo more >> kept; mkdir made; cat others; echo no > AGENTS.md; rm -rf .runner; id -u"


def docker(home: Path) -> DockerProvider:
    return DockerProvider(home, Engine(dockerd.host()))


@pytest.mark.parametrize("provider_at", [LocalProvider, docker], ids=["local", "docker"])
async def test_what_commands_make_in_a_directory_of_root_is_root_s(
    tmp_path: Path, provider_at: Callable[[Path], Provider]
) -> None:
    """Protected paths that are missing are held as elsewhere, and the files of third users stay out of reach."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "kept").write_text("theirs\n")
    (tree / "others").touch(mode=0o600)
    os.chown(tree / "others", 4711, 4711)
    provider = provider_at(tmp_path / "home")
    image = dockerd.IMAGE if provider.name == "docker" else None
    id = f"lent-{os.getpid()}-{provider.name}"
    handle = await provider.create(WorkspaceRequest(id=id, run="run-1", nonce="nonce", tree=tree, image=image))
    async with provider.open(handle, SandboxSpec(protected=("AGENTS.md", ".runner/"))) as workspace:
        seen = await shell(workspace, COMMANDS)
    await provider.destroy(handle)

    assert handle.uid not in (0, 4711)
    assert seen.startswith("theirs\n")
    assert "others: Permission denied" in seen
    assert seen.count("Read-only file system") + seen.count("Device or resource busy") == 2, seen
    assert {path.name: path.stat().st_uid for path in tree.iterdir()} == {"kept": 0, "others": 4711, "made": 0}
    assert (tree / "kept").read_text() == "theirs\nmore\n"


async def test_a_directory_of_root_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """A command could leave a program of root's there with the set-id bit."""
    with pytest.raises(ProviderFailed, match="other users can enter"):
        await LocalProvider(tmp_path).create(
            WorkspaceRequest(id="lent", run="run-1", nonce="nonce", tree=Path("/usr/share/misc"))
        )

    assert list((tmp_path / "sandboxes").glob("*")) == []


def test_a_host_without_user_namespaces_is_told_and_no_bug(tmp_path: Path) -> None:
    look = (
        "import os, sys; from runner.sandbox.idmapped_mounts import why_no_idmap;"
        "print(why_no_idmap(os.open(sys.argv[1], os.O_PATH), 7))"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", forbid, "sh"]

    done = subprocess.run([*words, sys.executable, "-c", look, tmp_path], capture_output=True, text=True, check=True)

    why = "unshare: unshare failed: No space left on device"
    assert done.stdout == f"unshare: this host makes no user namespace ({why})\n"


def test_threads_that_a_library_starts_after_each_fork_are_in_no_ones_way(tmp_path: Path) -> None:
    look = (
        "import os, sys, threading, time; from runner.sandbox.idmapped_mounts import why_no_idmap;"
        "begin = lambda: threading.Thread(target=time.sleep, args=(1,), daemon=True).start();"
        "os.register_at_fork(after_in_child=begin);"
        "print(why_no_idmap(os.open(sys.argv[1], os.O_PATH), 7))"
    )

    done = subprocess.run([sys.executable, "-c", look, tmp_path], capture_output=True, text=True, check=True)

    assert done.stdout == "None\n"
