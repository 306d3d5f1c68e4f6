"""Documents, settings and facts to a spec: which value counts, and what is refused. Nothing is looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import ImageMissing, RunnerError
from runner.core.model import Budget, IsolationClass, Limits
from runner.spec.model import Facts, Missing, RunFacts, Wanted
from tests.support.manifest_text import document, resolved

HELD = ImageMissing("not there", hint="make it")


def codes(findings: list[RunnerError]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize(
    ("written", "env", "limits"),
    [
        pytest.param({}, {}, Limits(2, 4 << 30, 10 << 30, 512), id="built in"),
        pytest.param({}, {"WORKSPACE_DEFAULT_MEMORY": "1G"}, Limits(2, 1 << 30, 10 << 30, 512), id="the environment"),
        pytest.param(
            {"resource_limits": {"memory": "2G"}},
            {"WORKSPACE_DEFAULT_MEMORY": "1G", "WORKSPACE_DEFAULT_CPU": "3"},
            Limits(3, 2 << 30, 10 << 30, 512),
            id="the manifest before it",
        ),
    ],
)
def test_a_limit_is_the_manifests_else_the_environments_else_built_in(
    tmp_path: Path, written: dict[str, object], env: dict[str, str], limits: Limits
) -> None:
    spec, _ = resolved(tmp_path, written, env=env)

    assert spec.limits == limits


@pytest.mark.parametrize(
    ("written", "env", "providers"),
    [
        pytest.param({}, {}, ("local",), id="built in"),
        pytest.param({}, {"WORKSPACE_PROVIDERS": "gvisor,docker"}, ("gvisor", "docker"), id="the environment"),
        pytest.param({"providers": ["process"]}, {"WORKSPACE_PROVIDERS": "gvisor"}, ("process",), id="the manifest"),
        pytest.param({"provider": "process"}, {}, ("process",), id="the short form"),
    ],
)
def test_providers_are_the_manifests_else_the_environments(
    tmp_path: Path, written: dict[str, object], env: dict[str, str], providers: tuple[str, ...]
) -> None:
    spec, _ = resolved(tmp_path, written, env=env)

    assert spec.providers == providers


@pytest.mark.parametrize(
    ("written", "policy", "untrusted", "isolation"),
    [
        pytest.param("none", None, False, IsolationClass.NONE, id="the agent type's"),
        pytest.param("none", "kernel", False, IsolationClass.KERNEL, id="a policy's, when it is stronger"),
        pytest.param("kernel", "namespaces", False, IsolationClass.KERNEL, id="not a policy's, when it is weaker"),
        pytest.param("none", None, True, IsolationClass.NAMESPACES, id="of a fork at least namespaces"),
    ],
)
def test_the_strongest_isolation_counts(
    tmp_path: Path, written: str, policy: str | None, untrusted: bool, isolation: IsolationClass
) -> None:
    others = [document("Policy", "strict", min_isolation=policy)] if policy else []
    agent = {"policy": "strict"} if policy else {}
    spec, _ = resolved(tmp_path, {"isolation": written}, *others, agent=agent, untrusted=untrusted)

    assert spec.isolation == isolation


@pytest.mark.parametrize(
    ("project", "written", "protected", "found"),
    [
        pytest.param({"workspace_isolation": True, "protected_paths": ["b"]}, ["a"], ["a", "b"], [], id="isolated"),
        pytest.param({"protected_paths": ["b"]}, [], [], ["policy.protected-ignored"], id="shared: a warning"),
        pytest.param({}, ["a"], [], ["plan.unenforceable"], id="shared: the agent type's are an error"),
    ],
)
def test_protected_paths_of_project_and_agent_type_unite_where_they_can_be_kept(
    tmp_path: Path, project: dict[str, object], written: list[str], protected: list[str], found: list[str]
) -> None:
    other = document("Project", "shop", root=".", **project)
    spec, findings = resolved(tmp_path, {"protected_paths": written}, other, run={"project": "shop"})

    assert (sorted(spec.protected), codes(findings)) == (protected, found)


def test_commands_that_are_text_go_to_a_shell_and_lists_do_not(tmp_path: Path) -> None:
    spec, _ = resolved(tmp_path, {"setup_commands": ["npm ci", ["npm", "test"]]})

    assert spec.setup.commands == (("sh", "-c", "npm ci"), ("npm", "test"))


def test_hooks_of_the_agent_type_come_before_those_of_the_run(tmp_path: Path) -> None:
    spec, _ = resolved(tmp_path, run={"post_hooks": [["b"]]}, agent={"post_hooks": [["a"]]})

    assert spec.post_hooks == (("a",), ("b",))


def test_an_agent_with_a_model_has_its_budget_and_no_key(tmp_path: Path) -> None:
    spec, _ = resolved(tmp_path, agent={"agent": "claude", "model": "sonnet", "budget": {"tokens": 1000}})

    assert (spec.model.name, spec.model.budget, spec.model.key_inside) == ("sonnet", Budget(tokens=1000), False)


@pytest.mark.parametrize(
    ("snapshot", "needs_change"),
    [
        pytest.param({"message": "m"}, True, id="a snapshot needs a change"),
        pytest.param({"message": "m", "allow_empty": True}, False, id="unless an empty one is allowed"),
    ],
)
def test_a_run_that_publishes_needs_a_change(tmp_path: Path, snapshot: dict[str, object], needs_change: bool) -> None:
    spec, _ = resolved(tmp_path, run={"snapshot": snapshot})

    assert spec.snapshot.needs_change == needs_change


@pytest.mark.parametrize(
    ("what", "line"),
    [
        pytest.param(Wanted.PROVIDERS, "workspace", id="providers"),
        pytest.param(Wanted.IMAGE, "base_image", id="image"),
        pytest.param(Wanted.INCIDENT, "directory", id="incident"),
    ],
)
def test_what_a_host_lacks_is_said_at_the_line_that_asks_for_it(tmp_path: Path, what: Wanted, line: str) -> None:
    facts = Facts({}, {"fix": RunFacts(missing=(Missing(what, HELD),))})
    incident = {"incident": {"directory": "here"}} if line == "directory" else {}
    _, findings = resolved(tmp_path, {"base_image": "team:1"}, run=incident, facts=facts)

    (finding,) = (finding for finding in findings if finding.message == HELD.message)
    assert (finding.code, finding.hint, f'"{line}"' in finding.at.text) == (HELD.code, HELD.hint, True)


@pytest.mark.parametrize(
    ("workspace", "run", "code"),
    [
        pytest.param({"enabled": False}, {}, "plan.workspace-disabled", id="no workspace"),
        pytest.param({}, {"prompt": "{{ task.no_such }}"}, "manifest.template", id="a name that is unknown"),
        pytest.param({"dependencies": [".venv"]}, {}, "plan.unenforceable", id="dependencies of no directory"),
        pytest.param({}, {"snapshot": {"branch": "a..b"}}, "git.ref", id="a branch that git refuses"),
    ],
)
def test_what_cannot_be_carried_out_is_an_error_of_its_own_code(
    tmp_path: Path, workspace: dict[str, object], run: dict[str, object], code: str
) -> None:
    _, findings = resolved(tmp_path, workspace, run=run)

    assert code in codes(findings)


def test_a_policy_names_the_provider_that_it_does_not_allow(tmp_path: Path) -> None:
    policy = document("Policy", "strict", providers=["gvisor"])
    _, findings = resolved(tmp_path, {"providers": ["local"]}, policy, agent={"policy": "strict"})

    assert codes(findings) == ["policy.provider"]
    assert "policy `strict` does not allow provider `local`" in findings[0].message
