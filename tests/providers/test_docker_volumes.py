"""Whole runs in containers of a daemon that sees nothing of this host: an ordinary user's, and one behind a wire."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from inspect import cleandoc
from pathlib import Path

import pytest

from runner.core.errors import WorkspaceLost
from runner.ports.provider import DiskUse, SandboxSpec, WorkspaceRequest
from runner.runtime.disk_watch import size_of
from runner.safefs import trees
from runner.sandbox.mirrored import Mirror
from runner.sandbox.shared_volumes import PROJECT_VOLUME
from runner.testing.place import GRACE
from tests.cli import test_network, test_network_credentials
from tests.cli.test_network import ELSEWHERE, PROGRAM, THERE
from tests.cli.test_workspace import STUBBORN, seconds_between_asking_and_the_end, start_inside
from tests.engine.test_crash_points import POINTS, commits, kill_and_recover, open_crashing
from tests.support import dockerd
from tests.support.dockerd import Daemon
from tests.support.needs import OPENSSL, ROOT, SSHD
from tests.support.providers import VOLUMES, make
from tests.support.remote_dockerd import RemoteDaemon, remote_daemon
from tests.support.situations import REPO, Project, commit, document, git, leftovers, step, until, write_files
from tests.support.ssh_server import SshServer, ssh_server
from tests.support.unprivileged import OtherDaemon, Podman, RootlessDocker

pytestmark = ROOT.mark  # who starts a daemon, and becomes another user
port = test_network.port  # of a server on this host
certificate = test_network_credentials.certificate
secure_port = test_network_credentials.port  # of one with TLS

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


def as_member(project: Project, daemon: Daemon) -> None:
    """Let a user in the group of the daemon's socket have the project."""
    daemon.root.chmod(0o711)
    os.chown(daemon.socket, 0, USER)
    _as_user(project, daemon, USER)


def settle(project: Project, homes: Path) -> Path:
    """Put the project where other users find it, and return that place."""
    place = Path(tempfile.mkdtemp(dir=homes))
    place.chmod(0o755)
    project.folder, project.home = place / "project", place / "home"
    project.folder.mkdir()
    project.home.mkdir()
    return place


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
    place = settle(project, homes)

    def use() -> Daemon:
        if isinstance(daemon, RemoteDaemon):
            _remotely(project, daemon)
        elif request.param == "root":
            project.env["DOCKER_HOST"] = daemon.host
        elif isinstance(daemon, OtherDaemon):
            _as_user(project, daemon, daemon.user)
        else:
            as_member(project, daemon)
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
    daemon = elsewhere()
    has_limits = not isinstance(daemon, OtherDaemon)  # on this kernel's control groups

    record = project.succeed()
    if isinstance(daemon, Podman):
        known = "known to be open: user-namespace (podman's system call filter allows new user namespaces)"
        assert known in project.runner("doctor").out

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


