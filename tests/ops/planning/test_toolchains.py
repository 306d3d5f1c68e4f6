"""Programs are found where version managers put them, with the directories that hold all that they link to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.ops.planning.toolchains import directories_of, find_toolchain
from tests.support.folder_contents import put


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def write(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """A program of this text."""
    return put(path, text, 0o755)


def link(path: Path, target: str | Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def variables(home: Path, *folders: Path, **more: str) -> dict[str, str]:
    return {"PATH": ":".join([*map(str, folders), "/usr/bin", "/bin"]), "HOME": str(home), **more}


async def test_a_program_of_the_system_needs_nothing(home: Path) -> None:
    found = await find_toolchain("sh", variables(home), home)

    assert (found.program, found.directories, found.environment) == ("/usr/bin/sh", (), {})


async def test_a_program_that_nobody_has_is_none(home: Path) -> None:
    assert await find_toolchain("no-such-program", variables(home), home) is None


@pytest.mark.parametrize(
    "place",
    [".nvm/versions/node/v20.1.0", ".local/share/mise/installs/node/20", ".asdf/installs/nodejs/20.1.0", "miniconda3"],
)
async def test_a_prefix_in_a_home_is_shown_whole(home: Path, place: str) -> None:
    node = write(home / place / "bin" / "node")
    (home / place / "lib").mkdir()

    found = await find_toolchain("node", variables(home, node.parent), home / "repository")

    assert found.directories == (str(home / place),)


@pytest.mark.parametrize("place", [".cargo", ".local", "work", "."])
async def test_of_a_home_s_own_folders_only_the_programs_are_shown(home: Path, place: str) -> None:
    """``~/.cargo`` holds the credentials of a registry beside `bin`."""
    tool = write((home / place).resolve() / "bin" / "tool")

    found = await find_toolchain("tool", variables(home, tool.parent), home / "repository")

    assert found.directories == (str(tool.parent),)


async def test_each_link_on_the_way_to_a_program_is_shown(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "store" / "uv" / "cpython-3.13" / "bin" / "python3.13")
    link(tmp_path / "links" / "bin" / "python3", "../../store/uv/current/bin/python3.13")
    link(tmp_path / "store" / "uv" / "current", "cpython-3.13")

    assert directories_of(str(tmp_path / "links/bin/python3")) == (
        str(tmp_path / "links"),
        str(tmp_path / "store/uv/cpython-3.13"),
    )


async def test_the_interpreter_of_a_script_is_shown_too(home: Path) -> None:
    node = write(home / ".nvm/versions/node/v22/bin/node")
    write(home / ".npm-global/lib/node_modules/tool/cli.js", "#!/usr/bin/env -S node --no-warnings\n")
    tool = link(home / ".npm-global/bin/tool", "../lib/node_modules/tool/cli.js")

    places = directories_of(str(tool), f"{node.parent}:/usr/bin")

    assert str(home / ".nvm/versions/node/v22") in places
    assert str(home / ".npm-global/lib/node_modules") in places


async def test_links_in_a_circle_end(home: Path) -> None:
    link(home / "opt/x/bin/a", "b")
    link(home / "opt/x/bin/b", "a")

    assert directories_of(str(home / "opt/x/bin/a")) == (str(home / "opt/x"),)


@pytest.mark.parametrize(
    "shim",
    [
        '#!/usr/bin/env bash\nset -e\nexec "{manager}" exec "$program" "$@"\n',
        '#!/bin/sh\nexec {manager} exec "node" "$@"\n',
    ],
    ids=["pyenv and its kin", "asdf"],
)
async def test_a_shim_is_the_program_that_its_manager_names(home: Path, shim: str) -> None:
    real = write(home / ".tool/versions/20/bin/node")
    answer = f'#!/bin/sh\n[ "$1 $2" = "which node" ] && [ "$PWD" = "{home}/repository" ] && echo {real}\n'
    manager = write(home / ".tool/libexec/manager", answer)
    front = write(home / ".tool/shims/node", shim.format(manager=manager))
    (home / "repository").mkdir()

    found = await find_toolchain("node", variables(home, front.parent), home / "repository")

    assert (found.program, found.directories) == (str(real), (str(home / ".tool/versions/20"),))


@pytest.mark.parametrize(
    ("manager", "shim"),
    [("mise", "mise"), ("volta", "volta-shim"), ("rustup", "rustup")],
    ids=["mise", "volta", "rustup"],
)
async def test_one_program_under_many_names_is_asked_for_the_real_one(home: Path, manager: str, shim: str) -> None:
    real = write(home / ".versions/1/bin/tool")
    write(home / ".m/bin" / manager, f'#!/bin/sh\n[ "$1 $2" = "which tool" ] && echo {real}\n')
    if shim != manager:
        write(home / ".m/bin" / shim)
    front = link(home / ".shims/tool", home / ".m/bin" / shim)
    (home / "repository").mkdir()

    found = await find_toolchain("tool", variables(home, front.parent), home / "repository")

    assert found.directories == (str(home / ".versions/1"),)


@pytest.mark.parametrize(
    ("answer", "patience"),
    [("echo 'version 3.9 is not installed' >&2\nexit 1", 30.0), ("exec sleep 60", 0.1)],
    ids=["has no such version", "hangs"],
)
async def test_a_manager_that_names_nothing_is_no_program(home: Path, answer: str, patience: float) -> None:
    manager = write(home / ".pyenv/libexec/pyenv", f"#!/bin/sh\n{answer}\n")
    front = write(home / ".pyenv/shims/python3", f'#!/bin/sh\nexec "{manager}" exec python3 "$@"\n')
    (home / "repository").mkdir()
    found = await find_toolchain("python3", variables(home, front.parent), home / "repository", patience=patience)

    assert found is None


async def test_a_manager_cannot_name_a_program_of_the_repository(home: Path) -> None:
    evil = write(home / "repository/evil/bin/node")
    manager = write(home / ".asdf/bin/asdf", f"#!/bin/sh\necho {evil}\n")
    front = write(home / ".asdf/shims/node", f"#!/bin/sh\nexec {manager} exec node\n")

    assert await find_toolchain("node", variables(home, front.parent), home / "repository") is None


async def test_a_virtual_environment_on_the_path_is_left_out(home: Path) -> None:
    """Such as runner's own, which is on the ``PATH`` of whoever activated it and nowhere in a CI."""
    program = write(home / "other/bin/own-tool")
    (home / "other/pyvenv.cfg").touch()

    assert await find_toolchain("own-tool", variables(home, program.parent), home / "repository") is None


