from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import trio

from runner.git import disk
from runner.git.ignore import IgnoreRules
from tests.support.needs import GIT

PROGRAM = shutil.which("git") or ""

RULES = {
    b"": b"*.log\n!keep.log\n/top\nbuild/\n**/cache/\ndoc/*.txt\n"
    b"# comment\n\\#literal\ntrail  \nspace\\ \n[ab]?c\na/**/z\n",
    b"sub": b"!*.log\nlocal\n/rooted\n",
    b"sub/deep": b"*\n!.gitignore\n!yes\n",
}
PATHS = [
    *("x.log", "keep.log", "sub/x.log", "top", "sub/top", "build/out", "sub/build/out", "build2", "other/build"),
    *("cache/a", "s/cache/b", "doc/a.txt", "doc/in/a.txt", "#literal", "trail", "axc", "bxc", "cxc", "a/z", "a/b/z"),
    *("a/b/c/z", "sub/local", "sub/in/local", "sub/rooted", "sub/in/rooted", "sub/deep/no", "sub/deep/yes"),
    *("sub/deep/in/yes", ".hidden", "ünï.log", "space ", "space"),
]


@GIT.mark
async def test_rules_mean_what_git_says_they_mean(tmp_path: Path) -> None:
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for folder, text in RULES.items():
        (tmp_path / os.fsdecode(folder) / ".gitignore").write_bytes(text)

    found, _ = await trio.to_thread.run_sync(lambda: disk.walk(tmp_path, ignores=IgnoreRules(RULES.get)))

    env = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run([PROGRAM, "init", "-q", str(tmp_path)], env=env, check=True)
    argv = [PROGRAM, "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"]
    expected = subprocess.check_output(argv, env=env).split(b"\0")[:-1]
    assert sorted(each.path for each in found) == sorted(expected)


def test_a_damaged_pattern_spoils_no_other() -> None:
    rules = IgnoreRules({b"": b"[\n[z-a]\n\xff\n*.log\n"}.get)

    assert rules(b"x.log", directory=False)
    assert not rules(b"x", directory=False)
