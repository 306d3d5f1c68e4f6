"""Situations for tests that use the command as a person would: manifests in a folder, a home of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from runner.core.model import Outcome
from runner.core.settings import Settings
from runner.events.record import RunRecord
from runner.safefs import trees
from runner.sandbox.mounts import shared_directory
from runner.testing.outside import read, volumes_of
from tests.support import dockerd
from tests.support.forked import FORKS, ROOT

REPO = "repo_source: {type: local, path: repo}"  # of an agent type's workspace, with the fixture `repository`
IDENTITY = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b\n"
DYING = 2.0  # seconds that a busy machine may take for processes that were killed
HEAD = "apiVersion: runner/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"


def document(kind: str, name: str, spec: str) -> str:
    return HEAD.format(kind=kind, name=name) + indent(dedent(spec).strip("\n"), "  ") + "\n"


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The codes of what was refused."""
        return re.findall(r"^error\[(.+?)\]", self.err, re.MULTILINE)


@dataclass
class Project:
    """A folder with manifests, and the state that runs of it leave."""

    folder: Path
    home: Path
    env: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()  # a command that the runner is started by
    user: int | None = None  # who runs it, if not who runs the tests

    @property
    def manifest(self) -> Path:
        return self.folder / "all.runner.yaml"

    def write(self, *documents: str) -> Path:
        self.manifest.write_text("---\n".join(documents))
        return self.manifest

    def add(self, *documents: str) -> Path:
        return self.write(self.manifest.read_text(), *documents)

    def edit(self, old: str, new: str) -> None:
        """Put another text in the place of one in the manifest."""
        text = self.manifest.read_text()
        assert old in text
        self.manifest.write_text(text.replace(old, new))

    def script(
        self,
        script: str,
        *,
        workspace: str = "",
        run: str = "",
        agent: str = "",
        provider: str = "local",
        policy: str | None = None,
    ) -> None:
        """One run `work` of a `script` agent; the extra YAML goes below workspace, run and agent type.

        A container that is of no image is of the tests' own, by their daemon.
        """
        (self.folder / "agent.sh").write_text(dedent(script))
        workspace = dedent(workspace).strip()
        if {"docker", "gvisor"} & {*provider.split(", ")} and "base_image" not in workspace:
            self.env["DOCKER_HOST"] = dockerd.host()
            workspace += f"\nbase_image: {dockerd.IMAGE}"
        spec = f"agent: script\nscript: {{path: agent.sh}}\n{dedent(agent)}\nworkspace:\n"
        spec += indent(f"enabled: true\nproviders: [{provider}]\n{workspace}\n", "  ")
        documents = [document("AgentType", "worker", spec)]
        policies = ""
        if policy is not None:
            documents.append(document("Policy", "house", policy))
            policies = "policy: house\n"
        documents.append(document("IncidentRun", "work", f"agent_type: worker\n{policies}{dedent(run)}"))
        self.write(*documents)

    def worker(self, name: str, script: str, workspace: str = "providers: [local]", more: str = "") -> str:
        """An agent type that plays a script of its name."""
        (self.folder / f"{name}.sh").write_text(script)
        spec = f"agent: script\nscript: {{path: {name}.sh}}\nworkspace: {{enabled: true, {workspace}}}\n{more}"
        return document("AgentType", name, spec)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the command."""
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "RUNNER_HOME": str(self.home / "state"), **self.env}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        words = ["-m", "runner"]
        if self.user is not None:
            words = ["-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.support import forked\n"]
            words[1] += f"forked.run_as({self.user})"
        return subprocess.Popen(
            [*self.within, sys.executable, *words, *arguments],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=self.user is None,  # else it makes its own
        )

    def runner(self, *arguments: str, timeout: float = 240) -> Done:
        if not self.within and not any(name.startswith(("PYTHON", "LC_", "LANG")) for name in self.env):
            return Done(*FORKS.run(arguments, cwd=self.folder, env=self.variables, timeout=timeout, user=self.user))
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Done(process.returncode, out, err)

    def apply(self, *arguments: str) -> tuple[Done, dict[str, Any]]:
        """Apply the folder, and the newest run's record."""
        done = self.runner("apply", str(self.folder), *arguments)
        assert (self.home / "state" / "state.db").exists(), done.err
        return done, self.record()

    def succeed(self, *arguments: str) -> dict[str, Any]:
        """The record of a run that is applied and has to succeed."""
        done, record = self.apply(*arguments)
        assert done.code == 0, done.out + done.err
        return record

    def record(self) -> dict[str, Any]:
        """What is known of the newest run."""
        shown = self.json("runs", "show", "last")
        assert isinstance(shown, dict)
        return shown

    def json(self, *arguments: str) -> Any:
        """What a verb that has to succeed prints as JSON."""
        done = self.runner(*arguments, "--output", "json")
        assert done.code == 0, done.out + done.err
        return json.loads(done.out)

    def events(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory(record) / "events.jsonl").read_text().splitlines()]

    def directory(self, record: RunRecord | dict[str, Any]) -> Path:
        return self.home / "state" / "runs" / (record["id"] if isinstance(record, dict) else record.id)

    def settings(self, **env: str) -> Settings:
        """Those of the command in a poor environment, for tests that call what is behind it."""
        return Settings.from_env({"RUNNER_HOME": str(self.home / "state"), "PATH": "/usr/bin:/bin", **env})

    def logs(self, step: str, stream: str = "stdout") -> str:
        newest = max((self.home / "state" / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
        return (newest / "logs" / f"{step}.{stream}").read_text()


def step(record: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in record["steps"] if s["id"] == name)
    return found


def outcome_of(record: RunRecord, step: str = "agent") -> Outcome:
    outcome = record.steps[step].outcome
    assert outcome is not None
    return outcome


def git(folder: Path, *arguments: str) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        **{f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait for what another process does."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def open_to_all(path: Path) -> None:
    """Let others into a folder of pytest's, which opens its own to their owner only."""
    for folder in (path, *path.parents):
        if folder.stat().st_mode & 0o077 == 0:
            folder.chmod(0o755)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by their names below a folder; those that start with `#!` may be executed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)


def commit(folder: Path, message: str = "change") -> str:
    """Commit all of a work tree, whose repository is made if there is none; the commit's id."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """An empty project; afterwards nothing that runs of it started or mounted may be left on the host."""
    folder, home = tmp_path / "project", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    before = {*pids()}
    yield Project(folder, home)
    deadline = time.monotonic() + DYING
    while (left := leftovers(home, before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for made in (folder, home):  # some tests make trees that are too deep for pytest to remove
        trees.remove(made)
    assert left == []


def leftovers(home: Path, before: Collection[int] = ()) -> list[str]:
    """What a run left behind, seen from outside: processes, mounts, cgroups, and files that are not evidence.

    Not looked at are the processes that were there ``before`` it.
    """
    found = [f"process {pid}: {text}" for pid, text in processes_of(home, before)]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
    found += [f"{device}, a volume's" for device in volumes_of(home)]
    state = home / "state"
    for pattern in ("projects/*/workspaces/*", "sandboxes/*", "volumes/*", "tmp/*"):
        found += [str(path) for path in state.glob(pattern)]
    return found


def pids() -> Iterator[int]:
    return map(int, filter(str.isdigit, os.listdir("/proc")))


def processes_of(home: Path, before: Collection[int] = ()) -> list[tuple[int, str]]:
    """Processes that name a home in their command line or environment, or that see a part of it mounted."""
    # Mounts are named within their file system, which may be that of /tmp or /dev/shm, or a volume.
    place = home.relative_to("/dev/shm" if home.is_relative_to("/dev/shm") else f"/{home.parts[1]}")
    mounted = [f"/{place}/".encode(), f"/{place} ".encode(), *(f"{device} ".encode() for device in volumes_of(home))]
    found = []
    shows: dict[str, bool] = {}  # of each mount namespace: what it has is long, and most processes have the same
    for pid in pids():
        if pid == os.getpid() or pid in before:
            continue
        try:
            words = read(f"/proc/{pid}/cmdline") + read(f"/proc/{pid}/environ")
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in shows:
                shows[namespace] = _shows(read(f"/proc/{pid}/mountinfo"), mounted)
        except OSError:
            continue
        if str(home).encode() in words or shows[namespace]:
            found.append((pid, words.replace(b"\0", b" ").decode(errors="replace")[:200]))
    return found


def _shows(mounts: bytes, places: Sequence[bytes]) -> bool:
    """Whether one of the places is mounted, but for where volumes are for everybody.

    That is also below the old root which any sandbox has for a moment while bubblewrap makes it, and below the copy of
    ``/run`` that a daemon of an ordinary user has.
    """
    if not any(place in mounts for place in places):
        return False
    everybody = re.compile(rf" \S*/{re.escape(shared_directory().name)}/".encode())
    return any(place in line and not everybody.search(line) for line in mounts.splitlines() for place in places)


@pytest.fixture
def host_without_user_namespaces(project: Project) -> Project:
    """A project whose runner finds no user namespaces, as on hosts that forbid them."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    project.within = ("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    return project


@pytest.fixture
def root_without_other_users(project: Project) -> Project:
    """A project whose runner is root of a user namespace that has no user but root."""
    project.within = ("unshare", "--user", "--map-root-user")
    return project


@pytest.fixture
def repository(project: Project) -> Path:
    """A real git repository beside the manifests' folder with one commit of two files."""
    path = project.folder / "repo"
    (path / "src").mkdir(parents=True)
    (path / "README").write_text("hello\n")
    (path / "src" / "app.sh").write_text("echo app\n")
    commit(path, "first")
    return path
