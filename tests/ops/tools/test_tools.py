"""Tools in real workspaces: what each does, and where it stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from runner.core.errors import RunnerError
from runner.core.model import Limits
from runner.events.events import ToolCalled
from runner.ops.tools._sandbox import KEPT, read_file, write_file
from runner.ops.tools.edit import Arguments as Edit
from runner.ops.tools.edit import edited
from runner.ops.tools.glob import Pattern
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.tools import KeptWorkspaces, OpenWorkspace, open_for_tools, outputs_of, tool
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, open_workspace_env
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.store import WorkspaceRow
from tests.support import dockerd
from tests.support.situations import Project, git


@pytest.fixture
async def env(project: Project) -> AsyncIterator[WorkspaceEnv]:
    async with open_workspace_env(project.settings(DOCKER_HOST=dockerd.host())) as opened:
        yield opened
        for row in await opened.store.workspaces():
            await ws.destroy(opened, row.id, discard=True)


async def create(env: WorkspaceEnv, provider: str = "local", **more: Any) -> WorkspaceRow:
    image = dockerd.IMAGE if provider == "docker" else None
    return await ws.create(env, WorkspaceOptions(provider=provider, image=image, **more))


async def call(opened: OpenWorkspace, name: str, **arguments: Any) -> Any:
    """The result of a tool, or the code and words of its refusal."""
    try:
        return await opened.call(name, msgspec.convert(arguments, tool(name).Arguments))
    except RunnerError as error:
        return error.code, error.message


@pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=dockerd.DOCKER.mark)])
async def test_the_tools_of_a_session(env: WorkspaceEnv, provider: str) -> None:
    row = await create(env, provider)
    async with open_for_tools(env, row.id, "test") as opened:

        async def do(name: str, **arguments: Any) -> Any:
            return await call(opened, name, **arguments)

        assert (await do("write", file_path="src/deep/shop.py", content="a = 1\r\nb = 'é'\r\n")).file_size == 17
        assert (await do("bash", command="chmod 750 src/deep/shop.py; ln -s src/deep near; mkfifo pipe")).exit_code == 0
        changed = await do("edit", file_path="near/shop.py", old_string="1\nb", new_string="2\nc")
        assert (changed.replacements, changed.lines) == (1, [1])
        assert (
            await do("bash", command="stat -c %a src/deep/shop.py; cat src/deep/shop.py; ls -A src/deep")
        ).stdout == ("750\na = 2\r\nc = 'é'\r\nshop.py\n")
        read = await do("read", file_path="src/deep/shop.py", offset=2, limit=5)
        assert (read.content, read.total_lines, read.file_size, read.truncated) == ("c = 'é'\r\n", 2, 17, False)
        assert (await do("read", file_path="src")).content == "deep/\n"
        assert (await do("glob", pattern="**/*.py")).matches == ["src/deep/shop.py"]
        [found] = (await do("grep", pattern="^[bc] =", include="*.py")).matches
        assert (found.file_path, found.line_number) == ("src/deep/shop.py", 2)
        assert (await do("grep", pattern="nowhere")).matches == []

        assert await do("grep", pattern="b(") == ("tool.argument", "`b(` is not an expression")
        assert await do("read", file_path="absent") == ("tool.no-file", "there is no `absent`")
        assert await do("read", file_path="pipe") == ("tool.argument", "`pipe` is not a file")
        assert (await do("write", file_path="src", content=""))[0] == "tool.argument"
        assert (await do("read", file_path="a\nb"))[0] == "tool.argument"


async def test_no_path_leads_a_tool_out_of_the_workspace_or_into_git(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        links = "ln -s /etc etc; ln -s /etc/passwd passwd; ln -s /tmp tmp; ln -s .git g; ln -s gone dangling"
        await call(opened, "bash", command=f"{links}; echo out >/tmp/out")
        outside = ("../x", "/etc/passwd", "etc/passwd", "passwd", "tmp/out", "tmp/new/deep")
        for path in outside:
            assert (await call(opened, "read", file_path=path))[0] in ("tool.outside", "tool.no-file"), path
            assert (await call(opened, "write", file_path=path, content="x"))[0] == "tool.outside", path
        for path in (".git/hooks/pre-commit", "a/.GIT/config", "g/config", "g/hooks/new/deep"):
            assert (await call(opened, "write", file_path=path, content="x"))[0] == "tool.outside", path
        assert (await call(opened, "write", file_path="dangling", content="x"))[0] == "tool.no-file"
        assert (await call(opened, "glob", pattern="*", path="etc"))[0] == "tool.outside"
        assert (await call(opened, "grep", pattern="root", path="passwd")) == (
            "tool.outside",
            "`passwd` leads out of the workspace",
        )
        left = await call(opened, "bash", command="ls /tmp; cat /tmp/out")
        assert left.stdout.split() == ["out", "out"]


async def test_what_is_no_file_of_the_workspace_is_refused_at_once_and_changes_nothing(env: WorkspaceEnv) -> None:
    """Neither content nor a wait for it, whatever stands at a path."""
    row = await create(env)
    made = "mkdir -p dir; echo kept >file; mkfifo fifo; ln -s fifo near; ln -s one two; ln -s two one"
    made += "; ln -s /proc/self/environ env; ln -s /dev/zero zero"
    paths = {
        "tool.outside": ("/dev/zero", "/proc/self/environ", "dir/./../..", "/workspace/../x", "//workspace/file"),
        "tool.argument": ("dir", "fifo", "near", "a\0b", "x" * 5000, "x/" * 2048 + "y", "\ud800"),
        "tool.no-file": ("one", "two", "file/x", "x" * 300),
    }
    async with open_for_tools(env, row.id, "test") as opened:
        await call(opened, "bash", command=made)
        before = await call(opened, "bash", command="ls -lA --full-time . dir")
        with trio.fail_after(60):
            for code, some in paths.items():
                for path in some:
                    edited = await call(opened, "edit", file_path=path, old_string="kept", new_string="lost")
                    assert edited[0] == code, (path, edited)
                    if path != "dir":
                        assert (await call(opened, "read", file_path=path))[0] == code, path
                    if path not in ("x" * 300, "file/x"):
                        assert (await call(opened, "write", file_path=path, content="x"))[0] == code, path
            for path in ("env", "zero"):
                assert (await call(opened, "read", file_path=path))[0] in ("tool.outside", "tool.argument")
                assert (await call(opened, "write", file_path=path, content="x"))[0] in ("tool.outside", "tool.no-file")
            assert (await call(opened, "write", file_path="x" * 300, content="x"))[0] == "tool.failed"
        assert (await call(opened, "bash", command="ls -lA --full-time . dir")).stdout == before.stdout
        for name in ("~", "~root", "%2e%2e", "...", "-", " ", "a\u202eb"):
            assert (await call(opened, "write", file_path=name, content="x")).file_size == 1
        listed = (await call(opened, "read", file_path=".")).content
        assert {"~", "~root", "%2e%2e", "...", "-", " ", "a\u202eb"} <= {*listed.split("\n")}


async def test_what_is_protected_is_not_written_through_another_of_its_names(env: WorkspaceEnv, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    git(place, "init", "-q")
    config = place / ".git" / "config"
    before = config.read_bytes()
    (place / "hard").hardlink_to(config)
    (place / "soft").symlink_to(".git/config")
    (place / "within").symlink_to(".git")
    row = await ws.create(env, WorkspaceOptions(provider="local", path=place))
    async with open_for_tools(env, row.id, "test") as opened:
        for path in ("soft", "within/config", "within/new/deep", ".git/config"):
            assert isinstance(await call(opened, "write", file_path=path, content="[core]"), tuple), path
        await call(opened, "write", file_path="hard", content="[core]")
        await call(opened, "edit", file_path="hard", old_string="[core]", new_string="[alias]")
    assert config.read_bytes() == before
    assert not (place / ".git" / "new").exists()


async def test_arguments_are_data(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        for text in ("$(touch pwned)", "`touch pwned`", "; touch pwned", "--help", "-rf", "'\"", "a b*?[x]", "%s\\n"):
            assert (await call(opened, "write", file_path=text, content=text)).file_size == len(text)
            assert (await call(opened, "read", file_path=text)).content == text
            assert [one.file_path for one in (await call(opened, "grep", pattern="pwned", path=text)).matches] in (
                [],
                [text],
            )
            await call(opened, "glob", pattern=text)
            done = await call(opened, "git", action="commit", message=text, files=[text])
            assert done.exit_code == 0, done
        assert (await call(opened, "glob", pattern="pwned")).matches == []
        assert (await call(opened, "git", action="checkout", branch="--orphan=x"))[0] == "tool.argument"


async def test_an_edit_does_not_undo_what_somebody_else_has_written_meanwhile(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        workspace = opened.sandbox.workspace
        await call(opened, "bash", command="echo first >file")
        content, state = await read_file(workspace, "file", 100)
        await call(opened, "bash", command="echo other >file")

        with pytest.raises(RunnerError, match=r"`file` has changed meanwhile") as caught:
            await write_file(workspace, "file", b"late\n", ".x.part", state=state)

        assert (content, caught.value.http_status) == (b"first\n", 409)
        assert (await call(opened, "bash", command="cat file; ls")).stdout == "other\nfile\n"
        content, state = await read_file(workspace, "file", 100)
        await write_file(workspace, "file", b"in time\n", ".x.part", state=state)
        assert (await call(opened, "read", file_path="file")).content == "in time\n"


@pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=dockerd.DOCKER.mark)])
async def test_a_search_tells_the_file_whatever_its_name_and_is_no_success_when_it_was_killed(
    env: WorkspaceEnv, provider: str
) -> None:
    """A name with a colon would tell of another file and line; a line of any length would pass for no match."""
    row = await create(env, provider, limits=Limits(memory_bytes=64 << 20))
    async with open_for_tools(env, row.id, "test") as opened:
        names = ("a", "b:1:2", "c\nd")
        await call(opened, "bash", command="for name in a b:1:2 'c\nd'; do printf '5:./x:6:needle\\n' >\"$name\"; done")

        found = (await call(opened, "grep", pattern="needle")).matches
        one = (await call(opened, "grep", pattern="needle", path="b:1:2")).matches

        line = "5:./x:6:needle"
        assert [(it.file_path, it.line_number, it.line) for it in found] == [(name, 1, line) for name in names]
        assert [(it.file_path, it.line_number, it.line) for it in one] == [("b:1:2", 1, line)]
        for pattern in ("-f/etc/passwd", "--help", "$(touch pwned)", "(a*)*\\1b", "(.*)(.*)(.*)\\1\\2\\3z"):
            assert (await call(opened, "grep", pattern=pattern)).matches == []
        await call(opened, "bash", command="head -c 200000000 /dev/zero | tr '\\0' x >long; echo needle >>long")
        for path in (".", "long"):
            killed = await call(opened, "grep", pattern="needle", path=path)
            assert killed == ("tool.failed", "the search for `needle` was ended by signal 9")
        assert (await call(opened, "read", file_path="long")).truncated


async def test_a_command_that_takes_too_long_is_ended_with_its_tree_and_what_it_printed(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        slow = "echo partial; trap 'echo told; exit' TERM; sleep 300 & setsid sleep 301 & wait"
        done = await call(opened, "bash", command=slow, timeout_ms=500)
        left = await call(opened, "bash", command="grep -c sleep /proc/[0-9]*/comm | grep -c ':1$'")

    assert (done.exit_code, done.timed_out, done.stdout) == (None, True, "partial\ntold\n")
    assert left.stdout == "0\n"


async def test_what_is_long_is_cut_with_its_size(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        done = await call(opened, "bash", command="seq 100000 | tee numbers; head -c 300000 /dev/zero >zero; exit 3")
        read = await call(opened, "read", file_path="numbers")
        rest = await call(opened, "read", file_path="numbers", offset=read.next_offset)
        zero = await call(opened, "read", file_path="zero")
        await call(opened, "edit", file_path="numbers", old_string="99999\n", new_string="99999.5\n")
        edited = await call(opened, "read", file_path="numbers", offset=99_999)

    assert (done.exit_code, done.truncated, done.stdout_bytes) == (3, True, 588_895)
    assert done.stdout.startswith("1\n2\n")
    assert done.stdout.endswith("99999\n100000\n")
    assert "[523359 bytes are left out]" in done.stdout
    assert (read.truncated, read.file_size, read.total_lines) == (True, 588_895, 100_000)
    assert rest.content.startswith(f"{read.next_offset}\n")
    assert (zero.is_binary, zero.content, zero.file_size) == (True, "", 300_000)
    assert edited.content == "99999.5\n100000\n"


@pytest.mark.parametrize(
    "provider", ["local", pytest.param("docker", marks=[dockerd.DOCKER.mark, pytest.mark.nightly])]
)
async def test_a_shell_goes_on_where_its_last_call_ended(env: WorkspaceEnv, provider: str) -> None:
    row = await create(env, provider)

    async def say(command: str, **more: Any) -> tuple[int | None, str]:
        done = await call(opened, "bash", command=command, shell="work", **more)
        return done.exit_code, done.stdout

    async with open_for_tools(env, row.id, "test") as opened:
        assert await say("mkdir -p 'a b'; cd 'a b'; export TEXT='one\n  \"two\" $x `y`'; false") == (1, "")
        assert await say('echo "$PWD $TEXT"') == (0, '/workspace/a b one\n  "two" $x `y`\n')
        assert await say("export TEXT=3; exit 4") == (4, "")
        assert await say("export TEXT=lost; cd /; echo begun; sleep 300 & wait", timeout_ms=1000) == (None, "begun\n")
        assert await say("set -eu; echo $TEXT; cat; false; echo never") == (1, "3\n")
        assert await say("unset TEXT; pwd; ls -A", workdir=".") == (0, "/workspace\n.git\na b\n")
        assert (await call(opened, "bash", command="echo $TEXT$PWD")).stdout == "/workspace\n"
        assert await call(opened, "bash", command="pwd", shell="other", workdir="a b") == await call(
            opened, "bash", command="pwd", shell="other"
        )
        assert await say("cd 'a b'; mv -T \"$PWD\" ../gone; echo $?") == (0, "0\n")
        assert await say("pwd; echo ${TEXT-unset}") == (0, "/workspace\nunset\n")
    async with open_for_tools(env, row.id, "test") as opened:
        await say("cd /tmp; TEXT=kept; greet() { echo hello $TEXT; }")
    async with open_for_tools(env, row.id, "test") as opened:
        if provider == "local":  # which has bash
            assert await say("greet; pwd") == (0, "hello kept\n/tmp\n")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"command": "true", "shell": "../x"}, tool("bash").Arguments)


async def test_the_whole_of_a_long_output_is_kept_for_a_while(env: WorkspaceEnv) -> None:
    row = await create(env)
    outputs = outputs_of(env, row.id)
    async with open_for_tools(env, row.id, "test") as opened:
        short = await call(opened, "bash", command="seq 10000")
        long = await call(opened, "bash", command="seq 100000; head -c 17000000 /dev/zero >&2")
        whole = outputs.find(long.stdout_handle)
        assert (short.stdout_handle, short.truncated) == (None, False)
        assert whole.read_text() == "".join(f"{n}\n" for n in range(1, 100_001))
        assert (outputs.find(long.stderr_handle).stat().st_size, long.stderr_bytes) == (16 << 20, 17_000_000)
        for _ in range(KEPT - 1):
            await call(opened, "bash", command="seq 20000")
        assert len([*outputs.folder.iterdir()]) == KEPT
        for handle in (whole.name, "../lease", ""):
            with pytest.raises(RunnerError, match="there is no output"):
                outputs.find(handle)
    await ws.destroy(env, row.id, discard=True)
    assert not outputs.folder.exists()


SWAPS = """
while :; do
    ln -sT /tmp/out next; mv -T next in; ln -sT real next; mv -T next in
    ln -sT /tmp/out/file real/next; mv -T real/next real/file; echo inside >real/next; mv -T real/next real/file
