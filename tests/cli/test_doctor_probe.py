"""``runner doctor --probe``: the ways out of a sandbox, tried in one that is removed again."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from runner.app.probe import Examined, Result, Tried
from runner.model import IsolationClass
from runner.providers._escapes import ESCAPES
from tests.conformance import dockerd
from tests.situations import Project, leftovers


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
    assert json.loads(project.runner("workspace", "list", "--output", "json").out) == []


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
    assert json.loads(project.runner("workspace", "list", "--output", "json").out) == []


@pytest.mark.nightly
def test_what_a_provider_declares_is_shown_with_its_reason(project: Project) -> None:
    done = project.runner("doctor", "--probe", "process")

    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "process, isolation none"
    at = next(i for i, line in enumerate(lines) if line.startswith("  gap   network"))
    assert any("declared: process puts nothing around commands" in line for line in lines[at:])
    assert any(line.startswith("  pass  descriptors") for line in lines)


def test_a_provider_that_is_not_there_is_said_so_and_is_no_success(project: Project) -> None:
    project.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    done = project.runner("doctor", "--probe", "docker")

    assert done.code == 4
    assert "not probed: the docker daemon at" in done.out
    assert "= hint: sudo systemctl start docker" in done.out


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
    ],
)
def test_what_makes_no_sense_is_refused(project: Project, arguments: list[str], words: str) -> None:
    done = project.runner("doctor", *arguments)

    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize("result", Result)
def test_only_a_way_out_that_is_not_declared_is_a_failure(result: Result) -> None:
    examined = Examined("local", IsolationClass.NAMESPACES, (Tried("mount", "mounting", result),))

    assert examined.holds == (result is not Result.OPEN)
