"""``runner plan``: what it shows, what it compares, and what a saved plan promises."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from runner.core.settings import Settings
from tests.support.forked import ROOT
from tests.support.needs import program
from tests.support.situations import Done, Project, commit, document

WORKSPACE = """
repo_source: {type: local, path: repo}
setup_commands: [make deps]
protected_paths: [AGENTS.md]
resource_limits: {pids: 100, enforcement: best_effort}
"""


@pytest.fixture
def fixer(project: Project, repository: Path) -> Project:
    """A project with one run that uses each step: setup, hook, snapshot, verify; limits and mounts are written."""
    project.script(
        "cat README",
        agent="timeouts: {agent: 7m}\npost_hooks: ['true']",
        workspace=WORKSPACE,
        run="timeout: 20m\nsnapshot: {branch: fix}\nverify: {commands: [{run: 'true'}]}",
    )
    return project


def plan(project: Project, *arguments: str, code: int = 0) -> Done:
    done = project.runner("plan", ".", *arguments)
    assert done.code == code, done.out + done.err
    return done


def line_of(project: Project, text: str) -> str:
    lines = project.manifest.read_text().splitlines()
    return f"all.runner.yaml:{next(n for n, line in enumerate(lines, start=1) if text in line)}"


@pytest.mark.parametrize(("path", "hint"), [((), True), (("elsewhere",), False)], ids=["by default", "of a name"])
@pytest.mark.parametrize("verb", ["plan", "apply", "validate"])
def test_where_there_is_nothing_yet_the_hint_is_how_to_begin(
    project: Project, verb: str, path: tuple[str, ...], *, hint: bool
) -> None:
    done = project.runner(verb, *path)

    assert done.code == 2
    assert ("= hint: `runner init` writes it" in done.err) is hint


def test_the_help_has_every_exit_code_of_the_reference(project: Project) -> None:
    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs/reference/exit-codes.md").read_text(), re.MULTILINE)

    told = project.runner("--help").out.partition("Exit codes:")[2]

    assert re.findall(r"(?:^|,)\s+(\d+)\s", told) == table


@pytest.mark.scenario("BEY-02")
def test_the_plan_shows_what_each_step_reaches_and_the_line_of_each_host_and_says_open_first(project: Project) -> None:
    network = """
        network:
          setup:
            allow:
              - pypi.org
              - {host: registry.corp, private: true}
          agent: open
    """
    project.script("true", workspace=dedent(network) + "setup_commands: [make]")
    project.env["COLUMNS"] = "400"
    title, opened, *rows = [" ".join(line.split()) for line in plan(project).out.splitlines()]

    assert title.startswith("plan work")
    assert opened == f"NETWORK OPEN: every public host for agent ({line_of(project, 'agent: open')})"
    assert f"reaches pypi.org {line_of(project, '- pypi.org')}" in rows
    assert f"reaches registry.corp (private too) {line_of(project, 'registry.corp')}" in rows
    assert f"reaches every public host {line_of(project, 'agent: open')}" in rows
    assert plan(project, "--summary").out.splitlines()[1].strip() == opened


@pytest.mark.scenario("BEY-02")
def test_the_plan_shows_deadline_mounts_network_limits_and_the_line_of_each(fixer: Project) -> None:
    fixer.env["COLUMNS"] = "400"
    rows = [" ".join(line.split()) for line in plan(fixer).out.splitlines()]

    def row(start: str) -> str:
        return next(line for line in rows if line.startswith(start))

    where = {step: line_of(fixer, text) for step, text in [("setup", "setup_commands"), ("verify", "verify:")]}
    assert row("provision local 2m none").endswith(line_of(fixer, "providers:"))
    assert row("100 pids").endswith(line_of(fixer, "pids: 100"))
    assert row("2 CPU, 4G, disk 10G, network none").endswith("defaults")
    assert row("setup make deps 15m none").endswith(where["setup"])
    assert row("AGENTS.md ro").endswith(line_of(fixer, "protected_paths"))
    assert row("agent script: agent.sh 7m none").endswith(line_of(fixer, "agent: script"))
    assert row("limit 7m").endswith(line_of(fixer, "timeouts:"))
    assert row("verify true on a clean checkout 10m none").endswith(where["verify"])
    assert row("deadline 20m").startswith(f"deadline 20m ({line_of(fixer, 'timeout: 20m')})")
    assert sum("/workspace rw, /output rw" in line for line in rows) == 4
    (run,) = json.loads(plan(fixer, "--output", "json").out)["runs"]
    for step in run["steps"]:
        assert {"deadline_seconds", "mounts", "network", "origin"} <= step.keys()
    assert all(mount["origin"] for step in run["steps"] for mount in step["mounts"])


def test_the_worst_case_is_the_longest_path_bounded_by_the_deadline(fixer: Project) -> None:
    (run,) = json.loads(plan(fixer, "--output", "json").out)["runs"]

    assert run["critical_path"] == [s["id"] for s in run["steps"]]
    assert run["worst_seconds"] == 20 * 60 + 30
    assert "over after 20m30s at the latest" in plan(fixer, "--summary").out


@pytest.mark.scenario("BEY-03")
@pytest.mark.parametrize("seeds", [3, pytest.param(12, marks=pytest.mark.nightly)])
def test_equal_inputs_give_equal_bytes_whatever_the_process_the_hash_seed_and_the_order_of_files(
    project: Project, repository: Path, seeds: int
) -> None:
    documents = {
        "agent.sh": "true\n",
        "a.runner.yaml": document(
            "AgentType",
            "worker",
            "agent: script\nscript: {path: agent.sh}\nenv: {B: b, A: a, C: c}\n"
            "workspace: {enabled: true, repo_source: {type: local, path: repo}, providers: [process]}",
        ),
        "p.runner.yaml": document("Policy", "house", "forbidden_patterns: ['**/.env', '**/*.pem', '**/*.key']"),
        **{
            f"r{n}.runner.yaml": document(
                "IncidentRun",
                f"run{n}",
                "agent_type: worker\npolicy: house\nincident: {directory: incident}\nprompt: '{{ incident.a }}'",
            )
            for n in range(4)
        },
        "incident/incident.json": '{"a": 1, "b": {"c": 2}}',
        "incident/one": "1",
        "incident/two": "2",
    }
    plans = set()
    for seed in range(seeds):
        chance = random.Random(seed)
        for name in documents:
            (project.folder / name).unlink(missing_ok=True)
        for name in chance.sample(sorted(documents), len(documents)):
            (project.folder / name).parent.mkdir(exist_ok=True)
            (project.folder / name).write_text(documents[name])
        project.env["PYTHONHASHSEED"] = str(seed)
        plans.add(plan(project, "--output", "json").out)

    assert len(plans) == 1
    assert json.loads(plans.pop())["digest"].startswith("sha256:")


CHANGED = {
    "a field": (
        lambda p: p.edit("make deps", "make all"),
        'AgentType worker spec.workspace.setup_commands[0] "make deps" -> "make all"',
    ),
    "a field more": (
        lambda p: p.edit("timeout: 20m", "timeout: 20m\n  prompt: x"),
        'IncidentRun work spec.prompt nothing -> "x"',
    ),
    "a context file": (
        lambda p: (p.folder / "agent.sh").write_text("echo other\n"),
        "file `agent.sh` of run `work` has changed",
    ),
    "a setting": (lambda p: p.env.update(WORKSPACE_DEFAULT_CPU="1"), "setting cpus 2.0 -> 1.0"),
    "the commit": (lambda p: fresh_repository(p.folder / "repo"), "gone"),
}


def fresh_repository(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "other").write_text("other\n")
    commit(path, "other history")


@pytest.mark.scenario("BEY-03")
@pytest.mark.parametrize("change", CHANGED, ids=lambda name: name.replace(" ", "-"))
def test_a_stale_plan_is_refused_and_says_what_changed(fixer: Project, change: str) -> None:
    saved = fixer.folder / "plan.json"
    plan(fixer, "--save", str(saved))
    edit, words = CHANGED[change]
    edit(fixer)

    done = fixer.runner("apply", str(saved))

    assert done.code == 2
    assert "error[plan.stale]" in done.err
    assert words in done.err
    assert change != "a field" or f"{line_of(fixer, 'make all')}:" in done.err
    assert not (fixer.home / "state" / "runs").exists()


def test_a_diff_against_a_saved_plan_names_field_values_and_line(fixer: Project) -> None:
    saved = fixer.folder / "plan.json"
    plan(fixer, "--save", str(saved))
    assert f"no difference since {saved}" in plan(fixer, "--against", str(saved), "--exit-code").out
    fixer.edit("make deps", "make all")
    fixer.edit("post_hooks: ['true']", "post_hooks: []")

    done = plan(fixer, "--against", str(saved), "--exit-code", code=9)

    assert f'~ work.setup.commands[0] "make deps" -> "make all"   {line_of(fixer, "make all")}' in done.out
    assert '- work.post_hook "true"' in done.out


def test_a_diff_against_the_last_run_of_the_name(project: Project) -> None:
    project.script("true", provider="process", run="prompt: one")
    plan(project, "--exit-code", code=9)
    _, record = project.apply()
    assert f"no difference since run {record['id']}" in plan(project, "--exit-code").out
    project.edit("prompt: one", "prompt: two")

    done = plan(project, "--exit-code", code=9)

    assert f"since run {record['id']}:" in done.out
    assert '~ work.agent.prompt "one" -> "two"' in done.out
    assert f"1 change since run {record['id']}" in plan(project, "--summary").out


def test_a_line_that_has_moved_or_another_spelling_of_the_folder_is_no_difference(project: Project) -> None:
    project.script("true", provider="process", policy="max_file_size: 1M")
    project.apply()
    path = project.manifest
    path.write_text("# moves all the others\n" + path.read_text())

    assert "no difference since run" in plan(project, "--exit-code").out
    assert project.runner("plan", "all.runner.yaml", "--exit-code").code == 0


def test_a_run_of_the_same_name_in_another_repository_is_not_the_last_one(project: Project, tmp_path: Path) -> None:
    """`runner init` calls the run of every repository `check`."""
    project.script("true", provider="process")
    _, record = project.apply()
    other = tmp_path / "other"
    shutil.copytree(project.folder, other)

    assert "since run" not in project.runner("plan", str(other)).out
    project.runner("apply", str(other))
    assert f"no difference since run {record['id']}" in plan(project, "--exit-code").out


def test_a_plan_says_when_uncommitted_files_are_left_out(fixer: Project) -> None:
    fixer.env["COLUMNS"] = "200"
    assert "uncommitted" not in plan(fixer).out
    (fixer.folder / "repo" / "README").write_text("changed\n")
    assert "private clone, uncommitted files left out" in plan(fixer).out


def test_a_verify_that_looks_at_nothing_is_no_step(project: Project) -> None:
    project.script("true", provider="process", run="verify: {commands: []}")

    assert re.search(r"^  verify ", plan(project).out, re.MULTILINE) is None


def test_a_saved_plan_is_not_planned_again(project: Project) -> None:
    project.script("true", provider="process")
    saved = plan(project, "--save", "a plan.json")
    assert "Saved. Run it with: runner apply 'a plan.json'" in saved.out

    done = project.runner("plan", "a plan.json")

    assert (done.code, done.err.count("error[")) == (2, 1)
    hint = "`runner apply 'a plan.json'` carries it out, `runner plan --against 'a plan.json'` compares"
    assert hint in done.err


def test_an_offline_plan_takes_a_url_and_can_not_be_applied(project: Project) -> None:
    project.script("true", run="task: {repository_url: 'https://git.example.org/org/repo', branch: main}")
    project.env["COLUMNS"] = "200"
    done = plan(project, "--offline", "--save", "open.json")

    assert "main of https://git.example.org/org/repo, not pinned" in done.out
    assert "cannot be applied" in done.out
    refused = project.runner("apply", "open.json")
    assert (refused.code, "error[plan.open]" in refused.err) == (2, True)


def test_an_offline_plan_asks_no_provider_and_looks_for_no_program(host_without_user_namespaces: Project) -> None:
    project = host_without_user_namespaces
    project.write(
        document("AgentType", "worker", "agent: claude\nworkspace: {enabled: true, providers: [local]}"),
        document("IncidentRun", "work", "agent_type: worker"),
    )

    assert plan(project, "--offline").code == 0


def test_a_saved_plan_keeps_what_was_asked_for(project: Project) -> None:
    project.script('printf %s "$BRANCH"', provider="process", agent="env: {BRANCH: '{{ task.branch }}'}")
    plan(project, "--task", "branch=a", "--save", "plan.json")

    done = project.runner("apply", "plan.json")

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "a"
    again = project.runner("apply", "plan.json", "--task", "branch=b")
    assert (again.code, "a saved plan runs as it is" in again.err) == (2, True)


HOSTILE = '"]; a -> b //\\N &lt; <b>#quot; `x` \\" \u202e漢字\n'


@pytest.fixture
def hostile(project: Project) -> Project:
    """A project whose setup command holds whatever could break out of a label."""
    project.script("true", provider="process", workspace=f"setup_commands: [{json.dumps(HOSTILE)}]")
    return project


@program("dot").mark
def test_dot_is_drawn_by_graphviz_with_hostile_labels_as_text(hostile: Project) -> None:
    dot = plan(hostile, "--output", "dot").out

    drawn = subprocess.run(["dot", "-Tsvg"], input=dot.encode(), capture_output=True, check=False)

    assert (drawn.returncode, drawn.stderr) == (0, b"")
    svg = drawn.stdout.decode()
    assert svg.count('class="node"') == len(json.loads(plan(hostile, "--output", "json").out)["runs"][0]["steps"])
    assert "a &#45;&gt; b" in svg
    assert "&amp;lt;" in svg


def test_mermaid_keeps_hostile_labels_in_their_quotes(hostile: Project) -> None:
    label = r'"(?:[\w .,:/\-+=]|#\d+;|<br/>)*"'
    lines = plan(hostile, "--output", "mermaid").out.splitlines()

    assert lines[0] == "flowchart LR"
    for line in lines[1:]:
        assert re.fullmatch(rf"\s+(subgraph r\d+\[{label}\]|r\d+s\d+\[{label}\]|r\d+s\d+ -\.?->? r\d+s\d+|end)", line)
    assert any("#93;#59; a -#62; b //#92;N" in line for line in lines)


def test_text_shows_no_control_characters_and_keeps_to_the_width(hostile: Project) -> None:
    hostile.env["COLUMNS"] = "100"
    shown = plan(hostile).out

    assert "\\u202e漢字" in shown
    assert all(c.isprintable() for line in shown.splitlines() for c in line)


def test_variables_of_the_ci_stay_out_of_the_environment_of_processes() -> None:
    settings = Settings.from_env({**os.environ, "GITHUB_TOKEN": "secret", "CI_JOB_TOKEN": "secret"})

    assert "secret" not in settings.environment.values()


def test_an_empty_key_is_refused(project: Project) -> None:
    """Of a variable that is not set: each apply would attach to whatever ran with an empty one before."""
    project.script("true", provider="process")

    done = project.runner("apply", ".", "--run-key", "")

    assert (done.code, "the key of `--run-key` is empty" in done.err) == (2, True)
    assert project.json("runs", "list") == []


@pytest.mark.nightly
def test_two_applies_with_one_key_give_one_run(project: Project) -> None:
    project.script("sleep 1; exit 3", provider="process")
    racing = [project.start("apply", ".", "--run-key", "deploy-7") for _ in range(4)]
    ends = [process.communicate(timeout=60) for process in racing]

    assert [process.returncode for process in racing] == [1, 1, 1, 1], ends
    assert sum("warning[run.attached]" in err for _, err in ends) == 3
    assert len(list((project.home / "state" / "runs").iterdir())) == 1
    (run,) = project.json("runs", "list")
    assert all(run["id"] in out for out, _ in ends)
    later = project.runner("apply", ".", "--run-key", "deploy-7")
    assert (later.code, "warning[run.attached]" in later.err) == (1, True)
    other = project.runner("apply", ".", "--run-key", "deploy-8")
    assert (other.code, "attached" in other.err) == (1, False)
    assert len(list((project.home / "state" / "runs").iterdir())) == 2


@pytest.mark.scenario("CFG-21")
def test_a_new_agent_type_has_no_workspace_until_it_is_configured(project: Project) -> None:
    """Nothing is made for it, and nothing works in it; that it is so is said where it is asked for work."""
    project.script("true")
    configured = project.manifest.read_text()
    agent, _, run = configured.partition("---\n")
    project.write(agent.partition("workspace:")[0].rstrip() + "\n", run)

    planned, applied = project.runner("plan", "."), project.runner("apply", ".")
    project.write(agent.partition("workspace:")[0].rstrip() + "\n")
    asked = project.runner("validate", ".")

    for done in (planned, applied):
        assert (done.code, "error[plan.workspace-disabled]" in done.err) == (2, True), done.err
    assert asked.code == 0, "it may be there without one"
    assert project.runner("runs", "list", "--output", "json").out.strip() in ("[]", "")
    assert project.runner("workspace", "list", "--output", "json").out.strip() == "[]"
    project.write(configured)
    assert project.runner("apply", ".").code == 0
