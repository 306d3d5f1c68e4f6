from __future__ import annotations

import pytest

from runner.policy.names import collisions, judge_name, may_offend, parents, read_by_git

HARMLESS = [".gitignore", ".github", "git", "git~2", "..a", "a..", ".gi", "x.git", "...", "\udcff", ".git2", ".git-x"]
HARMLESS += ["a\nb", "a\\b", "CON", "a:b", "a ", "a.", ".gitmodules", "gitmod~1", "a" * 255, "é" * 127, "\x1b[31m"]
AS_GIT = [
    ".git",
    ".GIT",
    ".Git",
    "git~1",
    "GIT~1",
    ".g\u200cit",
    "\u200b.git",
    ".git\ufeff",
    ".git.",
    ".git ",
    ".git. .",
]
AS_GIT += [
    ".git\udcff",
    ".git\u200c\udcffx",
    ".git\uffff",
    ".git::$INDEX_ALLOCATION",
    ".git .:x",
    ".git:",
    "git~1.",
    ".git\\config",
    "a\\.git",
    "a\\git~1\\b",
    ".git\n:"[:4],
]
MODULES = [
    ".gitmodules",
    ".GITMODULES",
    "gitmod~1",
    "GITMOD~4",
    "gi7eba~1",
    "gi7eb~10",
    ".gitmodules .",
    ".gitmodules:x",
]


@pytest.mark.parametrize("name", HARMLESS)
def test_ordinary_names_are_harmless(name: str) -> None:
    assert judge_name(name) is None


@pytest.mark.parametrize("name", AS_GIT)
def test_a_name_that_some_disk_takes_for_gits_own_is_refused(name: str) -> None:
    assert judge_name(name) == judge_name(name, "link") == judge_name(name, "directory") == "nested-git"


@pytest.mark.parametrize("name", MODULES)
def test_the_list_of_submodules_is_a_file(name: str) -> None:
    assert (judge_name(name), judge_name(name, "link"), judge_name(name, "directory")) == (None, "no-file", "no-file")


@pytest.mark.parametrize(
    "name", [".gitattributes", ".GitAttributes", "gitatt~1", "gi7d29~1", "gi7d2~10", ".gitattributes:x"]
)
def test_attributes_are_no_directory(name: str) -> None:
    assert (judge_name(name), judge_name(name, "link"), judge_name(name, "directory")) == (None, None, "no-file")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "unsafe-name"),
        (".", "unsafe-name"),
        ("..", "unsafe-name"),
        ("a" * 256, "long-name"),
        ("é" * 128, "long-name"),
    ],
)
def test_a_name_that_no_disk_holds_is_refused(name: str, rule: str) -> None:
    assert judge_name(name) == rule


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        pytest.param(["a", "b", "a.b", "a-b", "A.C"], {}, id="none"),
        pytest.param(["README", "readme"], {"README": "readme", "readme": "README"}, id="case"),
        pytest.param(
            ["caf\u00e9", "cafe\u0301"], {"caf\u00e9": "cafe\u0301", "cafe\u0301": "caf\u00e9"}, id="composition"
        ),
        pytest.param(["STRASSE", "stra\u00dfe"], {"STRASSE": "stra\u00dfe", "stra\u00dfe": "STRASSE"}, id="letters"),
        pytest.param(["ab", "a\u200cb"], {"ab": "a\u200cb", "a\u200cb": "ab"}, id="skipped by HFS+"),
        pytest.param(["src/a", "Src/b", "c"], {"src/a": "Src", "Src/b": "src"}, id="directories"),
        pytest.param(["x/A/p", "x/a"], {"x/A/p": "x/a", "x/a": "x/A"}, id="a directory and a file"),
        pytest.param(["a", "A", "\u00aa"], {"a": "A", "A": "a"}, id="no more than that"),
        pytest.param(["\udcff", "\udcfe"], {}, id="no text"),
        pytest.param(["\U0001f600", "\u2764\ufe0f", "\u2764"], {}, id="only eyes skip it"),
    ],
)
def test_names_that_some_disks_take_for_one_collide(paths: list[str], expected: dict[str, str]) -> None:
    found = collisions([path.encode("utf-8", "surrogateescape") for path in paths])

    assert {path.decode(): other.decode() for path, other in found.items()} == expected


def test_parents_are_all_folders_above() -> None:
    assert parents([b"a/b/c", b"a/d", b"e"]) == {b"a", b"a/b"}
    assert parents([b"x/y/z/file"]) == {b"x", b"x/y", b"x/y/z"}
    assert parents([b"/x/file"]) == {b"", b"/x"}


def test_a_name_may_have_as_many_bytes_as_a_disk_takes() -> None:
    for letter in ("a", "gi", "é"):
        most = letter * (255 // len(letter.encode()))
        assert judge_name(most + "a" * (255 - len(most.encode()))) is None
        assert judge_name(most + "a" * (256 - len(most.encode()))) == "long-name"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (".gitmodules", ".gitmodules"),
        (".GitModules", ".gitmodules"),
        ("gitmod~1", ".gitmodules"),
        (".gitattributes", ".gitattributes"),
        ("gitatt~1", ".gitattributes"),
        (".gitignore", None),
        ("gitmodules", None),
    ],
)
def test_what_git_reads_is_known_in_every_spelling(name: str, read: str | None) -> None:
    assert read_by_git(name) == read


def test_names_that_can_be_git_s_own_are_looked_at() -> None:
    assert may_offend("/a/.git/")
    assert not may_offend("/a/b/")


def test_a_collision_is_of_the_uppermost_directory_that_collides() -> None:
    assert collisions([b"a/b/c/d", b"A/x"]) == {b"a/b/c/d": b"A", b"A/x": b"a"}
    assert collisions([b"a/b/c/d", b"a/B/c/e"]) == {b"a/b/c/d": b"a/B", b"a/B/c/e": b"a/b"}
