"""``runs branch|apply|push|export`` as a person uses them: after real runs, into real repositories."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from runner.core.redact import Redactor
from runner.testing.outside import alive
from tests.support.bad_input import say
from tests.support.folder_contents import everything
from tests.support.needs import ROOT
from tests.support.situations import REPO, Project, git, until

VERIFIED = "snapshot: {}\nverify: {files: {required: [README]}}"
WORK = "echo better > README; mkdir lib; echo new > lib/new; echo note > $RUNNER_OUTPUT/note"


@pytest.fixture
def published(project: Project, repository: Path) -> dict[str, Any]:
    """A run that changed a file, made another, and published both."""
    project.script(WORK, workspace=REPO, run=VERIFIED)
    return project.succeed()


def test_the_branch_of_a_run_is_made_once_and_nothing_else_changes(
    project: Project, repository: Path, published: dict[str, Any]
) -> None:
    commit, branch = published["snapshot"]["commit"], f"runner/{published['id']}"
    (repository / "README").write_text("mine\n")
    status = git(repository, "status", "--short", "--branch")

    said = say(project, "runs", "branch", "last")
    again = say(project, "runs", "branch", "last", "--output", "json")

    assert (said.code, said.out) == (0, f"branch {branch} of {repository} is now at {commit[:12]}\n")
    assert json.loads(again.out) == {
        "run": published["id"],
        "status": "succeeded",
        "repository": str(repository),
        "branch": branch,
        "commit": commit,
        "made": False,
    }
    assert git(repository, "rev-parse", branch) == commit
    assert git(repository, "status", "--short", "--branch") == status


def test_a_branch_goes_into_another_clone_under_another_name(
    project: Project, repository: Path, published: Any
) -> None:
    git(project.folder, "clone", "-q", str(repository), "other")

    assert say(project, "runs", "branch", "last", "--into", "other", "--name", "fix").code == 0

    assert git(project.folder / "other", "show", "fix:lib/new") == "new"


def test_a_patch_is_checked_then_applied_then_refused(project: Project, repository: Path, published: Any) -> None:
    before = everything(repository)
    checked = say(project, "runs", "apply", "last", "--check")
    assert (checked.code, checked.out) == (0, f"2 files of {repository} would change\n")
    assert everything(repository) == before

    applied = say(project, "runs", "apply", "last", "--output", "json")

    assert applied.code == 0
    assert json.loads(applied.out)["paths"] == ["README", "lib/new"]
    assert git(repository, "status", "--short", "-uall").split("\n") == ["M README", "?? lib/new"]
    after = everything(repository)
    said = say(project, "runs", "apply", "last")
    assert (said.code, said.errors) == (2, ["deliver.would-overwrite"])
    assert everything(repository) == after
    assert not list((project.home / "state" / "tmp").iterdir())


def test_a_checkout_that_can_not_be_written_to_is_said_so(project: Project, repository: Path, published: Any) -> None:
    (repository / ".git" / "runner-apply").write_text("in the way\n")

    said = say(project, "runs", "apply", "last")

    assert (said.code, said.errors) == (4, ["host.refused"])
    assert git(repository, "status", "--short") == ""


def test_a_patch_that_was_edited_is_not_applied(project: Project, repository: Path, published: Any) -> None:
    with (project.directory(published) / "work.patch").open("a") as patch:
        patch.write("\n")

    said = say(project, "runs", "apply", "last")

    assert (said.code, said.errors) == (7, ["deliver.patch-changed"])
    assert git(repository, "status", "--short") == ""


def test_a_push_by_the_name_of_a_remote(project: Project, repository: Path, published: Any) -> None:
    git(project.folder, "clone", "-q", "--bare", str(repository), "remote.git")
    git(repository, "remote", "add", "origin", str(project.folder / "remote.git"))

    first = say(project, "runs", "push", "last", "--to", "origin")
    again = say(project, "runs", "push", "last", "--to", "origin", "--output", "json")

    assert first.code == 0, first.err
    assert "new, at" in first.out
    assert json.loads(again.out)["moved"] is False
    assert git(project.folder / "remote.git", "show", f"runner/{published['id']}:README") == "better"


def test_the_default_branch_is_pushed_to_only_by_name(project: Project, repository: Path) -> None:
    project.script(WORK, workspace=REPO, run=VERIFIED.replace("{}", "{branch: main}"))
    assert project.apply()[0].code == 0
    git(project.folder, "clone", "-q", "--bare", str(repository), "remote.git")
    url = f"file://{project.folder}/remote.git"

    refused = say(project, "runs", "push", "last", "--to", url)
    named = say(project, "runs", "push", "last", "--to", url, "--branch", "main")

    assert (refused.code, refused.errors) == (3, ["deliver.default-branch"])
    assert named.code == 0
    assert git(project.folder / "remote.git", "show", "main:README") == "better"


def test_a_signal_ends_a_push_and_its_processes(project: Project, repository: Path, published: Any) -> None:
    fake = project.folder / "bin"
    fake.mkdir()
    (fake / "ssh").write_text(f"#!/bin/sh\necho $$ > {project.folder}/pid\nsleep 600\n")
    (fake / "ssh").chmod(0o755)
    project.env["PATH"] = f"{fake}:{os.environ['PATH']}"
    process = project.start("runs", "push", "last", "--to", "git@host.example:shop")
    until(lambda: (project.folder / "pid").exists() and (project.folder / "pid").read_text())

    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 130
    process.communicate()
    until(lambda: not alive(int((project.folder / "pid").read_text())), 1)


NOT_DELIVERED: dict[str, tuple[str, str | None, str, int, str]] = {
    "policy broken": (WORK, "allowed_paths: ['lib/**']", "snapshot: {}", 3, "deliver.withheld"),
    "an agent that failed": (f"{WORK}; exit 1", None, "snapshot: {}", 6, "deliver.nothing-published"),
}


@pytest.mark.parametrize(("script", "policy", "run", "exit_code", "code"), NOT_DELIVERED.values(), ids=NOT_DELIVERED)
def test_only_what_was_published_is_delivered(
    project: Project, repository: Path, script: str, policy: str | None, run: str, exit_code: int, code: str
) -> None:
    project.script(script, workspace=REPO, run=run, policy=policy)
    _, record = project.apply()
    before = everything(repository)

    for verb in (("branch",), ("apply",), ("push", "--to", "/nowhere")):
        said = say(project, "runs", verb[0], "last", *verb[1:])
        assert (said.code, said.errors) == (exit_code, [code])
    assert everything(repository) == before
    if code == "deliver.withheld":
        assert "README: not-allowed" in said.err
        assert str(project.directory(record) / "withheld.patch") in said.err


UNVERIFIED = {
    "nothing verified": ("snapshot: {}", "verified nothing", 0),
    "checks that failed": ("snapshot: {}\nverify: {files: {required: [nowhere]}}", "ended failed", 1),
}


@pytest.mark.parametrize(("run", "why", "exit_code"), UNVERIFIED.values(), ids=UNVERIFIED)
def test_work_that_nothing_vouches_for_is_delivered_only_when_that_is_asked_for(
    project: Project, repository: Path, run: str, why: str, exit_code: int
) -> None:
    project.script(WORK, workspace=REPO, run=run)
    done, record = project.apply()
    assert (done.code, record["snapshot"] is not None) == (exit_code, True), done.out + done.err
    git(project.folder, "clone", "-q", "--bare", str(repository), "remote.git")
    url = f"file://{project.folder}/remote.git"
    before = everything(repository), everything(project.folder / "remote.git")

    for words in (("branch",), ("apply",), ("apply", "--check"), ("push", "--to", url)):
        said = say(project, "runs", words[0], "last", *words[1:])
        assert (said.code, said.errors) == (3, ["deliver.unverified"])
        assert f"run `{record['id']}` {why}" in said.err
    assert (everything(repository), everything(project.folder / "remote.git")) == before

    for words in (("branch",), ("apply",), ("push", "--to", url)):
        assert say(project, "runs", words[0], "last", *words[1:], "--unverified").code == 0
    assert git(repository, "show", f"runner/{record['id']}:README") == "better"


def test_a_commit_names_its_run_its_plan_and_its_task(project: Project, repository: Path) -> None:
    """As trailers that git reads, also behind those of the manifest's own message."""
    message = "fix: it\\n\\nBecause.\\n\\nReviewed-by: nobody"
    project.script(WORK, workspace=REPO, run=VERIFIED.replace("{}", f'{{message: "{message}"}}', 1))
    record = project.succeed("--task", "pull_request_number=7", "--task", "branch=feature/x")
    assert say(project, "runs", "branch", "last").code == 0

    body = git(repository, "log", "-1", "--format=%B", f"runner/{record['id']}")
    trailers = git(repository, "log", "-1", "--format=%(trailers)", f"runner/{record['id']}").splitlines()

    assert body.startswith("fix: it\n\nBecause.\n\nReviewed-by: nobody\n")
    assert trailers == [
        "Reviewed-by: nobody",
        f"Runner-Run: {record['id']}",
        f"Runner-Plan: {record['plan']}",
        "Runner-Task: branch=feature/x pull_request_number=7",
    ]


