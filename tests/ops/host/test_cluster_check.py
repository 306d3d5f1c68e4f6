"""What a cluster lacks for Jobs, told by trying one, on the double."""

from __future__ import annotations

from base64 import b64encode
from contextlib import ExitStack

import pytest

from tests.ops.runs.test_jobs import JOBS, api, project
from tests.providers.test_kubernetes import Api
from tests.support.needs import POSTGRES, ROOT
from tests.support.params import rows
from tests.support.situations import Project

__all__ = ["api", "project"]  # the fixtures

pytestmark = [ROOT.mark, POSTGRES.mark, pytest.mark.slow]


def test_a_job_is_tried_and_leaves_nothing(project: Project, api: Api) -> None:
    done = project.runner("cluster", "check")

    assert done.code == 0, done.out
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["ok", "cluster"],
        ["ok", "pods"],
        ["ok", "sandboxes"],
        ["ok", "jobs"],
        ["ok", "job"],
    ]
    assert "as account `runner`, with Secret `runner-worker`: it reaches the store" in done.out
    assert api("GET", JOBS)["items"] == []


RIGHTS = [("create", "jobs"), ("list", "events")]
SECRETS = "/api/v1/namespaces/agents/secrets"
NOWHERE = b64encode(b"postgres://127.0.0.1:1/x").decode()
NO_CONFIG = "Secret gone of RUNNER_WORKER_KUBECONFIG has no key config"
LACKING: dict[str, tuple[dict[str, str], list[tuple[str, str]], str, str, str]] = {
    "rights": ({}, RIGHTS, "jobs", "are missing in namespace", "create jobs, list events"),
    "files": ({"RUNNER_ARTIFACTS": ""}, [], "jobs", "no store of artifacts", "ARTIFACTS"),
    "kubeconfig": ({"RUNNER_WORKER_KUBECONFIG": "gone"}, [], "job", NO_CONFIG, "RUNNER_WORKER"),
    "image": ({"RUNNER_WORKER_IMAGE": "registry.example/gone:2"}, [], "job", "ErrImagePull", "can pull"),
    "secret": ({"RUNNER_WORKER_SECRET": "gone"}, [], "job", 'secret "gone" not', "namespace"),
    "store": ({"RUNNER_WORKER_SECRET": "poor"}, [], "job", "its worker ended with exit code", "store"),
}


@pytest.mark.parametrize(("setting", "denied", "step", "words", "more"), rows(LACKING, by_day={"rights"}))
def test_what_a_job_lacks_is_told(
    project: Project, api: Api, setting: dict[str, str], denied: list[tuple[str, str]], step: str, words: str, more: str
) -> None:
    project.env |= setting
    with ExitStack() as stack:
        api("POST", SECRETS, {"metadata": {"name": "poor"}, "data": {"RUNNER_DATABASE_URL": NOWHERE}})
        stack.callback(api, "DELETE", f"{SECRETS}/poor")
        api("POST", "/double/denied", denied)
        stack.callback(api, "POST", "/double/denied", [])
        done = project.runner("cluster", "check")

    told = done.out[done.out.index("MISSING") :]
    assert (done.code, told.split()[1]) == (4, step), done.out
    assert words in told
    assert more in told
    assert api("GET", JOBS)["items"] == []
