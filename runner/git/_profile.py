"""The environment and the options that git runs with: the host's configuration is switched off, the runner's is set."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Faults that old histories are full of, and that harm nobody.
IGNORED_FAULTS = (
    "badTimezone",
    "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail",
    "missingNameBeforeEmail",
    "zeroPaddedFilemode",
    "zeroPaddedDate",
)
_SETTINGS = {
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.ignoreCase": "false",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "checkout.workers": "2",  # half the wall time of 10,000 files, for a sixth more CPU
    "gc.auto": "0",
    "protocol.version": "2",  # a server of version 2 gives any object that it has
    "fetch.unpackLimit": "1",  # always a pack: one file with a checksum of its own
    "fetch.fsckObjects": "true",
    **{f"fetch.fsck.{name}": "ignore" for name in IGNORED_FAULTS},
}
_ENVIRONMENT = {
    "HOME": os.devnull,
    "LC_ALL": "C",
    "GIT_ALLOW_PROTOCOL": "file",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}


def git_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a git process, with further ``settings`` of git."""
    return _ENVIRONMENT | config_variables(_SETTINGS | dict(settings))


def fetch_arguments(depth: int | None) -> tuple[str, ...]:
    """Return ``fetch`` with its options: exactly the objects asked for, and nothing else in the repository changes."""
    return (
        "fetch",
        "--quiet",
        "--no-tags",
        "--no-write-fetch-head",
        "--no-recurse-submodules",
        "--no-auto-maintenance",
        "--update-shallow",
        *([f"--depth={depth}"] if depth is not None else []),
        "--end-of-options",
    )


def config_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that configure git with these settings."""
    return {
        "GIT_CONFIG_COUNT": str(len(settings)),
        **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(settings)},
        **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(settings.values())},
    }
