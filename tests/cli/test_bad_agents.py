"""Whole runs of agents and sources that do their worst: an outcome in words, evidence that can be read, nothing left.

A number in a docstring is the case's number in the catalogue of hazards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.situations import REPO, Done, Project, commit, document, step


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
    commit(repository, "ignore")
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
        workspace=REPO,
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
    project.script(f"echo made > made\n{mess}", workspace=REPO)

    record = project.succeed()

    assert record["snapshot"]["changed"] in (1, 2)
    assert not list((project.directory(record) / "output").iterdir())
    assert "+made" in (project.directory(record) / "work.patch").read_text()


def test_a_variable_too_long_for_a_command_line_is_an_outcome(project: Project) -> None:
    """Case 30."""
    project.script("echo ran", agent=f"env: {{LONG: '{'x' * 140_000}'}}")

    done, _ = project.apply()

    assert done.code == 1
    assert "Argument list too long" in plain(done)


def test_an_output_with_a_nul_gives_the_next_sandbox_no_argument(project: Project) -> None:
    """Case 31: what one agent wrote goes into a variable of another, and only the values are known too late to plan."""
    project.script(r"printf 'a\0--bind\0/\0/tmp' > $RUNNER_OUTPUT/x.txt", run="outputs: {x: {file: x.txt}}")
    reader = "agent: script\nscript: {path: agent.sh}\nenv: {A: '{{ outputs.work.x }}'}\n"
    reader += "workspace: {enabled: true, providers: [local]}"
    more = document("AgentType", "reader", reader), document("IncidentRun", "next", "agent_type: reader\nneeds: [work]")
    project.add(*more)

    done, record = project.apply()

    assert done.code == 4
    assert "U+0000" in plain(done)
    assert record["name"] == "next"
    assert step(record, "agent")["status"] == "failed"