done
"""


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tries", [100_000])
async def test_no_swap_of_directories_and_links_leads_a_tool_outside(env: WorkspaceEnv, tries: int) -> None:
    """Others swap in the same sandbox as fast as they can; what tools find and change is inside all the same."""
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        await call(opened, "bash", command="mkdir real /tmp/out; echo outside >/tmp/out/file; ln -s real in")
        codes: Counter[str] = Counter()

        async def swap() -> None:
            await opened.sandbox.workspace.run(["sh", "-c", SWAPS])

        async def attempt(number: int) -> None:
            match number % 5:
                case 0:
                    found = await call(opened, "write", file_path=f"in/{number % 7 or 'file'}", content="inside\n")
                case 1:
                    found = await call(opened, "edit", file_path="in/file", old_string="inside", new_string="inside.")
                case 2:
                    found = await call(opened, "grep", pattern="side", path="in")
                    assert isinstance(found, tuple) or all(one.line.startswith("inside") for one in found.matches)
                case 3:
                    found = await call(opened, "write", file_path=f"in/new/{number % 7}/x", content="inside\n")
                case _:
                    found = await call(opened, "read", file_path="in/file")
                    assert isinstance(found, tuple) or found.content.startswith("inside"), found
            codes[found[0] if isinstance(found, tuple) else "ok"] += 1

        async with trio.open_nursery() as swapping:
            swapping.start_soon(swap)
            for start in range(0, tries, 8):
                async with trio.open_nursery() as tools:
                    for number in range(start, start + 8):
                        tools.start_soon(attempt, number)
            swapping.cancel_scope.cancel()
        left = await call(opened, "bash", command="cat /tmp/out/*; ls -A /tmp/out")
    assert left.stdout == "outside\nfile\n"
    assert codes.total() == tries
    assert codes["ok"] > tries / 20, codes
    assert codes["tool.outside"] > 0, codes
    print(f"{tries:,} tries:", dict(codes))


async def test_a_tool_that_is_not_enabled_is_refused_in_the_words_of_the_document(env: WorkspaceEnv) -> None:
    row = await create(env, tools=("read", "grep"))

    async with trio.open_nursery() as nursery:
        kept = KeptWorkspaces(env, nursery)
        with pytest.raises(RunnerError, match=r"^Tool 'bash' is not enabled for this agent type$") as caught:
            await kept.call(row, "bash", tool("bash").Arguments(command="true"), by="ci")
        assert caught.value.http_status == 403
        assert (await kept.call(row, "read", tool("read").Arguments(file_path="."), by="ci")).is_dir
        nursery.cancel_scope.cancel()


async def test_each_call_moves_the_end_of_a_workspace_and_is_in_its_journal_without_content(env: WorkspaceEnv) -> None:
    row = await create(env)
    async with open_for_tools(env, row.id, "test") as opened:
        await call(opened, "bash", command="echo secret")
        await call(opened, "read", file_path="absent")

    after = await env.store.workspace(row.id)
    assert after.used > row.used
    assert after.expires is not None
    assert row.expires is not None
    assert after.expires > row.expires
    events = [recorded.event for recorded in await env.store.workspace_events(row.id)]
    assert [(e.tool, e.outcome) for e in events if isinstance(e, ToolCalled)] == [
        ("bash", "ok"),
        ("read", "tool.no-file"),
    ]
    assert "secret" not in str(events)


async def test_a_workspace_is_closed_for_its_end_and_when_nobody_calls(env: WorkspaceEnv) -> None:
    row = await create(env)
    bash = tool("bash").Arguments
    async with trio.open_nursery() as nursery:
        kept = KeptWorkspaces(env, nursery, idle_seconds=0.2)
        codes: list[str] = []

        async def run(command: str) -> None:
            try:
                await kept.call(row, "bash", bash(command=command), by="ci")
                codes.append("ok")
            except RunnerError as error:
                codes.append(error.code)

        async with trio.open_nursery() as calls:
            calls.start_soon(run, "trap 'sleep 1; touch /workspace/told; exit' TERM; sleep 300 & wait")
            await trio.sleep(1)
            calls.start_soon(run, "test -e told")  # waits for its turn, and is called when the workspace is open again
            await trio.sleep(0.1)
            async with kept.closed(row.id):
                assert (await env.store.lease(row.id)).id == ""
        assert codes == ["tool.stopped", "ok"]
        with trio.fail_after(30):
            while (await env.store.lease(row.id)).id:
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("before", "old", "new", "every", "after"),
    [
        pytest.param(b"a b a", "b", "c", False, b"a c a", id="once"),
        pytest.param(b"a b a", "a", "c", True, b"c b c", id="all"),
        pytest.param(b"a\r\nb\r\n", "a\nb", "c\nd", False, b"c\r\nd\r\n", id="line ends of the file"),
        pytest.param(b"a\r\nb\n", "b\n", "c\n", False, b"a\r\nc\n", id="line ends that are mixed"),
        pytest.param(b"\xff\0a", "a", "é", False, b"\xff\0\xc3\xa9", id="bytes that are not text"),
        pytest.param(b"a b a", "a", "c", False, None, id="twice"),
        pytest.param(b"a", "b", "c", False, None, id="nowhere"),
        pytest.param(b"a", "a", "a", False, None, id="the same"),
    ],
)
def test_an_edit_changes_what_it_names(before: bytes, old: str, new: str, every: bool, after: bytes | None) -> None:
    arguments = Edit(file_path="f", old_string=old, new_string=new, replace_all=every)
    if after is None:
        with pytest.raises(RunnerError):
            edited(before, arguments)
    else:
        assert edited(before, arguments)[0] == after


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "src/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "src/deep/a.py", True),
        ("src/**", "src/deep/a.py", True),
        ("src/**/test_*.py", "src/a/b/test_x.py", True),
        ("src/**/b/**/c", "src/b/b/x/c", True),
        ("src/**/b/**/c", "src/x/c", False),
        ("[ab]?.py", "bx.py", True),
        ("[!ab].py", "a.py", False),
        ("a*" * 50 + "b", "a" * 250, False),
        ("**/" * 100 + "x", "y/" * 500 + "z", False),
    ],
)
def test_a_pattern_matches_whole_paths_in_little_time(pattern: str, path: str, expected: bool) -> None:
    assert Pattern(pattern).matches(path) is expected
