"""Whole runs by the command, on the real sandbox: what each scenario promises, read from record, logs and disk."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from runner.core import compiled_programs
from runner.testing.outside import groups
from tests.support import dockerd
from tests.support.needs import MEMORY, USERS
from tests.support.situations import IDENTITY, REPO, Project, commit, document, git, step, until


@pytest.mark.scenario("CFG-04")
def test_repository_source_none_gives_an_empty_workspace(project: Project) -> None:
    """Whatever repository the task names."""
    project.script("ls -A /workspace | wc -l", workspace="repo_source: {type: none}")

    record = project.succeed("--task", "repository_url=https://127.0.0.1:1/never.git")

    assert project.logs("agent") == "0\n"
    assert [s["id"] for s in record["steps"]] == ["lease", "provision", "agent", "scan", "save", "teardown", "release"]


@pytest.mark.scenario("CFG-13")
def test_a_task_without_repository_gives_an_empty_workspace(project: Project) -> None:
    project.script("ls -A | wc -l", run="task: {pull_request_number: 42}")

    record = project.succeed()

    assert project.logs("agent") == "0\n"
    assert "clone" not in [s["id"] for s in record["steps"]]


@pytest.mark.scenario("CFG-14")
def test_a_setup_command_runs_in_the_checkout_before_the_agent(project: Project, repository: Path) -> None:
    project.script(
        "cat prepared",
        workspace="""
        repo_source: {type: local, path: repo}
        setup_commands: ["pwd; cat README > prepared"]
        """,
    )

    record = project.succeed()

    assert project.logs("setup") == "/workspace\n"
    assert project.logs("agent") == "hello\n"
    order = [s["id"] for s in record["steps"]]
    assert order.index("clone") < order.index("setup") < order.index("agent")
    assert step(record, "setup")["ended"] <= step(record, "agent")["started"]


def as_in_the_document(project: Project, setup: str, replaced: tuple[str, str] = ("", "")) -> None:
    """An agent type in the form of the configuration document, with its defaults; made today's by ``convert``."""
    project.script("echo ran")
    today = project.manifest
    run = today.read_text().partition("---\n")[2]
    spec = f"agent: script\nscript: {{path: agent.sh}}\nenabled: true\nprovider: local\nsetup_commands: {setup}\n"
    old = document("AgentType", "worker", spec).replace("runner/v1", "runner/v1alpha1")
    project.write(old, run)
    assert project.runner("convert", "--write", str(today)).code == 0
    today.write_text(today.read_text().replace(*replaced))


@pytest.mark.scenario("CFG-15")
def test_setup_stops_at_the_first_failure_and_the_run_goes_on_with_a_warning(project: Project) -> None:
    as_in_the_document(project, "[echo one, exit 3, echo three]")

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert project.logs("setup") == "one\n"
    message = "setup: setup command 2 of 3 exited 3; the rest were skipped"
    assert record["warnings"] == [{"code": "step.warning", "message": message}]
    assert (step(record, "setup")["status"], message.partition(": ")[2] in done.out) == ("succeeded", True)
    assert project.logs("agent") == "ran\n"


def test_setup_that_fails_ends_the_run_by_default(project: Project) -> None:
    project.script("echo ran", workspace="setup_commands: [exit 3]")

    done, record = project.apply()

    assert done.code == 1
    assert record["outcome"]["reason"] == "setup"
    assert step(record, "agent")["status"] == "skipped"
    assert record["saved_work"] is not None


@pytest.mark.scenario("CFG-16")
def test_a_slow_setup_command_is_killed_with_a_warning_and_logged(project: Project) -> None:
    """The five minutes, and what they are of, are in the plan; here it is a second."""
    as_in_the_document(project, '["echo begun; sleep 1000", echo never]')
    planned = project.json("plan", str(project.folder))
    (setup,) = [one for one in planned["runs"][0]["steps"] if one["kind"] == "setup"]
    assert (setup["body"]["command_seconds"], setup["body"]["may_fail"]) == (300, True)
    as_in_the_document(
        project,
        '["echo begun; sleep 1000", echo never]',
        ("setup: {on_failure: warn}", "setup: {on_failure: warn, timeout: 1s}"),
    )

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert project.logs("setup") == "begun\n"
    message = "setup: setup command 1 of 2 timed out after 1s; the rest were skipped"
    assert record["warnings"] == [{"code": "step.warning", "message": message}]
    assert message.partition(": ")[2] in done.out
    events = project.events(record)
    stop_stages = [(e["step"], e["stage"], e["reason"]) for e in events if e["type"] == "StopStageReached"]
    assert stop_stages[0] == ("setup", "term", "command deadline")
    assert project.logs("agent") == "ran\n"


