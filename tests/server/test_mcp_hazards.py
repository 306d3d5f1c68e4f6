"""Tools over MCP, on standard streams and over HTTP, with arguments that mean harm: each is refused with its code, at
once, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from mcp.client.client import Client

from tests.server import test_mcp_http
from tests.server.test_mcp import call, client
from tests.support.server import serving
from tests.support.situations import Project

# the SDK's client leaves the parser of a stream to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.nightly,
    pytest.mark.parametrize("face", ["stdio", "http"]),
]


class Tools:
    """The tools of one workspace."""

    def __init__(self, client: Client, workspace: str, tree: Path) -> None:
        self.client, self.workspace, self.tree = client, workspace, tree

    async def do(self, tool: str, /, **arguments: Any) -> Any:
        return await call(self.client, tool, workspace=self.workspace, **arguments)

    async def code(self, tool: str, /, **arguments: Any) -> str:
        """The code of a refusal, and nothing for what was done."""
        result = await self.client.call_tool(tool, {"workspace": self.workspace, **arguments})
        return str(result.content[0].text).partition("[")[2].partition("]")[0] if result.is_error else ""  # type: ignore[union-attr]


def at_face(project: Project, face: str, work: Callable[[Tools], Awaitable[None]]) -> None:
    """Do work with the tools of a new workspace, which is removed at the end, if it is there."""

    async def main(connect: Callable[[], AbstractAsyncContextManager[Client]]) -> None:
        async with connect() as mcp:
            id = (await call(mcp, "workspace_create"))["id"]
            made = Tools(mcp, id, project.home / "state" / "projects" / "default" / "workspaces" / id)
            with trio.fail_after(120):
                await work(made)
            if made.tree.exists():
                await call(mcp, "workspace_destroy", workspace=id, discard=True)

    if face == "stdio":
        trio.run(main, lambda: client(project))
    else:
        with serving(project, "--listen", "127.0.0.1:0") as served:
            trio.run(main, lambda: test_mcp_http.client(served, served.token))


def test_no_path_is_read_or_written_that_is_no_file_of_the_workspace(project: Project, face: str) -> None:
    made = "echo kept >file; mkdir dir; mkfifo fifo; ln -s /etc out; ln -s /dev/zero zero; ln .git/config hard"
    refused = ("../x", "/etc/passwd", "out/passwd", "a/./../../x", "/dev/zero", "zero", "/proc/self/environ",
               ".git/config", "dir", "fifo", "a\0b", "x" * 5000)  # fmt: skip

    async def work(ours: Tools) -> None:
        await ours.do("bash", command=made)
        before = await ours.do("bash", command="ls -lAR --full-time; cat .git/config")
        for path in refused:
            codes = {
                await ours.code("read", file_path=path) if path not in ("dir", ".git/config") else "tool.outside",
                await ours.code("write", file_path=path, content="x"),
                await ours.code("edit", file_path=path, old_string="kept", new_string="lost"),
            }
            assert codes <= {"tool.outside", "tool.argument"}, (path, codes)
        assert (await ours.do("bash", command="ls -lAR --full-time; cat .git/config")) == before
        assert await ours.code("write", file_path="out/new/deep", content="x") == "tool.outside"
        for name in ("~", "%2e%2e"):  # which are names like others
            await ours.do("write", file_path=name, content="x")
            assert (ours.tree / name).read_text() == "x"

    at_face(project, face, work)


def test_an_edit_changes_what_it_names_or_nothing(project: Project, face: str) -> None:
    files = {
        "twice": b"a a",
        "binary": b"\x00\xffa",
        "mixed": b"one\r\ntwo\nthree\r\n",
        "huge": b"x" * (20 << 20),
    }

    async def work(ours: Tools) -> None:
        for name, content in files.items():
            await ours.do("write", file_path=name, content="x")
            (ours.tree / name).write_bytes(content)
            (ours.tree / name).chmod(0o640)
        codes = {name: await ours.code("edit", file_path=name, old_string="a", new_string="b") for name in files}
        assert codes == dict.fromkeys(files, "tool.argument") | {"binary": ""}
        assert {name: (ours.tree / name).read_bytes() for name in files} == files | {"binary": b"\x00\xffb"}
        await ours.do("edit", file_path="mixed", old_string="two", new_string="2")
        assert (ours.tree / "mixed").read_bytes() == b"one\r\n2\nthree\r\n"
        assert (ours.tree / "mixed").stat().st_mode & 0o777 == 0o640

    at_face(project, face, work)


def test_a_pattern_is_data_and_a_search_is_bounded(project: Project, face: str) -> None:
    async def work(ours: Tools) -> None:
        await ours.do("bash", command="printf '%s' aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab >a; ln -s /etc out")
        await ours.do("bash", command="head -c 100000000 /dev/zero | tr '\\0' x >line; printf 'root\\0' >binary")
        found = await ours.do("grep", pattern="-f/etc/passwd")
        assert found["matches"] == []
        assert "root:" not in str(await ours.do("grep", pattern="root"))
        await ours.code("grep", pattern="(a+)+$", path="a")
        long = await ours.client.call_tool("grep", {"workspace": ours.workspace, "pattern": "x", "path": "line"})
        assert len(str(long.content)) < 3 << 20
        assert await ours.code("grep", pattern="root", path="out/passwd") == "tool.outside"

    at_face(project, face, work)


def test_calls_at_once_wait_for_each_other_and_are_all_answered_when_the_workspace_goes(
    project: Project, face: str
) -> None:
    async def work(ours: Tools) -> None:
        await ours.do("write", file_path="file", content="0")
        answers: list[str] = []

        async def one(tool: str, **arguments: Any) -> None:
            answers.append(await ours.code(tool, **arguments))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(lambda n=number: one("write", file_path="file", content=str(n) * 100_000))
                nursery.start_soon(lambda: one("edit", file_path="file", old_string="x", new_string="y"))
        assert len(answers) == 20
        assert {*answers} <= {"", "tool.argument"}
        content = (ours.tree / "file").read_text()
        assert content == content[0] * 100_000

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: one("bash", command="trap '' TERM; touch begun; sleep 300"))
            while not (ours.tree / "begun").exists():
                await trio.sleep(0.05)
            nursery.start_soon(lambda: one("write", file_path="other", content="x"))
            await call(ours.client, "workspace_destroy", workspace=ours.workspace, discard=True)
        assert len(answers) == 22
        assert trio.current_time() - began < 60
        assert not ours.tree.exists()

    at_face(project, face, work)
