"""What is written into an agent's home before its CLI starts: the command that does it, run for real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from msgspec.structs import replace

from runner.ports.agent import AgentSetup
from runner.ports.provider import Paths
from runner.steps.agent.home import furnish

FILES = {".config/cli/settings.json": "100%s \\n 'it' \"is\" $HOME `x`", ".hints": "-n\n", "empty": ""}


def test_files_are_written_as_they_are_for_their_user_only_and_skills_linked(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    paths = replace(Paths(**dict.fromkeys(Paths.__struct_fields__, "/nowhere")), home=str(home), skills="/skills")
    words = furnish(AgentSetup(env={}, files=FILES), paths, ["one", "two"])
    for _ in range(2):  # a later agent step of a run finds what an earlier one had
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

    assert {name: (home / name).read_text() for name in FILES} == FILES
    assert {(home / name).stat().st_mode & 0o777 for name in FILES} == {0o600}
    assert [os.readlink(home / ".claude" / "skills" / name) for name in ("one", "two")] == [
        "/skills/one",
        "/skills/two",
    ]
    assert sorted(os.listdir(home / ".agents" / "skills")) == ["one", "two"]
    assert furnish(AgentSetup(env={}), paths, []) == ()


def test_a_file_that_can_not_be_written_ends_it(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    paths = replace(Paths(**dict.fromkeys(Paths.__struct_fields__, "/nowhere")), home=str(tmp_path))
    words = furnish(AgentSetup(env={}, files={"taken/it": "x", "later": "y"}), paths, ["one"])

    assert subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode != 0
    assert not (tmp_path / "later").exists()
