"""``runner convert`` as a person uses it."""

from __future__ import annotations

import pytest

from tests.support.situations import Project

OLD = """\
apiVersion: runner/v1alpha1
kind: AgentType
metadata: {name: fixer}
spec:
  agent: script          # plays
  script: {files: []}
  enabled: true
  setup_commands: [make]
"""
NEW = """\
apiVersion: runner/v1
kind: AgentType
metadata: {name: fixer}
spec:
  agent: script          # plays
  script: {files: []}
  workspace:
    enabled: true
    setup_commands: [make]
    setup: {on_failure: warn}
"""


@pytest.mark.scenario("BEY-19")
def test_convert_prints_shows_and_writes(project: Project) -> None:
    path = project.write(OLD)

    assert project.runner("convert", str(path)).out == NEW
    assert (
        "-apiVersion: runner/v1alpha1\n+apiVersion: runner/v1\n" in project.runner("convert", "--diff", str(path)).out
    )
    assert path.read_text() == OLD
    assert project.runner("convert", "--write", str(path)).out == f"converted {path}\n"
    assert path.read_text() == NEW
    assert project.runner("convert", "--write", str(path)).err == "nothing to convert\n"
    assert project.runner("validate", str(path)).code == 0


def test_nothing_is_written_when_one_document_cannot_be_converted(project: Project) -> None:
    path = project.write(OLD, OLD.replace("fixer", "other") + "  tools: [read]\n")

    done = project.runner("convert", "--write", str(path))

    assert done.code == 2
    assert f"{path}:18:3" in done.err
    assert path.read_text().count("v1alpha1") == 2