@pytest.mark.scenario("CFG-17")
@pytest.mark.parametrize("commands", ["", "setup_commands: []"], ids=["omitted", "empty"])
def test_without_setup_commands_the_agent_follows_the_checkout(
    project: Project, repository: Path, commands: str
) -> None:
    project.script("cat README", workspace=f"repo_source: {{type: local, path: repo}}\n{commands}")

    record = project.succeed()

    assert [s["id"] for s in record["steps"]][:4] == ["lease", "provision", "clone", "agent"]
    assert project.logs("agent") == "hello\n"


WITHOUT_GUEST = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
WITHOUT_GUEST += (f'mount -t tmpfs none {compiled_programs.FOLDER}; exec "$@"', "sh")


@pytest.mark.scenario("LIF-02")
@pytest.mark.parametrize(("provider", "within"), [("local", ()), ("process", WITHOUT_GUEST)])
def test_a_named_provider_that_is_unavailable_is_an_error_and_nothing_weaker_is_used(
    host_without_user_namespaces: Project, provider: str, within: tuple[str, ...]
) -> None:
    project = host_without_user_namespaces
    project.within = within or project.within
    project.script("echo ran", provider=provider)

    done = project.runner("apply", ".")

    assert done.code == 4
    assert "error[provider.unavailable]" in done.err
    assert "= hint:" in done.err
    assert not (project.home / "state" / "runs").exists()


def test_a_chain_of_providers_is_walked_and_each_hop_recorded(host_without_user_namespaces: Project) -> None:
    project = host_without_user_namespaces
    project.script("echo ran", provider="local, process")

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert [r["provider"] for r in record["rejected_providers"]] == ["local"]
    assert record["isolation"] == "none"
    assert "NOT ISOLATED" in done.out


@pytest.mark.scenario("ISO-10", only="local")
@pytest.mark.scenario("ISO-11", only="local")
def test_protected_paths_are_read_only_and_the_rest_is_not(project: Project, repository: Path) -> None:
    (repository / "AGENTS.md").write_text("rules\n")
    commit(repository, "rules")
    project.script(
        """
        echo changed > src/app.sh
        (echo hacked > AGENTS.md) || true
        (echo hacked > src/deep.md) && echo "src is writable"
        """,
        workspace="""
        repo_source: {type: local, path: repo}
        protected_paths: [AGENTS.md]
        """,
    )

    record = project.succeed()

    assert "Read-only file system" in project.logs("agent", "stderr")
    assert "src is writable" in project.logs("agent")
    patch = (project.directory(record) / "work.patch").read_text()
    assert "src/app.sh" in patch
    assert "AGENTS.md" not in patch
    assert "/workspace/AGENTS.md" in record["observed"]["read_only"]


@pytest.mark.scenario("ISO-12", only="local")
def test_a_missing_protected_path_is_no_error_and_can_not_be_created(project: Project, repository: Path) -> None:
    project.script(
        "(echo forged > nonexistent.md) || echo refused",
        workspace="""
        repo_source: {type: local, path: repo}
        protected_paths: [nonexistent.md]
        """,
    )

    record = project.succeed()

    assert project.logs("agent") == "refused\n"
    assert record["saved_work"]["patch"] is None


@pytest.mark.scenario("BEY-05", only="local")
def test_isolation_is_read_back_before_the_agent_starts_and_recorded(project: Project) -> None:
    project.script("sleep 1; date +%s")

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    event = next(event for event in project.events(record) if event["type"] == "IsolationObserved")
    observed = event["isolation"]
    assert event["at"] / 1e6 < int(project.logs("agent"))
    assert observed["isolation"] == "namespaces"
    assert observed["interfaces"] == ["lo"]
    assert observed["capabilities"] == "none"
    assert observed["uid"] == os.geteuid() or observed["uid"] >= 0x70000000
    assert record["observed"] == observed
    assert "  sandbox     namespaces (local), no interface, " in done.out
    assert "read back" in project.runner("runs", "show", "last").out


