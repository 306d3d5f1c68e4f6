"""The command within the test's own process, for the many inputs that it must refuse without starting anything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from time import monotonic

import pytest

from runner.cli.main import main
from runner.cli.output import Output
from tests.support.situations import Project, git

PROMPTLY = 60.0  # seconds for a refusal, on a host that has other things to do

Make = Callable[[Project], object]


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return re.findall(r"^error\[(.+?)\]", self.err, re.MULTILINE)


def say(project: Project, *arguments: str | Path) -> Said:
    """Run the command as ``Project.runner`` does, but here; whatever it printed is safe for a terminal."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_HOME", str(project.home / "state"))
        patch.chdir(project.folder)
        code = main([os.fsdecode(argument) for argument in arguments], Output(out, err))
    said = Said(code, out.getvalue(), err.getvalue())
    assert "Traceback" not in said.err
    odd = {c for c in said.out + said.err if not c.isprintable() and c != "\n"}
    assert not odd, odd
    return said


def refused(project: Project, verb: str, *arguments: str | Path) -> Said:
    """Run a verb that must refuse: at once, with nothing made."""
    begun = monotonic()
    said = say(project, verb, *arguments)
    assert monotonic() - begun < PROMPTLY
    assert said.errors, said
    assert not (project.home / "state").exists()
    return said


def committed(project: Project) -> Path:
    """A repository `repo` beside the manifests, with one commit."""
    path = project.folder / "repo"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    (path / "README").write_text("hello\n")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "first")
    return path
