"""``runner tool`` as a person has it: what it prints, and how it exits."""

from __future__ import annotations

import pytest

from tests.support.situations import Project


@pytest.mark.scenario("CFG-05")
def test_each_tool_says_what_it_found(project: Project) -> None:
    id = project.json("workspace", "create", "--tool", "bash", "--tool", "read", "--tool", "glob", "--tool", "grep")[
        "id"
    ]

    def run(*arguments: str) -> tuple[int, str, str]:
        done = project.runner("tool", arguments[0], id[:8], *arguments[1:])
        return done.code, done.out, done.err.partition("\n")[0]

    assert run("bash", "mkdir src; echo 'a = 1' >src/a.py; head -c 9 /dev/zero >z; pwd; exit 7", "--workdir", ".") == (
        7,
        "/workspace\n",
        "",
    )
    assert run("read", "src/a.py") == (0, "a = 1\n", "")
    assert run("read", "src") == (0, "a.py\n", "")
    assert run("read", "z") == (0, "binary, 9 bytes\n", "")
    assert run("glob", "**/*.py") == (0, "src/a.py\n", "")
    assert run("grep", "^a", "--include", "*.py") == (0, "src/a.py:1:a = 1\n", "")
    assert run("read", "gone") == (6, "", "error[tool.no-file]: there is no `gone`")
    assert run("read", "src/a.py", "--offset", "0")[::2] == (2, "error[cli.usage]: Expected `int` >= 1 - at `$.offset`")
    enabled = "error[tool.not-enabled]: Tool 'edit' is not enabled for this agent type"
    assert run("edit", "src/a.py", "--old", "1", "--new", "2") == (3, "", enabled)
    done = project.runner("workspace", "create", "--tool", "ssh")
    assert (done.code, done.errors) == (2, ["tool.unknown"])
    assert project.runner("workspace", "destroy", id, "--discard").code == 0
