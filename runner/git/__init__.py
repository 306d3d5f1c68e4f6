"""Git for the runner: one contract (``runner.ports.git``), two adapters, one conformance suite.

The git binary is taken when the host has one that is recent enough, because it is several times
faster; the dulwich library works with nothing installed. What does not depend on either (names and
refs in ``tree``, files in ``disk``, a user's repository in ``source``) stands once, so that both
refuse, ignore and compare alike.
"""

from __future__ import annotations

import os
import shutil

from runner.core.settings import Settings
from runner.ports.git import Git

OLDEST = (2, 32)  # the first in which all of the host's configuration can be switched off


def open_git(settings: Settings) -> Git:
    """The git adapter for this host."""
    from runner.git import _run

    path = os.pathsep.join(p for p in settings.environment.get("PATH", "").split(os.pathsep) if os.path.isabs(p))
    program = shutil.which("git", path=path)
    if program and _run.version(program) >= OLDEST:
        from runner.git.binary import Binary
        from runner.git.remote import Reach

        return Binary(program, Reach.of(settings, path))
    from runner.git.dulwich import Dulwich

    return Dulwich()
