"""The Python client, and the verbs that work on a server through it, with the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from runner.client import AsyncClient, Client, requests
from runner.client.values import NewRuns, Planned, RunListing
from runner.core.errors import OutOfScope, Rejected, ServerFailed, Unauthorized, UnknownRun, UsageError
from tests.server.test_runs import BODY
from tests.support.server import Served, create_token, serving
from tests.support.situations import Project


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    project.script("echo done >file; echo it is made")
    with serving(project, "--manifests", str(project.folder), says=["run.attached"]) as server:
        yield server


def url_of(served: Served) -> str:
    return f"unix:{served.socket}"


def test_a_program_plans_starts_follows_and_reads_a_run(served: Served) -> None:
    with Client(url_of(served), served.token) as client:
        plan = client.send(requests.make_plan(Planned(run="work")))
        assert plan.id is not None
        wanted = NewRuns(plan=plan.id, key="once")
        [run] = client.send(requests.start_runs(wanted)).runs

        events = [event["type"] for event in client.follow(run.id)]

        assert (events[0], events[-1]) == ("RunStarted", "RunEnded")
        assert client.send(requests.start_runs(wanted)).runs[0].attached
        assert client.send(requests.get_record(run.id))["plan"] == plan.digest
        assert "it is made\n" in client.send(requests.get_logs(run.id, "agent"))
        [listed] = client.send(requests.list_runs(RunListing(state="succeeded"))).runs
        assert (listed.id, listed.project) == (run.id, "default")
        names = [one.name for one in client.send(requests.list_artifacts(run.id)).artifacts]
        assert "work.patch" in names
        assert b"+done" in client.send(requests.get_artifact(run.id, "work.patch"))
        with pytest.raises(UnknownRun, match="there is no run"):
            client.send(requests.get_report("0" * 12))
        with pytest.raises(UnknownRun, match="there is no run"):
            next(client.follow("0" * 12))
        with pytest.raises(Rejected) as refused:
            client.send(requests.make_plan(Planned(manifests=BODY | {"do.sh": "", "run.runner.yaml": "kind: [}"})))
        [finding] = refused.value.findings
        assert (finding.code, str(finding.at)) == ("manifest.syntax", "run.runner.yaml:1:8")
    reading = create_token(served.project.settings(), "reading", ("admin:ro",))
    with Client(url_of(served), reading) as client, pytest.raises(OutOfScope):
        client.send(requests.start_runs(NewRuns()))
    with Client(url_of(served), "rt_no_token") as client, pytest.raises(Unauthorized):
        client.send(requests.list_projects())


async def test_a_trio_program_does_the_same(served: Served) -> None:
    async with AsyncClient(url_of(served), served.token) as client:
        [run] = (await client.send(requests.start_runs(NewRuns(run="work", key="t")))).runs
        events = [event["type"] async for event in client.follow(run.id, after=3)]
        assert events[-1] == "RunEnded"
        assert (await client.send(requests.get_record(run.id)))["status"] == "succeeded"
        await client.send(requests.start_runs(NewRuns(run="work", key="t")))
    async with AsyncClient("unix:/nothing", "rt_no_token") as client:
        with pytest.raises(ServerFailed, match="cannot be reached"):
            await client.send(requests.list_projects())


@pytest.mark.parametrize("url", ["http://runner.example.org", "https://me@a.example", "ftp://a.example", "a.example"])
def test_a_token_is_not_sent_in_clear_text_or_elsewhere(url: str) -> None:
    with pytest.raises(UsageError):
        Client(url, "rt_a_token")


@pytest.mark.nightly
def test_verbs_work_on_a_server(served: Served) -> None:
    project = served.project
    project.env |= {"RUNNER_SERVER": url_of(served), "RUNNER_TOKEN": served.token}
    done = project.runner("plan")
    assert (done.code, done.out.splitlines()[0][:10]) == (0, "plan work ")

    done = project.runner("apply", "--run-key", "cli")
    assert done.code == 0, done.err
    assert f" on {url_of(served)}" in done.out.splitlines()[0]
    assert "agent         succeeded" in done.out
    assert "SUCCEEDED" in done.out
    assert "(it was there)" in project.runner("apply", "--run-key", "cli").out
    [run] = project.json("runs", "list")
    assert (run["name"], run["state"]) == ("work", "succeeded")
    heads, listed = project.runner("runs", "list").out.splitlines()
    assert (heads.split(), listed.split()[0]) == (["RUN", "NAME", "STATUS", "CREATED", "WHY"], run["id"])
    assert project.json("runs", "show", "last")["id"] == run["id"]
    assert "it is made" in project.runner("runs", "logs", run["id"][:5], "agent").out
    done = project.runner("runs", "cancel", run["id"])
    assert (done.code, "run.elsewhere" in done.err) == (5, True)

    (project.folder / "sent").mkdir()
    for name, text in BODY.items():
        (project.folder / "sent" / name).write_text(text + ("\nexit 3\n" if name == "do.sh" else ""))
    done = project.runner("apply", "sent", "--output", "jsonl")
    assert (done.code, json.loads(done.out.splitlines()[-1])["exit_code"]) == (1, 1)

    for words in (("triage",), ("runs", "attach", "last"), ("apply", "--untrusted"), ("plan", "--save", "a.json")):
        done = project.runner(*words)
        assert (done.code, "does not work on a server" in done.err) == (2, True), words
    assert project.runner("validate", str(project.folder)).code == 0
    del project.env["RUNNER_TOKEN"]
    assert "RUNNER_TOKEN" in project.runner("runs", "list").err
    del project.env["RUNNER_SERVER"]
    assert "error[run.elsewhere]" in project.runner("runs", "cancel", run["id"]).err
