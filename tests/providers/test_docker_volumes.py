"""Whole runs in containers of a daemon that sees nothing of this host: an ordinary user's, and one behind a wire."""

from __future__ import annotations

import os
import re
import signal
import subprocess
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
from tests.support.needs import OPENSSL, ROOT, SSHD
from tests.support.providers import VOLUMES, make
from tests.support.remote_dockerd import RemoteDaemon, remote_daemon
from tests.support.situations import REPO, Project, commit, git, leftovers, step, until, write_files
from tests.support.ssh_server import SshServer, ssh_server
from tests.support.unprivileged import OtherDaemon, Podman, RootlessDocker

pytestmark = ROOT.mark  # who starts a daemon, and becomes another user

USER = 65534  # in the group of the daemon's socket, and nothing more
OTHERS: dict[str, type[OtherDaemon]] = {"podman": Podman, "rootless docker": RootlessDocker}


def everywhere() -> pytest.MarkDecorator:
    """Every way to a daemon; each is a part of BEY-21."""
    parts = {"docker-user": "group docker", "docker-remote": "tcp with TLS"}
    kinds = ("root", "docker-user", "docker-remote", "ssh", *OTHERS)
    params = [pytest.param(kind, marks=pytest.mark.scenario("BEY-21", only=parts.get(kind, kind))) for kind in kinds]
    return pytest.mark.parametrize("elsewhere", params, indirect=True)


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


def _as_user(project: Project, daemon: Daemon, user: int) -> None:
    for top in (project.folder, project.home):
        for path in (top, *top.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)
    project.env["DOCKER_HOST"] = daemon.host
    project.user = user


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


@pytest.fixture(scope="module")
def over_ssh(near: Daemon, homes: Path) -> Iterator[SshServer]:
    SSHD.require()
    root = homes / "ssh"
    with ssh_server(root, near, USER) as server:
        server.know_host()
        yield server
    trees.remove(root)


def _daemon(request: pytest.FixtureRequest) -> Daemon:
    if request.param in OTHERS:
        OTHERS[request.param].component.require()
        return dockerd.session_of(OTHERS[request.param])
    found: Daemon = request.getfixturevalue("remote" if request.param == "docker-remote" else "near")
    return found


