"""Secrets in whole runs: who gets them, and where they are looked for afterwards."""

from __future__ import annotations

import base64
import os
import re
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest

from runner.testing.outside import cmdline
from tests.support.needs import ROOT
from tests.support.situations import REPO, Project, git, step, until

TOKEN = "npm_A8s7df6A9s8d7f6as8d7fQ"
SETUP = "hdf8734hKJhdf73-setup"
KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n-----END KEY-----\n"

SECRETS = """
secrets:
  - {name: NPM_TOKEN, from: {env: CI_NPM_TOKEN}, steps: [agent, verify]}
  - {name: FETCH, from: {command: [sh, -c, "printf %s $FROM_COMMAND"]}, steps: [setup]}
  - {name: DEPLOY, from: {file: deploy.key}, steps: [agent], as: file}
"""


OF_AGENT = "secrets: [{name: NPM_TOKEN, from: {env: CI_NPM_TOKEN}, steps: [agent]}]"


@pytest.fixture
def secretive(project: Project) -> Project:
    """A project whose secrets can be had from a variable, a command, and a file."""
    key = project.folder / "deploy.key"
    key.write_text(KEY)
    key.chmod(0o600)
    project.env |= {"CI_NPM_TOKEN": TOKEN, "FROM_COMMAND": SETUP}
    return project


def places_of_secrets(home: Path) -> dict[str, list[str]]:
    """Where each secret can be found below a directory, in any of the forms that people look for."""
    found: dict[str, list[str]] = {}
    for name, value in (("NPM_TOKEN", TOKEN), ("FETCH", SETUP), ("DEPLOY", KEY.splitlines()[1])):
        forms = (value.encode(), base64.b64encode(value.encode())[:-4], value.encode().hex().encode())
        for path in filter(Path.is_file, home.rglob("*")):
            content = path.read_bytes()
            if any(form in content for form in forms):
                found.setdefault(name, []).append(str(path.relative_to(home)))
    return found


def journal(home: Path) -> str:
    with sqlite3.connect(home / "state" / "state.db") as store:
        return "\n".join(store.iterdump())


def asleep(seconds: int) -> bool:
    words = f"sleep\0{seconds}\0".encode()
    return any(cmdline(pid) == words for pid in os.listdir("/proc") if pid.isdigit())


@pytest.mark.scenario("BEY-12")
def test_a_secret_reaches_the_commands_of_its_steps_alone_and_is_shown_nowhere(
    secretive: Project, repository: Path
) -> None:
    secretive.env |= {f"SENSITIVE_{number}_TOKEN": f"host-{number}-7dfg8s7" for number in range(50)}
    secretive.script(
        """
        cat; echo
        echo "plain $NPM_TOKEN" | tee $RUNNER_OUTPUT/report.md
        tar -C $RUNNER_OUTPUT -czf $RUNNER_OUTPUT/packed.tar.gz report.md
        printf %s "$NPM_TOKEN" | base64 >&2
        echo "setup ${FETCH-no}"
        cat "$DEPLOY_FILE"; stat -c '%a %u' "$DEPLOY_FILE"; id -u
        echo "core $(ulimit -c)"
        tr '\\0' '\\n' < /proc/self/environ | grep -c -e SENSITIVE -e CI_NPM -e FROM_COMMAND
        echo "last $NPM_TOKEN"
        """,
        agent=SECRETS,
        workspace="""
        repo_source: {type: local, path: repo}
        setup_commands: ["echo $FETCH ${NPM_TOKEN-no}; ls /dev/shm", "rm -rf /dev/shm/secrets"]
        """,
        run=f"prompt: deploy with {TOKEN}",
    )

    done = secretive.runner("apply", ".", "--output", "jsonl")
    told = secretive.runner("runs", "show", "last")

    assert secretive.logs("setup") == "[redacted:FETCH] no\n"
    assert secretive.logs("agent").splitlines() == [
        "deploy with [redacted:NPM_TOKEN]",
        "plain [redacted:NPM_TOKEN]",
        "setup no",
        "[redacted:DEPLOY]",
        "400 1000",
        "1000",
        "core 0",
        "0",
        "last [redacted:NPM_TOKEN]",
    ]
    assert secretive.logs("agent", "stderr") == "[redacted:NPM_TOKEN]==\n".replace("==", "=" * (-len(TOKEN) % 3))
    assert "/output/report.md: secret:NPM_TOKEN" in told.out
    assert "/output/packed.tar.gz: secret:NPM_TOKEN" in told.out
    assert "output packed.tar.gz is left out: an archive that shows secret NPM_TOKEN" in told.out
    assert [path.name for path in secretive.home.rglob("packed*")] == []
    assert done.code == 3
    for text in (done.out, done.err, told.out, journal(secretive.home)):
        assert TOKEN not in text
        assert SETUP not in text
    assert "host-7-7dfg8s7" not in journal(secretive.home)
    assert places_of_secrets(secretive.home) == {}


