"""Which version of a CLI there is, without starting it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runner.agents
from runner.core import plugins
from runner.core.npm_package import find_program, installed_version, pinned_version
from runner.ops.host.image import pins

CLIS = ("claude", "codex", "gemini", "goose")
PACKAGE = "@openai/codex"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A toolchain as npm makes it."""
    package = tmp_path / "lib" / "node_modules" / "@openai" / "codex"
    (package / "bin").mkdir(parents=True)
    (package / "bin" / "codex.js").touch(mode=0o755)
    (package / "package.json").write_text(json.dumps({"name": PACKAGE, "version": "0.159.3"}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "codex").symlink_to("../lib/node_modules/@openai/codex/bin/codex.js")
    return tmp_path


def test_the_version_is_that_of_the_package_with_the_program(installed: Path) -> None:
    program = find_program(["/nonexistent", f"{installed}/bin"], "codex")

    assert program == installed / "bin" / "codex"
    assert installed_version(program, PACKAGE) == "0.159.3"
    assert installed_version(program, "@google/gemini-cli") == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 7}', '{"version": "1"}'])
def test_of_a_program_of_no_package_nothing_is_known(installed: Path, text: str) -> None:
    (installed / "lib" / "node_modules" / "@openai" / "codex" / "package.json").write_text(text)

    assert installed_version(installed / "bin" / "codex", PACKAGE) == ""


@pytest.mark.parametrize("name", CLIS)
def test_what_is_tested_is_what_the_image_is_built_with(name: str) -> None:
    assert pinned_version(plugins.load(runner.agents, name).agent.package) == pins()[name]
