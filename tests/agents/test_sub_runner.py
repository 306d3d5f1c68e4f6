import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from runner.core.errors import SubRunnerContract
from runner.core.settings import shipped
from runner.runtime.subrunner import MAX_LINE, read_command

PATH = {"PATH": os.defpath}

Write = Callable[[str], Path]


@pytest.fixture
def sub_runner(tmp_path: Path) -> Write:
    """Write a sub-runner with this body, over the shipped common.sh."""

    def write(body: str) -> Path:
        script = tmp_path / "stub.sh"
        script.write_text(f'source "{shipped("runners")}/common.sh"\n{body}\n')
        return script

    return write


async def test_the_printed_words_are_the_command(sub_runner: Write) -> None:
    script = sub_runner('emit_command stub -p --model "$LLM_MODEL"')

    assert await read_command(script, PATH | {"LLM_MODEL": "x; rm -rf ~"}) == ["stub", "-p", "--model", "x; rm -rf ~"]


@pytest.mark.scenario("TRI-25")
async def test_a_sub_runner_prints_its_command_and_does_not_run_it(tmp_path: Path) -> None:
    """Runs only inside the workspace, so a path that exists nowhere is as good as any."""
    env = PATH | {"AGENT_CLI": "script", "AGENT_SCRIPT": f"{tmp_path}/it's here.sh"}

    assert await read_command(shipped("runners") / "script.sh", env) == ["bash", f"{tmp_path}/it's here.sh"]
    assert list(tmp_path.iterdir()) == []


async def test_only_the_given_environment_is_seen(sub_runner: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-host")
    script = sub_runner("emit_command $(compgen -e | sort)")

    assert await read_command(script, PATH | {"AGENT_CLI": "stub"}) == ["AGENT_CLI", "PATH", "PWD", "SHLVL"]


async def test_the_environment_cannot_make_bash_run_something_first(sub_runner: Write, tmp_path: Path) -> None:
    (tmp_path / "canary.sh").write_text(f"touch {tmp_path}/canary\n")
    env = PATH | {"BASH_ENV": f"{tmp_path}/canary.sh", "BASH_FUNC_printf%%": f"() {{ touch {tmp_path}/canary; }}"}

    assert await read_command(sub_runner("emit_command stub"), env) == ["stub"]
    assert not (tmp_path / "canary").exists()


async def test_a_sub_runner_has_no_input_no_folder_and_no_session_of_ours(sub_runner: Write) -> None:
    script = sub_runner('emit_command "$(cat)" "$PWD" "$(cut -d " " -f 6 < /proc/$$/stat)" $$')

    stdin, folder, session, pid = await read_command(script, PATH)

    assert (stdin, folder) == ("", "/")
    assert session == pid != str(os.getsid(0))


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        (":", "printed 0 lines, not exactly one"),
        ("echo", "printed an empty line"),
        ("echo said >&2", "printed 0 lines, not exactly one"),
        ("emit_command a; emit_command b", "printed 2 lines, not exactly one"),
        ("printf 'a b'", "printed 1 lines, not exactly one"),
        ("printf '\\xff\\n'", "printed what is not UTF-8, at byte 1"),
        ("fail agent.broken 'no model'", "exited 2: error[agent.broken]: no model"),
        ("require_env LLM_MODEL", "exited 2: error[agent.missing-variable]: LLM_MODEL must be set for this agent"),
        ("emit_command a; exit 3", "exited 3: it said nothing on stderr"),
        ("printf 'first\\nlast \\033[31m\\n' >&2; exit 1", "exited 1: last \\x1b[31m"),
        ("false; emit_command a", "exited 1"),
        ("emit_command $UNSET", "UNSET: unbound variable"),
        ("kill -KILL $$", "exited -9"),
        ("yes", f"printed more than {MAX_LINE} bytes"),
        ("head -c 1000000 /dev/zero >&2; exit 1", "exited 1: \\x00\\x00"),
    ],
    ids=lambda value: value[:24],
)
async def test_anything_but_one_line_breaks_the_contract(sub_runner: Write, body: str, broken: str) -> None:
    with pytest.raises(SubRunnerContract) as caught:
        await read_command(sub_runner(body), PATH)

    assert caught.value.message.startswith("sub-runner `stub.sh` ")
    assert broken in caught.value.message


async def test_shell_text_is_refused_and_nothing_of_it_runs(sub_runner: Write, tmp_path: Path) -> None:
    with pytest.raises(SubRunnerContract, match="`;` is an operator"):
        await read_command(sub_runner(f"echo 'claude; touch {tmp_path}/pwn'"), PATH)

    assert not (tmp_path / "pwn").exists()


async def test_a_job_left_behind_is_killed_and_holds_nothing_up(sub_runner: Write, tmp_path: Path) -> None:
    script = sub_runner(f"sleep 600 & echo $! >{tmp_path}/pid; emit_command stub")

    with trio.fail_after(60):
        assert await read_command(script, PATH) == ["stub"]

    await gone(int((tmp_path / "pid").read_text()))


async def test_cancelling_kills_the_sub_runner_with_its_tree(sub_runner: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    script = sub_runner(f"sleep 600 & echo $! >{tmp_path}/ready; trap '' TERM; wait")
    pids = []

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_command, script, PATH)
            pids.append(int(await trio.Path(tmp_path / "ready").read_text()))
            nursery.cancel_scope.cancel()

    await gone(pids[0])


async def gone(pid: int) -> None:
    """Return when no process has this number; a killed orphan is reaped by init in its own time."""
    with trio.fail_after(60):
        while True:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return
            if state == "Z":
                return
            await trio.sleep(0.01)
