"""Projects by the command: made and shown, mounted whole or not, with their AGENTS.md, and what they protect."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import called
from tests.support.situations import REPO, Project, commit, document, git, step

SHOP = "{workspace_isolation: %s}"
OWN = "project's own\n"


def runs(project: Project, script: str, spec: str | None, workspace: str = "", repository: str = "") -> None:
    """A run `work` of project `shop`, which is described by ``spec`` if there is one."""
    project.script(script, workspace=f"{repository}\n{workspace}", run="project: shop")
    if spec is not None:
        project.add(document("Project", "shop", spec))


@pytest.fixture(autouse=True)
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_HOME", str(project.home / "state"))
    monkeypatch.chdir(project.folder)


def in_project(project: Project, name: str, text: str) -> Path:
    """A file in the directory of project `shop`, that an agent may write."""
    path = project.home / "state" / "projects" / "shop" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o666)
    return path


def rarely(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.nightly)


def read_project(*arguments: str) -> Any:
    done = called("project", *arguments, "--output", "json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def patch(project: Project) -> str:
    return project.runner("runs", "patch", "last").out


def codes(record: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in record["warnings"]]


# --- records ---


@pytest.mark.scenario("ISO-01")
@pytest.mark.scenario("ISO-03")
@pytest.mark.scenario("ISO-04", only="local")
def test_a_project_made_with_isolation_says_so_and_its_workspaces_see_themselves_alone(project: Project) -> None:
    made = read_project("create", "shop", "--workspace-isolation", "--protected", "AGENTS.md")
    assert made["workspace_isolation"] is True
    assert read_project("get", "shop") == made == read_project("list")[0]

    runs(project, "pwd; ls -A /workspace; ls /workspace/.. | grep -c workspaces; echo x > AGENTS.md", None)
    done, record = project.apply()

    assert project.logs("agent") == "/workspace\nAGENTS.md\n0\n"
    assert "Read-only file system" in project.logs("agent", "stderr")
    assert done.code == 1, done.err
    assert record["warnings"] == []


@pytest.mark.scenario("ISO-02")
@pytest.mark.scenario("ISO-03")
@pytest.mark.scenario("ISO-05", only="local")
def test_a_project_made_without_isolation_is_seen_whole(project: Project) -> None:
    assert read_project("create", "shop")["workspace_isolation"] is False
    assert read_project("get", "shop")["workspace_isolation"] is False
    runs(project, "pwd; ls -A /workspace; cat /workspace/notes; echo more >> /workspace/notes; echo x > ../../y", None)
    notes = in_project(project, "notes", "some\n")

    record = project.succeed()

    place = f"/workspace/workspaces/{record['id']}-1"
    assert project.logs("agent").splitlines() == [place, "notes", "workspaces", "some"]
    assert notes.read_text() == "some\nmore\n"
    assert notes.with_name("y").read_text() == "x\n"


@pytest.mark.scenario("ISO-03")
def test_a_project_is_shown_in_words(project: Project) -> None:
    called("project", "create", "shop", "--workspace-isolation", "--protected", "b/", "--protected", "a")
    called("project", "create", "cellar")

    listed = called("project", "list").out
    heads, *rows = (line.split("  ") for line in listed.splitlines())
    assert [word.strip() for word in heads if word] == ["PROJECT", "WORKSPACES", "ROOT", "PROTECTED", "MANIFEST"]
    assert [[word.strip() for word in row if word] for row in rows] == [
        ["cellar", "shared", str(project.folder)],
        ["shop", "isolated", str(project.folder), "a, b/"],
    ]
    assert called("project", "get", "shop").out.splitlines()[1].split() == listed.splitlines()[2].split()


def test_a_project_that_is_not_there_is_not_found_and_the_nearest_is_named(project: Project) -> None:
    assert called("project", "list").out == "no projects\n"
    called("project", "create", "shop")

    done = called("project", "get", "shpo")

    assert done.code == 6
    assert "error[store.unknown-project]" in done.err
    assert "did you mean `shop`?" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["Shop!"], "cannot name a project", id="name"),
        pytest.param(["../shop"], "cannot name a project", id="path"),
        pytest.param(["shop", "--root", "nowhere"], "`nowhere` is not a directory", id="root"),
        pytest.param(["shop", "--protected", "../x"], "`..`", id="protected"),
    ],
)
def test_a_project_that_cannot_be_is_refused(project: Project, arguments: list[str], words: str) -> None:
    done = called("project", "create", *arguments)

    assert (done.code, words in done.err) == (2, True), done.err
    assert called("project", "list").out == "no projects\n"


@pytest.mark.nightly
def test_a_manifest_of_a_stranger_changes_no_project(project: Project) -> None:
    runs(project, "true", SHOP % "true")
    project.succeed("--untrusted")

    assert read_project("list") == []


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        pytest.param("{workspace_isolation: false}", "workspace_isolation: false", id="shared"),
        pytest.param("{workspace_isolation: true, root: /}", "root: /", id="root"),
    ],
)
def test_a_manifest_of_a_stranger_gets_no_directory_of_others(project: Project, spec: str, place: str) -> None:
    git(project.folder, "init", "-q")
    runs(project, "true", spec)
    done = called("plan", str(project.folder), "--untrusted")

    assert done.code == 3
    assert "error[policy.untrusted]" in done.err
    assert place in done.err


def test_a_recorded_project_is_nothing_to_a_stranger(project: Project) -> None:
    read_project("create", "shop", "--workspace-isolation", "--root", "/")
    runs(project, "true", None)

    done = called("plan", str(project.folder), "--untrusted")

    assert (done.code, "error[manifest.unknown-reference]" in done.err) == (2, True)


def test_a_recorded_project_may_have_names_that_json_escapes(project: Project) -> None:
    read_project("create", "shop", "--workspace-isolation", "--protected", "\U0001f600/\u00e9")
    runs(project, "true", None)

    done = called("plan", str(project.folder))

    assert done.code == 0, done.err
    assert "\U0001f600" in done.out


# --- mounts ---


def test_the_plan_shows_what_is_mounted_and_where_commands_start(project: Project) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    seen, digests = [], set()
    for isolated in ("true", "false"):
        runs(project, "true", SHOP % isolated)
        plan = json.loads(called("plan", str(project.folder), "--output", "json").out)
        steps = {step["id"]: step for step in plan["runs"][0]["steps"]}
        seen.append((steps["provision"]["what"], steps["agent"]["mounts"][0]["origin"].rpartition("/")[2]))
        digests.add(plan["digest"])

    assert seen == [
        ("local; alone in project shop, with its AGENTS.md", "built-in"),
        (
            "local; project shop whole, starting in /workspace/workspaces/ID, with its AGENTS.md",
            "all.runner.yaml:23",
        ),
    ]
    assert len(digests) == 2


@pytest.mark.nightly
@pytest.mark.scenario("ISO-09", only="local")
def test_an_isolated_run_sees_nothing_of_its_project(project: Project) -> None:
    (project.home / "state" / "projects" / "shop").mkdir(parents=True)
    (project.home / "state" / "projects" / "shop" / "metadata").write_text("secret")
    runs(
        project,
        """
        ls -A /workspace/../ ..; cd ..; pwd; ls -A; cat metadata ../metadata
        for root in /proc/*/root; do ls -A $root; ls $root/projects $root/runs; done
        ls -A /run/runner
        """,
        SHOP % "true",
    )
    _, record = project.apply()

    seen = set(project.logs("agent").split())
    assert "/" in seen
    assert not seen & {"metadata", "workspaces", "projects", "runs", "secret", "state.db", f"{record['id']}-1"}


# --- AGENTS.md ---


@pytest.mark.scenario("ISO-06")
@pytest.mark.parametrize(
    "source",
    [REPO, rarely(""), rarely("repo_source: {type: local, path: repo, include_dirty: true}")],
    ids=["clone", "no repository", "dirty clone"],
)
def test_the_project_s_agents_file_is_in_an_isolated_workspace_and_never_in_its_work(
    project: Project, repository: Path, source: str
) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    runs(project, "cat /workspace/AGENTS.md; echo work > made", SHOP % "true", repository=source)

    record = project.succeed()

    assert project.logs("agent") == OWN
    assert (record["saved_work"]["changed"], "made" in patch(project), "AGENTS" in patch(project)) == (1, True, False)
    assert record["warnings"] == []


@pytest.mark.parametrize(
    "change",
    ["echo x >> AGENTS.md", rarely("rm AGENTS.md"), rarely("rm AGENTS.md; mkdir AGENTS.md; cp made AGENTS.md/x")],
)
def test_an_agents_file_that_an_agent_changed_is_said_and_left_out(
    project: Project, repository: Path, change: str
) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    runs(project, f"echo work > made; {change}", SHOP % "true", repository=REPO)

    record = project.succeed()

    assert (record["saved_work"]["changed"], "AGENTS" in patch(project)) == (1, False)
    assert [w["message"] for w in record["warnings"]] == [
        "save: `AGENTS.md` was changed; it is a copy of the project's, not part of the work"
    ]


@pytest.mark.scenario("ISO-07")
def test_a_project_without_an_agents_file_is_no_error(project: Project, repository: Path) -> None:
    runs(project, "ls AGENTS.md || echo none", SHOP % "true", repository=REPO)

    done, record = project.apply()

    assert (done.code, project.logs("agent"), record["warnings"]) == (0, "none\n", [])


@pytest.mark.scenario("ISO-08")
@pytest.mark.parametrize("own", ["file", "link", rarely("folder")])
def test_a_workspace_s_own_agents_file_stays(project: Project, repository: Path, own: str) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    path = repository / "AGENTS.md"
    if own == "file":
        path.write_text("the workspace's\n")
    elif own == "link":
        path.symlink_to("README")
    else:
        path.mkdir()
        (path / "file").write_text("the workspace's\n")
    commit(repository, "own")
    runs(project, "cat AGENTS.md AGENTS.md/file; echo more > made; rm -r AGENTS.md", SHOP % "true", repository=REPO)

    _, record = project.apply()

    assert project.logs("agent") == ("hello\n" if own == "link" else "the workspace's\n")
    assert record["saved_work"]["changed"] == 2, "its own is work like any other"


def test_an_agents_file_that_is_a_link_is_refused_at_the_project(project: Project) -> None:
    (project.folder / "AGENTS.md").symlink_to("/etc/passwd")
    runs(project, "cat AGENTS.md", "{workspace_isolation: true, root: .}")

    done = called("apply", str(project.folder))

    assert done.code == 2
    assert "`AGENTS.md` cannot be read: it is a symbolic link" in done.err
    assert "root: ." in done.err


def test_without_isolation_the_agents_file_is_in_the_project_s_directory(project: Project, repository: Path) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    runs(project, "ls -A; cat /workspace/AGENTS.md; echo more >> /workspace/AGENTS.md", SHOP % "false", "", REPO)
    placed = in_project(project, "AGENTS.md", "forged\n")

    record = project.succeed()

    assert project.logs("agent").splitlines() == [".git", "README", "src", OWN.strip()]
    assert placed.read_text() == f"{OWN}more\n"
    assert record["saved_work"]["changed"] == 0


# --- protected paths ---


@pytest.mark.scenario("ISO-13", only="local")
def test_protected_paths_are_ignored_with_a_warning_when_isolation_is_off(project: Project, repository: Path) -> None:
    read_project("create", "shop", "--workspace-isolation")
    runs(project, "echo x > README", "{protected_paths: [README]}", repository=REPO)

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert "warning[policy.protected-ignored]: project `shop` is not isolated, so README can be written" in done.err
    assert "protected_paths: [README]" in done.err
    assert codes(record) == ["policy.protected-ignored"]
    assert record["observed"]["read_only"] == []
    assert "README" in patch(project)

    row = read_project("get", "shop")
    assert (row["workspace_isolation"], row["protected_paths"]) == (False, ["README"])
    assert row["manifest"] == str(project.manifest)
    refused = called("project", "create", "shop", "--workspace-isolation")
    assert (refused.code, f"change `{row['manifest']}`" in refused.err) == (2, True), "the manifest wins"
    assert read_project("get", "shop") == row


WAITS = "touch $RUNNER_OUTPUT/ready; while [ ! -e $RUNNER_OUTPUT/go ]; do sleep 0.05; done; echo work > made"


@pytest.mark.parametrize("change", ["content", rarely("mode"), rarely("gone"), rarely("none")])
def test_a_protected_path_that_changed_all_the_same_lets_nothing_out(
    project: Project, repository: Path, change: str
) -> None:
    """Nothing in a sandbox can do that; but whether it was done is looked at, and not assumed."""
    (repository / "src" / "deep").mkdir()
    (repository / "src" / "deep" / "file").write_text("one\n")
    commit(repository, "deep")
    runs(project, WAITS, SHOP % "true", "protected_paths: [src/, new.md]", REPO)
    process = project.start("apply", ".")
    tree, private = wait_until_ready(project)
    victim = tree / "src" / "deep" / "file"
    if change == "content":
        victim.write_text("two\n")
    elif change == "mode":
        victim.chmod(0o755)
    elif change == "gone":
        victim.unlink()
    (private / "output" / "go").touch()
    process.communicate(timeout=60)
    record = project.record()

    found = [(v["path"], v["rule"]) for v in record["violations"]]
    if change == "none":
        assert (process.returncode, found) == (0, [])
        return
    assert process.returncode == 3
    assert found == [("src", "protected-changed")]
    assert record["snapshot"] is None
    assert step(record, "scan")["outcome"]["reason"] == "policy"
    assert ("made" in patch(project), "src" in patch(project)) == (True, False)


def wait_until_ready(project: Project) -> tuple[Path, Path]:
    """Tree and private directory of the workspace of the only run, once its agent is ready."""
    state = project.home / "state"
    deadline = time.monotonic() + 60

    def private_of(tree: Path) -> Path:
        return tree.resolve().parent if tree.is_symlink() else state / "sandboxes" / tree.name

    def is_ready(private: Path) -> bool:
        return (private / "output" / "ready").exists()

    while not (trees := [t for t in state.glob("projects/shop/workspaces/*") if is_ready(private_of(t))]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return trees[0], private_of(trees[0])


@pytest.mark.nightly
def test_a_killed_run_is_recovered_without_the_copy_and_with_its_violation(project: Project, repository: Path) -> None:
    (project.folder / "AGENTS.md").write_text(OWN)
    runs(project, f"echo work > made; {WAITS}", SHOP % "true", "protected_paths: [src/]", REPO)
    process = project.start("apply", ".")
    tree, _ = wait_until_ready(project)
    process.kill()
    process.communicate(timeout=60)
    (tree / "src" / "app.sh").write_text("changed\n")

    recovered = project.runner("recover")
    record = project.record()

    assert recovered.code == 0, recovered.out + recovered.err
    assert [(v["path"], v["rule"]) for v in record["violations"]] == [("src", "protected-changed")]
    assert record["saved_work"]["withheld"] is True
    assert ("made" in patch(project), "AGENTS" in patch(project)) == (True, False)


def test_making_a_project_again_takes_no_protection_away(project: Project) -> None:
    """Regression: what was not said again was dropped without a word."""
    called("project", "create", "shop", "--workspace-isolation", "--protected", "a")
    before = read_project("get", "shop")

    for fewer in (["--protected", "a"], ["--workspace-isolation"]):
        refused = called("project", "create", "shop", *fewer)
        assert (refused.code, "would lose" in refused.err) == (2, True)
    assert read_project("get", "shop") == before

    more = called("project", "create", "shop", "--workspace-isolation", "--protected", "a", "--protected", "b")
    assert more.code == 0
    assert read_project("get", "shop")["protected_paths"] == ["a", "b"]
