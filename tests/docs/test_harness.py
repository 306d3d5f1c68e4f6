"""The harness of the pages itself: a page that shows what does not happen fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import differences, leads, session
from tests.support.page import Page, matches, read_page, rewritten
from tests.support.page_situations import ROOT

pytestmark = pytest.mark.slow


def outcome(folder: Path, *lines: str) -> str:
    """What is found wrong with a page of one block."""
    path = folder / "page.md"
    path.write_text("\n".join(["```console", *lines, "```", ""]))
    return differences("page.md", session(read_page(path), folder))


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo one; echo two", "one", "two"),
        ("$ echo one; echo two", "...", "two"),
        ("$ seq 5", "1", "...", "5"),
        ("$ echo any",),
        ("$ echo one two three", "one ... three"),
        ("$ false", "[exit 1]"),
        ("$ ls absent", "ls: ...: No such file or directory", "[exit 2]"),
        ("$ cat <<end", "> one", "> end", "one"),
        ("$ cd /; x=1", "$ echo $PWD $x", "/ 1"),
        ("$ pwd", "/home/you/work"),
        ("$ date --iso-8601=seconds", "2020-01-31T12:00:00+00:00"),
        ("$ echo 1.25s 340ms 1m05s, 4.5K, 0123456789ab", "0.1s 2s 3m00s, 17K, ba9876543210"),
        ("$ printf 'no end of line'", "no end of line"),
        ("$ git config user.name", "You"),
        ("$ runner --version", "runner ..."),
    ],
    ids=lambda lines: lines[0][2:],
)
def test_what_a_page_shows_happens(lines: tuple[str, ...], tmp_path: Path) -> None:
    assert outcome(tmp_path, *lines) == ""


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (("$ echo one", "two"), "page.md:2: $ echo one"),
        (("$ echo one; echo two", "one"), "page.md:2: $ echo one; echo two"),
        (("$ echo one", "one", "..."), None),
        (("$ false",), "[exit 1]"),
        (("$ true", "[exit 1]"), "[exit 0]"),
        (("$ echo 12 files", "13 files"), "12 files"),
        (("$ exit 0", "$ echo later"), "the session ended here"),
        (("$ if", "$ true"), "syntax error"),
    ],
)
def test_what_does_not_happen_is_found(lines: tuple[str, ...], named: str | None, tmp_path: Path) -> None:
    found = outcome(tmp_path, *lines)

    assert named in found if named else found == ""


def test_files_that_a_page_shows_are_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    script = "```bash\n# file: bin/say\n#!/bin/sh\necho said\n```\n"
    page.write_text(f"{script}\n```console\n$ bin/say\nsaid\n```\n")

    assert differences("page.md", session(read_page(page), tmp_path)) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("given", ["python-project", "node-project", "go-project", "incident", "cluster", "checkout"])
def test_a_situation_is_prepared(given: str, tmp_path: Path) -> None:
    commands = {
        "python-project": ".venv/bin/python -m pytest",
        "node-project": "npm test",
        "go-project": "go test ./...",
        "incident": "ls incident/incident.json",
        "cluster": "kubectl get pods",
        "checkout": ".venv/bin/python -m pytest --version && runner validate manifests/quickstart",
    }
    needs = {"node-project": "npm", "go-project": "go", "cluster": "kubectl"}.get(given, "git")
    page = tmp_path / "page.md"
    page.write_text(f"<!-- given: {given} -->\n<!-- needs: {needs} -->\n```console\n$ {commands[given]}\n```\n")

    assert differences("page.md", session(read_page(page), tmp_path)) == ""


def test_a_page_is_rewritten_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("- item\n  ```console\n  $ seq 3\n  ...\n  3\n  $ (echo out; exit 2)\n  old\n  ```\n\nlast\n")

    text = rewritten(read_page(path), session(read_page(path), tmp_path))

    assert text == (
        "- item\n  ```console\n  $ seq 3\n  ...\n  3\n  $ (echo out; exit 2)\n  out\n  [exit 2]\n  ```\n\nlast\n"
    )


def test_links_are_followed_to_their_headings() -> None:
    links = "[a](#one-code--more) [b](#two) [c](../README.md) [d](absent.md)"
    text = f"# One `code` & more\n\n{links}\n\n```\n[e](e)\n```\n"
    page = Page(ROOT / "docs" / "page.md", text)

    assert [leads(page, link) for link in page.links] == [True, False, True, False]


def test_only_what_is_volatile_may_differ() -> None:
    assert matches(["run 4x8k2m9qz7tb in 3.2s"], "run 1a2b3c4d5e6f in 10ms")
    assert matches(["... bytes in a", "...m ago"], "29922 bytes in a\n3m ago")
    assert not matches(["exit 3"], "exit 4")
    assert not matches(["3 files"], "3 files\nand more")