def test_a_run_without_a_change_has_nothing_to_apply(project: Project, repository: Path) -> None:
    project.script("true", workspace=REPO, run=VERIFIED.replace("snapshot: {}", "snapshot: {allow_empty: true}"))
    assert project.apply()[0].code == 0

    said = say(project, "runs", "apply", "last")

    assert (said.code, said.out) == (0, f"nothing to do: {repository} has all of the work\n")


def test_work_from_nothing_needs_a_place_to_go(project: Project) -> None:
    project.script("echo x > made", run=VERIFIED.replace("README", "made"))
    assert project.apply()[0].code == 0
    git(project.folder, "init", "-q", "-b", "main", "empty")

    assert say(project, "runs", "apply", "last").errors == ["cli.usage"]
    assert say(project, "runs", "branch", "last", "--into", "empty", "--name", "work").code == 0
    assert say(project, "runs", "apply", "last", "--into", "empty").code == 0

    assert git(project.folder / "empty", "show", "work:made") == "x"
    assert (project.folder / "empty" / "made").read_text() == "x\n"


def test_without_the_git_program_it_is_said_so(project: Project, repository: Path, published: Any) -> None:
    project.env["PATH"] = "/nowhere"

    done = project.runner("runs", "branch", "last")

    assert done.code == 4
    assert "error[git.missing]" in done.err


