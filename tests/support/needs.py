"""What a test may need that a machine may lack, and the one way to skip for want of it.

``@ROOT.mark`` skips a test, ``ROOT.require()`` a fixture. What was skipped is counted at the end by component, with why
it is missing and what brings it; with ``CI`` set it is a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import pytest

from runner.core.model import Feature
from runner.safefs.trees import can_chown
from runner.sandbox import cgroup
from tests.support import components

INSTALL = "sudo make test"
ADMINISTRATORS_PATH = "/usr/sbin:/usr/local/sbin"  # which is no ordinary user's


@dataclass(frozen=True)
class Component:
    """A part of the machine: its name, why it is not here (``None``: it is), and the command that brings it."""

    name: str
    why: Callable[[], str | None]
    command: str = INSTALL

    @cached_property
    def missing(self) -> str | None:
        return self.why()

    @property
    def reason(self) -> str:
        """The words of a skip, which the closing table takes apart again."""
        return f"{self.name} | {self.missing} | {self.command}"

    @property
    def mark(self) -> pytest.MarkDecorator:
        return pytest.mark.skipif(self.missing is not None, reason=self.reason)

    def require(self) -> None:
        """Skip the running test, or all tests of the running fixture, without the component."""
        if self.missing is not None:
            pytest.skip(self.reason)


def program(name: str, path: str | None = None) -> Component:
    return Component(name, lambda: None if shutil.which(name, path=path) else "not installed")


def _compiler() -> str | None:
    """Why nothing compiles here; a compiler alone, without the headers of the C library, is not enough."""
    if shutil.which("cc") is None:
        return "not installed: cc"
    return None if components.exists("/usr/include/stdio.h") else "not installed: headers of the C library"


def _agents() -> str | None:
    return None if components.agents_are_here() else f"not these versions in {components.AGENTS}"


def _kubectl() -> str | None:
    return None if components.kubectl_is_here() else f"not this version in {components.KUBECTL}"


def _axe() -> str | None:
    return None if components.axe_is_here() else f"not this version in {components.AXE}"


def _postgres() -> str | None:
    if components.postgres_programs() is None:
        return "not installed"
    return None if find_spec("psycopg") else "not installed: psycopg"


ROOT = Component("root", lambda: None if os.geteuid() == 0 else "these tests mount, or look as another user")
USERS = Component("root over other users", lambda: None if can_chown() else "workspaces get no user of their own")
MEMORY = Component("memory limits", lambda: cgroup.missing_limits().get(Feature.MEMORY))
CARGO = program("cargo")
CHROMIUM = program("chromium")
GIT = program("git")
GIT_LFS = program("git-lfs")
GO = program("go")
JQ = program("jq")
MAKE = program("make")
NPM = program("npm")
COMPILER = Component("C compiler", _compiler)
OPENSSL = program("openssl")
PGBOUNCER = program("pgbouncer", ADMINISTRATORS_PATH)
POSTGRES = Component("PostgreSQL", _postgres)
SHELLCHECK = program("shellcheck")
SSHD = program("sshd", ADMINISTRATORS_PATH)
AGENTS = Component("agents' CLIs", _agents, f"{components.COMMAND} --agents")
KUBECTL = Component("kubectl", _kubectl, f"{components.COMMAND} --kubectl")
AXE = Component("axe", _axe, f"{components.COMMAND} --axe")
