"""References in a report: lines of files, and commands. Pure; one that cannot be decided counts as right.

A reference is ``PATH:LINE``, ``PATH:FROM-TO`` or several with commas, such as ``kubectl/pods.txt:3-7``. Alone between
backquotes anything of that form is one; elsewhere only where the file is known, since quoted logs also name lines of
programs. Fenced blocks are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from runner.core.patterns import pattern
from runner.triage.sections import section

PLACES = ("/incident/", "/output/", "/workspace/", "/skills/")
EVIDENCE = ("csv", "json", "jsonl", "log", "md", "out", "txt", "yaml", "yml")  # what a recording is made of
MOST = 500  # references, and claims, that are looked at
PROGRAMS = ("kubectl", "oc", "helm")  # whose claims are compared: other things an agent may also read by its tools

_PATH = r"(?P<path>/?(?:[\w@+=-][\w.@+=-]*/)*[\w@+=-][\w.@+=-]*\.[A-Za-z]\w{0,9})"
_LINES = r"(?P<lines>\d{1,9}(?:-\d{1,9})?(?:, ?\d{1,9}(?:-\d{1,9})?)*)"
_ALONE = pattern(rf"`{_PATH}:{_LINES}`(?:[:,]? ?[\"\u201c](?P<quote>[^\"\u201c\u201d`\n]{{3,400}})[\"\u201d])?")
_INSIDE = pattern(rf"(?<![\w/.:@+=-]){_PATH}:{_LINES}(?![\w:.]*\w)")
_WIDEST = 4_000  # characters of a line that are looked at
_FENCE = pattern(r"^ {0,3}(```|~~~)")
_SPAN = pattern(r"`([^`\n]{3,2000})`")
_NOT_RUN = pattern(r"not run|refused|denied|could not|never", re.IGNORECASE)
_WORDS = pattern(r"[^\s;|&()`'\"\\$=]+")
_HOLES = pattern(r"\.\.\.|\u2026|<[^>]*>|\{[^}]*\}|\b[A-Z][A-Z_]+\b")  # what a report leaves open
_KINDS = {
    "po": "pod", "deploy": "deployment", "rs": "replicaset", "sts": "statefulset", "ds": "daemonset", "svc": "service",
    "ev": "event", "no": "node", "ns": "namespace", "cm": "configmap", "ep": "endpoint", "ing": "ingress",
    "pvc": "persistentvolumeclaim", "pv": "persistentvolume", "hpa": "horizontalpodautoscaler",
}  # fmt: skip
_CUT = pattern(r"\.\.\.|\u2026")


class Reference(Struct, frozen=True, kw_only=True):
    """Reference to lines of a file. ``lines`` are first and last of each range; ``quote`` what the report says one
    holds.

    One that stands ``alone`` must have a file, if it can be one of the evidence.
    """

    text: str
    path: str
    lines: tuple[tuple[int, int], ...]
    quote: tuple[str, ...] = ()
    alone: bool = False


def references(report: str) -> list[Reference]:
    """Return the references of a report, each once."""
    found: dict[Reference, None] = {}
    fenced = False
    for line in report.splitlines():
        fence = _FENCE.match(line) is not None
        fenced ^= fence
        if not fenced and not fence:
            found |= dict.fromkeys(_of_line(line[:_WIDEST]))
    return [*found][:MOST]


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each place in a text that reads like a reference."""
    return (match.span() for match in _INSIDE.finditer(text))


def _of_line(line: str) -> Iterator[Reference]:
    for match in _ALONE.finditer(line):
        yield _reference(match, quote=match["quote"] or "", alone=True)
    for match in _INSIDE.finditer(_ALONE.sub(" ", line)):
        yield _reference(match, quote="", alone=False)


def _reference(match: re.Match[str], *, quote: str, alone: bool) -> Reference:
    ranges = (part.strip().split("-") for part in match["lines"].split(","))
    lines = tuple((int(part[0]), int(part[-1])) for part in ranges)
    pieces = tuple(" ".join(piece.split()) for piece in _CUT.split(quote))
    return Reference(
        text=f"{match['path']}:{match['lines']}",
        path=match["path"],
        lines=lines,
        quote=tuple(filter(None, pieces)),
        alone=alone,
    )


def fault(reference: Reference, found: Callable[[str], Sequence[str | None]], folders: Iterable[str]) -> str | None:
    """Say what is wrong with a reference; ``None`` if nothing is.

    ``found`` returns the texts of the files that a path can mean, ``None`` for one that is too large to read;
    ``folders`` are the names of those with evidence in them.
    """
    texts = found(reference.path)
    if not texts:
        return "there is no such file" if _must_be_there(reference, {*folders}) else None
    faults = [fault_in(reference, text) for text in texts]
    return None if None in faults else faults[0]


def _must_be_there(reference: Reference, folders: set[str]) -> bool:
    if reference.path.startswith(PLACES):
        return True
    first, slash, _ = reference.path.partition("/")
    is_evidence = reference.path.rpartition(".")[2].lower() in EVIDENCE
    return reference.alone and (bool(slash and first in folders) or (is_evidence and bool(first)))


def fault_in(reference: Reference, text: str | None) -> str | None:
    """Say what is wrong with a reference to a text; ``None`` if nothing is, or the text could not be read."""
    if text is None:
        return None
    lines = text.split("\n")
    count = len(lines) - (lines[-1] == "")
    last = max(last for _, last in reference.lines)
    if min(first for first, _ in reference.lines) < 1 or any(last < first for first, last in reference.lines):
        return "these are not lines"
    if last > count:
        return f"there is no line {last}: it has {count}"
    if not reference.quote:
        return None
    cited = (" ".join(" ".join(lines[first - 1 : end]).split()) for first, end in reference.lines)
    if any(_in_order(reference.quote, words) for words in cited):
        return None
    return f'it does not hold "{" ... ".join(reference.quote)[:80]}"'


def _in_order(pieces: Sequence[str], text: str) -> bool:
    for piece in pieces:
        _, found, text = text.partition(piece)
        if not found:
            return False
    return True


def claimed(report: str) -> list[str]:
    """Return the commands to a cluster that a report lists as executed, without those that it says were not."""
    found: dict[str, None] = {}
    for line in section(report, "Commands Executed").split("\n"):
        if _NOT_RUN.search(_SPAN.sub(" ", line)):
            continue
        spans = [" ".join(span.removeprefix("$ ").split()) for span in _SPAN.findall(line)]
        found |= dict.fromkeys(span for span in spans if span.split(" ")[0] in PROGRAMS)
    return [*found][:MOST]


def not_run(claims: Iterable[str], commands: Sequence[str], shown: str) -> list[str]:
    """Return the ``claims`` that are in none of the ``commands``, by their words in any order, nor were ``shown`` at
    the start.

    A command that runs others, such as a script or a loop, decides nothing.
    """
    if any(_runs_others(command) for command in commands):
        return []
    ran = [_words(text) for text in (*commands, *shown.split("\n"))]
    return [claim for claim in claims if not any(_words(_HOLES.sub(" ", claim)) <= words for words in ran)]


def _words(command: str) -> set[str]:
    """Return a command's words without those for its shell; names of one kind of object are made the same."""
    return {_KINDS.get(word, word).removesuffix("s") for word in _WORDS.findall(command)}


def _runs_others(command: str) -> bool:
    return re.search(r"\.sh\b|\bxargs\b|\bfor\b|\bwhile\b|\bpython|\$\{?\w|\bbash\b", command) is not None