async def test_the_modules_of_go_come_with_it(home: Path) -> None:
    go = write(home / "sdk/go1.22/bin/go")
    (home / "go/pkg/mod").mkdir(parents=True)

    found = await find_toolchain("go", variables(home, go.parent), home / "repository")

    assert found.directories == (str(home / "sdk/go1.22"), str(home / "go/pkg/mod"))
    assert found.environment == {"GOMODCACHE": str(home / "go/pkg/mod"), "GOPROXY": "off"}


async def test_the_crates_of_cargo_come_with_it_and_its_credentials_do_not(home: Path) -> None:
    cargo = write(home / ".rustup/toolchains/stable/bin/cargo")
    (home / ".cargo/registry").mkdir(parents=True)
    (home / ".cargo/credentials.toml").write_text("[registry]\n")

    found = await find_toolchain("cargo", variables(home, cargo.parent), home / "repository")

    assert found.directories == (str(home / ".rustup/toolchains/stable"), str(home / ".cargo/registry"))
    assert found.environment == {"CARGO_NET_OFFLINE": "true", "CARGO_HOME": str(home / ".cargo")}


async def test_what_a_workspace_has_of_its_own_is_never_a_toolchain() -> None:
    assert directories_of(os.path.join("/run", "x", "bin", "tool")) == ()