@ROOT.mark
@pytest.mark.scenario("BEY-12")
def test_another_user_of_the_host_sees_no_secret_of_a_run(secretive: Project) -> None:
    """Nor does anybody see one on a command line."""

    def look(*names: str, user: tuple[str, ...] = ()) -> bytes:
        script = f"cat {' '.join(f'/proc/[0-9]*/{name}' for name in names)} 2>/dev/null; true"
        return subprocess.run([*user, "sh", "-c", script], capture_output=True, check=True).stdout

    secretive.script("cat $DEPLOY_FILE >/dev/null; sleep 2971", agent=SECRETS)
    with secretive.start("apply", ".") as process:
        try:
            until(lambda: b"sleep\x002971" in look("cmdline"), seconds=60)
            nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
            seen = {"nobody": look("cmdline", "environ", user=nobody), "root": look("cmdline")}
        finally:
            process.terminate()
            process.communicate()

    assert b"sleep\x002971" in seen["nobody"]
    for value in (TOKEN, SETUP, KEY.splitlines()[1]):
        assert [who for who, shown in seen.items() if value.encode() in shown] == []


@pytest.mark.scenario("BEY-12")
def test_a_runner_that_crashes_leaves_no_core_with_its_secrets(secretive: Project) -> None:
    """Nor does it hand one to a program of this host, for which a limit of 0 would not be low enough."""
    secretive.within = ("sh", "-c", 'ulimit -Hc unlimited; ulimit -Sc unlimited; exec "$@"', "sh")
    secretive.script("sleep 2973", agent=SECRETS)

    with secretive.start("apply", ".") as process:
        until(lambda: asleep(2973), seconds=60)
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.send_signal(signal.SIGSEGV)
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.communicate()

    assert re.search(r"^Max core file size +1 +1 ", limits, re.MULTILINE)
    assert ended is not None
    assert (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGSEGV)  # else CLD_DUMPED
    until(lambda: not asleep(2973), seconds=60)
    assert [*secretive.folder.glob("core*")] == []
    assert secretive.runner("recover").code == 0


@pytest.mark.scenario("BEY-12")
def test_a_secret_of_two_halves_on_two_streams_is_not_whole_in_the_log_of_both(secretive: Project) -> None:
    secretive.script(
        """
        printf %s "$NPM_TOKEN" | head -c 12; exec 1>&-; sleep 0.3; printf %s "$NPM_TOKEN" | tail -c +13 >&2
        """,
        agent=OF_AGENT,
        run="incident: {directory: incident}",
    )
    incident = secretive.folder / "incident"
    incident.mkdir()
    (incident / "incident.json").write_text("{}")

    done = secretive.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    [log] = (incident / "output").glob("*.log")
    assert log.read_text() == "[redacted:NPM_TOKEN]"
    assert TOKEN not in done.out


@pytest.mark.scenario("BEY-12")
def test_work_that_shows_a_secret_is_not_published_and_kept_without_the_files_that_do(
    secretive: Project, repository: Path
) -> None:
    secretive.script(
        """
        echo fine > good.txt
        printf %s "$NPM_TOKEN" | base64 -w0 > src/config.txt
        ln -s "$NPM_TOKEN" link
        git add -A; git -c user.name=a -c user.email=a@example.org commit -qm "with $NPM_TOKEN"
        """,
        agent=SECRETS,
        workspace=REPO,
        run="snapshot: {message: work}",
    )

    done, record = secretive.apply()

    assert done.code == 3, done.out + done.err
    rules = {(violation["path"], violation["rule"]) for violation in record["violations"]}
    assert rules == {("src/config.txt", "secret:NPM_TOKEN"), ("link", "secret:NPM_TOKEN")}
    (named,) = [line for line in done.out.splitlines() if line.startswith("  2 violations of policy: ")]
    assert all(path in named for path in ("link", "src/config.txt"))
    assert record["snapshot"] is None
    assert record["saved_work"]["withheld"]
    patch = (secretive.directory(record) / record["saved_work"]["patch"]).read_text()
    assert "good.txt" in patch
    assert "config.txt" not in patch
    assert TOKEN not in done.out + done.err + journal(secretive.home)


