"""Whole runs in containers of a daemon that sees nothing of this host: an ordinary user's, and one behind a wire."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.core.errors import WorkspaceLost
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.safefs import trees
from runner.sandbox.volume_docker import Mirror
from runner.testing.place import GRACE
from tests.support import dockerd
from tests.support.dockerd import Daemon
from tests.support.needs import OPENSSL, ROOT
from tests.support.providers import VOLUMES, make
from tests.support.remote_dockerd import RemoteDaemon, remote_daemon
from tests.support.situations import REPO, Project, commit, git, leftovers, step, until, write_files

pytestmark = ROOT.mark  # who starts a daemon, and becomes another user

USER = 65534  # in the group of the daemon's socket, and nothing more


@pytest.fixture(scope="module")
def homes() -> Iterator[Path]:
    """A place for projects: pytest's own is closed to other users."""
    place = Path(tempfile.mkdtemp(prefix="runner-homes-", dir="/tmp"))
    place.chmod(0o755)
    yield place
    place.rmdir()


@pytest.fixture(scope="module")
def remote(homes: Path) -> Iterator[RemoteDaemon]:
    dockerd.DOCKER.require()
    OPENSSL.require()
    with remote_daemon(dockerd.root(f"remote-{os.getpid()}"), homes) as daemon:
        yield daemon


