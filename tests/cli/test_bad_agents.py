"""Whole runs of agents and sources that do their worst: an outcome in words, evidence that can be read, nothing left.

A number in a docstring is the case's number in the catalogue of hazards.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from time import monotonic

import pytest

from tests.support.situations import Done, Project, document, git, step

LOCAL = "repo_source: {type: local, path: repo}"


def plain(done: Done) -> str:
    """All that the command said, which no terminal could obey."""
    said = done.out + done.err
    assert "Traceback" not in said
    assert not {c for c in said if not c.isprintable() and c != "\n"}
    return said


@pytest.fixture(params=["local", "process"])
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_tree_of_everything_that_may_not_be_is_named_whole_and_removed(
    project: Project, repository: Path, provider: str
) -> None:
    """Cases 61, 63, 65, 67, 68, 70 and 90."""
    (repository / ".gitignore").write_text(".env\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "ignore")
    project.script(
        r"""
        mkfifo f
        mkdir -p m secrets a/b/c/d
        touch m/x secrets/a x.pem
        echo TOKEN=1 | tee .env a/b/c/d/.env kept > committed.env.local
        mv committed.env.local .env.local
        git add -A 2>/dev/null; git -c user.name=a -c user.email=a commit -qm secret; git stash -q || true
        ln -s loop loop
        ln -s /etc/passwd out
        ln -s /proc/self/root host
        truncate -s 1T sparse
        truncate -s 10485761 large
        touch -- -rf "$(printf 'a\nb')" "$(printf 'r\377')" "$(printf 'e\033]52;c;aGk=\007')"
        chmod 000 m
        """,
        provider=provider,
        workspace=LOCAL,
    )

    done, record = project.apply()

    assert done.code == 3
    assert record["outcome"]["reason"] == "policy"
    plain(done)
    found = {v["path"]: v["rule"] for v in record["violations"]}
    assert {path for path, rule in found.items() if rule.startswith("forbidden:")} >= {".env", "a/b/c/d/.env", "x.pem"}
    assert found["f"] == "special-file"
    assert found["out"] == found["host"] == "link-outside"
    assert found["sparse"] == found["large"] == "max-file-size"
    assert "loop" not in found
    assert record["snapshot"] is None
    patch = (project.directory(record) / "withheld.patch").read_bytes()
    assert b"TOKEN" not in patch.replace(b"+++ b/kept\n@@ -0,0 +1 @@\n+TOKEN=1", b"")


def test_daemons_are_gone_and_the_step_does_not_wait_for_their_pipes(project: Project, provider: str) -> None:
    """Cases 110 and 111; the fixture looks for processes."""
    project.script(
        """
        (setsid sh -c 'trap "" TERM; sleep 1000' &)
        (setsid sleep 999 &)
        echo done
        """,
        provider=provider,
    )
    begun = monotonic()

    done, _ = project.apply()

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "done\n"
    assert monotonic() - begun < 60


def test_an_agent_that_kills_itself_has_failed(project: Project, provider: str) -> None:
    """Case 138."""
    project.script("kill -9 $$", provider=provider)

    done, record = project.apply()

    assert done.code == 1
    assert record["outcome"]["reason"] == "exit"


def test_what_an_agent_says_can_not_drive_a_terminal(project: Project) -> None:
    """Case 134."""
    project.script(r"printf 'bad \033]52;c;aGk=\007 \377\000 \342\200\256\n' >&2; exit 3")

    done, record = project.apply()

    assert done.code == 1
    assert r"exited 3: bad \x1b]52;c;aGk=\x07" in plain(done)
    assert record["outcome"]["message"].isprintable()


def test_output_of_any_name_is_kept_and_shown_escaped(project: Project, provider: str) -> None:
    """Case 97."""
    project.script(
        r"""
        cd "$RUNNER_OUTPUT"
        touch "$(printf 'r\377')" "$(printf 'e\033]52;c;aGk=\007')" "$(printf 'n\nl')" -- -rf
        mkfifo f
        ln -s /etc/passwd link
        truncate -s 1T sparse
        """,
        provider=provider,
    )

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert r"e\x1b]52;c;aGk=\x07" in plain(done)
    assert {p.name for p in (project.directory(record) / "output").iterdir()} >= {"r\udcff", "n\nl", "-rf"}
    assert len(record["warnings"]) == 3


def test_a_file_that_verify_forbids_is_shown_escaped(project: Project) -> None:
    project.script(
        r"""touch "$(printf 'r\377\033]52;c;aGk=\007.bad')" """,
        run="verify: {files: {forbidden: ['*.bad']}}",
    )

    done, record = project.apply()

    assert done.code == 1
    assert r"\x1b]52;c;aGk=\x07.bad" in plain(done)
    events = (project.directory(record) / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["type"] == "RunEnded"


@pytest.mark.parametrize(
    "mess",
    [
        "touch .git/index.lock; echo junk > .git/objects/pack/tmp_pack_x; rm -rf .git/refs",
        "rm -rf .git; ln -s /etc .git",
        "rm -rf .git; mkfifo .git",
        """
        for key in core.fsmonitor core.hooksPath core.sshCommand gpg.program diff.external core.pager filter.x.clean; do
            git config $key "touch $RUNNER_OUTPUT/ran"
        done
        git config core.worktree /; git config include.path /etc/passwd; echo '* filter=x diff=x' > .gitattributes
        """,
    ],
    ids=["60 half-written", "a link", "a FIFO", "58 programs"],
)
def test_a_git_directory_left_in_any_state_changes_nothing(project: Project, repository: Path, mess: str) -> None:
    project.script(f"echo made > made\n{mess}", workspace=LOCAL)

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert record["snapshot"]["changed"] in (1, 2)
    assert not list((project.directory(record) / "output").iterdir())
    assert "+made" in (project.directory(record) / "work.patch").read_text()


def test_a_nested_git_directory_is_a_violation(project: Project, repository: Path) -> None:
    project.script("mkdir -p sub/.git; echo x > sub/.git/config", workspace=LOCAL)

    done, record = project.apply()

    assert done.code == 3
    assert [v["rule"] for v in record["violations"]] == ["nested-git"]


def test_a_tree_a_thousand_folders_deep_is_scanned_and_removed(project: Project) -> None:
    """Case 69."""
    project.script("deep=$(printf 'd/%.0s' $(seq 1000)); mkdir -p $deep; echo > $deep/deepest.pem")

    done, record = project.apply()

    assert done.code == 3
    assert record["violations"][0]["rule"] == "forbidden:**/*.pem"


def test_a_variable_too_long_for_a_command_line_is_an_outcome(project: Project) -> None:
    """Case 30."""
    project.script("echo ran", agent=f"env: {{LONG: '{'x' * 140_000}'}}")

    done, _ = project.apply()

    assert done.code == 1
    assert "Argument list too long" in plain(done)


def test_setup_commands_run_on_the_bare_host_as_well(project: Project) -> None:
    project.script("cat prepared", provider="process", workspace="setup_commands: ['echo ready > prepared']")

    done, _ = project.apply()

    assert done.code == 0, done.out + done.err
    assert project.logs("agent") == "ready\n"


def test_an_output_with_a_nul_gives_the_next_sandbox_no_argument(project: Project) -> None:
    """Case 31: what one agent wrote goes into a variable of another, and only the values are known too late to plan."""
    project.script(r"printf 'a\0--bind\0/\0/tmp' > $RUNNER_OUTPUT/x.txt", run="outputs: {x: {file: x.txt}}")
    manifest = project.folder / "all.runner.yaml"
    reader = "agent: script\nscript: {path: agent.sh}\nenv: {A: '{{ outputs.work.x }}'}\n"
    reader += "workspace: {enabled: true, providers: [local]}"
    more = document("AgentType", "reader", reader), document("IncidentRun", "next", "agent_type: reader\nneeds: [work]")
    manifest.write_text("---\n".join([manifest.read_text(), *more]))

    done, record = project.apply()

    assert done.code == 4
    assert "U+0000" in plain(done)
    assert record["name"] == "next"
    assert step(record, "agent")["status"] == "failed"


# --- sources ---------------------------------------------------------------------------------------


def commit_tree(repository: Path, *entries: str) -> None:
    """Commit a tree written by hand, as git itself would not."""
    tree = subprocess.run(
        ["git", "-C", str(repository), "mktree", "--missing"],
        input="".join(f"{entry}\n" for entry in entries),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    commit = git(repository, "commit-tree", tree, "-m", "by hand")
    git(repository, "update-ref", "refs/heads/main", commit)


@pytest.mark.parametrize("name", [".GIT", "git~1", ".g\u200cit"])
def test_a_clone_that_is_refused_leaves_no_workspace(project: Project, repository: Path, name: str) -> None:
    """Case 51."""
    blob = git(repository, "hash-object", "-w", "README")
    commit_tree(repository, f"100644 blob {blob}\t{name}")
    project.script("echo ran", workspace=LOCAL)

    done, record = project.apply()

    assert done.code == 4
    assert "git.hostile-tree" in plain(done)
    assert step(record, "agent")["status"] == "skipped"
    assert record["left_behind"] == []


def test_nothing_of_a_source_runs_and_its_bytes_arrive(project: Project, repository: Path) -> None:
    """Cases 43, 49 and 50."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (repository / ".gitattributes").write_text("*.bin filter=lfs\n* filter=x text eol=crlf ident\n")
    (repository / "a.bin").write_text(pointer)
    (repository / "id").write_text("$Id$\n")
    git(repository, "add", "-A")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    (repository / ".gitmodules").write_text('[submodule "sub"]\npath = sub\nurl = ext::sh -c touch% pwned\n')
    git(repository, "add", ".gitmodules")
    git(repository, "commit", "-qm", "attributes")
    canary = project.folder / "ran"
    for key in ("core.fsmonitor", "filter.x.smudge", "filter.x.clean", "filter.lfs.smudge", "core.sshCommand"):
        git(repository, "config", key, f"touch {canary}; cat")
    git(repository, "config", "uploadpack.packObjectsHook", f"touch {canary}")
    git(repository, "config", "core.hooksPath", str(project.folder))
    project.script("cat id a.bin; ls -A sub 2>/dev/null", workspace=LOCAL)

    done, record = project.apply()

    assert "$Id$\n" + pointer in project.logs("agent"), done.out + done.err
    assert not canary.exists()
    assert record["snapshot"] is None or record["snapshot"]["changed"] == 0


def test_a_work_tree_a_detached_head_and_uncommitted_files_are_sources(project: Project, repository: Path) -> None:
    linked = project.folder / "linked"
    git(repository, "worktree", "add", "-q", "--detach", str(linked))
    (linked / "new\nname").write_text("new\n")
    project.script(
        "ls | cat -A; git status --short | wc -l",
        workspace="repo_source: {type: local, path: linked, include_dirty: true, depth: 1}",
    )

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    assert "new$" in project.logs("agent")
    assert "with 1 uncommitted" in step(record, "clone")["outcome"]["message"]
    plain(done)
