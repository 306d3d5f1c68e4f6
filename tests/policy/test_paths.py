"""The glob rule as a table, and what policies make of it."""

from __future__ import annotations

import random
import re
import time

import pytest
from wcmatch import fnmatch

from runner.core.model import Verdict, Violation
from runner.core.sanitize import printable_path
from runner.policy.paths import PathPolicy, _regex, check_pattern, compose, fold, matcher

DOCUMENTED = (
    "**/.env",
    "**/.env.*",
    "**/secrets/**",
    "**/*.pem",
    "**/*.key",
    "**/credentials.json",
    "**/service-account*.json",
)


def policy(*, allowed: tuple[str, ...] = ("**",), forbidden: tuple[str, ...] = (), size: int = 1000) -> PathPolicy:
    return PathPolicy(allowed, forbidden, size)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("**/x", "x", True),
        ("**/x", "a/x", True),
        ("**/x", "a/b/c/x", True),
        ("**/x", "a/xx", False),
        ("**/x", "x/a", False),
        ("**", "a", True),
        ("**", "a/b", True),
        ("a/**", "a", False),
        ("a/**", "a/b", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b/a/c", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/**/b", "a/b", True),
        ("a/**/b", "a/bb", False),
        ("*", "a", True),
        ("*.py", "a/b.py", True),
        ("src/*", "src/a", True),
        ("src/*", "src/a/b", False),
        ("src/*", "src", False),
        ("src/*/c", "src/a/c", True),
        ("src/*/c", "src/c", False),
        ("src/?", "src/a", True),
        ("src?a", "src/a", False),
        ("src[!x]a", "src/a", False),
        ("src/*", "src/.hidden", True),
        ("x", "a/b/x", True),
        ("x/", "x/a", True),
        ("x/", "a/x/b/c", True),
        ("x/", "x", False),
        ("a/x/", "a/x/b", True),
        ("a/x/", "b/a/x/b", False),
        ("*.{py,pyi}", "a/b.pyi", True),
        ("*.{py,pyi}", "a/b.pyx", False),
        ("{a,b}/c", "b/c", True),
        ("[a-c]", "b", True),
        ("[!a-c]", "b", False),
        ("[*]", "*", True),
        ("[*]", "a", False),
        ("a.c", "abc", False),
        ("[^a-c]", "b", False),
        ("[^a-c]", "B", True),
        ("[[]x]", "[x]", True),
        ("app/(auth)/*", "app/(auth)/page.tsx", True),
        ("app/(auth)/*", "app/auth/page.tsx", False),
        ("x.{pem}", "x.{pem}", True),
        ("*.pem", "x.pem\n", False),
        ("A", "a", False),
        ("package*.json", "deep/package-lock.json", True),
    ],
    ids=str,
)
def test_a_glob_means_one_thing(pattern: str, path: str, matches: bool) -> None:
    assert check_pattern(pattern) is None
    assert policy(allowed=(pattern,)).judge(path).allowed is matches


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (".env", "**/.env"),
        ("a/b/c/d/e/.env", "**/.env"),
        (".ENV", "**/.env"),
        (".env.local", "**/.env.*"),
        ("a/.Env.Production", "**/.env.*"),
        ("secrets/a", "**/secrets/**"),
        ("x/secrets/a/b", "**/secrets/**"),
        ("Secrets/a", "**/secrets/**"),
        ("secrets/", "**/secrets/**"),
        (".env/", "**/.env"),
        (".env/inside", "**/.env"),
        ("k.pem", "**/*.pem"),
        ("a/ID.KEY", "**/*.key"),
        ("deep/er/CREDENTIALS.JSON", "**/credentials.json"),
        ("service-account.json", "**/service-account*.json"),
        ("a/service-account-prod.json", "**/service-account*.json"),
        ("a/\u017fecrets/b", "**/secrets/**"),
        ("\u200b.en\u200dv", "**/.env"),
        ("./a/.//.env", "**/.env"),
        ("secrets", "**/secrets/**"),
        ("x/Secrets", "**/secrets/**"),
    ],
    ids=ascii,
)
def test_documented_patterns_forbid_at_any_depth_and_in_any_spelling(path: str, rule: str) -> None:
    assert policy(forbidden=DOCUMENTED).judge(path) == Verdict(False, f"forbidden:{rule}")


