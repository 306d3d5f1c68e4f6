"""The command within the test's own process, for the many inputs that it must refuse without starting anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from time import monotonic

import pytest

from runner.cli.main import main
from runner.cli.output import Output
from tests.support.situations import Done, Project, commit

PROMPTLY = 60.0  # seconds for a refusal, on a host that has other things to do

Make = Callable[[Project], object]


def called(*arguments: str) -> Done:
    """Run the command here, with this environment and in this directory."""
    out, err = StringIO(), StringIO()
    return Done(main(arguments, Output(out, err)), out.getvalue(), err.getvalue())


def say(project: Project, *arguments: str | Path) -> Done:
    """Run the command as ``Project.runner`` does, but here; whatever it printed is safe for a terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_HOME", str(project.home / "state"))
        patch.chdir(project.folder)
        said = called(*map(os.fsdecode, arguments))
    assert "Traceback" not in said.err
    odd = {c for c in said.out + said.err if not c.isprintable() and c != "\n"}
    assert not odd, odd
    return said


def refused(project: Project, verb: str, *arguments: str | Path) -> Done:
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
    (path / "README").write_text("hello\n")
    commit(path, "first")
    return path