def _remotely(project: Project, daemon: RemoteDaemon) -> None:
    certificates = project.home / "certificates"
    certificates.mkdir()
    for file in daemon.certificates.iterdir():
        (certificates / file.name).write_bytes(file.read_bytes())
    project.env |= {"DOCKER_HOST": daemon.host, "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(certificates)}


def _by_group(project: Project, daemon: Daemon) -> None:
    daemon.root.chmod(0o711)
    os.chown(daemon.socket, 0, USER)
    for top in (project.folder, project.home):
        for path in (top, *top.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
    project.env["DOCKER_HOST"] = daemon.host
    project.user = USER


@pytest.fixture(scope="module")
def near() -> Iterator[Daemon]:
    dockerd.DOCKER.require()
    daemon = Daemon(dockerd.root(f"user-{os.getpid()}"))
    try:
        daemon.start()
        daemon.make_image()
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture(params=["docker-user", "docker-remote"])
def elsewhere(request: pytest.FixtureRequest, project: Project, homes: Path) -> Iterator[Callable[[], Daemon]]:
    """What lets the project use such a daemon, called once its files are there; afterwards the daemon has nothing."""
    daemon = request.getfixturevalue("remote" if request.param == "docker-remote" else "near")
    place = Path(tempfile.mkdtemp(dir=homes))
    place.chmod(0o755)
    project.folder, project.home = place / "project", place / "home"
    project.folder.mkdir()
    project.home.mkdir()

    def use() -> Daemon:
        if isinstance(daemon, RemoteDaemon):
            _remotely(project, daemon)
        else:
            _by_group(project, daemon)
        return daemon

    before = had_by(daemon)
    yield use
    left = leftovers(project.home)
    trees.remove(place)
    assert left == []
    assert had_by(daemon) == before


def had_by(daemon: Daemon) -> tuple[set[str], set[str], set[str]]:
    """The containers, volumes and images that carry the runner's labels."""
    ours = {"label": "runner.product=runner"}
    with daemon.client() as client:
        return (
            {container["Id"] for container in client.containers(all=True, filters=ours)},
            {volume["Name"] for volume in client.volumes(filters=ours)["Volumes"] or ()},
            {image["Id"] for image in client.images(filters=ours)},
        )


def write(project: Project, script: str, *, workspace: str = "", run: str = "") -> None:
    """A run on a small repository, by a script."""
    write_files(project.folder / "repo", {"a/kept": "kept", "gone": "gone", "run.sh": "#!/bin/sh\n"})
    (project.folder / "repo" / "link").symlink_to("a/kept")
    commit(project.folder / "repo")
    image = f"base_image: {dockerd.IMAGE}"
    project.script(script, provider="docker", workspace=f"{REPO}\n{image}\n{workspace}", run=run)


@pytest.mark.scenario("ISO-04", only="elsewhere")
@pytest.mark.scenario("ISO-09", only="elsewhere")
@pytest.mark.scenario("BEY-05", only="elsewhere")
def test_a_whole_run_works_there_as_anywhere(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    script = """
        test "$(pwd)" = /workspace && cd ../.. && test "$(pwd)" = / && test ! -e "$OUTSIDE" && cd /workspace || exit 1
        test "$(id -u)" != 0 && test -x run.sh && test "$(cat link)" = kept || exit 1
        cat made-by-setup "$HOME/of-setup"
        rm gone; mkdir b; echo new > b/new; chmod +x b/new; ln -s new b/link; echo more >> a/kept
        echo "a report" > /output/report.md
        echo bad > /usr/bin/x || test -e /etc/shadow || echo closed
    """
    setup = 'setup_commands: ["echo setup > made-by-setup; echo home > ~/of-setup"]'
    verify = "verify: {report: {path: report.md}, files: {required: [b/new]}, commands: [{run: [sh, -c, "
    verify += "'test -x b/new && test ! -e gone && echo built > built'], timeout: 60s}]}"
    script = script.replace("$OUTSIDE", str(project.home))
    write(project, script, workspace=setup, run=f"snapshot: {{message: work}}\n{verify}")
    elsewhere()

    record = project.succeed()

    (seen,) = [event for event in project.events(record) if event["type"] == "IsolationObserved"]
    assert seen["step"] == "agent"
    assert seen["isolation"]["interfaces"] == ["lo"]
    assert seen["isolation"]["limits"]["memory_bytes"] == 4 << 30
    assert seen["isolation"]["capabilities"] == "none"

    assert project.logs("agent").splitlines() == ["setup", "home", "closed"]
    repository = project.folder / "repo"
    git(repository, "-c", "safe.directory=*", "apply", "--cached", str(project.directory(record) / "work.patch"))
    tree = git(repository, "-c", "safe.directory=*", "ls-files", "-s").splitlines()
    assert {line.split("\t")[1]: line.split()[0] for line in tree} == {
        "a/kept": "100644",
        "b/link": "120000",
        "b/new": "100755",
        "link": "120000",
        "made-by-setup": "100644",
        "run.sh": "100755",
    }
    assert (project.directory(record) / "output" / "report.md").read_text() == "a report\n"


def test_a_protected_path_that_was_changed_is_not_published_and_the_plan_says_how(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    write(project, "echo mine > a/kept", workspace="protected_paths: [a/]", run="snapshot: {message: work}")
    elsewhere()

    plan = project.runner("plan", str(project.folder))
    done, record = project.apply()

    assert "protected_paths a/: checked before anything is published, not prevented, with docker" in plan.out
    assert done.code == 3, done.out + done.err
    assert record["snapshot"] is None
    assert [(v["path"], v["rule"]) for v in record["violations"]] == [("a", "protected-changed")]


@pytest.mark.scenario("LIF-17", only="elsewhere")
def test_limits_hold_there_and_who_exceeds_them_is_told(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    limits = "resource_limits: {memory: 64M, cpu: '0.5', pids: 64}"
    write(project, "tail /dev/zero", workspace=limits)
    elsewhere()

    done, record = project.apply()

    assert done.code == 1
    assert step(record, "agent")["outcome"]["reason"] == "oom"


@pytest.mark.parametrize("elsewhere", ["docker-remote"], indirect=True)
def test_work_of_a_killed_runner_is_fetched_and_saved(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    write(project, "echo work > made; echo ready; sleep 600", run="snapshot: {message: work}")
    elsewhere()
    running = project.start("apply", str(project.folder))
    state = project.home / "state"
    try:
        until(lambda: any("ready" in log.read_text() for log in state.glob("runs/*/logs/agent.stdout")), 60)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    done = project.runner("recover")

    assert done.code == 0, done.out + done.err
    assert "+work" in project.runner("runs", "patch", "last").out


@pytest.mark.scenario("LIF-08", only="elsewhere")
@pytest.mark.scenario("LIF-11", only="elsewhere")
@pytest.mark.scenario("LIF-12", only="elsewhere")
def test_a_workspace_stops_comes_back_with_its_files_and_goes(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    elsewhere()
    name = project.json("workspace", "create", "--provider", "docker", "--image", dockerd.IMAGE)["id"]
    done = project.runner("workspace", "exec", name, "--", "sh", "-c", "echo work > made; echo home > ~/mine")
    assert done.code == 0, done.err

    used = project.json("workspace", "show", name)["used"]
    assert project.runner("workspace", "stop", name).code == 0
    stopped = project.json("workspace", "show", name)
    assert project.runner("workspace", "resume", name).code == 0
    seen = project.runner("workspace", "exec", name, "--", "sh", "-c", "cat made ~/mine")
    gone = project.runner("workspace", "destroy", name)

    assert (stopped["status"], stopped["used"] >= used) == ("stopped", True)
    assert (seen.code, seen.out) == (0, "work\nhome\n")
    assert gone.code == 0, gone.err
    assert name in gone.out


def test_what_was_fetched_outlives_a_volume_that_somebody_removed(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    write(project, "", workspace="")
    daemon = elsewhere()
    made = project.json("workspace", "create", "--provider", "docker", "--image", dockerd.IMAGE)
    name = made["id"]
    done = project.runner("workspace", "exec", name, "--", "sh", "-c", "echo work > made")
    assert done.code == 0, done.err
    with daemon.client() as client:
        for volume in client.volumes(filters={"label": f"runner.workspace={name}"})["Volumes"]:
            client.remove_volume(volume["Name"])

    done = project.runner("workspace", "exec", name, "--", "cat", "made")

    assert (done.code, done.out) == (0, "work\n")  # it had been fetched
    assert project.runner("workspace", "destroy", "--discard", name).code == 0


async def test_a_volume_that_was_removed_before_it_was_fetched_is_missed_once(tmp_path: Path) -> None:
    provider = make(VOLUMES, tmp_path, GRACE)
    handle = await provider.create(WorkspaceRequest("missed", "run-1", "nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace:
        await workspace.run(["sh", "-c", "echo fetched > made"])
    tree = f"runner-{handle.id}-tree"
    Mirror(handle).daemon_is_ahead([tree])  # as when the runner is killed
    with dockerd.session().client() as client:
        client.remove_volume(tree)

    with pytest.raises(WorkspaceLost, match=f"somebody removed volume `{tree}`"):
        await provider.retrieve(handle)
    await provider.retrieve(handle)

    assert (handle.tree / "made").read_text() == "fetched\n"
    await provider.destroy(handle)


def test_a_daemon_that_does_not_answer_is_named_in_time(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    write(project, "echo work > made")
    daemon = elsewhere()
    daemon.signal(signal.SIGSTOP)
    try:
        done = project.runner("plan", str(project.folder), timeout=60)
    finally:
        daemon.signal(signal.SIGCONT)

    assert done.code == 4
    assert f"the docker daemon at `{daemon.host}` has not answered within 10s" in done.err
