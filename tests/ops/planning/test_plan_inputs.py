"""What of manifests and host decides for which step, so that a resumed run repeats no more than it has to."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
from msgspec.structs import replace

import runner.steps
from runner.core import plugins
from runner.core.settings import Settings
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.planning.plan_inputs import keys_of, made_anew
from runner.plan.keys import differences
from tests.support.situations import Project, git

SPEC = {
    "agent": "post_hooks: [[touch, hooked]]\nenv: {A: one}\nprompt: {system: Be brief.}",
    "workspace": "repo_source: {type: local, path: repo}\nsetup_commands: [[make]]\n"
    "resource_limits: {pids: 100, enforcement: best_effort}",
    "run": "task: {pull_request_number: 1}\nprompt: go\nverify: {commands: [{run: [make, check]}]}",
    "policy": "max_file_size: 1M",
}
RUNNING = ["setup", "agent", "post_hook", "verify"]  # commands


async def planned(project: Project, **changes: str) -> PlanResult:
    given = {**SPEC, **changes}
    project.script("true", provider="process", **given)
    return await make_plan(project.folder, Settings.from_env({"RUNNER_HOME": str(project.home), "PATH": "/usr/bin"}))


def changed(old: PlanResult, new: PlanResult) -> dict[str, str]:
    before, after = (keys_of(p.plan.runs[0], p.facts, {}) for p in (old, new))
    found = {name: "; ".join(differences(before[name], after[name])) for name in after}
    return {name: words for name, words in found.items() if words}


@pytest.mark.parametrize(
    ("field", "old", "new", "words"),
    [
        pytest.param("run", "prompt: go", "prompt: stop", {"agent": "prompt changed"}, id="prompt"),
        pytest.param("agent", "brief", "slow", {"agent": "prompt changed"}, id="system prompt"),
        pytest.param("agent", "one", "two", dict.fromkeys(("agent", "post_hook"), "env changed"), id="env"),
        pytest.param("agent", "touch", "rm", {"post_hook": "commands changed"}, id="hook"),
        pytest.param("workspace", "[make]", "[make, all]", {"setup": "commands changed"}, id="setup"),
        pytest.param("workspace", "100", "200", {"provision": "limits changed"}, id="limit"),
        pytest.param("run", "check]", "all]", {"verify": "commands changed"}, id="check"),
        pytest.param("run", "check]", "check], timeout: 7m", {}, id="time of a check"),
        pytest.param("run", "prompt: go", "prompt: go\ntimeout: 7m", {}, id="time of the run"),
        pytest.param("run", "number: 1", "number: 2", dict.fromkeys(RUNNING, "task changed"), id="task"),
        pytest.param(
            "policy", "1M", "2M", dict.fromkeys(("scan", "snapshot"), "policy changed"), id="policy, clone untouched"
        ),
        pytest.param(
            "run",
            "prompt: go",
            "prompt: go\nsnapshot: {branch: x, allow_empty: true}",
            {"snapshot": "branch is new"},
            id="branch of the work",
        ),
        pytest.param(
            "workspace",
            "repo}",
            "repo, branch: dev}",
            {"clone": "branch changed from main to dev"},
            id="branch of the same commit",
        ),
        pytest.param(
            "workspace",
            "resource",
            "toolchains: [/opt]\nresource",
            {**dict.fromkeys(["setup", "agent", "post_hook"], "mounts changed"), "verify": "toolchains changed"},
            id="toolchain",
        ),
    ],
)
async def test_a_change_decides_for_the_steps_that_see_it(
    project: Project, repository: Path, field: str, old: str, new: str, words: dict[str, str]
) -> None:
    git(repository, "branch", "dev")
    assert old in SPEC[field]
    before = await planned(project)
    after = await planned(project, **{field: SPEC[field].replace(old, new)})

    found = changed(before, after)
    if field == "workspace" and "toolchains" in new:
        found.pop("provision", None)  # a written toolchain must be enforced
    assert found == words


async def test_files_commits_and_programs_count_by_content(project: Project, repository: Path) -> None:
    before = await planned(project)
    probe = before.facts.probes["process"]
    guest = replace(probe, versions={"guest": "other", "kernel": "other"})
    other = replace(before, facts=replace(before.facts, probes={"process": guest}))
    moved = await planned(project, run=f"# a comment moves every line\n{SPEC['run']}")

    assert changed(before, moved) == {}
    words = changed(before, other)["provision"]
    assert words.startswith("guest of process changed from ")
    assert words.endswith(" to other")


async def test_what_earlier_runs_put_out_decides_for_commands(project: Project, repository: Path) -> None:
    plan = await planned(project)
    before, after = (keys_of(plan.plan.runs[0], plan.facts, {"find": {"cause": text}}) for text in "ab")

    assert [name for name in after if before[name] != after[name]] == RUNNING


async def test_only_the_workspace_is_made_anew_in_any_case(project: Project, repository: Path) -> None:
    plan = await planned(project)

    anew = [step.id for step in plan.plan.runs[0].phase("work") if made_anew(step)]
    assert anew == ["lease", "provision"]


UNDECIDING = {  # fields that are no inputs: their content is, they follow from others, or say how long and where
    "provision": {
        *(
            "providers",
            "incident",
            "inputs_in_tree",
            "script",
            "unprotected",
            "agents_file",
            "warm",
            "skills",
            "advice",
        ),
        *("base_image", "pull"),
    },
    "clone": {"path", "policies", "untrusted", "within"},
    "dependencies": {"untrusted"},
    "setup": {"command_seconds"},
    "preload": {"baseline_seconds"},
    "agent": {"must", "incident", "member", "cli"},
    "post_hook": set(),
    "session": set(),
    "scan": set(),
    "snapshot": {"commits"},
    "verify": set(),
}


@pytest.mark.parametrize("kind", plugins.names(runner.steps))
def test_every_field_of_a_body_decides_or_is_known_not_to(kind: str) -> None:
    module = import_module(f"runner.steps.{kind}.plan")
    if not hasattr(module, "inputs"):
        assert kind not in UNDECIDING
        return
    tree = ast.parse(inspect.getsource(module.inputs))
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "body"}

    read |= {"network"}  # of the step, which counts for every kind
    assert {*getattr(module, f"{kind.title().replace('_', '')}Body").__struct_fields__} - read == UNDECIDING[kind]
