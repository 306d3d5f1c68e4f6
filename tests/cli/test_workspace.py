"""``runner workspace`` and ``runner lease`` as a person has them: output, exit codes, signals, and runners that die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main
from runner.cli.output import Output
from runner.safefs.trees import can_chown
from tests.support import dockerd
from tests.support.folder_contents import everything
from tests.support.git_servers import https
from tests.support.needs import MEMORY
from tests.support.situations import Done, Project, git, leftovers, processes_of, until

# A holder whose lease is short, as no person's ever is.
SHORT = """
import sys, trio
from runner.cli.streams import descriptor_streams
from runner.ops.workspaces.exec import CommandCancellation, execute
from runner.ops.workspaces.workspace_lease import open_workspace_env
from runner.core.errors import RunnerError
from runner.core.settings import current

async def whole():
    async with open_workspace_env(current(), lease_seconds=float(sys.argv[2])) as env:
        argv = ["sh", "-c", sys.argv[3]]
        return await execute(env, sys.argv[1], argv, descriptor_streams(0, 1, 2), CommandCancellation())

try:
    code = trio.run(whole)
except RunnerError as error:
    print(f"error[{error.code}]", file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


Run = Callable[..., Done]


@pytest.fixture
def runner(project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command in this process, which costs a tenth of one of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_HOME", str(project.home / "state"))

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        code = main(arguments, Output(sys.stdout, sys.stderr))
        said = capfd.readouterr()
        return Done(code, said.out, said.err)

    return run


def run_inside(runner: Run, id: str, *argv: str) -> Done:
    """A command in a workspace; one word is a script."""
    return runner("workspace", "exec", id, "--", *(argv if len(argv) > 1 else ("sh", "-c", *argv)))


def start_inside(project: Project, id: str, script: str) -> subprocess.Popen[str]:
    """A script in a workspace, which has said `begun`."""
    return wait_begun(project.start("workspace", "exec", id, "--", "sh", "-c", script))


def create(runner: Run, *arguments: str) -> str:
    return str(read_json(runner, "workspace", "create", *arguments)["id"])


def read_json(runner: Run, *arguments: str) -> Any:
    done = runner(*arguments, "--output", "json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture
def docked(runner: Run, project: Project, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command where docker is the default provider, with an image for what is made."""
    project.env |= {"DOCKER_HOST": dockerd.host()}
    monkeypatch.setenv("DOCKER_HOST", dockerd.host())
    monkeypatch.setenv("WORKSPACE_PROVIDERS", "docker")

    def run(*arguments: str) -> Done:
        return runner(*arguments, *(("--image", dockerd.IMAGE) if "create" in arguments else ()))

    return run


@pytest.fixture
def theirs(project: Project) -> Path:
    """A directory that the user has."""
    folder = project.home / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def run_on(request: pytest.FixtureRequest, runner: Run, monkeypatch: pytest.MonkeyPatch, provider: str) -> Run:
    """The command where this provider is the default."""
    on: Run = runner if provider == "local" else request.getfixturevalue("docked")
    monkeypatch.setenv("WORKSPACE_PROVIDERS", provider)
    return on


def wait_begun(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_the_life_of_a_workspace(project: Project, theirs: Path, runner: Run) -> None:
    (theirs / "kept").write_text("theirs\n")
    id = create(runner, str(theirs), "--persistent")
    before = everything(theirs)

    done = run_inside(runner, id[:8], "cat kept; echo bad >&2; exit 3")
    assert (done.code, done.out, done.err) == (3, "theirs\n", "bad\n")
    row = read_json(runner, "workspace", "show", id)
    assert (row["status"], row["expires"], row["path"], row["lease"]) == ("ready", None, str(theirs), None)
    assert read_json(runner, "workspace", "find", str(theirs / "kept"))["id"] == id
    assert [row["id"] for row in read_json(runner, "workspace", "list")] == [id]
    assert "ready" in runner("workspace", "list").out
    assert "status     stopped" in runner("workspace", "stop", id).out
    assert run_inside(runner, id, "true").code == 5
    assert runner("workspace", "resume", id).code == 0
    assert runner("lease", "show", id).out == f"workspace {id} is free\n"
    done = runner("workspace", "delete", id)
    assert (done.code, done.out) == (0, f"workspace {id} is gone, and {theirs} stays as it is\n")
    assert everything(theirs) == before
    for verb in (("workspace", "show"), ("workspace", "destroy"), ("lease", "show")):
        assert runner(*verb, id).code == 6
    assert runner("workspace", "find", str(theirs)).code == 6


def test_a_workspace_has_the_defaults_and_says_which_of_them_do_not_hold(theirs: Path, runner: Run) -> None:
    """Among others' files no limit on the disk holds."""
    for arguments, limited in ((), True), ((str(theirs),), False):
        done = runner("workspace", "create", *arguments)
        assert done.code == 0, done.err
        (row,) = read_json(runner, "workspace", "list")

        assert row["id"] in done.out
        assert (row["provider"], row["status"]) == ("local", "ready")
        kept, rest = row["limits"] or {}, row["not_enforced"] or {}
        wanted = {name: kept.get(name) or rest[name] for name in ("cpus", "memory_bytes", "disk_bytes")}
        assert wanted == {"cpus": 2.0, "memory_bytes": 4 << 30, "disk_bytes": 10 << 30}
        assert (kept.get("disk_bytes") is not None) == (limited and can_chown())
        told = re.search(r"^ +not enforced: .*disk 10G.* by local$", done.out, re.MULTILINE)
        assert bool(told) == (kept.get("disk_bytes") is None)
        assert runner("workspace", "delete", row["id"]).code == 0


HAS = """
cd /sys/fs/cgroup
if test -e cgroup.controllers; then cat memory.max cpu.max
else cat memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us; fi
python3 -SIc 'import os; f = os.statvfs("/workspace"); print(f.f_blocks * f.f_frsize)'
"""


@pytest.mark.scenario("LIF-01", only="docker")
@pytest.mark.scenario("LIF-08", only="docker")
@pytest.mark.scenario("LIF-10", only="docker")
@pytest.mark.scenario("LIF-11", only="docker")
@pytest.mark.scenario("LIF-12", only="docker")
@pytest.mark.scenario("LIF-15", only="docker")
def test_the_life_of_a_workspace_in_containers(project: Project, docked: Run) -> None:
    id = create(docked)
    row = read_json(docked, "workspace", "show", id)
    assert (row["provider"], row["status"], row["image"]) == ("docker", "ready", dockerd.image_id())
    assert row["limits"] == {"cpus": 2.0, "memory_bytes": 4 << 30, "disk_bytes": 10 << 30, "pids": 512}
    assert row["not_enforced"] is None

    done = run_inside(docked, id, HAS)
    memory, quota, period, disk = map(int, done.out.split())
    assert (memory, quota / period, disk) == (4 << 30, 2.0, pytest.approx(10 << 30, rel=0.01))

    script = "test -e /.dockerenv && echo contained; echo work > made; echo mine > $HOME/note; exit 3"
    done = run_inside(docked, id, script)
    assert (done.code, done.out) == (3, "contained\n"), done.err
    used = read_json(docked, "workspace", "show", id)
    assert used["used"] > row["used"]
    assert used["expires"] == used["used"] + 30 * 86_400 * 1_000_000
    stopped = read_json(docked, "workspace", "stop", id)
    assert stopped["status"] == "stopped"
    assert stopped["used"] > used["used"]
    assert run_inside(docked, id, "true").code == 5
    assert read_json(docked, "workspace", "resume", id)["status"] == "ready"
    assert run_inside(docked, id, "cat made $HOME/note").out == "work\nmine\n"

    assert docked("workspace", "delete", id).code == 2, "there is unsaved work"
    docked("workspace", "stop", id)
    removed = read_json(docked, "workspace", "destroy", id)
    assert removed["saved_work"]["changed"] == 1
    patch = project.home / "state" / "saved" / id / "work.patch"
    assert (removed["saved"], "+work" in patch.read_text()) == (str(patch.parent), True)
    assert read_json(docked, "workspace", "list") == []
    assert dockerd.containers(id) == []
    assert docked("workspace", "destroy", id).code == 6


@pytest.mark.slow
@pytest.mark.scenario("LIF-08", only="gvisor")
@pytest.mark.scenario("LIF-10", only="gvisor")
@pytest.mark.scenario("LIF-11", only="gvisor")
@pytest.mark.scenario("LIF-12", only="gvisor")
@pytest.mark.scenario("LIF-15", only="gvisor")
@dockerd.GVISOR.mark
def test_the_life_of_a_workspace_with_a_kernel_of_its_own(
    project: Project, docked: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKSPACE_PROVIDERS", "gvisor")
    id = create(docked)
    row = read_json(docked, "workspace", "show", id)
    assert (row["provider"], row["status"], row["image"]) == ("gvisor", "ready", dockerd.image_id())

    done = run_inside(docked, id, "echo work > made; cat /proc/version; exit 3")
    assert done.code == 3, done.err
    assert done.out != Path("/proc/version").read_text()
    used = read_json(docked, "workspace", "show", id)
    assert used["used"] > row["used"]
    assert used["expires"] == used["used"] + 30 * 86_400 * 1_000_000
    stopped = read_json(docked, "workspace", "stop", id)
    assert stopped["status"] == "stopped"
    assert stopped["used"] > used["used"]
    assert run_inside(docked, id, "true").code == 5
    assert read_json(docked, "workspace", "resume", id)["status"] == "ready"
    assert run_inside(docked, id, "cat", "made").out == "work\n"

    assert read_json(docked, "workspace", "destroy", id)["saved_work"]["changed"] == 1
    assert (read_json(docked, "workspace", "list"), dockerd.containers(id)) == ([], [])
    assert docked("workspace", "destroy", id).code == 6


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(("--provider", "docker"), 4, "name one with --image", id="docker without an image"),
        pytest.param(
            ("--provider", "docker", "--image", "127.0.0.1:9/gone:7"),
            4,
            "[provider.registry-unreachable]",
            id="no image",
        ),
        pytest.param(("--provider", "docker", "--image", ""), 2, "`` is not the name of an image", id="an empty name"),
        pytest.param(("--provider", "docker", "--image", "Gone"), 2, "write a name such as", id="no name of an image"),
        pytest.param(("--provider", "local", "--image", "gone:7"), 4, "`local`: it has no images", id="local"),
    ],
)
def test_an_image_that_cannot_be_had_is_said_before_anything_is_made(
    runner: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", dockerd.host())
    done = runner("workspace", "create", *arguments)

    assert (done.code, words in done.err) == (code, True), done.err
    assert read_json(runner, "workspace", "list") == []


@pytest.mark.scenario("WSM-03")
def test_a_workspace_from_a_url_is_shallow_and_follows_its_remote(
    project: Project, runner: Run, repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "served").mkdir()
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    git(tmp_path / "served", "clone", "-q", "--bare", str(repository), "repo.git")
    with https(tmp_path / "served", tmp_path) as server:
        project.env |= server.env
        id = create(project.runner, "--url", f"{server.url}/repo.git")
    script = "git rev-parse --abbrev-ref @{u}; git remote get-url origin; git rev-list --count HEAD; git rev-parse HEAD"

    done = run_inside(runner, id, f"{script}; git status --short; echo x >> README")

    head = git(repository, "rev-parse", "HEAD")
    assert done.out.split("\n") == ["origin/main", f"{server.url}/repo.git", "1", head, ""], done.err
    row = read_json(runner, "workspace", "show", id)
    assert (row["base"], row["branch"], row["url"]) == (head, "main", f"{server.url}/repo.git")
    done = runner("workspace", "destroy", id)
    patch = project.home / "state" / "saved" / id / "work.patch"
    assert (done.code, str(patch.parent) in done.out) == (0, True)
    git(repository, "apply", str(patch))
    assert (repository / "README").read_text() == "hello\nx\n"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        pytest.param(("exec", "zzz", "--", "true"), 6, "store.unknown-workspace", id="unknown"),
        pytest.param(("exec", "zzz"), 2, "cli.usage", id="no command"),
        pytest.param(("create", "gone"), 2, "workspace.directory", id="no directory"),
        pytest.param(("create", "--provider", "docke"), 2, "plugin.unknown", id="no provider"),
        pytest.param(("create", "--project", "shop"), 6, "store.unknown-project", id="no project"),
        pytest.param(("create", "--url", "http://host/x"), 2, "git.url", id="no URL that is allowed"),
    ],
)
def test_what_is_wrong_is_said_with_its_code(runner: Run, arguments: tuple[str, ...], code: int, error: str) -> None:
    done = runner("workspace", *arguments)

    assert (done.code, done.out) == (code, "")
    assert f"error[{error}]" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_ends_the_command_with_its_grace(project: Project, runner: Run, number: signal.Signals) -> None:
    id = create(runner)
    script = "trap 'echo ending; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    process = start_inside(project, id, script)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None

    process.send_signal(number)

    assert process.communicate(timeout=60)[0] == "ending\n"
    assert process.returncode == 130
    assert read_json(runner, "lease", "list") == []
    assert runner("workspace", "delete", id).code == 0


@pytest.mark.nightly
def test_a_second_signal_ends_a_command_that_ignores_the_first_at_once(project: Project, runner: Run) -> None:
    id = create(runner)
    stubborn = "trap '' TERM; echo begun; while :; do sleep 0.05; done"
    process = start_inside(project, id, stubborn)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    start = time.monotonic()

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert time.monotonic() - start < 9, "the grace is ten seconds"
    assert runner("workspace", "delete", id).code == 0


@pytest.mark.scenario("WSM-11")
def test_a_killed_exec_leaves_nothing_running_and_the_next_takes_over(project: Project, runner: Run) -> None:
    id = create(runner)
    process = start_inside(project, id, "echo begun; setsid sleep 1000")
    (lease,) = read_json(runner, "lease", "list")
    assert (lease["holder"], lease["state"]) == (f"exec {process.pid}", "live")
    assert runner("workspace", "delete", id).code == 5
    done = runner("lease", "break", id)
    assert (done.code, f"kills all that `exec {process.pid}`" in done.err) == (2, True)
    process.kill()
    process.communicate()
    until(lambda: processes_of(project.home) == [])

    assert "dead" in runner("lease", "list").out
    done = run_inside(runner, id, "echo", "mine")

    assert (done.code, done.out) == (0, "mine\n")
    assert "warning[lease.taken-over]" in done.err
    assert runner("workspace", "destroy", id).code == 0


@pytest.mark.scenario("WSM-14")
def test_whoever_asks_about_a_workspace_sees_who_has_it_and_nobody_else_writes(
    project: Project, theirs: Path, runner: Run
) -> None:
    used, free = create(runner, str(theirs)), create(runner)
    process = start_inside(project, used, "echo begun; sleep 1000")
    holder = f"exec {process.pid}"

    listed = {row["id"]: row["lease"] for row in read_json(runner, "workspace", "list")}
    texts = [runner("workspace", *words).out for words in (["list"], ["show", used], ["find", str(theirs)])]

    assert listed[free] is None
    (lease,) = read_json(runner, "lease", "list")
    assert (lease["holder"], lease["state"]) == (holder, "live")
    for seen in (
        listed[used],
        *(read_json(runner, "workspace", *w)["lease"] for w in (["show", used], ["find", str(theirs)])),
    ):
        assert seen == lease
    assert f"{holder}, live" in texts[0]
    assert all(f"lease      {holder}, live, until " in text for text in texts[1:])
    for verb in (["stop", used], ["delete", used], ["exec", used, "--", "true"]):
        done = runner("workspace", *verb)
        assert (done.code, holder in done.err) == (5, True), verb
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert [row["lease"] for row in read_json(runner, "workspace", "list")] == [None, None]
    assert runner("workspace", "delete", used).code == runner("workspace", "delete", free).code == 0


@pytest.mark.scenario("WSM-07")
def test_each_git_operation_of_the_document_is_had_in_a_workspace(project: Project, runner: Run) -> None:
    id = create(runner)
    who = ("-c", "user.name=somebody", "-c", "user.email=s@example.org")

    def run(*argv: str) -> str:
        done = run_inside(runner, id, *argv)
        assert done.code == 0, done.err
        return done.out.strip()

    assert run("git", "rev-parse", "--is-inside-work-tree") == "true"  # isGitRepo
    run("sh", "-c", "echo one > file")
    assert run("git", "status", "--porcelain") == "?? file"  # hasUncommittedChanges
    run("git", "add", "-A")  # stageAll
    assert run("git", "status", "--porcelain") == "A  file"
    run("git", *who, "commit", "-qm", "first")
    first = run("git", "rev-parse", "HEAD")  # getCurrentSha
    assert (len(first), run("git", "status", "--porcelain")) == (40, "")
    run("git", "checkout", "-qb", "topic")  # createBranch
    run("sh", "-c", "echo two > file")
    run("git", *who, "commit", "-qam", "second")
    assert "-one\n+two" in run("git", "diff", first, "topic")  # getDiff
    run("git", "checkout", "-q", "main")  # checkout
    assert (run("cat", "file"), run("git", "rev-parse", "HEAD")) == ("one", first)
    again = "git clone -q . /tmp/clone && git init -q /tmp/new && git -C /tmp/clone rev-parse HEAD"
    assert run("sh", "-c", again) == first  # cloneRepo, initRepo
    removed = read_json(runner, "workspace", "destroy", id)
    assert removed["saved_work"]["changed"] == 1


@MEMORY.mark
@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("local", marks=pytest.mark.scenario("LIF-17", only="local")),
        pytest.param("docker", marks=pytest.mark.scenario("LIF-17", only="docker")),
    ],
)
def test_memory_over_the_limit_is_said_and_logged_though_only_a_child_was_killed(
    project: Project, run_on: Run, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    runner = run_on
    monkeypatch.setenv("WORKSPACE_DEFAULT_MEMORY", "64M")
    id = create(runner)

    own = run_inside(runner, id, "tail", "/dev/zero")
    child = run_inside(runner, id, "tail /dev/zero; tail /dev/zero; echo alive")

    assert (own.code, child.code, child.out) == (137, 0, "alive\n")
    assert "warning[workspace.out-of-memory]: the command was killed: out of memory" in own.err
    assert "2 processes of the command were killed: out of memory" in child.err
    journal = (project.home / "state" / "workspaces" / id / "events.jsonl").read_text().splitlines()
    logged = [event for event in map(json.loads, journal) if event["type"] == "OomKilled"]
    assert [(event["step"], event["count"]) for event in logged] == [("exec", 1), ("exec", 2)]
    assert run_inside(runner, id, "true").code == 0
    assert runner("workspace", "destroy", id).code == 0


OBEDIENT = "trap 'echo ending >> log; exit 0' TERM; echo begun; while :; do sleep 0.05; done"


def by_provider(scenario: str, *gvisor: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """On each of three, as the part of a scenario that it shows."""
    more = {"gvisor": gvisor}
    marks = {name: [pytest.mark.scenario(scenario, only=name), *more.get(name, ())] for name in PROVIDERS}
    return pytest.mark.parametrize("provider", [pytest.param(name, marks=marks[name]) for name in PROVIDERS])


PROVIDERS = ("local", "docker", "gvisor")


@by_provider("LIF-09", pytest.mark.nightly)
def test_destroying_ends_a_command_that_runs_and_saves_what_it_did_last(
    project: Project, run_on: Run, provider: str
) -> None:
    id = create(run_on)
    process = start_inside(project, id, OBEDIENT)
    assert provider == "local" or len(dockerd.containers(id)) == 1

    done = run_on("workspace", "destroy", id)

    assert (done.code, done.err) == (0, "")
    assert provider == "local" or dockerd.containers(id) == []
    assert "+ending" in (project.home / "state" / "saved" / id / "work.patch").read_text()
    process.communicate(timeout=60)
    assert process.returncode == 130


STUBBORN = """
trap 'read now rest < /proc/uptime; echo "asked at $now" >> made' TERM
echo begun
while :; do read now rest < /proc/uptime; echo "lived at $now" >> beats; sleep 0.05; done
"""


def seconds_between_asking_and_the_end(project: Project, id: str) -> float:
    """Of ``STUBBORN`` in a workspace that was destroyed."""
    patch = (project.home / "state" / "saved" / id / "work.patch").read_text()
    asked, lived = (float(re.findall(rf"^\+{word} at (.*)$", patch, re.M)[-1]) for word in ("asked", "lived"))
    return lived - asked


@pytest.mark.slow
@by_provider("LIF-09", dockerd.GVISOR.mark)
def test_destroying_asks_a_command_waits_ten_seconds_and_then_forces_it(
    project: Project, run_on: Run, provider: str
) -> None:
    id = create(run_on)
    process = start_inside(project, id, STUBBORN)

    done = run_on("workspace", "destroy", id)

    assert (done.code, done.err) == (0, "")
    assert 9 < seconds_between_asking_and_the_end(project, id) < 13
    assert read_json(run_on, "workspace", "list") == []
    process.communicate(timeout=60)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fixture", "adopted"),
    [
        pytest.param("runner", False, marks=pytest.mark.scenario("LIF-09", only="local"), id="local"),
        pytest.param("runner", True, id="local in place"),
        pytest.param("docked", False, marks=pytest.mark.scenario("LIF-09", only="docker"), id="docker"),
    ],
)
def test_destroying_takes_a_workspace_from_who_cannot_end_its_command(
    project: Project, theirs: Path, request: pytest.FixtureRequest, fixture: str, adopted: bool
) -> None:
    """Nothing of the command runs while its work is saved, and who had it can write nothing afterwards."""
    runner: Run = request.getfixturevalue(fixture)
    id = create(runner, *([str(theirs)] if adopted else []))
    sleeper = start_inside(project, id, "echo work > made; echo begun; sleep 99")
    sleeper.send_signal(signal.SIGSTOP)
    start = time.monotonic()

    done = runner("workspace", "destroy", id)

    assert (done.code, "did not end when it was asked to" in done.err) == (0, True), done.err
    assert time.monotonic() - start < 60
    assert (project.home / "state" / "saved" / id / "work.patch").exists() is not adopted
    assert read_json(runner, "workspace", "list") == []
    sleeper.send_signal(signal.SIGCONT)
    assert "error[lease.lost]" in sleeper.communicate(timeout=60)[1]
    assert sleeper.returncode == 5


@pytest.mark.scenario("WSM-11")
@pytest.mark.parametrize("adopted", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "sleeps"])
def test_who_lives_past_the_end_of_his_lease_has_it_until_it_is_broken(
    project: Project, theirs: Path, runner: Run, adopted: bool, dies: bool
) -> None:
    """What he ran is dead before the next one begins, and if he wakes then he finds the lease another's."""
    id = create(runner, *([str(theirs)] if adopted else []))
    words = [sys.executable, "-c", SHORT, id, "3", "echo begun; while :; do echo alive >> beat; sleep 0.05; done"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    sleeper = wait_begun(subprocess.Popen(words, env=project.variables, text=True, **pipes))  # type: ignore[call-overload]
    sleeper.send_signal(signal.SIGSTOP)
    assert run_inside(runner, id, "true").code == 5
    until(lambda: read_json(runner, "lease", "list")[0]["state"] == "expired")
    refused = run_inside(runner, id, "true")
    assert refused.code == 5
    assert f"runner lease break {id} --yes" in refused.err
    if dies:
        sleeper.kill()
        sleeper.communicate()
    else:
        assert runner("lease", "break", id, "--yes").code == 0

    done = run_inside(runner, id, "wc -c < beat; sleep 0.5; wc -c < beat")

    before, after = done.out.split()
    assert (done.code, before) == (0, after), "nothing of the sleeper's ran meanwhile"
    assert ("whose time was over" in done.err) is dies
    if not dies:
        sleeper.send_signal(signal.SIGCONT)
        assert "error[lease.lost]" in sleeper.communicate(timeout=60)[1]
        assert sleeper.returncode == 5
    assert runner("workspace", "destroy", id).code == 0


@pytest.mark.nightly
def test_an_ordinary_user_has_workspaces_as_well(root_without_other_users: Project, theirs: Path) -> None:
    project = root_without_other_users
    id = create(project.runner, str(theirs))

    done = run_inside(project.runner, id, "id -u; echo work > made; rm -rf .git || true")

    assert (done.code, done.out) == (0, "1000\n")
    assert (theirs / "made").stat().st_uid == theirs.stat().st_uid
    assert (theirs / ".git" / "HEAD").exists()
    assert project.runner("workspace", "delete", id).code == 0
    assert leftovers(project.home) == []


def test_gc_and_recover_speak_of_workspaces(project: Project, runner: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKSPACE_TTL", "1s")
    project.env["WORKSPACE_TTL"] = "1s"
    id = create(runner)
    process = start_inside(project, id, "echo work > made; echo begun; sleep 1000")
    process.kill()
    process.communicate()
    done = runner("recover")
    assert (done.code, done.out) == (0, f"workspace {id} was left ready, and is ready now\n")
    assert runner("recover").out == "nothing to recover\n"
    time.sleep(1)

    done = runner("gc")

    assert f"removed  workspace {id}" in done.out
    assert str(project.home / "state" / "saved" / id) in done.out
    assert read_json(runner, "workspace", "list") == []


@pytest.mark.parametrize("verb", [["show"], ["exec"], ["destroy"], ["delete"]], ids=" ".join)
def test_an_empty_id_is_that_of_no_workspace(project: Project, runner: Run, verb: list[str]) -> None:
    """Regression: it was the beginning of the only one's, so that an unset variable destroyed that."""
    id = create(runner)

    done = runner("workspace", *verb, "", *(["--", "true"] if verb == ["exec"] else []))

    assert (done.code, "store.unknown-workspace" in done.err) == (6, True)
    assert read_json(runner, "workspace", "show", id)["status"] == "ready"
    runner("workspace", "destroy", id)


@pytest.mark.parametrize("verb", ["create", "find"])
def test_an_empty_path_and_links_in_a_circle_name_no_directory(project: Project, runner: Run, verb: str) -> None:
    """Regression: the current directory was adopted, and a circle was a bug in runner."""
    (project.home / "loop").symlink_to("loop")

    assert runner("workspace", verb, "").code == 2
    assert runner("workspace", verb, str(project.home / "loop")).code in (2, 6)
    assert read_json(runner, "workspace", "list") == []


def test_a_directory_whose_name_is_no_text_is_a_workspace(project: Project, runner: Run) -> None:
    """Regression: the list of mounts was read as text, so that one odd name on a host stopped every sandbox."""
    odd = os.fsdecode(os.fsencode(project.home) + b"/b\xff")
    os.mkdir(odd)
    id = create(runner, odd)

    assert run_inside(runner, id, "true").code == 0

    runner("workspace", "delete", id)
