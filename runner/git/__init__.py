"""Git for the runner: one port (``runner.ports.git``), two adapters, one conformance suite.

The git binary is used when the host has a recent one, because it is several times faster; the dulwich library works
with nothing installed. Everything else (names and refs in ``tree``, files in ``disk``, a user's repository in
``source``) is shared, so that both refuse, ignore and compare alike.
"""

from __future__ import annotations

import os
import shutil

from runner.core.settings import Settings
from runner.ports.git import Git

OLDEST = (2, 32)  # the first version in which all of the host's configuration can be switched off


def open_git(settings: Settings) -> Git:
    """Return the git adapter for this host."""
    from runner.git import _run

    path = os.pathsep.join(p for p in settings.environment.get("PATH", "").split(os.pathsep) if os.path.isabs(p))
    program = shutil.which("git", path=path)
    if program and _run.version(program) >= OLDEST:
        from runner.git.binary import GitBinary
        from runner.git.remote import RemoteAccess

        return GitBinary(program, RemoteAccess.of(settings, path))
    from runner.git.dulwich import GitDulwich

    return GitDulwich()
