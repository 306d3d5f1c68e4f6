"""The directories of a host that a workspace may see: toolchains and dependencies. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath

# Each workspace has these of its own; what lies below the host's would show processes, devices or sockets of the
# host, or be taken for the agent's work.
_OWN = ("/dev", "/incident", "/output", "/proc", "/run", "/sys", "/workspace")
_SHARED = ("/etc", "/home/agent", "/tmp")

# What a stranger's manifest may name: it can learn nothing from these but what was installed.
_LANGUAGES = frozenset(
    {"bun", "bundle", "cargo", "composer", "deno", "dotnet", "elixir", "go", "gradle", "java", "mvn", "node", "npm"}
    | {"perl", "php", "pnpm", "python", "python3", "ruby", "rustc", "uv", "yarn"}
)
_INSTALLED = frozenset({".bundle", ".venv", "bundle", "node_modules", "vendor", "venv"})


def is_language(toolchain: str) -> bool:
    """Tell whether a toolchain is named by a program that compiles or runs a language."""
    return toolchain in _LANGUAGES


def is_installed(dependency: str) -> bool:
    """Tell whether package managers install to a directory."""
    return PurePosixPath(dependency).name in _INSTALLED


def check_toolchain(text: str) -> str | None:
    """Return the fault of a toolchain's path, to be read after it; ``None`` for a valid one, and for a name."""
    path = PurePosixPath(text)
    if not path.is_absolute():
        return None
    if ".." in path.parts:
        return "has a `..` part"
    for place in (*_OWN, *_SHARED):
        if PurePosixPath(place).is_relative_to(path) or (place in _OWN and path.is_relative_to(place)):
            return f"cannot be shown: each workspace has a `{place}` of its own"
    return None
