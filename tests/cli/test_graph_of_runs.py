"""Projects, matrices, runs that need runs, and manifests that are not trusted, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.situations import REPO, Project, document


def records(project: Project) -> dict[str, dict[str, object]]:
    listed = project.json("runs", "list")
    return {row["name"]: row for row in listed}


def test_a_matrix_runs_one_member_for_each_combination(project: Project) -> None:
    for name in ("first", "second"):
        (project.folder / name).mkdir()
        (project.folder / name / "incident.json").write_text(json.dumps({"id": name}))
    project.write(
        project.worker("a", "echo a $(cat $RUNNER_INCIDENT/incident.json)"),
        project.worker("b", "echo b $(cat $RUNNER_INCIDENT/incident.json)"),
        document("IncidentRun", "triage", "matrix: {agent_type: [a, b], incident: [first, second], max_parallel: 2}"),
    )

    done = project.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    assert sorted(records(project)) == ["triage.a.1", "triage.a.2", "triage.b.1", "triage.b.2"]


def test_a_later_run_reads_what_earlier_ones_put_out_in_member_order(project: Project) -> None:
    project.write(
        project.worker("a", "echo cause a > $RUNNER_OUTPUT/cause.md"),
        project.worker("b", "echo cause b > $RUNNER_OUTPUT/cause.md"),
        project.worker("fixer", "cat"),
        document("IncidentRun", "triage", "matrix: {agent_type: [a, b]}\noutputs: {cause: {file: cause.md}}"),
        document("IncidentRun", "alone", "agent_type: a\noutputs: {cause: {file: cause.md}}"),
        document(
            "IncidentRun",
            "fix",
            """
            agent_type: fixer
            needs: [triage, alone]
            prompt: "{{ outputs.triage.cause | join('|') }} and {{ outputs.alone.cause }}"
            """,
        ),
    )

    done = project.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    fix = records(project)["fix"]["id"]
    assert project.runner("runs", "logs", str(fix), "agent").out == "cause a\n|cause b\n and cause a\n"


def test_a_run_whose_need_failed_is_not_started_and_says_so(project: Project) -> None:
    project.write(
        project.worker("bad", "exit 3"),
        project.worker("good", "echo ran"),
        document("IncidentRun", "first", "agent_type: bad"),
        document("IncidentRun", "second", "agent_type: good\nneeds: [first]"),
    )

    done = project.runner("apply", ".")

    assert done.code == 1
    assert {name: row["status"] for name, row in records(project).items()} == {"first": "failed", "second": "skipped"}
    assert "needs first, which failed" in done.out


@pytest.mark.parametrize("script", ["true", "head -c 2000000 /dev/zero > $RUNNER_OUTPUT/x.md"], ids=["none", "2 MB"])
def test_an_output_that_can_not_be_read_fails_the_run_that_promised_it(project: Project, script: str) -> None:
    project.write(
        project.worker("a", script), document("IncidentRun", "work", "agent_type: a\noutputs: {x: {file: x.md}}")
    )

    done, record = project.apply()

    assert done.code == 1
    assert record["outcome"]["reason"] == "no-evidence"


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        pytest.param({"a": "needs: [b]", "b": "needs: [a]"}, "a -> b -> a", id="circle"),
        pytest.param({"a": "needs: [a]"}, "a -> a", id="itself"),
        pytest.param({"abc": "", "b": "needs: [abd]"}, "did you mean `abc`?", id="unknown"),
        pytest.param({"a": "prompt: '{{ outputs.b }}'", "b": "outputs: {x: {file: x}}"}, "in `needs`", id="no need"),
        pytest.param({"a": "matrix: {max_parallel: 2}"}, "a matrix without an axis", id="no axis"),
    ],
)  # fmt: skip
def test_a_graph_that_can_not_run_is_an_error_at_its_place(
    project: Project, runs: dict[str, str], message: str
) -> None:
    documents = [document("IncidentRun", name, f"agent_type: w\n{spec}") for name, spec in runs.items()]
    project.write(project.worker("w", "true"), *documents)

    done = project.runner("plan", ".")

    assert done.code == 2
    assert message in done.err
    assert "all.runner.yaml:" in done.err


def test_a_project_gives_its_runs_what_they_do_not_say(project: Project, repository: Path) -> None:
    project.write(
        project.worker("w", "echo x > README", f"providers: [local], {REPO}"),
        document("Policy", "house", "allowed_paths: ['src/**']"),
        document(
            "Project",
            "all",
            "{workspace_isolation: true, agent_type: w, policy: house, protected_paths: [src/]}",
        ),
        document("IncidentRun", "work", "project: all"),
    )

    done, record = project.apply()

    assert done.code == 3
    assert [(v["path"], v["rule"]) for v in record["violations"]] == [("README", "not-allowed")]
    assert "/workspace/src" in record["observed"]["read_only"]


@pytest.mark.parametrize(
    ("by_type", "lines"),
    [
        pytest.param(None, {"src/": "project"}, id="only the project's"),
        pytest.param("[]", {"src/": "project"}, id="an empty list of the type"),
        pytest.param("[docs/]", {"docs/": "type", "src/": "project"}, id="one of each"),
        pytest.param("[src/]", {"src/": "type"}, id="the type's hides the project's"),
    ],
)
def test_a_protected_path_shows_the_line_of_the_document_that_protects_it(
    project: Project, by_type: str | None, lines: dict[str, str]
) -> None:
    written = f", protected_paths: {by_type}" if by_type else ""
    path = project.write(
        project.worker("w", "true", f"providers: [local]{written}"),
        document("Project", "all", "{workspace_isolation: true, agent_type: w, protected_paths: [src/]}"),
        document("IncidentRun", "work", "project: all"),
    )
    texts = path.read_text().splitlines()
    places = {
        name: f"{path}:{next(n for n, text in enumerate(texts, start=1) if mark in text)}"
        for name, mark in {"type": "enabled: true", "project": "workspace_isolation"}.items()
    }

    (run,) = project.json("plan", str(project.folder))["runs"]

    (agent,) = (step for step in run["steps"] if step["id"] == "agent")
    assert {m["path"]: m["origin"] for m in agent["mounts"] if not m["writable"]} == {
        path: places[name] for path, name in lines.items()
    }


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        pytest.param("agent_type: w, requires_runner: '>=99'", "manifest.requires-runner", id="version"),
        pytest.param("agent_type: v", "manifest.unknown-reference", id="agent type"),
        pytest.param("agent_type: w, root: other", "manifest.path-escape", id="root"),
    ],
)
def test_what_a_project_asks_for_holds_or_is_an_error(project: Project, spec: str, code: str) -> None:
    shop = document("Project", "all", f"{{workspace_isolation: true, {spec}}}")
    project.write(project.worker("w", "true"), shop, document("IncidentRun", "work", "project: all"))

    done = project.runner("plan", ".")

    assert done.code in (2, 3)
    assert f"error[{code}]" in done.err


@pytest.mark.parametrize(
    ("workspace", "code"),
    [
        pytest.param("providers: [process]", "policy.isolation", id="weaker provider"),
        pytest.param("toolchains: [/usr]", "policy.untrusted", id="host mount"),
        pytest.param("repo_source: {type: local, path: ../home}", "policy.untrusted", id="outside"),
    ],
)
def test_an_untrusted_manifest_gets_nothing_of_the_host(project: Project, workspace: str, code: str) -> None:
    project.write(project.worker("w", "true", workspace), document("IncidentRun", "work", "agent_type: w"))

    done = project.runner("plan", ".", "--untrusted")

    assert done.code == 3, done.err
    assert f"error[{code}]" in done.err


def test_an_untrusted_policy_only_tightens(project: Project) -> None:
    project.write(
        project.worker("w", "echo TOKEN > .env"),
        document("Policy", "lax", "forbidden_patterns: ['**/nothing']"),
        document("IncidentRun", "work", "agent_type: w\npolicy: lax"),
    )

    trusted = project.runner("apply", ".")
    untrusted = project.runner("apply", ".", "--untrusted")

    assert (trusted.code, untrusted.code) == (0, 3)
