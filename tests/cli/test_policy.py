"""``runner policy``, and runs of repositories that have a policy of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.bad_input import say
from tests.support.situations import REPO, Project, commit, document, git, step

OWN = ".agentgate/policy.yaml"


def own_policy(repository: Path, text: str, *, commit: bool = True) -> None:
    (repository / OWN).parent.mkdir(exist_ok=True)
    (repository / OWN).write_text(dedent(text))
    if commit:
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "policy")


def within(project: Project, folder: Path) -> Project:
    return Project(folder, project.home)


# --- check, scan, explain -----------------------------------------------------------------------


def test_without_anything_the_built_in_defaults_decide(project: Project) -> None:
    said = say(project, "policy", "check", "src/a.py", "deep/.env", "../x", "/etc/passwd", ".env/../a")

    assert said.code == 3
    assert [line.split() for line in said.out.splitlines()] == [
        ["✓", "src/a.py", "allowed:**", "built-in", "default"],
        ["✗", "deep/.env", "forbidden:**/.env", "built-in", "default"],
        ["✗", "../x", "outside-root", "built-in"],
        ["✗", "/etc/passwd", "outside-root", "built-in"],
        ["✗", ".env/../a", "outside-root", "built-in"],
    ]
    assert say(project, "policy", "check", "src/a.py").code == 0


def test_the_policy_of_the_repository_decides_as_its_commit_has_it(project: Project, repository: Path) -> None:
    own_policy(repository, "maxFileSize: 100\nforbiddenPatterns:\n  - '**/*.pem'\n")
    own_policy(repository, "forbiddenPatterns: []\n", commit=False)

    said = say(within(project, repository), "policy", "check", ".env", "x.pem")

    assert said.code == 3
    assert [line.split() for line in said.out.splitlines()] == [
        ["✓", ".env", "allowed:**", "built-in", "default"],
        ["✗", "x.pem", "forbidden:**/*.pem", f"{OWN}:3"],
    ]
    assert "warning[policy.defaults-dropped]: `**/.env` and 5 more defaults" in said.err


def test_a_policy_manifest_is_never_loosened(project: Project, repository: Path) -> None:
    own_policy(repository, "forbiddenPatterns: ['**/*.bak']\n")
    house = "allowed_paths: [src/**]\nforbidden_patterns:\n  - '**/.env'\n  - '**/*.key'"
    (repository / ".runner").mkdir()
    (repository / ".runner" / "house.yaml").write_text(document("Policy", "house", house))

    said = say(within(project, repository), "policy", "check", "src/.env", "src/a.bak", "README", "--policy", "house")

    assert [line.split() for line in said.out.splitlines()] == [
        ["✗", "src/.env", "forbidden:**/.env", ".runner/house.yaml:7"],
        ["✗", "src/a.bak", "forbidden:**/*.bak", f"{OWN}:1"],
        ["✗", "README", "not-allowed", ".runner/house.yaml:5"],
    ]


def test_the_policies_of_a_run_are_explained_with_the_line_that_decides(project: Project, repository: Path) -> None:
    own_policy(repository, "allowedPaths: [src/**]\n")
    project.script("true", workspace=REPO, policy="forbidden_patterns: ['**/*.key']")

    said = say(project, "policy", "explain", "README", "--run", "work", "--manifests", "all.runner.yaml")
    shown = say(
        project, "policy", "explain", "src/a", "--run", "work", "--manifests", "all.runner.yaml", "--output", "json"
    )

    assert said.code == 3
    assert said.out.splitlines() == [
        "README is not allowed",
        "  by rule   not-allowed",
        "  of policy repository",
        f"  written   {OWN}:1",
        "✓ house: allowed:**   built-in default",
        f"✗ repository: not-allowed   {OWN}:1",
    ]
    assert shown.code == 0
    assert json.loads(shown.out)["policies"][1] == {
        "path": "src/a",
        "allowed": True,
        "rule": "allowed:src/**",
        "policy": "repository",
        "origin": f"{OWN}:1",
    }


@pytest.mark.scenario("WSM-19")
@pytest.mark.scenario("WSM-26")
def test_a_directory_is_scanned_with_the_whole_list_of_violations(project: Project) -> None:
    tree = project.folder / "tree"
    (tree / "secrets").mkdir(parents=True)
    git(tree, "init", "-q")
    for name in (".env", "fine.txt", "secrets/a", "x.pem", ".git/x.pem"):
        (tree / name).write_text("x")
    os.mkfifo(tree / "pipe")
    (tree / "out").symlink_to("/etc")
    with (tree / "big").open("wb") as file:
        file.truncate((10 << 20) + 1)

    said = say(project, "policy", "scan", "tree")
    shown = say(project, "policy", "scan", "tree", "--output", "json")

    assert said.code == shown.code == 3
    assert said.out.splitlines() == [
        "✗ .env: forbidden:**/.env   built-in default",
        "✗ big: max-file-size (10485761 bytes, at most 10485760)   built-in default",
        "✗ out: link-outside (/etc)   built-in",
        "✗ pipe: special-file (FIFO)   built-in",
        "✗ secrets: forbidden:**/secrets/**   built-in default",
        "✗ secrets/a: forbidden:**/secrets/**   built-in default",
        "✗ x.pem: forbidden:**/*.pem   built-in default",
        "5 files, 7 violations",
    ]
    assert len(json.loads(shown.out)["violations"]) == 7


def test_a_clean_directory_is_fine(project: Project, repository: Path) -> None:
    said = say(project, "policy", "scan", "repo")

    assert (said.code, said.out) == (0, "2 files, no violations\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("check", "a", "--policy", "huose"), "manifest.unknown-reference", id="unknown policy"),
        pytest.param(("check", "a", "--run", "wrok"), "manifest.unknown-reference", id="unknown run"),
        pytest.param(("check", "a", "--run", "work", "--policy", "house"), "cli.usage", id="both"),
        pytest.param(("check",), "cli.usage", id="no path"),
        pytest.param(("scan", "nowhere"), "cli.usage", id="no directory"),
        pytest.param(("scan", "agent.sh"), "cli.usage", id="a file"),
        pytest.param(("frobnicate",), "cli.usage", id="no such verb"),
    ],
)
def test_what_is_not_there_is_bad_input(project: Project, arguments: tuple[str, ...], code: str) -> None:
    project.script("true", policy="forbidden_patterns: ['**/.env']")
    extra = () if code == "cli.usage" else ("--manifests", "all.runner.yaml")

    said = say(project, "policy", *arguments, *extra)

    assert (said.code, said.errors) == (2, [code])


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.scenario("WSM-18")
def test_a_repository_may_permit_env_files_to_its_agents(project: Project, repository: Path) -> None:
    own_policy(repository, "forbiddenPatterns: ['**/*.pem']\n")
    project.script("echo TOKEN=1 > .env", workspace=REPO)

    record = project.succeed()
    planned = say(project, "plan", "all.runner.yaml")

    assert "+TOKEN=1" in (project.directory(record) / record["saved_work"]["patch"]).read_text()
    commit = git(repository, "rev-parse", "HEAD")[:12]
    assert f"policy repository ({OWN} at {commit})" in " ".join(planned.out.split())
    assert f"{OWN}:1" in next(line for line in planned.out.splitlines() if line.startswith("  scan"))


@pytest.mark.scenario("WSM-18")
@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("allowedPaths: [made/**]", "not-allowed"),
        ("forbiddenPatterns: ['**/*.bak']", "forbidden:**/*.bak"),
        ("maxFileSize: 99", "max-file-size"),
    ],
)
def test_each_field_of_a_repository_s_policy_overrides_the_default_in_a_run(
    project: Project, repository: Path, field: str, rule: str
) -> None:
    """Without it the work is fine."""
    project.script("mkdir made; echo > made/fine; printf %0100d > a.bak", workspace=REPO)
    project.succeed()
    own_policy(repository, f"{field}\n")

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    assert [(found["path"], found["rule"].partition(" ")[0]) for found in record["violations"]] == [("a.bak", rule)]


PUBLIC = "93.184.215.14"
# A network of this test's own, in which a public address is this host's.
HOST = f"""
    ip link set lo up; ip address add {PUBLIC} dev lo
    python3 -m http.server -d / -b {PUBLIC} 80 >/dev/null 2>&1 & server=$!
    "$@"; code=$?; kill $server; exit $code
