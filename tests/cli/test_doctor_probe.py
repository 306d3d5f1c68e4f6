"""``runner doctor --probe``: the ways out of a sandbox, tried in one that is removed again."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from runner.core.model import Exit, IsolationClass, Limits
from runner.ops.host.probe import EscapeAttempt, EscapeResult, ProbedProvider, _try
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.sandbox.escapes import ESCAPES
from tests.support import dockerd
from tests.support.fake_provider import FakeProvider, Scripted
from tests.support.situations import Project, leftovers


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=pytest.mark.nightly)])
def test_every_way_out_is_tried_and_nothing_is_left(project: Project, provider: str) -> None:
    image = []
    if provider == "docker":
        project.env["DOCKER_HOST"] = dockerd.host()
        image = ["--image", dockerd.IMAGE]
    done = project.runner("doctor", "--probe", provider, *image, "--output", "json")

    assert done.code == 0, done.out + done.err
    (examined,) = json.loads(done.out)
    assert (examined["provider"], examined["isolation"], examined["holds"]) == (provider, "namespaces", True)
    assert [tried["name"] for tried in examined["tried"]] == [escape.name for escape in ESCAPES]
    assert all(tried["result"] == "refused" or tried["reason"] for tried in examined["tried"])
    assert project.json("workspace", "list") == []


@pytest.mark.slow
def test_a_probe_that_is_stopped_leaves_nothing(project: Project) -> None:
    bait = project.home / "bait"
    left = bait / "runner-probe-killed"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    project.env["TMPDIR"] = str(bait)
    process = project.start("doctor", "--probe", "process")
    while not list((project.home / "state").glob("projects/*/workspaces/*")):
        assert process.poll() is None
        time.sleep(0.01)  # another process makes it

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)

    assert (process.returncode, out) == (130, ""), err
    assert leftovers(project.home) == []
    assert list(bait.glob("runner-probe-*")) in ([], [left])  # it had not come to look there, or had
    assert project.json("workspace", "list") == []


def test_a_question_to_a_provider_that_is_stopped_ends_at_once(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as provider:
        place = f"http://127.0.0.1:{provider.getsockname()[1]}/v1"
        project.env.update(OPENAI_API_KEY="sk-real-0123456789abcdef", RUNNER_OPENAI_URL=place)
        process = project.start("doctor", "--spend")
        provider.settimeout(20)
        asked, _ = provider.accept()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        asked.close()

    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.nightly
def test_what_a_provider_declares_is_shown_with_its_reason(project: Project) -> None:
    done = project.runner("doctor", "--probe", "process")

    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "process, isolation none"
    at = next(i for i, line in enumerate(lines) if line.startswith("  gap   network"))
    assert any("declared: process gives commands at most a user of their own" in line for line in lines[at:])
    assert any(line.startswith("  pass  descriptors") for line in lines)


def test_a_provider_that_is_not_there_is_said_so_and_is_no_success(project: Project) -> None:
    project.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    done = project.runner("doctor", "--probe", "docker")

    assert done.code == 4
    assert "not probed: the docker daemon at" in done.out
    assert "= hint: start the daemon that listens there" in done.out


async def test_an_image_without_the_programs_that_try_is_not_one_with_ways_out(tmp_path: Path) -> None:
    """Each of the twenty was a failure, `ends the sandbox`, in an image without `true`."""
    provider = FakeProvider(tmp_path, lambda argv: Scripted(Exit(code=127)))
    handle = await provider.create(WorkspaceRequest(id="w", run="r", nonce="n", limits=Limits()))
    async with provider.open(handle, SandboxSpec()) as workspace:
        tried = (await _try(workspace, ESCAPES[0], {}, None))[0]

    assert (tried.result, tried.told) == (EscapeResult.UNTRIED, ("the probe exited 127",))


def test_a_provider_with_images_asks_for_one(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()
    done = project.runner("doctor", "--probe", "docker")

    assert done.code == 4
    assert "runner doctor --probe docker --image REF" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--probe", "dockr"], "did you mean `docker`?"),
        (["--image", "x"], "--image is where --probe tries"),
        (["--image", "x", "--settings"], "--image is where --probe tries"),
        (["--probe", "local", "--spend"], "`--spend` and `--probe` exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused(project: Project, arguments: list[str], words: str) -> None:
    done = project.runner("doctor", *arguments)

    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize("result", EscapeResult)
def test_only_a_way_out_that_is_not_declared_is_a_failure(result: EscapeResult) -> None:
    examined = ProbedProvider(
        provider="local",
        isolation=IsolationClass.NAMESPACES,
        tried=(EscapeAttempt(name="mount", about="mounting", result=result),),
    )

    assert examined.holds == (result is not EscapeResult.OPEN)
