"""The environment that git runs in: what the host configures is switched off, and what is ours is said."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
    # Old histories are full of these, and they harm nobody.
    "fetch.fsck.badTimezone": "ignore",
    "fetch.fsck.missingSpaceBeforeDate": "ignore",
    "fetch.fsck.missingSpaceBeforeEmail": "ignore",
    "fetch.fsck.missingNameBeforeEmail": "ignore",
    "fetch.fsck.zeroPaddedFilemode": "ignore",
    "fetch.fsck.zeroPaddedDate": "ignore",
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


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The whole environment, with ``more`` of git's settings."""
    settings = _SETTINGS | dict(more)
    return {
        **_ENVIRONMENT,
        "GIT_CONFIG_COUNT": str(len(settings)),
        **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(settings)},
        **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(settings.values())},
    }