@pytest.mark.parametrize(
    ("pattern", "path", "forbids"),
    [
        ("[!a-z]*", "Abc", True),
        ("[!a-z]*", "abc", False),
        ("[^a-z]*", "Abc", True),
        ("[!A-Z]*", "abc", True),
        ("[!A-Z]*", "ABC", False),
        ("x[!a]/y", "xA/y", True),
        ("[a-c]*", "B", True),
        ("[A-C]*", "b", True),
        ("[Z-a]*", "Z", True),
        ("secret?", "secret\u00df", True),
        ("[\u00df]", "\u00df", True),
        ("secrets/**", "secrets", True),
        ("secrets/**", "x/secrets", False),
        ("secrets/", "secrets", False),
        ("secrets/", "secrets/a", True),
        ("secrets/", "x/secrets/", True),
        ("**/", "a", True),
    ],
    ids=ascii,
)
def test_what_a_pattern_matches_as_it_is_written_is_forbidden(pattern: str, path: str, forbids: bool) -> None:
    assert check_pattern(pattern) is None
    assert policy(forbidden=(pattern,)).judge(path).allowed is not forbids


def test_names_and_patterns_agree_in_either_unicode_composition() -> None:
    composed, decomposed = "caf\u00e9.txt", "cafe\u0301.txt"

    assert not policy(forbidden=(composed,)).judge(decomposed).allowed
    assert not policy(forbidden=(decomposed,)).judge(composed).allowed


@pytest.mark.parametrize(
    "path",
    ["src/main.py", "README.md", ".environment", "env", "secret", "docs/secrets.md", "pem", "keys/readme", "a.keys"],
)
def test_a_normal_file_is_allowed(path: str) -> None:
    assert policy(forbidden=DOCUMENTED).judge(path) == Verdict(True, "allowed:**")
    assert not matcher(DOCUMENTED).may_forbid(matcher(DOCUMENTED).root, f"/{path.rpartition('/')[2]}/")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "a/../b"])
def test_a_path_that_is_absolute_or_climbs_is_outside_the_root(path: str) -> None:
    assert policy().judge(path) == Verdict(False, "outside-root")


def test_the_first_forbidding_pattern_is_the_rule_and_beats_what_is_allowed() -> None:
    judged = policy(allowed=("**/a.key",), forbidden=("**/b", "*.key", "a.*"))

    assert judged.judge("a.key") == Verdict(False, "forbidden:*.key")
    assert judged.judge("c.txt") == Verdict(False, "not-allowed")


def test_policies_compose_to_the_narrowest() -> None:
    both = compose(
        [
            policy(allowed=("src/**", "docs/**"), forbidden=("*.key",), size=500),
            policy(allowed=("**/*.py",), forbidden=("*.pem", "*.key"), size=100),
        ]
    )

    assert both.judge("src/a.py").allowed
    assert both.judge("src/a.md") == Verdict(False, "not-allowed")
    assert both.judge("other/a.py") == Verdict(False, "not-allowed")
    assert both.forbidden == ("*.key", "*.pem")
    assert both.max_file_size == 100


def test_composing_what_is_composed_loses_no_allow_list() -> None:
    inner = compose([policy(allowed=("a/**",)), policy(allowed=("**/b/**",))])

    judged = compose([policy(allowed=("**/c",)), inner])

    assert judged.judge("a/b/c").allowed
    assert [judged.judge(path).rule for path in ("a/b/d", "x/b/c", "a/x/c")] == ["not-allowed"] * 3


