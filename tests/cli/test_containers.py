"""Whole runs by the command in containers: images in manifests and plans, and what a killed runner leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import dockerd
from tests.support.situations import Project, document, step


@pytest.fixture
def docked(project: Project) -> Project:
    """A project whose docker is the tests' own."""
    project.env["DOCKER_HOST"] = dockerd.host()
    return project


def containers(home: Path) -> list[str]:
    """Those of workspaces below a home."""
    with dockerd.session().client() as client:
        found = client.containers(all=True, filters={"label": "runner.product=runner"})
        mounts = [[mount["Source"] for mount in container["Mounts"]] for container in found]
    ids = {path.stem for path in (home / "state" / "sandboxes").glob("*.json")}
    return [source for sources in mounts for source in sources if any(f"/{id}/" in source for id in ids)]


@pytest.mark.scenario("BEY-05", only="docker")
def test_a_run_works_in_a_container_of_its_image_and_leaves_nothing(docked: Project, repository: Path) -> None:
    docked.script(
        """
        cat README; echo changed > README; echo report > /output/report.md
        echo forged > AGENTS.md || echo denied; test -e /.dockerenv && echo contained
        """,
        provider="docker",
        workspace=f"""
        base_image: {dockerd.IMAGE}
        repo_source: {{type: local, path: repo}}
        resource_limits: {{memory: 256M, cpu: "0.5", pids: 64}}
        setup_commands: ["echo prepared > $HOME/prepared"]
        """,
        run="""
        snapshot: {message: work}
        verify:
          commands: [{run: grep -q changed README}, {run: test ! -e /home/agent/prepared}]
        """,
    )

    done, record = docked.apply()

    assert done.code == 0, done.out + done.err
    assert docked.logs("agent").split() == ["hello", "contained"]
    assert step(record, "verify")["status"] == "succeeded"
    seen = record["observed"]
    assert (seen["provider"], seen["isolation"], seen["capabilities"]) == ("docker", "namespaces", "none")
    assert (seen["shared_namespaces"], seen["interfaces"]) == (["user"], ["lo"])
    assert seen["limits"] == {"cpus": 0.5, "memory_bytes": 256 << 20, "disk_bytes": 10 << 30, "pids": 64}
    assert containers(docked.home) == []


@pytest.mark.slow
@pytest.mark.scenario("BEY-05", only="gvisor")
@dockerd.GVISOR.mark
@pytest.mark.parametrize(
    ("providers", "isolation"),
    [("gvisor", "kernel"), pytest.param("gvisor, docker", "namespaces", marks=pytest.mark.nightly)],
)
def test_a_run_gets_a_kernel_of_its_own_and_leaves_nothing(
    docked: Project, repository: Path, providers: str, isolation: str
) -> None:
    docked.script(
        "cat README; echo changed > README",
        provider=providers,
        workspace=f"""
        isolation: {isolation}
        base_image: {dockerd.IMAGE}
        repo_source: {{type: local, path: repo}}
        resource_limits: {{memory: 256M, cpu: "0.5", pids: 64}}
        """,
        run="""
        snapshot: {message: work}
        verify: {commands: [{run: grep -q changed README}]}
        """,
    )
    shown = docked.runner("plan", str(docked.folder))
    done, record = docked.apply()

    assert "gvisor" in shown.out
    assert done.code == 0, done.out + done.err
    assert docked.logs("agent").split() == ["hello"]
    assert step(record, "verify")["status"] == "succeeded"
    seen = record["observed"]
    assert (seen["provider"], seen["isolation"], seen["capabilities"]) == ("gvisor", "kernel", "none")
    assert (seen["no_new_privileges"], seen["shared_namespaces"], seen["interfaces"]) == (True, [], ["lo"])
    assert seen["limits"] == {"cpus": 0.5, "memory_bytes": 256 << 20, "disk_bytes": 10 << 30, "pids": 64}
    assert containers(docked.home) == []


@pytest.mark.scenario("ISO-13", only="docker")
def test_protected_paths_are_ignored_in_a_container_when_isolation_is_off(docked: Project, repository: Path) -> None:
    docked.script(
        "echo x > README",
        provider="docker",
        workspace=f"base_image: {dockerd.IMAGE}\nrepo_source: {{type: local, path: repo}}",
        run="project: shop",
    )
    docked.write(
        (docked.folder / "all.runner.yaml").read_text(), document("Project", "shop", "protected_paths: [README]")
    )

    done, record = docked.apply()

    assert done.code == 0, done.out + done.err
    assert [warning["code"] for warning in record["warnings"]] == ["policy.protected-ignored"]
    assert record["observed"]["read_only"] == []
    assert "README" in docked.runner("runs", "patch", "last").out


def test_a_plan_pins_the_image_and_is_stale_when_that_is_gone(docked: Project) -> None:
    docked.script("true", provider="docker", workspace=f"base_image: {dockerd.IMAGE}")
    plan = docked.folder / "saved.json"
    done = docked.runner("plan", str(docked.folder), "--save", str(plan))

    assert done.code == 0, done.err
    shown = "".join(line.strip() for line in done.out.splitlines())
    assert f"image {dockerd.IMAGE} at" in shown
    assert json.loads(plan.read_text())["runs"][0]["image"] == dockerd.image_id()

    saved = json.loads(plan.read_text())
    saved["pinned"]["images"] = {"work": "sha256:" + "0" * 64}
    plan.write_text(json.dumps(saved))
    applied = docked.runner("apply", str(plan))

    assert applied.code == 2
    assert "error[plan.stale]: the image that was planned is gone" in applied.err


def test_an_image_that_is_not_there_is_said_at_its_line(docked: Project) -> None:
    docked.script("true", provider="docker", workspace="base_image: no-such-image:7")
    done = docked.runner("plan", str(docked.folder))

    assert done.code == 4
    assert "error[provider.image-missing]" in done.err
    assert "all.runner.yaml:" in done.err
    assert "runner pulls nothing" in done.err


@pytest.mark.parametrize(
    ("provider", "workspace", "words"),
    [
        ("local", f"base_image: {dockerd.IMAGE}", "`local` cannot enforce base image runner-tests:1"),
        ("docker", "", "`docker` makes workspaces from an image, and none is named"),
    ],
    ids=["an image for local", "docker without one"],
)
def test_what_a_provider_cannot_do_is_an_error_before_anything_starts(
    docked: Project, provider: str, workspace: str, words: str
) -> None:
    docked.script("true", provider=provider, workspace=workspace)
    done = docked.runner("plan", str(docked.folder))

    assert done.code == 2
    assert f"error[plan.unenforceable]: {words}" in done.err


def test_a_daemon_that_is_not_there_is_refused_with_what_to_do(project: Project) -> None:
    project.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    project.script("true", provider="docker", workspace=f"base_image: {dockerd.IMAGE}")
    done = project.runner("plan", str(project.folder))

    assert done.code == 4
    assert "error[provider.unavailable]" in done.err
    assert "start the daemon that listens there" in done.err


def test_recover_removes_what_a_killed_runner_has_left(docked: Project) -> None:
    docked.script("touch begun; sleep 1000", provider="docker", workspace=f"base_image: {dockerd.IMAGE}")
    with docked.start("apply", str(docked.folder)) as runner:
        trees = docked.home / "state" / "projects"
        while not list(trees.glob("*/workspaces/*/begun")):
            assert runner.poll() is None
            time.sleep(0.05)
        os.kill(runner.pid, signal.SIGKILL)
        runner.communicate()
    left = containers(docked.home)
    done = docked.runner("recover")

    assert left
    assert done.code in (0, 1), done.err
    assert containers(docked.home) == []
