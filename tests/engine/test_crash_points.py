"""A runner that is killed anywhere loses nothing and, once recovered, leaves nothing: looked at from outside.

Each append of a whole run is a place to die, before it, half-way through it and after it, on a fake and on a real
sandbox; and so is each append of the recovery.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from runner.safefs import trees
from runner.testing.outside import groups
from tests.support import dockerd
from tests.support.quick_folder import quick_folder
from tests.support.situations import git, leftovers

PROVIDERS = {
    "fake": "[process]",
    "local": "[local]",
    "chain": "[local, process]",
    "docker": f"[docker]\n    base_image: {dockerd.IMAGE}",
    "gvisor": f"[gvisor]\n    base_image: {dockerd.IMAGE}",
}
GVISOR = [dockerd.GVISOR.mark, pytest.mark.scenario("BEY-10", only="gvisor")]
POINTS = ("before", "torn", "after")
KILLED = -signal.SIGKILL

WHOLE = """
apiVersion: runner/v1
kind: AgentType
metadata: {name: worker}
spec:
  agent: script
  script: {path: agent.sh}
  workspace:
    enabled: true
    providers: [process]
    repo_source: {type: local, path: repo}
    setup_commands: [["true"]]
  post_hooks: [["true"]]
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {name: work}
spec:
  agent_type: worker
  verify: {commands: [{run: "true"}]}