@MEMORY.mark
@pytest.mark.scenario("BEY-05", only="local")
def test_no_agent_starts_in_a_sandbox_that_is_not_what_was_planned(project: Project) -> None:
    """Its limit of processes is lifted while it is set up, from outside."""
    project.script(
        "echo ran",
        workspace="""
        resource_limits: {pids: 64}
        setup_commands: ["touch here; until test -e go; do sleep 0.1; done"]
        """,
    )
    process = project.start("apply", ".")
    trees = project.home / "state" / "projects" / "default" / "workspaces"
    while not (found := [*trees.glob("*/here")]):
        assert process.poll() is None
        time.sleep(0.1)
    limits = [limit for group in groups() if found[0].parent.name in group for limit in Path(group).glob("pids.max")]
    for limit in limits:
        limit.write_text("max")
    (found[0].parent / "go").touch()
    out, err = process.communicate(timeout=60)
    record = project.record()

    assert limits
    assert process.returncode == 4, out + err
    assert "the sandbox is not what was planned: limits are" in out + err
    assert record["outcome"]["reason"] == "platform"
    assert record["observed"]["limits"]["pids"] is None
    assert not (project.directory(record) / "logs" / "agent.stdout").exists()


@pytest.mark.scenario("WSM-21")
@pytest.mark.scenario("WSM-22")
@pytest.mark.scenario("WSM-23")
def test_verify_sees_the_snapshot_byte_for_byte_without_git_and_can_not_change_it(
    project: Project, repository: Path
) -> None:
    (repository / ".gitattributes").write_text("tests export-ignore\n*.txt eol=crlf ident\n")
    (repository / "tests").mkdir()
    (repository / "tests" / "test.txt").write_bytes(b"$Id$\nline\n")
    (repository / "tool").write_text("#!/bin/sh\n")
    (repository / "tool").chmod(0o755)
    (repository / "link").symlink_to("tool")
    commit(repository, "attributes")
    project.script(
        "echo made > made",
        workspace=REPO,
        run="""
        verify:
          commands:
            - {run: "test ! -e .git"}
            - {run: "printf '$Id$\\\\nline\\\\n' | cmp - tests/test.txt"}
            - {run: [test, -x, tool]}
            - {run: "test $(readlink link) = tool"}
            - {run: "cat made; ls -A $HOME; echo end of home; env; echo end of env"}
            - {run: "echo new > new"}
            - {run: "grep new new; chmod 600 README && chmod 644 README"}
        """,
    )

    record = project.succeed()

    assert step(record, "verify")["outcome"]["message"] == "7 of 7 checks"
    made, seen = project.logs("verify").split("end of home\n")
    assert made == "made\n", "the home is empty"
    names = {line.partition("=")[0] for line in seen.partition("end of env")[0].splitlines()}
    assert {name for name in names if name.startswith("RUNNER_")} == STANDARD
    assert not list((project.home / "state" / "tmp").glob("*"))


STANDARD = {"RUNNER_RUN_ID", "RUNNER_RUN_NAME", "RUNNER_WORKSPACE", "RUNNER_OUTPUT"}
FORGERIES = {
    "written": "echo forged > README",
    "as long as before": "echo HELLO > README",
    "replaced": "echo forged > other; mv other README",
    "removed": "rm README",
    "of another mode": "chmod +x README",
    "in another folder": "cp -a src other; echo forged > other/app.sh; mv src was; mv other src",
    "in a folder that is a link": "mv src was; ln -s was src",
}


@pytest.mark.slow
@pytest.mark.scenario("WSM-22")
@pytest.mark.parametrize(
    ("provider", "how"),
    [
        ("local", "replaced"),
        ("process", "written"),
        ("docker", "removed"),
        pytest.param("gvisor", "written", marks=dockerd.GVISOR.mark),
        *(pytest.param("local", how, marks=pytest.mark.nightly) for how in FORGERIES if how != "replaced"),
    ],
)
def test_a_check_that_changes_what_another_would_look_at_fails_and_no_other_is_run(
    project: Project, repository: Path, provider: str, how: str
) -> None:
    check = f"{{run: {json.dumps(FORGERIES[how])}}}"
    project.script(
        "true",
        provider=provider,
        workspace=REPO,
        run=f"verify: {{commands: [{{run: 'echo built > out'}}, {check}, {{run: 'cat README'}}]}}",
    )

    done, record = project.apply()

    assert (done.code, record["outcome"]["reason"]) == (1, "verify"), done.out + done.err
    assert record["left_behind"] == []
    bad = step(record, "verify")["outcome"]["details"]
    name = "src/app.sh" if "folder" in how else "README"
    assert f"changed {name} of the clean checkout" in bad[0]
    assert bad[1:] == ["`cat README` not run, because the clean checkout was changed", "`echo built > out` exited 0"]
    assert project.logs("verify") == ""


