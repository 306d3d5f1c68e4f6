"""Images come from registries when a run needs them, by the digest that its plan has pinned."""

from __future__ import annotations

import json
import os
import signal
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.errors import CredentialHelperFailed
from runner.sandbox import registry_credentials
from runner.sandbox.registry_credentials import RegistryLogin
from tests.support import dockerd
from tests.support.dockerd import Daemon
from tests.support.needs import ROOT
from tests.support.registries import PASSWORD, USER, Served, forget, lying_registry, push, registry
from tests.support.situations import Project, step, until

pytestmark = ROOT.mark  # who starts a daemon

_PORT = 20_000 + os.getpid() % 10_000 * 4  # of the four registries of one session


@pytest.fixture(scope="module")
def daemon() -> Daemon:
    return dockerd.session()


@pytest.fixture(scope="module")
def served(daemon: Daemon) -> Iterator[Served]:
    with registry(daemon, _PORT) as one:
        yield one


@pytest.fixture
def name(daemon: Daemon, served: Served) -> Iterator[str]:
    """The name of an image that the registry has and the daemon has not."""
    name = f"{served.host}/team/agent:1"
    push(daemon, name, "first")
    yield name
    forget(daemon, name)


def write(project: Project, image: str, script: str = "cat /mark") -> None:
    project.script(script, provider="docker", workspace=f"base_image: {image}\nrepo_source: {{type: none}}")
    project.env["DOCKER_HOST"] = dockerd.host()


def ids(daemon: Daemon, name: str) -> set[str]:
    """Those of a repository; other tests have theirs at the same daemon."""
    with daemon.client() as client:
        return {image["Id"] for image in client.images(name.rpartition(":")[0])}


def put_config(project: Project, content: dict[str, object], **helpers: str) -> None:
    """Docker's configuration of the project's user, and credential helpers on the ``PATH``."""
    folder = project.home / ".docker"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    programs = project.home / "bin"
    programs.mkdir()
    for name, script in helpers.items():
        (programs / f"docker-credential-{name}").write_text(f"#!/bin/sh\n{script}\n")
        (programs / f"docker-credential-{name}").chmod(0o755)
    project.env["PATH"] = f"{programs}:{os.environ['PATH']}"


def test_a_plan_pins_the_digest_and_downloads_nothing_and_a_run_pulls_just_that(
    project: Project, daemon: Daemon, name: str
) -> None:
    write(project, name)
    saved = project.home / "plan.json"

    planned = project.runner("plan", str(project.folder), "--save", str(saved))
    assert planned.code == 0, planned.err
    assert ids(daemon, name) == set()
    assert f"{name}@sha256:" in "".join(planned.out.split())
    (pinned,) = (run["image"] for run in project.json("plan", str(project.folder))["runs"])
    assert pinned.startswith(f"{name.removesuffix(':1')}@sha256:")

    push(daemon, name, "second")  # the tag moves
    done = project.runner("apply", str(saved))

    assert done.code == 0, done.out + done.err
    assert f"image       pulled {name}, " in done.out + done.err
    assert project.logs("agent") == "first"
    (seen,) = [event for event in project.events(project.record()) if event["type"] == "ImagePullProgressed"]
    assert (seen["step"], seen["received_bytes"]) == ("provision", seen["expected_bytes"])

    again = project.runner("plan", str(project.folder), "--against", str(saved), "--exit-code")  # now it is here
    assert again.code == 0, again.out + again.err
    project.edit(f"base_image: {name}", f"base_image: {{ref: '{name}', pull: always}}")
    (newer,) = (run["image"] for run in project.json("plan", str(project.folder))["runs"])
    assert newer.partition("@")[0] == pinned.partition("@")[0]
    assert newer != pinned


def test_an_image_that_is_never_pulled_is_missed(project: Project, name: str) -> None:
    write(project, f"{{ref: '{name}', pull: never}}")

    done = project.runner("plan", str(project.folder))

    assert done.code == 4
    assert f"error[provider.image-missing]: docker has no image `{name}`" in done.err


def test_a_manifest_of_a_fork_pulls_nothing(project: Project, name: str) -> None:
    write(project, name)

    done = project.runner("plan", str(project.folder), "--untrusted")

    assert "error[provider.image-missing]" in done.err


