"""Root of a user namespace that has no user but root, as in small containers: an ordinary user in disguise."""

from __future__ import annotations

import pytest

from tests.support.situations import Project


@pytest.mark.usefixtures("repository")
def test_the_sandbox_works_and_is_read_back(root_without_other_users: Project) -> None:
    project = root_without_other_users
    project.script(
        "id -u; echo made > made; (echo hacked > README) || echo refused",
        workspace="repo_source: {type: local, path: repo}\nprotected_paths: [README]",
        run="verify: {commands: [{run: [cat, made]}]}",
    )

    record = project.succeed()

    assert project.logs("agent") == "1000\nrefused\n"
    assert project.logs("verify") == "made\n"
    assert (record["isolation"], record["observed"]["uid"]) == ("namespaces", 0)
    assert record["left_behind"] == []


def test_the_doctor_says_what_is_there(root_without_other_users: Project) -> None:
    done = root_without_other_users.runner("doctor")

    assert (done.code, done.err) == (0, "")


@pytest.mark.nightly
def test_what_outgrows_a_limit_on_the_disk_is_ended_and_kept(root_without_other_users: Project) -> None:
    project = root_without_other_users
    project.script(
        "echo first > first; dd if=/dev/zero of=big bs=1M count=80 2> /dev/null; sleep 100",
        workspace="repo_source: {type: none}\nresource_limits: {disk: 64M}",
    )

    planned = project.runner("plan", ".")
    assert "disk 64M: watched from outside, and what goes beyond it is ended, with local" in planned.out

    done, record = project.apply()

    assert done.code == 1, done.out + done.err
    assert record["outcome"]["reason"] == "disk"
    assert "its workspace grew to 8" in record["outcome"]["message"]
    assert "+first" in (project.directory(record) / "withheld.patch").read_text()  # a file of 80M breaks the policy
    assert record["left_behind"] == []


def test_what_outgrew_the_disk_before_anybody_looked_is_found_at_the_end_of_its_step(
    root_without_other_users: Project,
) -> None:
    project = root_without_other_users
    project.script(
        "dd if=/dev/zero of=$RUNNER_OUTPUT/big bs=1M count=30 2> /dev/null",
        workspace="repo_source: {type: none}\nresource_limits: {disk: 16M}",
    )

    done, record = project.apply()

    assert (done.code, record["outcome"]["reason"]) == (1, "disk"), done.out + done.err
    assert "and may have 16" in record["outcome"]["message"]