@pytest.mark.scenario("BEY-12")
@pytest.mark.parametrize("last", ["", "/file"], ids=["empty", "with a file"])
def test_a_directory_named_after_a_secret_is_a_violation_and_not_kept(
    secretive: Project, tmp_path: Path, last: str
) -> None:
    """Also of a value with a slash, whose first part is a directory above it; what was empty before stays."""
    value = "s3cr3t/Tok+en&value9Qz"
    (secretive.home / "slashed").write_text(value)
    (secretive.home / "slashed").chmod(0o600)
    secretive.script(
        f"""
        cd "$RUNNER_OUTPUT"; mkdir -p "d/$SLASHED/below" plain
        {'echo x > "d/$SLASHED/file"' if last else ""}
        """,
        agent=f"secrets: [{{name: SLASHED, from: {{file: {secretive.home}/slashed}}, steps: [agent]}}]",
    )

    done, record = secretive.apply()

    assert done.code == 3, done.out + done.err
    assert {violation["rule"] for violation in record["violations"]} == {"secret:SLASHED"}
    kept = secretive.directory(record) / "output"
    wanted = ["d", "d/[redacted:SLASHED]" + last, "d/[redacted:SLASHED]", "plain"] if last else ["plain"]
    found = [str(path.relative_to(kept)) for path in kept.rglob("*")]
    assert sorted(found) == sorted(wanted)
    assert "output d/[redacted:SLASHED]" in " ".join(message for _, message in map(dict.values, record["warnings"]))


@pytest.mark.nightly
@pytest.mark.scenario("BEY-12")
def test_in_a_container_a_secret_reaches_its_step_alone(secretive: Project) -> None:
    secretive.script(
        """
        echo "$NPM_TOKEN ${FETCH-no}"
        cat "$DEPLOY_FILE"; ls -A /dev/shm/secrets
        grep -c " /dev/shm tmpfs" /proc/mounts; ulimit -c
        """,
        agent=SECRETS,
        provider="docker",
        workspace="""setup_commands: ['echo "$FETCH ${NPM_TOKEN-no}"; ls -A /dev/shm']""",
    )

    done = secretive.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    assert secretive.logs("setup") == "[redacted:FETCH] no\n"
    assert secretive.logs("agent") == "[redacted:NPM_TOKEN] no\n[redacted:DEPLOY]\nDEPLOY\n1\n0\n"
    assert places_of_secrets(secretive.home) == {}


@pytest.mark.nightly
def test_a_hook_and_a_resumed_run_get_theirs(secretive: Project, repository: Path) -> None:
    secretive.script(
        "echo done > done.txt",
        agent="""
        secrets: [{name: NPM_TOKEN, from: {env: CI_NPM_TOKEN}, steps: [post_hook, verify]}]
        post_hooks: ['echo "hook $NPM_TOKEN"']
        """,
        workspace=REPO,
        run='verify: {commands: [{run: "test ${NPM_TOKEN%%_*} = other"}]}',
    )
    done, record = secretive.apply()
    assert done.code == 1, done.out + done.err
    assert step(record, "verify")["status"] == "failed"
    assert secretive.logs("post_hook") == "hook [redacted:NPM_TOKEN]\n"

    secretive.env["CI_NPM_TOKEN"] = "other_9d8f7g9d8f7g"
    resumed = secretive.runner("resume", "last")

    assert resumed.code == 0, resumed.out + resumed.err
    assert "other_9d8f7g9d8f7g" not in resumed.out + journal(secretive.home)


@pytest.mark.nightly
def test_commits_of_the_agent_are_withheld_for_what_a_message_or_a_later_commit_may_hide(
    secretive: Project, repository: Path
) -> None:
    secretive.script(
        'echo x > x; git add x; git -c user.name=a -c user.email=a@example.org commit -qm "with $NPM_TOKEN"',
        agent=OF_AGENT,
        workspace=REPO,
        run="snapshot: {message: work, branch: work}",
    )

    record = secretive.succeed()

    assert "secrets" in record["commits"]["withheld"]
    delivered = secretive.runner("runs", "branch", "last", "--unverified", "--into", str(repository))
    assert delivered.code == 0, delivered.err
    assert TOKEN not in git(repository, "log", "--all", "-p") + delivered.out


@pytest.mark.nightly
@pytest.mark.scenario("BEY-12")
def test_what_is_saved_after_a_killed_runner_is_withheld_for_nobody_knows_its_secrets(
    secretive: Project, repository: Path
) -> None:
    secretive.script(
        'echo "$NPM_TOKEN" > kept.txt; echo "$NPM_TOKEN"; echo "begun."; sleep 1000',
        agent=OF_AGENT,
        workspace=REPO,
        run="snapshot: {message: work}",
    )
    process = secretive.start("apply", ".")
    while not any("begun." in path.read_text() for path in secretive.home.glob("state/runs/*/logs/agent.stdout")):
        assert process.poll() is None
    process.kill()
    process.communicate()

    recovered = secretive.runner("recover")
    told = secretive.record()

    assert recovered.code == 0, recovered.out + recovered.err
    assert secretive.logs("agent") == "[redacted:NPM_TOKEN]\nbegun.\n"
    assert told["saved_work"]["withheld"]
    assert any("could not be searched for secrets" in warning["message"] for warning in told["warnings"])
    assert secretive.runner("runs", "apply", "last").code == 3