@pytest.mark.parametrize(
    ("image", "code", "words", "hint"),
    [
        pytest.param("{}/team/gone:1", "image-missing", "neither has registry", "check its name", id="unknown"),
        pytest.param("127.0.0.1:9/a:1", "registry-unreachable", "connection refused", "docker pull 127", id="nobody"),
    ],
)
def test_an_image_that_no_registry_gives_says_why_and_what_helps(
    project: Project, served: Served, image: str, code: str, words: str, hint: str
) -> None:
    write(project, image.format(served.host))

    done = project.runner("plan", str(project.folder))

    assert done.code == 4
    assert f"error[provider.{code}]" in done.err
    assert words in done.err
    assert f"= hint: {hint}" in done.err or hint in done.err


def test_credentials_are_those_of_docker_by_login_or_helper(project: Project, daemon: Daemon) -> None:
    with registry(daemon, _PORT + 1, closed=True) as closed:
        name = f"{closed.host}/team/private:1"
        push(daemon, name, "private", {"username": USER, "password": PASSWORD})
        write(project, name)
        try:
            refused = project.runner("plan", str(project.folder))
            put_config(
                project,
                {"credHelpers": {closed.host: "tests"}},
                tests=f"""test "$(cat)" = {closed.host} && echo '{{"Username": "{USER}", "Secret": "{PASSWORD}"}}'""",
            )
            done = project.runner("apply", str(project.folder))
            forget(daemon, name)
            written = {"auths": {closed.host: {"auth": b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
            (project.home / ".docker" / "config.json").write_text(json.dumps(written))
            logged_in = project.runner("plan", str(project.folder))
        finally:
            forget(daemon, name)

    assert "error[provider.registry-denied]" in refused.err
    assert f"= hint: docker login {closed.host}" in refused.err
    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "private"
    assert logged_in.code == 0, logged_in.err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(None, "cannot be started: No such file", id="missing"),
        pytest.param("exec sleep 600", "has not answered within", id="hangs"),
        pytest.param("echo the keyring is locked >&2; exit 1", "failed: the keyring is locked", id="fails"),
        pytest.param("echo what", "answers with no credentials", id="babbles"),
    ],
)
async def test_a_credential_helper_that_does_not_help_is_named_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    monkeypatch.setattr(registry_credentials, "HELPER_TIMEOUT", 0.5)
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "tests"}))
    if script is not None:
        (tmp_path / "docker-credential-tests").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker-credential-tests").chmod(0o755)

    with pytest.raises(CredentialHelperFailed, match=words) as caught:
        await RegistryLogin(tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"}).header("registry.example")

    assert "docker-credential-tests" in caught.value.message
    assert "echo registry.example | docker-credential-tests get" in str(caught.value.hint)


async def test_who_has_no_credentials_asks_without_any(tmp_path: Path) -> None:
    (tmp_path / "docker-credential-tests").write_text(
        "#!/bin/sh\necho credentials not found in native keychain; exit 1\n"
    )
    (tmp_path / "docker-credential-tests").chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "tests"}))
    nothing = b64encode(b"{}").decode()

    for folder in (tmp_path, tmp_path / "nothing", None):
        assert await RegistryLogin(folder, {"PATH": f"{tmp_path}:/usr/bin:/bin"}).header("docker.io") == nothing


def test_a_registry_that_sends_other_bytes_than_it_named_is_found_out(project: Project, daemon: Daemon) -> None:
    with lying_registry(daemon, _PORT + 2, "wrong") as lying:
        write(project, f"{lying.host}/team/agent:1")
        planned = project.runner("plan", str(project.folder))
        done = project.runner("apply", str(project.folder))

    assert planned.code == 0, planned.err
    assert done.code == 4, done.out + done.err
    assert "serves something other than" in done.out + done.err


@pytest.mark.nightly
def test_a_cancelled_run_ends_its_pull(project: Project, daemon: Daemon) -> None:
    with lying_registry(daemon, _PORT + 3, "slow") as slow:
        write(project, f"{slow.host}/team/agent:1")
        running = project.start("apply", str(project.folder))
        state = project.home / "state"
        try:
            until(lambda: any("PullProgressed" in one.read_text() for one in state.glob("runs/*/events.jsonl")), 30)
            began = time.monotonic()
        finally:
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=30)

    assert time.monotonic() - began < 10
    assert f"pulling {slow.host}/team/agent:1: " in out + err
    assert step(project.record(), "provision")["status"] == "cancelled"
