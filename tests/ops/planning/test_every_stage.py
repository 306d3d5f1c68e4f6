"""Validating goes through every stage, over every document, and says each thing once."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import RunnerError
from runner.core.settings import Settings
from runner.ops.planning.validate import validate
from tests.support.situations import document

AGENT = document("AgentType", "fixer", "agent: script\nscript: {files: []}\nworkspace: {enabled: true}")
RUN = document("IncidentRun", "fix", "agent_type: fixer")


def findings(folder: Path, *documents: str) -> list[RunnerError]:
    path = folder / "all.runner.yaml"
    path.write_text("---\n".join(documents))
    return validate(path, Settings.from_env({}))[1]


def codes(folder: Path, *documents: str) -> list[str]:
    return [finding.code.partition(".")[2] for finding in findings(folder, *documents)]


def test_findings_of_every_stage_are_in_one_report_by_place(tmp_path: Path) -> None:
    found = findings(
        tmp_path,
        AGENT,
        document("Policy", "twice", "max_file_size: 1M\nmax_file_size: 2M"),
        document("Policy", "house", 'providers: [process]\nallowed_paths: ["/src"]'),
        document("IncidentRun", "a", "agent_type: fixer\npolicy: house"),
        document("IncidentRun", "b", "agent_type: fxer"),
        document("IncidentRun", "c", 'agent_type: fixer\nprompt: "{{ nothing }}"'),
    )

    assert [finding.code for finding in found] == [
        "policy.provider",
        "manifest.duplicate-key",
        "manifest.bad-value",
        "manifest.unknown-reference",
        "manifest.template",
    ]
    lines = [finding.at.line for finding in found if finding.at]
    assert lines == sorted(lines)
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("broken", "run"),
    [
        pytest.param(AGENT.replace("files", "fils"), RUN, id="its agent type"),
        pytest.param(AGENT.replace("kind: AgentType", "kind: AgntType"), RUN, id="a document of an unknown kind"),
        pytest.param(AGENT.replace("enabled: true", "enabled: ["), RUN, id="a document that cannot be parsed"),
        pytest.param(AGENT.replace("runner/v1", "runner/v1alpha1"), RUN, id="a document of an older version"),
        pytest.param(
            RUN.replace("agent_type", "agent_typ"),
            AGENT + "---\n" + document("IncidentRun", "then", "agent_type: fixer\nneeds: [fix]"),
            id="a run that it needs",
        ),
        pytest.param(
            document("Project", "shop", "rot: x"),
            document("IncidentRun", "fix", "project: shop"),
            id="its project",
        ),
    ],
)
def test_what_refers_to_a_broken_document_is_not_wrong_for_that(tmp_path: Path, broken: str, run: str) -> None:
    found = findings(tmp_path, broken, run)

    assert found
    assert "manifest.unknown-reference" not in [finding.code for finding in found]
    assert len({finding.at.line for finding in found if finding.at}) <= 2
    assert all(finding.at is not None and finding.at.line <= broken.count("\n") for finding in found)


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        pytest.param(document("Policy", "house", "allowed_paths: ['..']"), ["bad-value"], id="pattern"),
        pytest.param(AGENT.replace("true", "true, protected_paths: [/x]"), ["bad-value"], id="protected path"),
        pytest.param(AGENT + '  env: {X: "{{ a() }}"}\n', ["template"], id="template"),
        pytest.param(RUN.replace("agent_type: fixer", "agent_type: none\n  verify: {files: {required: ['!x']}}"),
                     ["unknown-reference", "bad-value"], id="run without its agent type"),
    ],
)  # fmt: skip
def test_a_document_that_no_run_reaches_is_judged_too(tmp_path: Path, alone: str, expected: list[str]) -> None:
    assert codes(tmp_path, alone) == expected


def test_what_several_runs_share_is_found_once(tmp_path: Path) -> None:
    agent = AGENT.replace("true", "true, providers: [none-such], protected_paths: [/x]")

    assert codes(tmp_path, agent, RUN, RUN.replace("name: fix", "name: b")) == ["unknown", "bad-value"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("{{ task.branch }}, {{ task.pull_request_number }}", [], id="task fields may come later"),
        pytest.param("{{ task.brnch }}", ["template"], id="but only those that there are"),
        pytest.param("{{ incident.resource.kind | upper }}", [], id="an incident may hold anything"),
        pytest.param("{{ run.id }} {{ run.prompt }}", ["template"], id="a run's prompt is not in itself"),
    ],
)
def test_a_template_is_judged_by_what_can_be_there(tmp_path: Path, template: str, expected: list[str]) -> None:
    run = document("IncidentRun", "fix", f'agent_type: fixer\nprompt: "{template}"\nincident: {{directory: INC-1}}')

    assert codes(tmp_path, AGENT, run) == expected


def test_a_script_that_is_not_there_is_found(tmp_path: Path) -> None:
    assert codes(tmp_path, AGENT.replace("{files: []}", "{path: fix.sh}"), RUN) == ["bad-value"]


def test_providers_of_the_server_are_judged_like_written_ones(tmp_path: Path) -> None:
    policy = document("Policy", "house", "providers: [local]")
    run = document("IncidentRun", "fix", "agent_type: fixer\npolicy: house")
    (tmp_path / "f.yaml").write_text("---\n".join((AGENT, policy, run)))

    _, found = validate(tmp_path / "f.yaml", Settings.from_env({"WORKSPACE_PROVIDERS": "process"}))

    assert [finding.code for finding in found] == ["policy.provider"]


def test_a_folder_without_a_run_is_fine(tmp_path: Path) -> None:
    assert codes(tmp_path, AGENT) == []
