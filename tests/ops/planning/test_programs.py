"""Programs are found where people have them, and shown with what they link to, and with nothing private."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.core.errors import UsageError
from runner.ops.planning.programs import find_program, linked_directories, search_path
from runner.ports.provider import SandboxSpec
from tests.ops.planning.test_toolchains import link, write


def shown(home: Path, name: str = "claude", **variables: str) -> list[str]:
    """The directories of a program, those in the home directory from there."""
    folders = search_path({"HOME": str(home), **variables})
    program = find_program(name, folders, home)
    return [place.removeprefix(f"{home}/") for place in linked_directories(program, folders, home)]


def npm(prefix: Path) -> None:
    """As npm lays out what is installed for all of a person's projects."""
    write(prefix / "lib/node_modules/@anthropic-ai/claude-code/cli.js", "#!/usr/bin/env node\n")
    link(prefix / "bin/claude", "../lib/node_modules/@anthropic-ai/claude-code/cli.js")


def test_npm_with_a_prefix_of_ones_own_and_the_node_of_a_version_manager(tmp_path: Path) -> None:
    npm(tmp_path / ".npm-global")
    for version in ("v9.1.0", "v20.2.0"):
        write(tmp_path / f".nvm/versions/node/{version}/bin/node", "\x7fELF")

    found = shown(tmp_path, PATH="")

    assert found == [".npm-global/bin", ".npm-global/lib/node_modules", ".nvm/versions/node/v20.2.0/bin"]


def test_npm_with_a_prefix_that_its_settings_name(tmp_path: Path) -> None:
    npm(tmp_path / "tools/npm")
    write(tmp_path / "tools/npm/bin/node", "\x7fELF")
    (tmp_path / ".npmrc").write_text("//r.example/:_authToken=x\nprefix=${HOME}/tools/npm\n")

    assert shown(tmp_path, PATH="") == ["tools/npm/bin", "tools/npm/lib/node_modules"]


@pytest.mark.parametrize(
    "prefix",
    [
        ".nvm/versions/node/v20.2.0",
        ".local/share/fnm/node-versions/v20.2.0/installation",
        ".asdf/installs/nodejs/20.2.0",
        ".local/share/mise/installs/node/20.2.0",
    ],
)
def test_a_version_manager_that_is_not_on_the_path(tmp_path: Path, prefix: str) -> None:
    npm(tmp_path / prefix)
    write(tmp_path / prefix / "bin/node", "\x7fELF")

    assert shown(tmp_path, PATH="") == [f"{prefix}/bin", f"{prefix}/lib/node_modules"]


def test_of_volta_the_program_and_not_its_shim(tmp_path: Path) -> None:
    write(tmp_path / ".volta/bin/volta-shim")
    link(tmp_path / ".volta/bin/claude", "volta-shim")
    package = ".volta/tools/image/packages/@anthropic-ai/claude-code"
    npm(tmp_path / package)
    write(tmp_path / ".volta/tools/image/node/20.2.0/bin/node", "\x7fELF")

    found = shown(tmp_path, PATH=str(tmp_path / ".volta/bin"))

    assert found == [f"{package}/bin", f"{package}/lib/node_modules", ".volta/tools/image/node/20.2.0/bin"]


def test_the_agents_own_installer(tmp_path: Path) -> None:
    write(tmp_path / ".local/share/claude/versions/2.1.0", "\x7fELF")
    link(tmp_path / ".local/bin/claude", str(tmp_path / ".local/share/claude/versions/2.1.0"))
    write(tmp_path / ".local/lib/python3.11/site-packages/x.py")

    assert shown(tmp_path, PATH="") == [".local/bin", ".local/share/claude/versions"]


def test_the_agents_own_folder_without_its_credentials(tmp_path: Path) -> None:
    write(tmp_path / ".claude/.credentials.json", "{}")
    write(tmp_path / ".claude/local/node_modules/@anthropic-ai/claude-code/cli.js", "\x7fELF")
    link(tmp_path / ".claude/local/node_modules/.bin/claude", "../@anthropic-ai/claude-code/cli.js")

    found = shown(tmp_path, PATH="")

    assert found == [".claude/local/node_modules/.bin", ".claude/local/node_modules"]


def test_homebrew_comes_with_its_libraries(tmp_path: Path) -> None:
    brew = tmp_path / "brew/.linuxbrew"
    write(brew / "Cellar/claude/2/bin/claude", "\x7fELF")
    link(brew / "bin/claude", "../Cellar/claude/2/bin/claude")

    assert shown(tmp_path, PATH=str(brew / "bin")) == ["brew/.linuxbrew/bin", "brew/.linuxbrew"]


def test_a_program_of_a_virtual_environment_comes_with_its_python(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venvs/a")], check=True)
    tool = write(tmp_path / "venvs/a/bin/tool", f"#!{tmp_path}/venvs/a/bin/python\nprint(6 * 7)\n")
    link(tmp_path / ".local/bin/tool", str(tool))

    found = shown(tmp_path, "tool", PATH="")

    base = Path(os.path.realpath(sys.executable)).parent.parent
    assert found[:2] == [".local/bin", "venvs/a"]
    assert str(base) in found or str(base) == "/usr"


@pytest.mark.parametrize("place", [".", ".claude", ".config/tools", ".local/share"])
def test_a_program_beside_private_files_is_not_shown(tmp_path: Path, place: str) -> None:
    write(tmp_path / place / "claude", "\x7fELF")
    link(tmp_path / ".local/bin/claude", os.path.normpath(tmp_path / place / "claude"))

    assert find_program("claude", search_path({"HOME": str(tmp_path), "PATH": ""}), tmp_path) is None


def test_a_program_without_its_interpreter_names_it(tmp_path: Path) -> None:
    write(tmp_path / "bin/claude", "#!/usr/bin/env -S noode --x\n")

    with pytest.raises(UsageError, match=r"`noode`, which runs `.*`, is not on this host"):
        shown(tmp_path, PATH="")


def test_a_link_through_a_link_of_a_directory_would_be_broken_so_another_is_taken(tmp_path: Path) -> None:
    npm(tmp_path / "one")
    (tmp_path / "one/lib").rename(tmp_path / "elsewhere")
    link(tmp_path / "one/lib", "../elsewhere")
    npm(tmp_path / ".npm-global")
    write(tmp_path / "bin/node", "\x7fELF")

    assert shown(tmp_path, PATH=str(tmp_path / "one/bin"))[0] == ".npm-global/bin"


def test_links_in_a_circle_are_no_program(tmp_path: Path) -> None:
    link(tmp_path / "bin/claude", "claude")

    assert find_program("claude", search_path({"HOME": str(tmp_path), "PATH": ""}), tmp_path) is None


def test_a_toolchain_that_is_a_directory_of_programs_is_on_the_path_itself() -> None:
    spec = SandboxSpec(toolchains=("/a", "/b/bin", "/c/node_modules/.bin/"))

    assert spec.environment["PATH"].startswith("/a/bin:/b/bin:/c/node_modules/.bin:/usr/local/bin")


def test_what_every_workspace_has_needs_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path, "sh", PATH="/usr/bin") == []
