"""Completion scripts, typed at in the real shells: what Tab makes of a line is what the shell then runs."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.cli.completion_names import KINDS
from tests.support.bad_input import called
from tests.support.needs import program
from tests.support.situations import Project, document

DOCUMENTS = [
    document("AgentType", "fixer", "agent: script"),
    document("IncidentRun", "repair", "agent_type: fixer"),
    "apiVersion: runner/v1\nkind: Policy\nmetadata:\n  labels: {a: b}\n  name: house\nspec: {}\n",
]
KUBECONFIG = """
clusters:
- cluster: {server: "https://x"}
  name: eu-cluster
contexts:
- context:
    cluster: eu-cluster
    user: me
  name: prod-eu
- name: stage-eu
  context: {cluster: eu-cluster}
current-context: prod-eu
users:
- name: me
"""
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
    (folder / ".runner").mkdir()
    (folder / ".runner" / "all.yaml").write_text("---\n".join(DOCUMENTS))
    for number, run in enumerate(("3f9caaaaaaaa", "7k3qbbbbbbbb")):
        (folder / "state" / "runs" / run).mkdir(parents=True)
        os.utime(folder / "state" / "runs" / run, (number, number))
    (folder / "state" / "workspaces" / "8961d08c-30bc").mkdir(parents=True)
    (folder / ".kube").mkdir()
    (folder / ".kube" / "config").write_text(KUBECONFIG)
    (folder / "script").write_text(called("completion", name).out)
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
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `runner` is that the script asks
    state = str(folder / "state")
    env = {
        "PATH": path,
        "RUNNER_HOME": state,
        "HOME": str(folder),
        "ZDOTDIR": str(folder),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
    }
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
        pytest.param("runner runs show 3f\t", "runs show 3f9caaaaaaaa", id="run"),
        pytest.param("runner runs logs la\t", "runs logs last", id="last run"),
        pytest.param("runner resume 7\t", "resume 7k3qbbbbbbbb", id="run to resume"),
        pytest.param("runner plan --run rep\t", "plan --run repair", id="run of the manifests"),
        pytest.param("runner policy scan --policy h\t", "policy scan --policy house", id="policy"),
        pytest.param("runner triage --context st\t", "triage --context stage-eu", id="context"),
        pytest.param("runner workspace show 89\t", "workspace show 8961d08c-30bc", id="workspace"),
        pytest.param("runner triage --agent ge\t", "triage --agent gemini", id="agent"),
        pytest.param("runner triage --provider gv\t", "triage --provider gvisor", id="provider"),
        pytest.param("runner schema Inc\t", "schema IncidentRun", id="kind"),
        pytest.param("runner runs list --status tim\t", "runs list --status timed-out", id="status"),
    ],
)
def test_tab_completes(shell: Shell, typed: str, run: str) -> None:
    assert shell.type(typed).rstrip() == run


def ask(kind: str, home: Path, *, at: Path) -> tuple[int, str]:
    env = {"HOME": str(home), "RUNNER_HOME": str(home / "state"), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-m", "runner", "completion", "--names", kind]
    done = subprocess.run(words, cwd=at, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_where_there_is_nothing_nothing_is_completed_and_nothing_said(kind: str, tmp_path: Path) -> None:
    code, names = ask(kind, tmp_path, at=tmp_path)

    assert (code in (0, 1), names) == (True, "last\n" if kind == "runs" else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pools", "projects"])
def test_names_of_the_store_are_completed(kind: str, project: Project) -> None:
    assert project.runner("project", "create", "shop").code == 0

    assert project.runner("completion", "--names", kind).out == ("shop\n" if kind == "projects" else "")


@pytest.mark.parametrize("kind", ["runs", "names", "policies", "contexts", "workspaces"])
def test_what_tab_waits_for_imports_neither_manifests_nor_the_store(kind: str) -> None:
    """A shell is slow with everything else that it waits for; this is as fast as asking for the version."""
    program = "import sys; from runner.cli.main import main; from runner.cli.output import standard; "
    program += f"main(['completion', '--names', '{kind}'], standard()); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    loaded = {name.split(".")[0] for name in done.stderr.split()} | set(done.stderr.split())
    assert not loaded & {"trio", "pydantic", "ruamel", "sqlite3", "shtab", "runner.ops", "runner.store"}