def test_changed_files_are_judged_by_place_and_size() -> None:
    judged = policy(allowed=("src/**",), forbidden=("*.key",), size=1000)

    violations = judged.judge_changes(
        [
            ("src/fine.py", 1000),
            ("src/big.bin", 1001),
            ("README.md", 5),
            ("src/a.key", 5),
            ("src/removed.key", None),
            ("docs/removed.md", None),
        ]
    )

    assert violations == (
        Violation("src/big.bin", "max-file-size", "1001 bytes, at most 1000"),
        Violation("README.md", "not-allowed"),
        Violation("src/a.key", "forbidden:*.key"),
        Violation("docs/removed.md", "not-allowed"),
    )


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("", "is empty"),
        ("/", "starts with `/`"),
        ("/etc/**", "starts with `/`"),
        ("../x", "`..` part"),
        ("a/../b", "`..` part"),
        ("./a", "`.` or"),
        ("a//b", "an empty"),
        ("!a", "cannot be negated"),
        ("a\\b", "has a `\\`"),
        ("x" * 1025, "longer than 1024 bytes"),
        ("\u00e9" * 513, "longer than 1024 bytes"),
        ("{a,b}" * 7, "more than 100 patterns"),
        ("{1..100000000}", "more than 100 patterns"),
        ("{a,b/c}", "a brace"),
        ("a/{b", "a brace"),
        ("*a*a*a*a*b", "more than 3 `*`"),
        ("*.@(pem|key)", "a group"),
        ("**/?(a)b", "a group"),
        ("*(a)/b", "a group"),
        ("a/+(b|c)", "a group"),
        ("a!(b)", "a group"),
        ("**/(secrets|private)/**", "a group"),
        ("[[:alpha:]]*", "a class by name"),
        ("[!x[:digit:]]", "a class by name"),
        ("[z-a]", "ends before it begins"),
        ("*.[ch", "does not close"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_pattern_is_told_what_is_wrong(pattern: str, complaint: str) -> None:
    assert complaint in (check_pattern(pattern) or "")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*a*a*a", "a" * 254 + "b"), ("**/a/**/a/**/a/**/b", "/".join("a" * 2000)), ("[[]" * 250 + "b", "[" * 250)],
    ids=["stars", "globstars", "brackets"],
)
def test_no_accepted_pattern_takes_long_on_any_path(pattern: str, path: str) -> None:
    assert check_pattern(pattern) is None
    judged = policy(allowed=("zz",), forbidden=(pattern,))
    start = time.process_time()

    assert judged.judge(path).rule == "not-allowed"

    assert time.process_time() - start < 2


@pytest.mark.parametrize("word", ["*.pem", ".env.*", "a-b_c", "*", "a**b", "..", "-", "*a*", "x.*.y", "+a", "a b"])
def test_a_plain_word_is_translated_as_the_glob_library_does_it(word: str) -> None:
    """Which is then not imported for it."""
    translated = fnmatch.translate(word, flags=fnmatch.DOTMATCH | fnmatch.FORCEUNIX | fnmatch.BRACE)[0]

    assert _regex(word).pattern == "|".join(translated)


def test_following_names_down_a_tree_agrees_with_a_plain_reading_of_globs() -> None:
    rng = random.Random(7)
    words = ["a", "b", "ab", ".a", "a.b", "B"]
    parts = ["**", "*", "a", "a*", "*b", "?", "[ab]", "{a,b}", "*.b", "a.b"]
    for _ in range(3000):
        pattern = "/".join(rng.choices(parts, k=rng.randint(1, 4))) + rng.choice(["", "/"])
        names = rng.choices(words, k=rng.randint(1, 4))
        compiled, regex = matcher((pattern,)), _plainly(pattern)
        above = ["/".join(names[:end]) + "/" for end in range(1, len(names))]
        candidates = [*above, *(path.rstrip("/") for path in above), "/".join(names)]

        found = compiled.match("/".join(names), directory=False) is not None

        assert found == any(regex.fullmatch(path) for path in candidates), (pattern, names)
        if found and not any(compiled.match(path, directory=True) for path in above):
            state = compiled.root
            for name in names[:-1]:
                state = compiled.enter(state, name)
            text = f"/other/{fold(names[-1])}/"
            assert compiled.may_forbid(state, text), "the prefilter never says no for something"


def _plainly(pattern: str) -> re.Pattern[str]:
    """One regular expression for a whole pattern and folded names: the rule as a reader would write it down."""
    text = pattern if "/" in pattern.removesuffix("/") else f"**/{pattern}"
    text = re.sub(r"\*\*(/\*\*)+", "**", text)
    if text.strip("/") == "**":
        return re.compile(".+")
    text = text + "<" if text.endswith("/") else text
    pieces = {
        "**/": "(?:[^/]+/)*",
        "/**": "(?:/.*)?",
        "/**/<": "/.*",
        "/<": "/.*",
        "**": ".+",
        "*": "[^/]*",
        "?": "[^/]",
        "{a,b}": "[ab]",
        "[ab]": "[ab]",
    }
    tokens = re.findall(r"(?:^|(?<=/))\*\*/|/\*\*$|/\*\*/<|/<|\*\*|\*|\?|\[ab\]|\{a,b\}|.", text)
    return re.compile("".join(pieces.get(token) or re.escape(token) for token in tokens), re.IGNORECASE)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a/b", "a/b"),
        ("caf\u00e9", "caf\u00e9"),
        (b"a\xff".decode(errors="surrogateescape"), "a\\xff"),
        ("a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        ("a\u202egpj.exe", "a\\u202egpj.exe"),
    ],
    ids=ascii,
)
def test_a_path_is_shown_in_characters_that_do_nothing(path: str, shown: str) -> None:
    assert printable_path(path) == shown


def test_of_several_policies_each_has_to_allow() -> None:
    first = compose([policy(allowed=("a/**",)), policy(allowed=("**/x",))])
    whole = compose([first, policy(allowed=("**/b/**",)), policy()])

    assert [path for path in ("a/b/x", "a/x", "b/x", "a/b/y") if whole.judge(path).allowed] == ["a/b/x"]
