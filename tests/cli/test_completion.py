"""Completion scripts, typed at in the real shells: what Tab makes of a line is what the shell then runs."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.cli.output import Output
from tests.needs import program

LIMIT = 60.0  # seconds for a shell to say something

# What each shell reads first: our script as the README says to load it, and a `runner` that shows its words.
SHOW = "PS1='ready> '\nrunner() { printf '<%s>\\n' \"$*\"; }\n"
START = {
    "bash": f'eval "$(cat script)"\n{SHOW}',
    "zsh": f'autoload -U compinit\ncompinit -u -D\neval "$(cat script)"\n{SHOW}',
    "fish": "cat script | source\nfunction fish_prompt; printf 'ready> '; end\n"
    "function runner; printf '<%s>\\n' \"$argv\"; end\n",
}
COMMAND = {
    "bash": ["bash", "--noprofile", "--rcfile", "start", "-i"],
    "zsh": ["zsh", "-i"],
    "fish": ["fish", "--private", "--init-command", "source start", "--interactive"],
}


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """An interactive shell in a folder with one manifest file."""
    name: str = request.param
    program(name).require()
    folder = tmp_path_factory.mktemp(name)
    (folder / "house.runner.yaml").touch()
    (folder / "script").write_text(printed("completion", name))
    (folder / ("start" if name != "zsh" else ".zshrc")).write_text(START[name])
    with open_shell(COMMAND[name], folder) as shell:
        yield shell


class Shell:
    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._unread = ""

    def type(self, text: str) -> str:
        """The words that `runner` got when ``text`` and then Return were typed."""
        self.wait("ready> ")
        os.write(self._terminal, f"{text}\n".encode())
        return self.wait(r"<(.*?)>\r?\n")[1]

    def wait(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + LIMIT
        while (found := re.search(pattern, self._unread)) is None:
            readable, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert readable, f"no {pattern!r} in {self._unread!r}"
            self._unread += os.read(self._terminal, 65536).decode(errors="replace")
        self._unread = self._unread[found.end() :]
        return found


@contextmanager
def open_shell(command: list[str], folder: Path) -> Iterator[Shell]:
    ours, theirs = os.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "ZDOTDIR": str(folder), "TERM": "dumb", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield Shell(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def printed(*arguments: str) -> str:
    out = io.StringIO()
    assert main(arguments, Output(out, out)) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("typed", "run"),
    [
        pytest.param("runner pl\t", "plan", id="verb"),
        pytest.param("runner runs sh\t", "runs show", id="verb below a verb"),
        pytest.param("runner plan --sa\t", "plan --save", id="option"),
        pytest.param("runner plan --output j\t", "plan --output json", id="choice of an option"),
        pytest.param("runner completion z\t", "completion zsh", id="choice"),
        pytest.param("runner plan hou\t", "plan house.runner.yaml", id="file"),
        pytest.param("runner plan --save hou\t", "plan --save house.runner.yaml", id="file of an option"),
    ],
)
def test_tab_completes(shell: Shell, typed: str, run: str) -> None:
    assert shell.type(typed).rstrip() == run