@USERS.mark
@pytest.mark.scenario("WSM-23")
def test_a_clean_checkout_that_is_not_gone_is_said_and_removed_by_recover(project: Project, repository: Path) -> None:
    project.script("true", workspace=REPO, run="verify: {commands: [{run: 'echo begun; sleep 3'}]}")
    running = project.start("apply", ".")
    until(lambda: [log for log in project.home.glob("state/runs/*/logs/verify.stdout") if log.read_text()])
    (file,) = project.home.glob("state/tmp/*/README")
    subprocess.run(["chattr", "+i", file], check=True)
    try:
        out, err = running.communicate(timeout=60)
        assert running.returncode == 4, out + err
        assert "the clean checkout was not removed: " in out
        assert f"remove `{file.parent}` yourself" in out
        assert file.exists()
    finally:
        subprocess.run(["chattr", "-i", file], check=True)
    assert project.runner("recover").code == 0
    assert not list((project.home / "state" / "tmp").glob("*"))


@pytest.mark.parametrize(
    ("setup", "bad"),
    [("exit 3", "`exit 3` exited 3"), ("rm README", "`rm README` changed README of the clean checkout")],
)
def test_what_prepares_a_clean_checkout_is_judged_as_well(
    project: Project, repository: Path, setup: str, bad: str
) -> None:
    project.script("true", workspace=REPO, run=f"verify: {{setup: [echo one, {setup}], commands: [{{run: 'true'}}]}}")

    done, record = project.apply()

    assert (done.code, record["outcome"]["reason"]) == (1, "verify")
    assert step(record, "verify")["outcome"]["details"] == [bad, "`echo one` exited 0"]


def test_all_results_of_verify_are_kept(project: Project, repository: Path) -> None:
    project.script(
        "echo x > new.orig",
        workspace=REPO,
        run="""
        verify:
          files: {required: [README, missing.json], forbidden: ["**/*.orig"]}
          commands: [{run: exit 3}, {run: [sh, -c, exit 4], exit: 4}, {run: sleep 100, timeout: 1s}]
        """,
    )

    done, record = project.apply()

    assert done.code == 1
    outcome = step(record, "verify")["outcome"]
    assert outcome["reason"] == "verify"
    assert outcome["details"] == [
        "required file `missing.json`",
        "forbidden file `**/*.orig`: new.orig",
        "`exit 3` exited 3",
        "`sleep 100` timed out after 1s",
        "required file `README`",
        "`exit 4` exited 4, wanted 4",
    ]


def test_a_missing_report_is_no_evidence_whatever_the_exit_status_says(project: Project) -> None:
    project.script("exit 0", run="verify: {report: {path: report.md, sections: [Root Cause]}}")

    done, record = project.apply()

    assert done.code == 1
    assert record["outcome"]["reason"] == "no-evidence"


@pytest.mark.scenario("BEY-07")
@pytest.mark.parametrize(
    ("script", "snapshot", "found"),
    [
        ("true", "{branch: work}", (1, "no-evidence", False)),
        ("echo more > README; git add -A; git commit -qm x; git revert -n HEAD", "{}", (1, "no-evidence", False)),
        ("true", "{branch: work, allow_empty: true}", (0, None, True)),
        ("echo more > README", "{branch: work}", (0, None, True)),
    ],
    ids=["nothing", "there and back", "allowed", "a change"],
)
def test_a_run_that_is_to_publish_a_change_fails_without_one(
    project: Project, repository: Path, script: str, snapshot: str, found: tuple[int, str | None, bool]
) -> None:
    """Whatever the agent says of itself."""
    project.script(f"{IDENTITY}{script}", workspace=REPO, run=f"snapshot: {snapshot}")

    done, record = project.apply()

    assert (done.code, record["outcome"]["reason"], record["snapshot"] is not None) == found, done.out
    assert step(record, "agent")["status"] == "succeeded"
    if done.code:
        assert "nothing was changed" in done.out
        assert "write `snapshot: {allow_empty: true}`" in done.out