@pytest.mark.scenario("ISO-10", only="elsewhere")
@pytest.mark.scenario("ISO-11", only="elsewhere")
def test_protected_paths_are_read_only_in_place_and_the_rest_is_writable(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    script = """
        echo mine > a/kept || echo refused
        mv a b || rm -r a || echo "it stays"
        echo mine > missing || echo "nor made"
        mkdir rest && echo work > rest/made
    """
    write(project, script, workspace="protected_paths: [a/kept, missing]", run="snapshot: {message: work}")
    elsewhere()

    plan = project.runner("plan", str(project.folder))
    record = project.succeed()

    assert "not prevented" not in plan.out
    assert "Read-only file system" in project.logs("agent", "stderr")
    assert project.logs("agent").splitlines() == ["refused", "it stays", "nor made"]
    assert {"/workspace/a/kept", "/workspace/missing"} <= {*record["observed"]["read_only"]}
    patch = (project.directory(record) / "work.patch").read_text()
    assert "rest/made" in patch
    assert "a/kept" not in patch
    assert "missing" not in patch


@pytest.mark.scenario("ISO-05", only="elsewhere")
@pytest.mark.scenario("ISO-13", only="elsewhere")
def test_without_isolation_the_project_is_seen_whole_and_nothing_in_it_is_protected(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    script = """
        pwd; ls /workspace; cat /workspace/notes && echo more >> /workspace/notes && echo made > ../../made
        rm /workspace/gone; rmdir ../../workspaces/* || echo "it stays"; echo mine > a/kept
    """
    write(project, script, run="project: shop\nsnapshot: {message: work}")
    project.add(document("Project", "shop", "protected_paths: [a/kept]"))
    shop = project.home / "state" / "projects" / "shop"
    write_files(shop, {"notes": "some\n", "gone": ""})
    elsewhere()

    record = project.succeed()

    place = f"/workspace/workspaces/{record['id']}-1"
    assert project.logs("agent").splitlines() == [place, "gone", "notes", "workspaces", "some", "it stays"]
    assert {path.name: path.read_text() for path in shop.iterdir() if path.is_file()} == {
        "notes": "some\nmore\n",
        "made": "made\n",
    }
    assert [warning["code"] for warning in record["warnings"]] == ["policy.protected-ignored"]
    assert "+mine" in (project.directory(record) / "work.patch").read_text()


@pytest.mark.nightly
async def test_what_changed_on_both_sides_of_a_shared_project_stays_and_the_rest_is_exchanged(tmp_path: Path) -> None:
    """Also what commands have closed to their own guest, and what came while the runner was killed."""
    provider = make(VOLUMES, tmp_path, GRACE)
    requests = [WorkspaceRequest(id=f"s{n}", run="run-1", nonce="nonce", project="shop", shared=True) for n in "12"]
    first, second = [await provider.create(request) for request in requests]
    shop = first.project_tree
    assert shop is not None
    write_files(shop, {"both": "", "gone-there": "", "gone-here/x": "", "workspaces/s2/own": ""})
    async with provider.open(first, SandboxSpec()) as one, provider.open(second, SandboxSpec()) as other:
        await one.run(
            ["sh", "-c", "cd ../..; echo there > both; echo new > made; rm gone-there; mkdir d; echo x > d/x"]
        )
        seen = await other.run(["sh", "-c", "cat ../../made; rm own; chmod 0 ../../d"])
        write_files(shop, {"both": "here and longer", "workspaces/s2/late": "late"})
        trees.remove(shop / "gone-here")
    Mirror(second).daemon_is_ahead([f"{PROJECT_VOLUME}x"])  # as when the runner is killed
    await provider.retrieve(second)
    async with provider.open(second, SandboxSpec()) as other:
        again = await other.run(["sh", "-c", "cat ../../both late; ls ../.."])
    with dockerd.session().client() as client:
        volumes = client.volumes(filters={"label": "runner.project=shop"})["Volumes"]
    await provider.destroy(first)
    async with provider.open(second, SandboxSpec()) as other:
        alone = await other.run(["ls", ".."])
    await provider.destroy(second)

    assert seen.stdout == b"new\n"
    assert (shop / "both").read_text() == "here and longer"
    assert again.stdout.decode() == "here and longerlateboth\nd\nmade\nworkspaces\n"
    assert (shop / "d" / "x").read_text() == "x\n"
    assert not (shop / "workspaces" / "s2").exists()
    assert alone.stdout == b"s2\n"
    assert len(volumes) == 1
    with dockerd.session().client() as client:
        assert not client.volumes(filters={"label": "runner.project=shop"})["Volumes"]


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
    assert int(throttled) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("elsewhere", ["docker-user", "docker-remote", *OTHERS], indirect=True)
def test_what_outgrows_a_limit_on_the_disk_is_ended_and_kept(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    fill = "echo work > made; head -c 20M /dev/zero > $HOME/big; sleep 600"
    write(project, fill, workspace="resource_limits: {disk: 16M}", run="snapshot: {message: work}")
    elsewhere()

    planned = project.runner("plan", str(project.folder))
    done, record = project.apply()

    assert "disk 16M: watched from outside, and what goes beyond it is ended, with docker" in planned.out
    assert (done.code, record["outcome"]["reason"]) == (1, "disk"), done.out + done.err
    assert "its workspace grew to 20 MiB, and may have 16 MiB" in record["outcome"]["message"]
    assert "+work" in project.runner("runs", "patch", "last").out


async def test_what_commands_write_is_measured_where_it_is_also_in_what_they_close(tmp_path: Path) -> None:
    """The guest is asked, and the daemon about a directory that the guest cannot read; later, the copies here."""
    provider = make(VOLUMES, tmp_path, GRACE)
    assert isinstance(provider, DiskUse)
    handle = await provider.create(WorkspaceRequest(id="measured", run="run-1", nonce="nonce"))
    measure = partial(provider.disk_bytes, handle, partial(size_of, (handle.private, handle.tree)))
    before = await measure()
    async with provider.open(handle, SandboxSpec()) as workspace:
        await workspace.run(["sh", "-c", "echo > small; mkdir ~/d; cd ~/d; head -c 4M /dev/zero > big; ln big same"])
        by_guest = await measure()
        await workspace.run(["chmod", "0", "/home/agent/d"])
        by_daemon = await measure()
        await workspace.run(["chmod", "700", "/home/agent/d"])
    await provider.destroy(handle)

    assert before < 1 << 20
    assert by_guest == by_daemon == (4 << 20) + 4096


@pytest.mark.scenario("BEY-13", only="elsewhere")
def test_the_allowed_host_is_reached_from_the_runner_and_no_other(
    project: Project, elsewhere: Callable[[], Daemon], port: int
) -> None:
    write(
        project,
        f"cat > /tmp/ask.py <<'END'\n{PROGRAM}END\npython3 /tmp/ask.py {port} {THERE} {ELSEWHERE}",
        workspace=f"network: {{agent: {{allow: [{{host: '{THERE}:{port}', private: true}}]}}}}",
    )
    elsewhere()

    record = project.succeed()

    lines = project.logs("agent").splitlines()
    assert [lines[0], *(line.split()[0] for line in lines[1:3])] == [f"hello /a {THERE}:{port}", "403", "403"]
    assert "OUT" not in lines
    assert [(one["place"], one["refusal"]) for one in record["network"]] == [
        (f"{THERE}:{port}", None),
        (f"{ELSEWHERE}:{port}", "not-allowed"),
        ("169.254.169.254:80", "not-allowed"),
    ]


@pytest.mark.scenario("BEY-24", only="elsewhere")
def test_a_credential_is_added_by_the_runner_and_never_gets_to_the_daemon(
    project: Project, elsewhere: Callable[[], Daemon], certificate: Path, secure_port: int
) -> None:
    trusted = project.home / "server.pem"
    trusted.write_bytes(certificate.read_bytes())
    project.env |= {"API_TOKEN": test_network_credentials.TOKEN, "SSL_CERT_FILE": str(trusted)}
    write(
        project,
        cleandoc(test_network_credentials.asking(secure_port)),
        workspace=cleandoc(test_network_credentials.injecting(secure_port)),
    )
    elsewhere()

    project.succeed()

    test_network_credentials.assert_used_and_nowhere(project, secure_port)


@pytest.mark.scenario("BEY-10", only="elsewhere")
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


@pytest.mark.slow
@pytest.mark.scenario("BEY-10", only="elsewhere")
@pytest.mark.parametrize(
    ("elsewhere", "stride"),
    [
        pytest.param(kind, stride, marks=pytest.mark.nightly if stride == 1 else ())
        for kind in ("docker-user", "docker-remote")
        for stride in (18, 1)
    ],
    indirect=["elsewhere"],
)
def test_a_run_that_is_killed_at_any_append_is_recovered_whole(
    project: Project, elsewhere: Callable[[], Daemon], stride: int
) -> None:
    """By day some appends, before, in or after it; by night each of them in each way."""
    daemon = elsewhere()
    env = {name: project.env[name] for name in project.env.keys() & {"DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"}}
    with open_crashing("docker", project.home, daemon, env, project.user or 0) as crashing:
        for number, at in enumerate(range(3, commits(crashing) + 1, stride)):
            for point in POINTS if stride == 1 else POINTS[number % 3 :][:1]:
                assert kill_and_recover(crashing, point, at), (point, at)
        trees.remove(crashing.folder)


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


@pytest.mark.slow
@pytest.mark.scenario("LIF-09", only="elsewhere")
def test_destroying_asks_a_command_waits_ten_seconds_and_then_forces_it(
    project: Project, elsewhere: Callable[[], Daemon]
) -> None:
    elsewhere()
    id = project.json("workspace", "create", "--provider", "docker", "--image", dockerd.IMAGE)["id"]
    process = start_inside(project, id, STUBBORN)

    done = project.runner("workspace", "destroy", id)

    assert (done.code, done.err) == (0, "")
    assert 9 < seconds_between_asking_and_the_end(project, id) < 13
    process.communicate(timeout=60)


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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
