"""What the API says of a Job, as people are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from runner.cluster.job import KUBECONFIG, JobShape, JobState, job, judge, plan_map

SHAPE = JobShape(
    run="7k3q9m2x4c6p",
    name="fix",
    submission="submission",
    image="registry.example/worker:1",
    secret="runner-worker",
    seconds=1800.4,
    stop_seconds=30,
    environment={"WORKSPACE_MAX": "1000000"},
)
FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}
SAID = "text\nwarning[x]: nothing\nerror[plan.stale]: it has changed\n  = hint: plan again\n"


def pod(**state: Any) -> dict[str, Any]:
    status = {"containerStatuses": [{"name": "runner", "image": "a/b:1", "state": state}]} if state else {}
    return {"status": {"phase": "Pending", **status}}


def test_a_job_is_tried_once_and_its_time_begins_with_its_pod() -> None:
    made = job(SHAPE)
    spec = made["spec"]["template"]["spec"]

    assert (made["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert "activeDeadlineSeconds" not in made["spec"], "a Job that waits for a quota must not run out of time"
    assert spec["activeDeadlineSeconds"] == 1800 + 600
    assert spec["terminationGracePeriodSeconds"] == 60
    assert "suspend" not in made["spec"]


def test_a_worker_that_is_told_to_end_before_it_heeds_signals_ends() -> None:
    """The first process of a container of its own would ignore it, and run until it is killed."""
    assert job(SHAPE)["spec"]["template"]["spec"]["shareProcessNamespace"] is True


def test_the_policy_that_closes_workspaces_leaves_the_worker_its_network() -> None:
    assert "runner.product" not in json.dumps(job(SHAPE))


def test_only_a_job_of_a_cluster_has_a_kubeconfig_which_its_worker_alone_may_read() -> None:
    assert "secretName" not in json.dumps(job(SHAPE))

    spec = job(replace(SHAPE, kubeconfig="clusters"))["spec"]["template"]["spec"]
    [volume] = [one["secret"] for one in spec["volumes"] if "secret" in one]
    [mount] = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "kubeconfig"]

    assert (volume["secretName"], volume["defaultMode"]) == ("clusters", 0o440)
    assert mount["mountPath"] == KUBECONFIG
    assert mount["readOnly"]


def test_a_plan_goes_with_its_job() -> None:
    (owner,) = plan_map("7k3q9m2x4c6p", "{}", {"metadata": {"uid": "u-1"}})["metadata"]["ownerReferences"]

    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "runner-7k3q9m2x4c6p", "u-1")


@pytest.mark.parametrize(
    ("found", "pods", "events", "expected"),
    [
        pytest.param({}, [pod(running={})], [], JobState(), id="running"),
        pytest.param(
            {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, [], [], JobState(over=True), id="done"
        ),
        pytest.param(
            FAILED,
            [pod(terminated={"exitCode": 2, "message": SAID})],
            [],
            JobState(
                over=True,
                why="its worker ended with exit code 2: error[plan.stale]: it has changed = hint: plan again",
            ),
            id="error",
        ),
        pytest.param(
            FAILED,
            [pod(terminated={"exitCode": 137, "reason": "OOMKilled"})],
            [],
            JobState(over=True, why="its worker ran out of memory"),
            id="memory",
        ),
        pytest.param(
            FAILED,
            [{"status": {"reason": "Evicted", "message": "The node was low on memory."}}],
            [],
            JobState(over=True, why="its pod has failed: Evicted: The node was low on memory."),
            id="evicted",
        ),
        pytest.param(FAILED, [], [], JobState(over=True, why="BackoffLimitExceeded: no message"), id="pod is gone"),
        pytest.param({"metadata": {"deletionTimestamp": "x"}}, [], [], None, id="deleted"),
    ],
)
def test_how_a_job_is_told(
    found: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], expected: JobState | None
) -> None:
    state = judge(found, pods, events)

    assert state == (expected or JobState(over=True, why="somebody deleted it"))


@pytest.mark.parametrize(
    ("message", "waits"),
    [
        ('pods "x" is forbidden: exceeded quota: small, requested: pods=1', True),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', False),
        ('error looking up service account agents/runner: serviceaccount "runner" not found', False),
    ],
)
def test_a_job_without_a_pod_waits_for_a_quota_only(message: str, *, waits: bool) -> None:
    state = judge({}, [], [{"reason": "SuccessfulCreate"}, {"reason": "FailedCreate", "message": message}])

    assert (message in state.waits, message in state.hopeless) == (waits, not waits)
