"""Which directories of a host a workspace may see as toolchains. Whether they are there is looked up elsewhere."""

from __future__ import annotations

from pathlib import PurePosixPath

# Each workspace has these of its own; what lies below the host's would show processes, devices or sockets of the
# host, or be taken for the agent's work.
_OWN = ("/dev", "/incident", "/output", "/proc", "/run", "/sys", "/workspace")
_SHARED = ("/etc", "/home/agent", "/tmp")


def check_toolchain(text: str) -> str | None:
    """What is wrong with a toolchain's path, to be read after it; ``None`` when it can be shown."""
    path = PurePosixPath(text)
    if ".." in path.parts:
        return "has a `..` part"
    for place in (*_OWN, *_SHARED):
        if PurePosixPath(place).is_relative_to(path) or (place in _OWN and path.is_relative_to(place)):
            return f"can not be shown: each workspace has a `{place}` of its own"
    return None
