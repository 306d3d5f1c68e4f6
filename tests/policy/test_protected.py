from __future__ import annotations

import pytest

from runner.policy.protected import check_protected, unite


@pytest.mark.parametrize("path", ["AGENTS.md", "app/(auth)/page.tsx", ".factory/", "a/b/c", "caf\u00e9"])
def test_a_plain_name_below_the_workspace_can_be_protected(path: str) -> None:
    assert check_protected(path) is None


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("", "is empty"),
        ("/etc/passwd", "starts with `/`"),
        ("../x", "`..` part"),
        ("a/../../x", "`..` part"),
        (".", "`.` or"),
        ("a//b", "an empty"),
        ("*.md", "is a pattern"),
        ("a[0]", "is a pattern"),
        ("@(a|b)", "is a pattern"),
        ("x/(a|b)", "is a pattern"),
        ("a\x00b", "cannot be displayed"),
        ("a\nb", "cannot be displayed"),
        ("x" * 1025, "longer than 1024 bytes"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_a_bad_protected_path_is_told_what_is_wrong(path: str, complaint: str) -> None:
    assert complaint in (check_protected(path) or "")


@pytest.mark.parametrize(
    ("paths", "united"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([".factory", ".factory/", ".factory/x"], (".factory/",)),
        (["ab", "a/b", "a"], ("a", "ab")),
        ([], ()),
    ],
    ids=["repeated", "directory wins", "below another", "none"],
)
def test_protected_paths_of_several_places_unite(paths: list[str], united: tuple[str, ...]) -> None:
    assert unite(paths) == united
