"""Glob rules for the paths that a workspace may hold and a run may change, judged without touching a disk.

The one glob rule, for paths relative to the root:

* ``*`` and ``?`` match within one name and do not cross ``/``; dot files are names like any other.
* ``**`` matches any number of names, none included: ``**/x`` also matches at the root.
* A pattern without ``/`` holds at any depth: ``x`` means ``**/x``. A trailing ``/`` names a directory
  and all that is below it: ``x/`` means ``**/x/**``.
* ``[a-z]``, ``[!a-z]`` (or ``[^a-z]``) and ``{a,b}`` within one name as in a shell; no escape but ``[*]``.
* What other tools read as more than that is refused, never taken literally: ``!x``, ``@(a|b)``, ``(a|b)``,
  ``[[:alpha:]]``. Parentheses without ``|`` and braces without ``,`` are characters like any other.

Forbidden patterns hold whatever a name is written like: case, Unicode composition and characters that
are not displayed make no difference, and what a pattern matches as it is written it forbids in any case.
They are tried on an entry and on every directory above it. ``secrets/**`` is against everything called
``secrets``, a regular file too; ``secrets/`` is against directories, and links, which may lead to one.
Allowed patterns are tried on the file alone, exactly as written; ``src/**`` allows what is below ``src``.

The glob library of the documents, fast-glob with ``dot``, reads a pattern without ``/`` at the top only,
forbids nothing below a directory that a pattern names, and has an allowed ``src/**`` match a file ``src``;
for all other patterns that are accepted here the two agree on every file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from msgspec import Struct

from runner.core.model import Verdict, Violation
from runner.core.patterns import pattern
from runner.core.sanitize import printable_path

_PATTERN_BYTES = 1024
_MOST_STARS = 3  # in one name: a regular expression tries every division among them

# Unicode's default ignorable code points: file systems and eyes skip them.
_IGNORABLE = pattern(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_MOST_WORDS = 100  # that the braces in one name may stand for
_PLAIN = pattern(r"(?=.)[A-Za-z0-9._-]*\**[A-Za-z0-9._-]*")  # stars in one place
_WILD = pattern(r"[*?]|\[.*\]")
_CLASS = pattern(r"\[([!^]?\]?[^\]]*)\]")
_GROUP = pattern(r"[?*+@!]\(|\(.*\|.*\)")
_RANGE = pattern(r"(.)-(.)", re.DOTALL)


class PathPolicy(Struct, frozen=True):
    """Every tuple holds patterns. ``further`` are allow lists of composed policies: each must match as well."""

    allowed: tuple[str, ...]
    forbidden: tuple[str, ...]
    max_file_size: int  # bytes
    further: tuple[tuple[str, ...], ...] = ()

    def judge(self, path: str) -> Verdict:
        """Judge the path of a file (of a directory, with a trailing ``/``) relative to the root.

        Rules are ``outside-root``, ``forbidden:PATTERN``, ``not-allowed`` and ``allowed:PATTERN``; the
        first that applies, in this order. Links are the caller's: a path is taken as it is written.
        """
        names = _names(path)
        if names is None:
            return Verdict(False, "outside-root")
        if pattern := matcher(self.forbidden).match(path, directory=path.endswith("/")):
            return Verdict(False, f"forbidden:{pattern}")
        return self._judge_allowed(names)

    def judge_changes(self, changes: Iterable[tuple[str, int | None]]) -> tuple[Violation, ...]:
        """Judge changed files by path and size in bytes; ``None`` is a deletion, which only ``allowed`` can refuse."""
        violations = []
        for path, size in changes:
            verdict = self.judge(path)
            if size is None and verdict.rule.startswith("forbidden:"):
                verdict = self._judge_allowed(_names(path) or ())
            if not verdict.allowed:
                violations.append(Violation(printable_path(path), verdict.rule))
            if size is not None and size > self.max_file_size:
                violations.append(oversized(path, size, self.max_file_size))
        return tuple(violations)

    def _judge_allowed(self, names: Sequence[str]) -> Verdict:
        found = [_allowing(patterns, names) for patterns in (self.allowed, *self.further)]
        return Verdict(False, "not-allowed") if None in found else Verdict(True, f"allowed:{found[0]}")


def compose(policies: Sequence[PathPolicy]) -> PathPolicy:
    """The policy of all of one or more together: what each allows, what any forbids, the least size."""
    return PathPolicy(
        allowed=policies[0].allowed,
        forbidden=tuple(dict.fromkeys(pattern for policy in policies for pattern in policy.forbidden)),
        max_file_size=min(policy.max_file_size for policy in policies),
        further=(*policies[0].further, *(a for policy in policies[1:] for a in (policy.allowed, *policy.further))),
    )


def check_pattern(text: str) -> str | None:
    """Return the fault of a pattern, to be read after its text; ``None`` when it is valid."""
    parts = text.removesuffix("/").split("/")
    classes = [found for part in parts for found in _CLASS.findall(part)]
    bare = [_CLASS.sub("", part) for part in parts]
    complaints = {
        "is empty": not text,
        f"is longer than {_PATTERN_BYTES} bytes": len(text.encode(errors="surrogatepass")) > _PATTERN_BYTES,
        "starts with `/`: patterns are relative to the root": text.startswith("/"),
        "starts with `!`: patterns cannot be negated": text.startswith("!"),
        "has a `\\`: separate names with `/`, write a literal `*` as `[*]`": "\\" in text,
        "has an empty, `.` or `..` part": any(part in ("", ".", "..") for part in parts),
        "has a brace that its part does not close": any(part.count("{") != part.count("}") for part in parts),
        "has a `[` that its part does not close: write a literal one as `[[]`": any("[" in part for part in bare),
        "has a group: write `{a,b}` for a choice, and a literal `(` as `[(]`": any(map(is_group, bare)),
        "has a class by name: write its characters out": any("[:" in found for found in classes),
        "has a range that ends before it begins": any(a > b for found in classes for a, b in _RANGE.findall(found)),
        f"has more than {_MOST_STARS} `*` in one part": any(part.count("*") > _MOST_STARS for part in parts),
    }
    return next((words for words, holds in complaints.items() if holds), None) or _check_translation(text)


def is_group(part: str) -> bool:
    """Tell whether a part of a path has parentheses that other tools read as a choice or a repetition."""
    return _GROUP.search(part) is not None


Part = tuple[re.Pattern[str], ...]  # what one name must match whole: for each form that names are compared in, the same


class Rule(Struct, frozen=True, eq=False):
    """A compiled pattern. ``tree``: it ended in ``/`` or ``/**`` and speaks of what is below directories."""

    pattern: str
    parts: tuple[Part | None, ...]  # one a name; None is `**`
    piece: str  # literal text that `/NAME/` holds, in the first form, if NAME matches the last part
    tree: bool


@dataclass(frozen=True, eq=False)
class State:
    """The state in a directory: each live rule, and the number of its parts that are matched."""

    reached: tuple[tuple[Rule, int], ...]

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Return strings of which every full match, written with slashes around it, holds one."""
        return tuple(dict.fromkeys(rule.piece for rule, at in self.reached if at == len(rule.parts) - 1))

    @cached_property
    def named(self) -> Part:
        """Return the names that lead anywhere but to ``unnamed``; empty if none does."""
        parts = [part for rule, at in self.reached for part in rule.parts[at : at + 1] if part]
        forms = [dict.fromkeys(f"(?:{regex.pattern})" for regex in form) for form in zip(*parts, strict=True)]
        return tuple(re.compile("|".join(form)) for form in forms)

    @cached_property
    def unnamed(self) -> State:
        """The state below all other names; this one itself where only ``**`` lives on."""
        below = _closed((rule, at) for rule, at in self.reached if rule.parts[at : at + 1] == (None,))
        return self if below.reached == self.reached else below


class Matcher:
    """Patterns followed down a tree, name by name, so that a path's length costs nothing twice."""

    def __init__(self, patterns: Sequence[str], *forms: Callable[[str], str]) -> None:
        """Patterns and names are compared in each of these forms."""
        self._forms = forms
        self.root = _closed((_compile(pattern, forms), 0) for pattern in patterns)

    def match(self, path: str, *, directory: bool) -> str | None:
        """The first pattern that forbids this relative path, or a directory above it."""
        state, names = self.root, _names(path) or []
        for depth, name in enumerate(names, start=1):
            state = self.enter(state, name)
            if pattern := self.forbidding(state, directory=directory or depth < len(names)):
                return pattern
        return None

    def enter(self, state: State, name: str) -> State:
        """The state below ``name``, whatever kind of entry it is."""
        texts = [form(name) for form in self._forms]
        if not _matches(state.named, texts):
            return state.unnamed
        return _closed(
            (rule, at if part is None else at + 1)
            for rule, at in state.reached
            for part in rule.parts[at : at + 1]
            if part is None or _matches(part, texts)
        )

    def matched(self, state: State) -> Iterator[Rule]:
        """The rules, in their order, that the entry just entered matches to the end."""
        return (rule for rule, at in state.reached if at == len(rule.parts))

    def forbidding(self, state: State, *, directory: bool) -> str | None:
        """The first pattern against the entry just entered; ``directory`` also for links and special files."""
        matched = self.matched(state)
        return next((r.pattern for r in matched if directory or not (r.tree and r.pattern.endswith("/"))), None)

    def may_forbid(self, state: State, names: str) -> bool:
        """Tell whether a pattern can forbid one of these entries: no is certain, yes is not.

        ``names`` are folded, with a slash before each and behind the last: one search for each literal piece covers a
        directory full of them.
        """
        for piece in state.pieces:  # noqa: SIM110  # a generator takes three times as long
            if piece in names:
                return True
        return False


@cache
def matcher(patterns: tuple[str, ...]) -> Matcher:
    return Matcher(patterns, fold, _visible)


def fold(text: str) -> str:
    """The form in which forbidden patterns and names are the same in any spelling."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", _visible(text).casefold())


def _visible(text: str) -> str:
    """The form in which only case still makes a difference: ``[!a]`` and ``?`` hold as they are written."""
    return text if text.isascii() else unicodedata.normalize("NFC", _IGNORABLE.sub("", text))


def oversized(path: str, size: int, limit: int) -> Violation:
    return Violation(printable_path(path), "max-file-size", f"{size} bytes, at most {limit}")


@cache
def _allowed_matcher(patterns: tuple[str, ...]) -> Matcher:
    return Matcher(patterns, str)


def _names(path: str) -> list[str] | None:
    """The names in a path, or ``None`` when it is absolute or climbs."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    return None if path.startswith("/") or ".." in names else names


def _allowing(patterns: tuple[str, ...], names: Sequence[str]) -> str | None:
    allowed = _allowed_matcher(patterns)
    state = allowed.root
    for depth, name in enumerate(names, start=1):
        state = allowed.enter(state, name)
        for rule in allowed.matched(state):
            if rule.tree == (depth < len(names)):
                return rule.pattern
    return None


def _closed(reached: Iterable[tuple[Rule, int]]) -> State:
    """Without repeats, and with the places behind each ``**`` that may stand for nothing."""
    closed: dict[tuple[Rule, int], None] = {}
    for rule, at in reached:
        closed[rule, at] = None
        if at < len(rule.parts) and rule.parts[at] is None:
            closed[rule, at + 1] = None
    return State(tuple(closed))


def _compile(pattern: str, forms: Sequence[Callable[[str], str]]) -> Rule:
    words = pattern.removesuffix("/").split("/")
    if len(words) == 1:
        words.insert(0, "**")
    tree = pattern.endswith("/") or words[-1] == "**"
    words = [word for word, following in pairwise([*words, ""]) if (word, following) != ("**", "**")]
    if words == ["**"]:
        words, tree = ["**", "*"], False
    if words[-1] == "**":
        words.pop()
    parts = (None if word == "**" else tuple(_regex(form(word)) for form in forms) for word in words)
    return Rule(pattern, tuple(parts), _piece(forms[0](words[-1])), tree)


def _matches(part: Part, texts: Sequence[str]) -> bool:
    return any(regex.fullmatch(text) for regex, text in zip(part, texts, strict=False))


def _piece(word: str) -> str:
    return "/" if "{" in word else max(_WILD.split(f"/{word}/"), key=len)


@cache
def _regex(word: str) -> re.Pattern[str]:
    """Compile the pattern of one name."""
    if _PLAIN.fullmatch(word):  # as wcmatch translates it, but without its patterns, which take 10 ms to compile
        parts = (".*?" if part.startswith("*") else re.escape(part) for part in re.split(r"(\*+)", word))
        return re.compile(f"^(?s:{'(?=.)' * word.startswith('*')}{''.join(parts)})$")
    from wcmatch import fnmatch

    flags = fnmatch.DOTMATCH | fnmatch.FORCEUNIX | fnmatch.BRACE
    return re.compile("|".join(fnmatch.translate(word, flags=flags, limit=_MOST_WORDS)[0]))


def _check_translation(text: str) -> str | None:
    if "[" not in text and "{" not in text:
        return None  # stars and names always translate, and need no wcmatch
    from wcmatch._wcparse import PatternLimitException  # raised by public functions, exported by no public module

    try:
        _compile(text, (fold, _visible))
    except PatternLimitException:
        return f"stands for more than {_MOST_WORDS} patterns"
    except (re.error, RecursionError):
        return "is not a pattern"
    return None