"""


@pytest.mark.scenario("WSM-18")
def test_a_repository_may_allow_a_network_to_its_agents_or_forbid_it(project: Project, repository: Path) -> None:
    project.within = ("unshare", *(["--map-root-user"] if os.geteuid() else []), "--net", "sh", "-c", HOST, "sh")
    ask = f"curl -s -o /dev/null --retry 9 --retry-connrefused -w '%{{http_code}}' http://{PUBLIC}/; echo"
    project.script(ask, workspace=REPO)
    project.succeed()
    assert project.logs("agent") == "000\n"

    own_policy(repository, "maxFileSize: 1M\nallowNetwork: true\n")
    record = project.succeed()

    assert project.logs("agent") == "200\n"
    assert record["open_network"] == ["agent"]
    assert [(one["place"], one["origin"]) for one in record["network"]] == [(f"{PUBLIC}:80", f"{OWN}:2")]

    own_policy(repository, "allowNetwork: false\n")
    project.script(ask, workspace=f"{REPO}\nnetwork: open")
    done = say(project, "plan", "all.runner.yaml")
    assert (done.code, done.errors) == (3, ["policy.network"])
    assert f"{OWN}:1" in done.err


@pytest.mark.scenario("WSM-16")
@pytest.mark.scenario("WSM-17")
def test_the_shipped_policy_finds_secrets_at_any_depth_and_nothing_else(project: Project, repository: Path) -> None:
    secrets = {
        ".env": "**/.env",
        "a/b/c/.env": "**/.env",
        ".env.local": "**/.env.*",
        "a/b/.env.production": "**/.env.*",
        "secrets/token": "**/secrets/**",
        "a/secrets/b/token": "**/secrets/**",
        "server.pem": "**/*.pem",
        "a/b/server.pem": "**/*.pem",
        "id.key": "**/*.key",
        "a/b/ID.KEY": "**/*.key",
        "credentials.json": "**/credentials.json",
        "a/credentials.json": "**/credentials.json",
        "service-account.json": "**/service-account*.json",
        "a/b/service-account-prod.json": "**/service-account*.json",
    }
    fine = ["environment", "src/env.py", "a/secrets.md", "src/key.py", "my-credentials.json", "account.json"]
    files = " ".join([*secrets, *fine])
    project.script(f'for f in {files}; do mkdir -p "$(dirname "$f")"; echo x > "$f"; done', workspace=REPO)

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    found = {each["path"]: each["rule"] for each in record["violations"]}
    assert {path: f"forbidden:{pattern}" for path, pattern in secrets.items()}.items() <= found.items()
    assert found.keys() - secrets.keys() == {"secrets", "a/secrets", "a/secrets/b"}


def test_what_an_agent_writes_into_the_policy_does_not_count_and_is_said(project: Project, repository: Path) -> None:
    own_policy(repository, "maxFileSize: 1000000\n")
    project.script(f"echo 'forbiddenPatterns: []' > {OWN}; git commit -qam x || true; echo > .env", workspace=REPO)

    blocked, _ = project.apply()
    project.script(f"echo 'forbiddenPatterns: []' > {OWN}", workspace=REPO)
    record = project.succeed()

    assert blocked.code == 3, blocked.out + blocked.err
    assert [w["message"] for w in record["warnings"]] == [
        f"snapshot: the work changes `{OWN}`, which holds only once it is committed where runs start"
    ]


def test_of_an_untrusted_run_it_only_tightens(project: Project, repository: Path) -> None:
    own_policy(repository, "forbiddenPatterns: ['**/*.bak']\n")
    project.script("echo > .env; echo > a.bak", workspace=REPO)
    git(project.folder, "init", "-q")  # the manifests' own repository, which the code lies in

    done, record = project.apply("--untrusted")

    assert done.code == 3, done.out + done.err
    assert sorted(record["saved_work"]["left_out"]) == [".env", "a.bak"]


@pytest.mark.scenario("WSM-20")
def test_a_checkout_that_breaks_policy_stops_the_run_before_anything_runs(project: Project, repository: Path) -> None:
    (repository / "config").mkdir()
    (repository / "config" / ".env").write_text("SECRET=1\n")
    commit(repository, "secret")
    project.script("echo ran", workspace=f"{REPO}\nsetup_commands: [echo ran]")

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    assert step(record, "clone")["status"] == "failed"
    assert step(record, "clone")["outcome"]["message"] == (
        "1 violation before anything ran: config/.env: forbidden:**/.env"
    )
    assert {step(record, s)["status"] for s in ("setup", "agent", "scan", "snapshot")} == {"skipped"}
    assert step(record, "teardown")["status"] == "succeeded"
    assert record["saved_work"]["patch"] is None


@pytest.mark.scenario("WSM-20")
def test_what_the_agent_leaves_is_scanned_and_blocks_the_snapshot(project: Project, repository: Path) -> None:
    project.script("echo good > good; echo TOKEN=1 > .env; mkfifo pipe; exit 1", workspace=REPO)

    failed, record = project.apply()
    left_out = record["saved_work"]["left_out"]
    project.script("echo good > good; echo TOKEN=1 > .env; mkfifo pipe", workspace=REPO)
    done, blocked = project.apply()

    assert failed.code == 1, failed.out + failed.err
    assert left_out == [".env", "pipe"]
    assert done.code == 3, done.out + done.err
    assert step(blocked, "scan")["status"] == "failed"
    assert step(blocked, "snapshot")["status"] == "skipped"
    assert "TOKEN" not in (project.directory(blocked) / "withheld.patch").read_text()


@pytest.mark.scenario("BEY-08")
def test_a_workspace_whose_work_cannot_be_saved_is_kept(project: Project) -> None:
    """There are more violations than a scan lists, so nothing of the tree can be let out."""
    project.script("for n in $(seq 1100); do : > $n.pem; done; echo work > made")

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    assert record["saved_work"] is None
    assert {name: step(record, name)["status"] for name in ("save", "teardown")} == dict.fromkeys(
        ("save", "teardown"), "failed"
    )
    assert "the work was not saved, so `" in step(record, "teardown")["outcome"]["message"]
    (made,) = project.home.glob("state/projects/default/workspaces/*/made")
    assert made.read_text() == "work\n"
    for secret in made.parent.glob("*.pem"):
        secret.unlink()
    recovered = project.runner("recover", "last")
    assert recovered.code == 0, recovered.out + recovered.err
    assert not made.exists()