def test_a_repository_of_a_run_that_is_gone_is_not_found(project: Project, repository: Path, published: Any) -> None:
    shutil.rmtree(project.home / "state" / "snapshots")

    assert say(project, "runs", "branch", "last").errors == ["deliver.nothing-published"]


# --- export ----------------------------------------------------------------------------------------


@pytest.fixture
def odd(project: Project) -> dict[str, Any]:
    """A run with outputs of odd names, and with a link and a FIFO among its files."""
    project.script(
        r"cd $RUNNER_OUTPUT; mkdir -p a/b; echo 1 > a/b/c; echo 2 > 'with\slash'; echo 3 > line;"
        " head -c 3000000 /dev/zero > big"
    )
    record = project.succeed()
    files = project.directory(record)
    os.rename(files / "output" / "line", files / "output" / "a\nline")
    (files / "output" / os.fsdecode(b"raw\xff")).write_text("4\n")
    (files / "output" / "secret").symlink_to("/etc/passwd")
    (files / "output" / "etc").symlink_to("/etc")
    os.mkfifo(files / "logs" / "fifo")
    return record


def test_a_folder_has_the_evidence_with_checksums_that_hold(project: Project, odd: dict[str, Any]) -> None:
    said = say(project, "runs", "export", "last", "--to", "out", "--output", "json")

    assert said.code == 0, said.err
    assert json.loads(said.out)["left_out"] == [
        {"name": "logs/fifo", "why": "not a regular file"},
        {"name": "output/etc", "why": "a link"},
        {"name": "output/secret", "why": "a link"},
    ]
    out = project.folder / "out"
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    evidence = {"run.json", "plan.json", "events.jsonl", "report.txt", "report.md", "prompt-sent.md", "output/a/b/c"}
    assert found > evidence | {"EXPORT.json", "SHA256SUMS"}
    listed = {file["name"]: file for file in json.loads((out / "EXPORT.json").read_text())["files"]}
    assert found == set(listed) | {"EXPORT.json", "SHA256SUMS"}
    assert listed["output/a_line"]["was"] == "output/a\\nline"
    assert listed["output/raw_"]["was"] == "output/raw\\udcff"
    assert (out / "output" / "with_slash").read_text() == "2\n"
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=out, check=False)
    assert checked.returncode == 0
    assert len((out / "SHA256SUMS").read_bytes().splitlines()) == len(found) - 1
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_an_archive_is_the_same_every_time_and_unpacks_to_what_its_checksums_say(
    project: Project, odd: dict[str, Any]
) -> None:
    one, two = project.folder / "one.tar.gz", project.folder / "two.tgz"
    assert say(project, "runs", "export", "last", "--to", one).code == 0
    for path in project.directory(odd).rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (1, 1))
    assert say(project, "runs", "export", "last", "--to", two).code == 0

    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_mode & 0o777 == 0o600
    with tarfile.open(one) as tar:
        members = tar.getmembers()
    *names, contents, sums = [member.name.removeprefix(f"run-{odd['id']}/") for member in members]
    assert len(names) > 10
    assert (contents, sums) == ("EXPORT.json", "SHA256SUMS")
    assert {(m.mtime, m.uid, m.gid, m.uname, m.isreg()) for m in members} == {(odd["started"] // 10**6, 0, 0, "", True)}
    subprocess.run(["tar", "-xzf", one], cwd=project.folder, check=True)
    out = project.folder / f"run-{odd['id']}"
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=False).returncode == 0
    assert f"{hashlib.sha256(bytes(3_000_000)).hexdigest()}  output/big\n" in (out / "SHA256SUMS").read_text()


def test_a_key_that_this_host_knows_by_now_is_nowhere_in_an_archive(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed when no key was known here, in the log, the report of the incident, a message and a file's name."""
    key = "sk-ant-api03-Zm9v+YmFy/0123456789"
    (project.folder / "inc").mkdir()
    (project.folder / "inc" / "incident.json").write_text("{}")
    project.script(
        f"""
        echo '{key}'; echo '{key}' | base64; echo '{key}' >&2
        echo '{key}' > $RUNNER_OUTPUT/r.md; echo 1 > $RUNNER_OUTPUT/{key.replace("/", "%2F")}
        exit 3
        """,
        run="incident: {directory: inc}",
    )
    assert project.runner("apply", ".").code == 1
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)

    said = say(project, "runs", "export", "last", "--to", "e.tar.gz")

    assert said.code == 0
    assert "secrets taken out of events.jsonl, incident/triage_script_" in said.out
    redactor = Redactor({"ANTHROPIC_API_KEY": key.encode()})
    with tarfile.open(project.folder / "e.tar.gz") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert len(contents) > 10
    assert {name for name, content in contents.items() if redactor.names_in(name.encode() + b"\n" + content)} == set()


@pytest.mark.parametrize("name", ["there", "there.tar.gz", "link", "link.tar.gz"])
def test_an_export_overwrites_nothing(project: Project, odd: dict[str, Any], name: str) -> None:
    (project.folder / "there").mkdir()
    (project.folder / "there.tar.gz").write_text("mine\n")
    (project.folder / "link").symlink_to("nowhere")
    (project.folder / "link.tar.gz").symlink_to("nowhere.tar.gz")
    before = everything(project.folder)

    said = say(project, "runs", "export", "last", "--to", name)

    assert (said.code, said.errors) == (2, ["deliver.exists"])
    assert everything(project.folder) == before


@ROOT.mark
@pytest.mark.parametrize("name", ["full/out", "full/out.tar.gz"])
def test_an_export_that_the_disk_does_not_take_leaves_nothing(project: Project, odd: dict[str, Any], name: str) -> None:
    """On a file system of one megabyte."""
    files = project.directory(odd)
    (files / "output" / "noise").write_bytes(os.urandom(3_000_000))
    full = project.folder / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", full], check=True)
    try:
        said = say(project, "runs", "export", "last", "--to", name)
        left = list(full.iterdir())
    finally:
        subprocess.run(["umount", full], check=True)

    assert (said.code, said.errors, left) == (4, ["host.refused"], [])


def test_the_evidence_of_a_withheld_run_can_be_exported(project: Project, repository: Path) -> None:
    project.script(WORK, workspace=REPO, run="snapshot: {}", policy="allowed_paths: ['lib/**']")
    project.apply()

    assert say(project, "runs", "export", "last", "--to", "e.tar.gz").code == 0

    assert gzip.decompress((project.folder / "e.tar.gz").read_bytes()).count(b"withheld.patch") >= 1