@pytest.fixture(params=["docker-user", "docker-remote"])
def elsewhere(request: pytest.FixtureRequest, project: Project, homes: Path) -> Iterator[Callable[[], Daemon]]:
    """What lets the project use such a daemon, called once its files are there; afterwards the daemon has nothing."""
    daemon = _daemon(request)
    ssh: SshServer | None = request.getfixturevalue("over_ssh") if request.param == "ssh" else None
    place = Path(tempfile.mkdtemp(dir=homes))
    place.chmod(0o755)
    project.folder, project.home = place / "project", place / "home"
    project.folder.mkdir()
    project.home.mkdir()

    def use() -> Daemon:
        if isinstance(daemon, RemoteDaemon):
            _remotely(project, daemon)
        elif request.param == "root":
            project.env["DOCKER_HOST"] = daemon.host
        elif isinstance(daemon, OtherDaemon):
            _as_user(project, daemon, daemon.user)
        else:
            daemon.root.chmod(0o711)
            os.chown(daemon.socket, 0, USER)
            _as_user(project, daemon, USER)
        if ssh is not None:
            project.env |= {"DOCKER_HOST": ssh.host, "HOME": str(ssh.home)}
            project.within, project.user = ssh.within, None
        return daemon

    before = had_by(daemon)
    yield use
    left = leftovers(project.home)
    trees.remove(place)
    assert left == []
    assert [now - then for now, then in zip(had_by(daemon), before, strict=True)] == [set(), set(), set()]


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
@pytest.mark.scenario("ISO-12", only="elsewhere")
@everywhere()
def test_a_whole_run_works_there_as_anywhere(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    script = """
        test "$(pwd)" = /workspace && cd ../.. && test "$(pwd)" = / && test ! -e "$OUTSIDE" && cd /workspace || exit 1
        test "$(id -u)" != 0 && test -x run.sh && test "$(cat link)" = kept || exit 1
        cat made-by-setup "$HOME/of-setup"
        rm gone; mkdir b; echo new > b/new; chmod +x b/new; ln -s new b/link; echo more >> a/kept
        echo "a report" > /output/report.md
        echo bad > /usr/bin/x || test -e /etc/shadow || echo closed
    """
    setup = "protected_paths: [gone-before/]\n"
    setup += 'setup_commands: ["echo setup > made-by-setup; echo home > ~/of-setup"]'
    verify = "verify: {report: {path: report.md}, files: {required: [b/new]}, commands: [{run: [sh, -c, "
    verify += "'test -x b/new && test ! -e gone && echo built > built'], timeout: 60s}]}"
    script = script.replace("$OUTSIDE", str(project.home))
    write(project, script, workspace=setup, run=f"snapshot: {{message: work}}\n{verify}")
    has_limits = not isinstance(elsewhere(), OtherDaemon)  # on this kernel's control groups

    record = project.succeed()

    (seen,) = [event for event in project.events(record) if event["type"] == "IsolationObserved"]
    assert seen["step"] == "agent"
    assert seen["isolation"]["interfaces"] == ["lo"]
    assert seen["isolation"]["limits"]["memory_bytes"] == (4 << 30 if has_limits else None)
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


@pytest.mark.scenario("LIF-16", only="elsewhere")
@pytest.mark.scenario("LIF-17", only="elsewhere")
def test_limits_hold_there_and_who_exceeds_them_is_told(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    limits = "resource_limits: {memory: 64M, cpu: '0.2', pids: 64}"
    spin = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; cat /sys/fs/cgroup/cpu/cpu.stat /sys/fs/cgroup/cpu.stat"
    write(project, f"{spin}\ntail /dev/zero", workspace=limits)
    elsewhere()

    done, record = project.apply()

    assert done.code == 1
    assert step(record, "agent")["outcome"]["reason"] == "oom"
    (throttled,) = re.findall(r"^nr_throttled (\d+)$", project.logs("agent"), re.MULTILINE)
    assert int(throttled) > 2


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
@pytest.mark.scenario("LIF-10", only="elsewhere")
@pytest.mark.scenario("LIF-11", only="elsewhere")
@pytest.mark.scenario("LIF-12", only="elsewhere")
@pytest.mark.scenario("LIF-15", only="elsewhere")
def test_a_workspace_stops_comes_back_with_its_files_and_goes(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    elsewhere()
    made = project.json("workspace", "create", "--provider", "docker", "--image", dockerd.IMAGE)
    name = made["id"]
    done = project.runner("workspace", "exec", name, "--", "sh", "-c", "echo work > made; echo home > ~/mine")
    assert done.code == 0, done.err

    row = project.json("workspace", "show", name)
    used = row["used"]
    assert used > made["used"]
    assert row["expires"] == used + 30 * 86_400 * 1_000_000
    assert project.runner("workspace", "stop", name).code == 0
    stopped = project.json("workspace", "show", name)
    assert project.runner("workspace", "resume", name).code == 0
    seen = project.runner("workspace", "exec", name, "--", "sh", "-c", "cat made ~/mine")
    gone = project.runner("workspace", "destroy", name)

    assert (stopped["status"], stopped["used"] >= used) == ("stopped", True)
    assert (seen.code, seen.out) == (0, "work\nhome\n")
    assert gone.code == 0, gone.err
    assert name in gone.out
    assert project.runner("workspace", "destroy", name).code == 6


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
    handle = await provider.create(WorkspaceRequest(id="missed", run="run-1", nonce="nonce"))
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


@pytest.mark.parametrize("elsewhere", ["docker-remote", "ssh"], indirect=True)
def test_a_docker_context_names_such_a_daemon(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    write(project, "echo work > made")
    elsewhere()
    host = {"host": project.env.pop("DOCKER_HOST")}
    if folder := project.env.pop("DOCKER_CERT_PATH", None):
        host |= {name: f"{folder}/{name}.pem" for name in ("ca", "cert", "key")}
    project.env |= {"DOCKER_CONFIG": str(project.home / "docker"), "DOCKER_TLS_VERIFY": ""}
    words = ["create", "far", "--docker", ",".join(f"{key}={value}" for key, value in host.items())]
    for arguments in (words, ["use", "far"]):
        command = [*project.within, "docker", "context", *arguments]
        subprocess.run(command, check=True, env=project.variables, capture_output=True)

    done = project.runner("plan", str(project.folder))

    assert done.code == 0, done.err
    assert project.runner("doctor", "--settings").out.count("docker context far") == 1


@pytest.mark.parametrize("elsewhere", ["ssh"], indirect=True)
def test_an_ssh_host_that_is_not_known_is_refused_and_nobody_is_asked(
    project: Project, elsewhere: Callable[[], Daemon], over_ssh: SshServer
) -> None:
    write(project, "echo work > made")
    elsewhere()
    (over_ssh.home / ".ssh" / "known_hosts").unlink()
    try:
        done = project.runner("plan", str(project.folder))
    finally:
        over_ssh.know_host()

    assert done.code == 4
    assert "Host key verification failed" in done.err
    assert f"ssh -o BatchMode=yes {over_ssh.host} docker version" in done.err


@pytest.mark.nightly
@pytest.mark.parametrize("elsewhere", ["ssh"], indirect=True)
def test_a_connection_that_breaks_in_a_run_is_told_and_its_work_is_saved(
    project: Project, elsewhere: Callable[[], Daemon], over_ssh: SshServer
) -> None:
    write(project, "echo work > made; echo ready; sleep 600", run="snapshot: {message: work}")
    elsewhere()
    running = project.start("apply", str(project.folder))
    state = project.home / "state"
    try:
        until(lambda: any("ready" in log.read_text() for log in state.glob("runs/*/logs/agent.stdout")), 60)
        over_ssh.break_connections()
    finally:
        out, err = running.communicate(timeout=60)

    assert running.returncode == 4, out + err
    assert "the guest of workspace" in step(project.record(), "agent")["outcome"]["message"]
    assert "+work" in project.runner("runs", "patch", "last").out
