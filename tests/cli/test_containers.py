"""Whole runs by the command in containers: images in manifests and plans, and what a killed runner leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.ops.planning.plan_file import content_digest
from tests.support import dockerd
from tests.support.situations import REPO, Project, document, step


def containers(home: Path) -> list[str]:
    """Those of workspaces below a home."""
    with dockerd.session().client() as client:
        found = client.containers(all=True, filters={"label": "runner.product=runner"})
        mounts = [[mount["Source"] for mount in container["Mounts"]] for container in found]
    ids = {path.stem for path in (home / "state" / "sandboxes").glob("*.json")}
    return [source for sources in mounts for source in sources if any(f"/{id}/" in source for id in ids)]


GVISOR = [pytest.mark.slow, dockerd.GVISOR.mark]


@pytest.mark.parametrize(
    ("providers", "isolation", "shared"),
    [
        pytest.param("docker", "namespaces", ["user"], marks=pytest.mark.scenario("BEY-05", only="docker")),
        pytest.param("gvisor", "kernel", [], marks=[*GVISOR, pytest.mark.scenario("BEY-05", only="gvisor")]),
        pytest.param("gvisor, docker", "kernel", [], marks=[*GVISOR, pytest.mark.nightly]),
    ],
)
def test_a_run_works_in_a_container_of_its_image_and_leaves_nothing(
    project: Project, repository: Path, providers: str, isolation: str, shared: list[str]
) -> None:
    project.script(
        "cat README; echo changed > README; echo report > /output/report.md",
        provider=providers,
        workspace="""
        repo_source: {type: local, path: repo}
        resource_limits: {memory: 256M, cpu: "0.5", pids: 64}
        setup_commands: ["echo prepared > $HOME/prepared"]
        """,
        run="""
        snapshot: {message: work}
        verify:
          commands: [{run: grep -q changed README}, {run: test ! -e /home/agent/prepared}]
        """,
    )

    record = project.succeed()

    assert project.logs("agent").split() == ["hello"]
    assert step(record, "verify")["status"] == "succeeded"
    seen = record["observed"]
    assert (seen["provider"], seen["isolation"], seen["capabilities"]) == (providers.split(",")[0], isolation, "none")
    assert (seen["no_new_privileges"], seen["shared_namespaces"], seen["interfaces"]) == (True, shared, ["lo"])
    assert seen["limits"] == {"cpus": 0.5, "memory_bytes": 256 << 20, "disk_bytes": 10 << 30, "pids": 64}
    assert containers(project.home) == []


@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("docker", marks=pytest.mark.scenario("ISO-13", only="docker")),
        pytest.param("gvisor", marks=[*GVISOR, pytest.mark.scenario("ISO-13", only="gvisor")]),
    ],
)
def test_protected_paths_are_ignored_in_a_container_when_isolation_is_off(
    project: Project, repository: Path, provider: str
) -> None:
    project.script(
        "echo x > README",
        provider=provider,
        workspace=REPO,
        run="project: shop",
    )
    project.add(document("Project", "shop", "protected_paths: [README]"))

    record = project.succeed()

    assert [warning["code"] for warning in record["warnings"]] == ["policy.protected-ignored"]
    assert record["observed"]["read_only"] == []
    assert "README" in project.runner("runs", "patch", "last").out


def test_a_plan_pins_the_image_and_is_stale_when_that_is_gone(project: Project) -> None:
    project.script("true", provider="docker")
    plan = project.folder / "saved.json"
    done = project.runner("plan", ".", "--save", str(plan))

    assert done.code == 0, done.err
    shown = "".join(line.strip() for line in done.out.splitlines())
    assert f"image {dockerd.IMAGE} at" in shown
    assert json.loads(plan.read_text())["runs"][0]["image"] == dockerd.image_id()

    saved = json.loads(plan.read_text())
    saved["facts"]["work"]["image"] = "sha256:" + "0" * 64
    plan.write_text(json.dumps({**saved, "content": content_digest(saved)}))
    applied = project.runner("apply", str(plan))

    assert applied.code == 2
    assert "error[plan.stale]: the image that was planned is gone" in applied.err