"""


@dataclass
class Crashing:
    """The program ``crashing`` over one project, and homes for its runs."""

    process: subprocess.Popen[str]
    provider: str
    folder: Path
    numbers: Iterator[int]
    daemon: dockerd.Daemon | None = None
    counted: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # effects of the last one, if it was to die at one

    def home(self) -> Path:
        home = self.folder / f"home-{next(self.numbers)}"
        home.mkdir()
        os.chown(home, self.folder.stat().st_uid, -1)
        return home

    def ask(self, what: str, home: Path, **where: object) -> tuple[int, int]:
        """How an ``apply`` or ``recover`` ended, and how many commits it began."""
        request = {"what": what, "home": str(home), "provider": self.provider, **where}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        self.calls = answer["calls"]
        return answer["code"], answer["commits"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with quick_folder(tmp_path_factory.mktemp("crashing")) as folder:
        yield folder


@pytest.fixture(scope="module", params=["fake", "local"])
def crashing(request: pytest.FixtureRequest, quick: Path) -> Iterator[Crashing]:
    daemon = dockerd.session() if request.param in ("docker", "gvisor") else None
    with open_crashing(request.param, quick, daemon) as opened:
        yield opened


@contextmanager
def open_crashing(
    provider: str,
    quick: Path,
    daemon: dockerd.Daemon | None = None,
    env: Mapping[str, str] | None = None,
    user: int = 0,
) -> Iterator[Crashing]:
    """The program over a project of its own, whose runs are a ``user``'s; ``env`` is how it reaches the daemon."""
    if daemon:
        env = {"DOCKER_HOST": daemon.host, **(env or {})}
    folder = Path(tempfile.mkdtemp(prefix=f"{provider}-", dir=quick))
    folder.chmod(0o755)
    repository = folder / "project" / "repo"
    repository.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    (repository / "README").write_text("hello\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "first")
    (folder / "project" / "all.runner.yaml").write_text(WHOLE.replace("[process]", PROVIDERS[provider]))
    (folder / "project" / "agent.sh").write_text("echo work > made\n")
    if user:
        trees.chown_tree(folder, user)
    command = [sys.executable, "-m", "tests.support.crashing", str(folder / "project"), str(user)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, **(env or {})}
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield Crashing(process=process, provider=provider, folder=folder, numbers=count(1), daemon=daemon)
        process.stdin.close()


def assert_whole(home: Path, recovered: int) -> None:
    """A home after recovery: each run ended once, its work is with the user, and nothing of it is on the host."""
    assert recovered == 0
    assert leftovers(home) == []
    with closing(sqlite3.connect(home / "state" / "state.db")) as store:
        runs = {run for (run,) in store.execute("SELECT id FROM runs")}
        assert store.execute("SELECT count(*) FROM runs WHERE ended IS NULL").fetchone() == (0,)
        assert store.execute("SELECT count(*) FROM agent_workspaces").fetchone() == (0,)
        assert store.execute("SELECT * FROM leases").fetchall() == []
        events = list(store.execute("SELECT run, type, body FROM events ORDER BY run, seq"))
    assert {path.name for path in (home / "state" / "runs").glob("*")} == runs
    assert not groups_of(runs)
    for run in runs:
        assert_ended(home, run, [(kind, json.loads(body)) for of, kind, body in events if of == run])


def assert_ended(home: Path, run: str, events: list[tuple[str, dict[str, Any]]]) -> None:
    kinds = [kind for kind, _ in events]
    directory = home / "state" / "runs" / run
    assert kinds.count("RunEnded") == 1
    ended = json.loads((directory / "run.json").read_text())
    assert ended["status"] == events[kinds.index("RunEnded")][1]["outcome"]["status"]
    assert ended["left_behind"] == []
    assert [json.loads(line)["type"] for line in (directory / "events.jsonl").read_text().splitlines()] == kinds
    open_steps = {body["step"] for kind, body in events if kind == "StepStarted"}
    assert open_steps == {body["step"] for kind, body in events if kind == "StepEnded" and body["step"] in open_steps}
    assert len([1 for kind, body in events if kind == "StepStarted" and body["step"] == "agent"]) <= 1
    agents = [body["outcome"]["status"] for kind, body in events if kind == "StepEnded" and body["step"] == "agent"]
    if agents == ["succeeded"] or (home / "witness").exists():
        assert "+work" in (directory / "work.patch").read_text()


def groups_of(runs: set[str]) -> list[str]:
    """The control groups of their workspaces."""
    return [group for group in groups() if any(f"/runner-{run}" in group for run in runs)]


def commits(crashing: Crashing, until: str = "RunEnded") -> int:
    """How many appends an undisturbed run makes, each with a time of its own, ``until`` an event's beginning."""
    if until not in crashing.counted:
        crashing.counted[until] = _count(crashing, until)
    return crashing.counted[until]


def _count(crashing: Crashing, until: str) -> int:
    home = crashing.home()
    code, _ = crashing.ask("apply", home)
    assert code == 0
    assert_whole(home, 0)
    (run,) = (home / "state" / "runs").iterdir()
    lines = (run / "events.jsonl").read_text().splitlines()
    shutil.rmtree(home)
    last = next(i for i, line in enumerate(lines) if until in line)
    return len({json.loads(line)["at"] for line in lines[: last + 1]})


AGENT_ENDED = '"type": "StepEnded", "step": "agent"'


def kill_and_recover(crashing: Crashing, point: str, at: int, *recoveries: tuple[str, int]) -> bool:
    """Whether the run was killed there, and each recovery as well; then everything is recovered and looked at."""
    home = crashing.home()
    reached = crashing.ask("apply", home, point=point, at=at)[0] == KILLED
    for inner, number in recoveries:
        reached &= crashing.ask("recover", home, point=inner, at=number)[0] == KILLED
    assert_whole(home, crashing.ask("recover", home)[0])
    if crashing.daemon:
        assert_nothing_of_docker(home, crashing.daemon)
    shutil.rmtree(home)
    return reached


def assert_nothing_of_docker(home: Path, daemon: dockerd.Daemon) -> None:
    runs = {path.name for path in home.glob("state/runs/*")}
    ours = {"label": "runner.product=runner"}
    with daemon.client() as client:
        found = [*client.containers(all=True, filters=ours), *client.images(filters=ours)]
        found += client.volumes(filters=ours)["Volumes"] or ()
        assert [each for each in found if each["Labels"]["runner.run"] in runs] == []
        assert dockerd.volumes(client) == []
    files = [file.read_text() for file in Path("/sys/block").glob("loop*/loop/backing_file") if file.exists()]
    assert [file for file in files if str(home) in file] == []
    handed = Path("/run/runner-docker").glob("*")
    assert [place for place in handed if place.name.rpartition("-")[0] in runs] == []


@pytest.mark.slow
@pytest.mark.scenario("BEY-10", only="local")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_a_run_that_is_killed_at_any_append_is_recovered_whole(
    crashing: Crashing, point: str, all_of_them: bool
) -> None:
    """By day every third append of the real run is the last at one point or another, of the fake's every twelfth."""
    stride = 1 if all_of_them else 9 if crashing.provider == "local" else 36
    for at in range(1, commits(crashing) + 1)[POINTS.index(point) * stride // 3 :: stride]:
        assert kill_and_recover(crashing, point, at), at


@pytest.mark.nightly
@pytest.mark.parametrize("crashing", ["chain"], indirect=True)
def test_a_run_that_is_killed_while_it_falls_back_is_recovered_whole(crashing: Crashing) -> None:
    total = commits(crashing)
    for point in POINTS:
        for at in range(1, total + 1):
            assert kill_and_recover(crashing, point, at), at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crashing", "stride"),
    [
        pytest.param("docker", 15, marks=pytest.mark.scenario("BEY-10", only="docker"), id="docker"),
        pytest.param("docker", 1, marks=pytest.mark.nightly, id="docker, all"),
        pytest.param("gvisor", 18, marks=GVISOR, id="gvisor"),
        pytest.param("gvisor", 1, marks=[*GVISOR, pytest.mark.nightly], id="gvisor, all"),
    ],
    indirect=["crashing"],
)
def test_a_run_in_containers_that_is_killed_anywhere_is_recovered_whole(crashing: Crashing, stride: int) -> None:
    """By day some appends, before, in or after it; by night each of them in each way."""
    for number, at in enumerate(range(1, commits(crashing) + 1, stride)):
        for point in POINTS if stride == 1 else POINTS[number % 3 :][:1]:
            assert kill_and_recover(crashing, point, at), (point, at)


@pytest.mark.slow
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_a_recovery_that_is_killed_at_any_append_is_done_by_the_next(crashing: Crashing, all_of_them: bool) -> None:
    stride = 1 if all_of_them else {"fake": 40, "local": 80}[crashing.provider]
    ended = commits(crashing, AGENT_ENDED)
    for point in POINTS:
        number = 1
        while kill_and_recover(crashing, "after", ended, (point, number)):
            number += stride
        assert number > stride


@pytest.mark.slow
@pytest.mark.parametrize("crashing", ["local"], indirect=True)
def test_recoveries_at_once_do_it_once(crashing: Crashing) -> None:
    ended = commits(crashing, AGENT_ENDED)
    home = crashing.home()
    assert crashing.ask("apply", home, point="after", at=ended)[0] == KILLED

    several = [recover_command(home) for _ in range(4)]

    assert [process.communicate()[0] != "" and process.returncode for process in several] == [0] * 4
    assert_whole(home, 0)
    assert crashing.ask("recover", home) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("crashing", ["fake"], indirect=True)
def test_what_could_not_be_removed_is_named_and_done_by_a_later_recovery(crashing: Crashing) -> None:
    """The command knows no provider `fake`: to it, that is one which cannot be reached any more."""
    ended = commits(crashing, AGENT_ENDED)
    home = crashing.home()
    assert crashing.ask("apply", home, point="after", at=ended)[0] == KILLED

    out, _ = (first := recover_command(home)).communicate()

    assert first.returncode == 7
    assert "LEFT BEHIND  workspace " in out
    assert crashing.ask("recover", home)[0] == 0
    assert leftovers(home) == []
    (run,) = (home / "state" / "runs").iterdir()
    assert (run / "work.patch").exists()
    assert json.loads((run / "run.json").read_text())["left_behind"] == []
    assert (run / "events.jsonl").read_text().count("RunEnded") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("crashing", "stride"),
    [
        pytest.param("fake", 2, id="fake"),
        pytest.param("local", 5, id="local"),
    ],
    indirect=["crashing"],
)
def test_a_resumed_run_that_is_killed_anywhere_is_resumed_again_and_its_agent_not(
    crashing: Crashing, stride: int
) -> None:
    verifying = commits(crashing, '"type": "StepStarted", "step": "verify"')
    for point in POINTS:
        at, reached = 1, True
        while reached:
            home = crashing.home()
            assert crashing.ask("apply", home, point="after", at=verifying)[0] == KILLED
            assert crashing.ask("recover", home)[0] == 0
            reached = crashing.ask("resume", home, run="last", point=point, at=at)[0] == KILLED
            if reached:
                assert crashing.ask("recover", home)[0] == 0
                assert crashing.ask("resume", home, run="last")[0] == 0
            assert_resumed(home)
            shutil.rmtree(home)
            at += stride
        assert at > stride + 1