def test_a_section_with_nothing_in_it_is_told_from_one_that_is_missing(project: Project) -> None:
    wanted = "verify: {report: {path: r.md, min_bytes: 4, sections: [Summary, Impact, Root Cause, Evidence]}}"
    text = "## 1. Summary\\n\\n### In short\\nx\\n## **Blast Radius:**\\nall\\n## Root Cause\\n---\\n"
    project.script(f"printf '%b' '{text}' > $RUNNER_OUTPUT/r.md", run=wanted)

    done, record = project.apply()

    assert done.code == 1
    outcome = step(record, "verify")["outcome"]
    assert (outcome["reason"], outcome["details"]) == (
        "verify",
        [
            "report section `Root Cause`: it is empty",
            "report section `Evidence`",
            "report r.md: 73 bytes of at least 4",
            "report section `Summary`",
            "report section `Impact`",
        ],
    )


def test_a_report_that_is_an_output_as_well_is_checked_once(project: Project) -> None:
    wanted = "verify: {report: {path: report.md, min_bytes: 4}}\noutputs: {report: {file: report.md}}"
    project.script("printf abc > $RUNNER_OUTPUT/report.md", run=wanted)

    _, record = project.apply()

    assert step(record, "verify")["outcome"]["details"] == ["report report.md: 3 bytes of at least 4"]


@pytest.mark.scenario("WSM-26")
def test_a_change_outside_the_allowed_paths_or_over_the_size_is_a_violation(project: Project, repository: Path) -> None:
    project.script(
        "echo x >> README; echo y > src/new; head -c 2000 /dev/zero > src/big",
        workspace=REPO,
        policy="allowed_paths: ['src/**']\nmax_file_size: 1K",
    )

    done, record = project.apply()

    assert done.code == 3
    assert {(v["path"], v["rule"]) for v in record["violations"]} >= {("src/big", "max-file-size")}
    project.script("echo x >> README; echo y > src/new", workspace=REPO, policy="allowed_paths: ['src/**']")
    done, record = project.apply()
    assert done.code == 3
    assert [(v["path"], v["rule"]) for v in record["violations"]] == [("README", "not-allowed")]
    assert "src/new" in (project.directory(record) / "withheld.patch").read_text()


def test_a_saved_plan_runs_the_pinned_commit(project: Project, repository: Path) -> None:
    project.script("cat README", workspace=REPO)
    saved = project.folder / "plan.json"
    planned = project.runner("plan", ".", "--save", str(saved))
    assert planned.code == 0, planned.err
    (repository / "README").write_text("moved\n")
    git(repository, "commit", "-qam", "moved")

    done = project.runner("apply", str(saved))

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "hello\n"


def test_a_saved_plan_goes_with_a_checkout_that_is_moved(project: Project, repository: Path) -> None:
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "incident.json").write_text("{}")
    project.script("cat README", workspace=REPO, run="incident: {directory: incident}")
    planned = project.runner("plan", ".", "--save", str(project.folder / "plan.json"))
    assert planned.code == 0, planned.err
    moved = project.folder.with_name("moved")
    project.folder.rename(moved)
    project.folder.mkdir()  # where the command is started

    done = project.runner("apply", str(moved / "plan.json"))

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "hello\n"


@pytest.mark.scenario("BEY-04")
def test_an_error_shows_file_line_column_the_value_and_what_to_write_instead(project: Project) -> None:
    project.script("true", workspace="setup: {on_failure: wran}")

    done = project.runner("apply", ".")

    assert done.code == 2
    written = project.manifest.read_text().split("\n")
    line = next(number for number, text in enumerate(written, start=1) if "wran" in text)
    assert done.err == (
        "error[manifest.bad-value]: `wran` is not a valid choice\n"
        f"  --> all.runner.yaml:{line}:25\n"
        "   |\n"
        f"{line} |     setup: {{on_failure: wran}}\n"
        "   |                         ^^^^\n"
        "   = hint: did you mean `warn`?\n"
    )


@pytest.mark.scenario("LIF-17", only="local")
@MEMORY.mark
@pytest.mark.parametrize("provider", ["local", "process"])
def test_memory_over_the_limit_kills_the_offender_and_is_recorded_while_the_step_goes_on(
    project: Project, provider: str
) -> None:
    project.script(
        "tail /dev/zero; tail /dev/zero; echo alive", provider=provider, workspace="resource_limits: {memory: 64M}"
    )

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "alive\n"
    message = "agent: out of memory, the kernel killed 2 processes"
    assert record["warnings"] == [{"code": "step.oom", "message": message}]
    assert f"  ! {message}" in done.out.splitlines()
    events = project.events(record)
    assert [(e["step"], e["count"]) for e in events if e["type"] == "OomKilled"] == [("agent", 2)]
