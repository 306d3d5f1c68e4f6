"""Daemons that docker's clients can use in the place of root's docker: podman, also without root, and rootless docker.

Each is alone in mount and process namespaces, so nothing of it outlives it, and an ordinary user who has one is nobody
of this host: only there does its name have ids below it.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support.dockerd import IMAGE, Daemon, root_file_system, wait_until_gone
from tests.support.needs import Component

_NAME, USER, _IDS = "runner-tests", 64_321, 1_700_000
_READY = 60.0  # seconds
_FILES = {
    "passwd": f"{_NAME}:x:{USER}:{USER}::{{home}}:/bin/sh\n",
    "group": f"{_NAME}:x:{USER}:\n",
    "subuid": f"{_NAME}:{_IDS}:65536\n",
    "subgid": f"{_NAME}:{_IDS}:65536\n",
}
_ENTER = """
mount --make-rslave / && cd "$1/etc" || exit
for file in *; do
  mount --bind "$file" "/etc/$file" || exit
done
home=$1/home user=$2; shift 2; cd "$home"
test "$user" = 0 || set -- setpriv --reuid "$user" --regid "$user" --clear-groups "$@"
exec env -i PATH="$PATH" HOME="$home" XDG_RUNTIME_DIR="$home/run" \
  DOCKERD_ROOTLESS_ROOTLESSKIT_NET=host DOCKERD_ROOTLESS_ROOTLESSKIT_PORT_DRIVER=none "$@"
"""
_PODMAN = (
    *("podman", "--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "file"),
    *("--root", "{home}/data", "--runroot", "{home}/run/root", "system", "service", "--time", "0", "unix://{socket}"),
)
_ROOTLESS = (
    *("sh", "/usr/share/docker.io/contrib/dockerd-rootless.sh", "--host", "unix://{socket}", "--data-root"),
    *(
        "{home}/data",
        "--exec-root",
        "{home}/run/exec",
        "--storage-driver",
        "overlay2",
        "--iptables=false",
        "--bridge=none",
    ),
    *("--ip-forward=false", "--exec-opt", "native.cgroupdriver=cgroupfs", "--log-level=warn"),
)


def _missing(*programs: str) -> str | None:
    if os.geteuid() != 0:
        return "only root can start a daemon for another user"
    absent = [program for program in programs if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _few_files() -> str | None:
    """Podman of root sets a limit of a million open files, whatever root may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"root may have {hard} open files only" if 0 <= hard < 1 << 20 else None


class OtherDaemon(Daemon):
    """One of these daemons below ``root``, of ``user``."""

    component: Component
    words: tuple[str, ...] = ()
    user = USER

    def __init__(self, root: Path, data: Path | None = None) -> None:
        super().__init__(root, data)
        self.home = root / "home"
        self.socket = self.home / "run" / "docker.sock"
        self.host = f"unix://{self.socket}"

    def start(self, bridge: str | None = None) -> None:
        (self.root / "etc").mkdir(parents=True)
        (self.home / "run").mkdir(parents=True)
        for name, line in _FILES.items():
            before = Path("/etc", name)
            text = before.read_text() if before.exists() else ""
            (self.root / "etc" / name).write_text(text + line.format(home=self.home))
        for path in (self.root, self.home, self.home / "run"):
            path.chmod(0o755)
        for path in (self.home, self.home / "run"):
            os.chown(path, self.user, self.user)
        words = [word.format(home=self.home, socket=self.socket) for word in self.words]
        noted = ["setsid", "--fork", "sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.root / "pid")]
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-c", _ENTER, "sh", str(self.root), str(self.user)]
        with (self.root / "log").open("ab") as log:
            all = [*noted, *alone, *enter, *words]
            subprocess.run(all, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _READY
        while not self.answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.words[0]} does not start:\n{(self.root / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def pids(self) -> list[int]:
        return [int((self.root / "pid").read_text())] if (self.root / "pid").exists() else []

    def make_image(self) -> None:
        with self.client() as client:
            client.import_image_from_data(root_file_system(), repository=IMAGE)

    def stop(self) -> None:
        pids = self.pids()
        for pid in pids:
            # The first process of a namespace ends with all others; `--kill-child` is forgotten when the user changes.
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            for each in (*children, pid):
                os.kill(each, signal.SIGKILL)
            wait_until_gone([*children, pid])
        shutil.rmtree(self.root)


class Podman(OtherDaemon):
    component = Component("podman", lambda: _missing("podman", "newuidmap"))
    words = _PODMAN


class RootPodman(Podman):
    component = Component("podman as root", lambda: _missing("podman") or _few_files())
    user = 0


class RootlessDocker(OtherDaemon):
    component = Component("rootless docker", lambda: _missing("dockerd", "rootlesskit", "newuidmap"))
    words = _ROOTLESS

    def make_image(self) -> None:
        Daemon.make_image(self)
