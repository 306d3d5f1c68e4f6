"""``runner tool``: call one of the tools that agents have, in a workspace."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from runner.cli.output import Output
from runner.cli.verbs._workspace import line, run_with_env

if TYPE_CHECKING:
    from runner.ops.workspaces.workspace_lease import WorkspaceEnv

SUMMARY = "call a tool in a workspace: bash, read, write, edit, glob, grep, git"
GROUP = "workspaces"
EXAMPLES = (
    "runner tool bash 3f9c 'make test' --timeout 600",
    "runner tool bash 3f9c 'cd src && . env' --shell work",
    "runner tool read 3f9c src/shop.py --offset 20 --limit 10",
    "runner tool write 3f9c notes.md",
    "runner tool edit 3f9c src/shop.py --old 'VAT = 19' --new 'VAT = 20'",
    "runner tool glob 3f9c 'src/**/*.py'",
    "runner tool grep 3f9c 'def total' --include '*.py'",
    "runner tool git 3f9c commit --message 'Round prices'",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    def add(name: str, summary: str, *positional: tuple[str, str, str]) -> ArgumentParser:
        verb: ArgumentParser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verb.add_argument("--output", choices=("text", "json"), default="text")
        verb.add_argument("id", metavar="ID", help="a workspace: an id, or its beginning")
        for field, metavar, text in positional:
            verb.add_argument(field, metavar=metavar, help=text)
        return verb

    path = ("file_path", "PATH", "relative to the workspace")
    bash = add("bash", "run a command line, and exit as it does", ("command", "COMMAND", "for bash, or sh without it"))
    bash.add_argument("--workdir", metavar="DIR", help="where to run it")
    bash.add_argument(
        "--shell", metavar="NAME", help="go on with the directory and variables that the last call has left"
    )
    bash.add_argument("--timeout", metavar="SECONDS", type=float, help="then its whole tree is ended; 120")
    read = add("read", "lines of a file, or the names in a directory", path)
    read.add_argument("--offset", metavar="LINE", type=int, help="the first line, from 1")
    read.add_argument("--limit", metavar="LINES", type=int, help="how many")
    add("write", "write a file from standard input, all at once", path)
    edit = add("edit", "replace a text that a file has once", path)
    edit.add_argument("--old", metavar="TEXT", dest="old_string", required=True, help="as the file has it")
    edit.add_argument("--new", metavar="TEXT", dest="new_string", required=True, help="in its place")
    edit.add_argument("--all", dest="replace_all", action="store_true", help="wherever it is")
    glob = add("glob", "files whose names match", ("pattern", "PATTERN", "such as `src/**/*.py`"))
    grep = add("grep", "lines that match", ("pattern", "PATTERN", "an extended regular expression"))
    grep.add_argument("--include", metavar="NAMES", help="names of files, such as `*.py`")
    for verb in (glob, grep):
        verb.add_argument("--path", metavar="DIR", help="where to look")
    git = add("git", "look at changes and commit them")
    git.add_argument("action", choices=("status", "diff", "log", "commit", "checkout"), help="what to do")
    git.add_argument("files", metavar="PATH", nargs="*", help="of `diff` and `commit`")
    git.add_argument("--message", metavar="TEXT", help="of a commit")
    git.add_argument("--branch", metavar="BRANCH", help="to switch to")
    git.add_argument("--create", action="store_true", help="make the branch")
    git.add_argument("--staged", action="store_true", help="what is staged")
    git.add_argument("--limit", metavar="COMMITS", type=int, help="of the log")


def main(args: Namespace, out: Output) -> int:
    import msgspec

    from runner.core.codec import plain
    from runner.core.errors import UsageError
    from runner.core.settings import current
    from runner.ops.workspaces.leases import EXEC
    from runner.ops.workspaces.tools import open_for_tools, outputs_of, require_tool, tool

    given = {name: value for name, value in vars(args).items() if value is not None}
    if args.what == "write":
        given["content"] = _standard_input()
    if "timeout" in given:
        given["timeout_ms"] = round(given["timeout"] * 1000)
    kind = tool(args.what).Arguments
    try:
        arguments = msgspec.convert({name: given[name] for name in kind.__struct_fields__ if name in given}, kind)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error

    async def call(env: WorkspaceEnv) -> Any:
        require_tool(await env.store.workspace(args.id), args.what)
        async with open_for_tools(env, args.id, EXEC) as opened:
            result = await opened.call(args.what, arguments)
            for name in ("stdout", "stderr"):
                if handle := getattr(result, f"{name}_handle", None):
                    out.complain(f"the whole {name} is in {outputs_of(env, opened.row.id).find(handle)}")
            return result

    result = run_with_env(current(), out, call)
    if args.output == "json":
        out.json(plain(result))
    else:
        _tell(args.what, result, out)
    code = getattr(result, "exit_code", 0)
    return 124 if code is None else int(code)


def _standard_input() -> str:
    from runner.core.errors import UsageError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not UTF-8", hint="runner workspace exec ID -- sh -c 'cat >PATH'") from error


def _tell(name: str, result: Any, out: Output) -> None:
    if name in ("bash", "git"):
        for text, say in ((result.stdout, out.line), (result.stderr, out.complain)):
            if text:
                say(text.removesuffix("\n"))
        return
    for text in _lines(name, result):
        line(out, text)
    if getattr(result, "truncated", False):
        out.complain("there is more than this")


def _lines(name: str, result: Any) -> list[str]:
    match name:
        case "read":
            return [f"binary, {result.file_size} bytes"] if result.is_binary else result.content.splitlines()
        case "write":
            return [f"{result.file_path}: {result.file_size} bytes"]
        case "edit":
            return [f"{result.file_path}: changed in line {', '.join(map(str, result.lines))}"]
        case "glob":
            return list(result.matches)
    return [f"{match.file_path}:{match.line_number}:{match.line}" for match in result.matches]