def assert_resumed(home: Path) -> None:
    """Of all runs, one performed the agent, and the last one has its work."""
    assert leftovers(home) == []
    with closing(sqlite3.connect(home / "state" / "state.db")) as store:
        events = [(kind, json.loads(body)) for kind, body in store.execute("SELECT type, body FROM events")]
        (last,) = store.execute("SELECT id FROM runs WHERE status = 'succeeded'").fetchone()
    started, reused = (
        [body for kind, body in events if kind == name and body["step"] == "agent"]
        for name in ("StepStarted", "StepReused")
    )
    assert len(started) == len(reused) + 1
    assert "+work" in (home / "state" / "runs" / last / "work.patch").read_text()


def recover_command(home: Path) -> subprocess.Popen[str]:
    env = {"PATH": os.environ["PATH"], "RUNNER_HOME": str(home / "state")}
    command = [sys.executable, "-m", "runner", "recover"]
    return subprocess.Popen(command, env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("stride", [40, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_a_write_that_fails_loses_and_doubles_no_end(
    crashing: Crashing, fault: str, lasting: bool, stride: int
) -> None:
    until = {"until": 1_000} if lasting else {}
    for point in ("torn", "after") if fault == "EIO" else ("torn",):
        for at in range(1 + lasting, commits(crashing) + 1, stride):
            home = crashing.home()
            code, _ = crashing.ask("apply", home, point=point, at=at, fault=fault, **until)
            assert code in (0, 4)
            crashing.ask("recover", home, point=point, at=1, fault=fault)
            assert_whole(home, crashing.ask("recover", home)[0])
            shutil.rmtree(home)


@pytest.mark.nightly
def test_a_thousand_random_kills_leave_nothing(crashing: Crashing) -> None:
    seeded = random.Random(crashing.provider)
    total = commits(crashing)

    for _ in range(500):
        recoveries = [(seeded.choice(POINTS), seeded.randint(1, 8)) for _ in range(seeded.randint(0, 2))]
        kill_and_recover(crashing, seeded.choice(POINTS), seeded.randint(1, total), *recoveries)
