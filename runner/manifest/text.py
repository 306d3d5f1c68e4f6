"""Bytes to YAML trees in which every value has an exact place.

libyaml parses, through ruamel's C composer; everything else is decided here: scalars by the YAML 1.2
core schema, and no tags, merge keys, duplicate keys or keys that are not text. All limits are checked
while reading, so that no input costs more than about a second: the composer asks us before it goes one
level deeper, and a node and its text count against the file's allowance each time that an alias repeats them.

A document marker at the start of a line ends a document whatever surrounds it. Each document is
therefore parsed on its own, and a broken one does not hide the errors of those after it.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct
from ruamel.yaml.cyaml import CParser  # type: ignore[attr-defined]  # whichever of its two extension modules is there
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.tag import Tag

from runner.core.errors import (
    BadEncoding,
    BadSyntax,
    BadValue,
    CustomTag,
    DuplicateKey,
    OverBudget,
    Place,
    RunnerError,
    UnreadableManifest,
)
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.manifest import STDIN

FILE_BYTES = 8 << 20
LINE_CHARACTERS = 256 << 10
DEPTH = 64
NODES = 200_000  # a file; a node counts when it is read, and again at each use
_NODE_BYTES = 8  # that a value takes besides its text, roughly

# All but YAML's printable characters, and those of them that are a line break to some readers only. The complement of
# what is printable would take 5 ms to compile.
_UNPRINTABLE = pattern("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_MARKER = pattern(r"^---(?=\s|\Z)", re.MULTILINE)
_PREAMBLE = pattern(r"(?:[ \t]*(?:#.*)?\n|%.*\n)*")  # what may stand before a first marker

_PLAIN, _QUOTED = Tag(suffix="plain"), Tag(suffix="quoted")  # how a node without a tag is written; told by identity
_BARE_TAG = pattern(r"(?:&[^\s\[\]{},]+[ \t]+)?!(?!\S)")
_CONSTANTS: dict[str, object] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"))
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_NUMBER = pattern(
    r"(?P<whole>[-+]?[0-9]+)|(?P<other>0o[0-7]+|0x[0-9a-fA-F]+)"
    r"|(?P<infinite>[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
    r"|[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
)
_LEADING_ZERO = pattern(r"[-+]?0[0-9]")

# libyaml reads YAML 1.1, where an unquoted `https://x`, `a?b` or `a ? b` in brackets is an error. Inside such words,
# but neither in a tag nor in a directive, these characters are swapped for private ones of the same width while libyaml
# looks at them. So is a tab at the start of a line that holds nothing else.
_INSIDE_WORD = pattern(
    r"""[!%\t:?](?:(?<=(?<![^\s\[{,])!)(?:<[^\s>]*>)?[^\s\[\]{},]*|(?<=^%).*|(?<=^\t)[ \t]*(?=\#|$)"""
    r"""|(?<=[^\s"'\[\]{},]:)(?=[^\s\[\]{},])|(?<=[^\s"'\[\]{},]\?)|(?<=\?)(?=[^\s\[\]{},])|(?<=[ \t]\?))""",
    re.MULTILINE,
)
_NO_WORD = frozenset("\n\"'[]{},:-?")  # behind one of these, a `?` by itself begins a key
_SWAP = {":": "\ue000", "?": "\ue001"}
_SWAP_BACK = {0xE000: ":", 0xE001: "?"}

# JSON writes what is beyond 16 bits as two escapes, halves that libyaml knows nothing of. They are swapped likewise,
# for two in the private area; of other than double quotes the text itself is swapped back.
_PAIR = pattern(r"(?<!\\)((?:\\\\)*\\u)([dD])([89abAB][0-9a-fA-F]{2}\\u)([dD])(?=[c-fC-F][0-9a-fA-F]{2})")
_PAIR_BACK = pattern(r"(\\u)([eE])([89abAB][0-9a-fA-F]{2}\\u)([eE])(?=[c-fC-F][0-9a-fA-F]{2})")
_HALVES = pattern("([\ue800-\uebff])([\uec00-\uefff])")
_PRIVATE = pattern(r"[\ue000\ue001]|\\(?:u|U0000)[eE]00[01]")
_PRIVATE_HALF = pattern(r"[\ue800-\uefff]|\\(?:u|U0000)[eE][89a-fA-F]")
_TWINS = str.maketrans("dDeE", "eEdD")

_QUOTE = "put the value in quotes"
_BLOCK = "mapping values are not allowed in this context"
_OF_INDENTATION = frozenset({_BLOCK, "did not find expected key"})
_FIELD = pattern(r"( *)(?:- +)?([^\s:#'\"{}\[\],]+)(?=:(?:\s|$))")
_SYNTAX_HINTS = {
    _BLOCK: "put a value that holds `: ` in quotes",
    "did not find expected ',' or '}'": "close the `{` with `}`, and put a comma behind each field",
    "did not find expected ',' or ']'": "close the `[` with `]`, and put a comma behind each item",
    "did not find expected alphabetic or numeric character": "put a value that starts with `*` or `&` in quotes",
    "found undefined alias": "put a value that starts with `*` in quotes",
    "found character that cannot start any token": _QUOTE,
    "found a tab character that violates indentation": "indent with spaces",
}


@dataclass(frozen=True)
class Source:
    """A stretch of a file that holds one document. ``line`` is where it begins, counted from 0."""

    file: str
    line: int
    text: str

    @cached_property
    def swappable(self) -> bool:
        return not (("\\" in self.text or not self.text.isascii()) and _PRIVATE.search(self.text))

    @cached_property
    def has_pairs(self) -> bool:
        return "\\u" in self.text and not _PRIVATE_HALF.search(self.text)

    @cached_property
    def has_bare_tags(self) -> bool:
        return _BARE_TAG.search(self.text) is not None

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def place(self, start: Any, end: Any = None) -> Place:
        """Return the place from one parser mark to another, cut at the end of the first line; at least one column."""
        number, column = start.line, start.column
        if end is None and not "".join(self.lines[number:]).strip():  # the end, which is shown where there is text
            number = max((at for at, line in enumerate(self.lines) if line.strip()), default=0)
            column = len(self.lines[number])
        line = self.lines[number]
        match end:
            case None:
                last = column
            case _ if end.line == start.line:
                last = end.column
            case _:
                last = len(line.rstrip())
        return Place(self.file, self.line + number + 1, column + 1, width=max(1, last - column), text=line)


@dataclass(frozen=True)
class Tree:
    """One document: ``data`` as plain JSON values, and where each of them is written.

    Of a document that is not ``sound``, because something in it is wrong as YAML, ``data`` is the rest.
    ``size`` is roughly that of ``data`` written out, in bytes.
    """

    source: Source
    root: Node
    data: object
    sound: bool
    size: int

    def place(self, *keys: str | int) -> Place:
        """Return the place of a value or its nearest written ancestor; a block collection is shown by its key."""
        key, node, _ = self._find(keys)
        block = isinstance(node, CollectionNode) and not node.flow_style
        return self._of(key if block and key is not None else node)

    def key_place(self, *keys: str | int) -> Place:
        """Return the place of a value's key, of a value without a key, or of the nearest written ancestor."""
        key, node, _ = self._find(keys)
        return self._of(node if key is None else key)

    def wrote(self, *keys: str | int) -> bool:
        return self._find(keys)[2]

    def written(self, *keys: str | int) -> str:
        """A value for a person: a scalar as it is written, in backticks, else what it is."""
        node = self._find(keys)[1]
        match node:
            case MappingNode():
                return "a mapping"
            case SequenceNode():
                return "a list"
            case _:
                return f"`{excerpt(node.value)}`" if node.value or node.ctag is _QUOTED else "an empty value"

    def node(self, *keys: str | int) -> Node:
        """The node of a value that is written."""
        return self._find(keys)[1]

    def mapping(self, *keys: str | int) -> MappingNode:
        """The node of a mapping that is written."""
        node = self.node(*keys)
        assert isinstance(node, MappingNode)
        return node

    def spell_out(self, *keys: str, singular: str, plural: str) -> None:
        """Treat ``singular: x`` in the mapping at ``keys`` as the ``plural: [x]`` that it is short for."""
        mapping = self._find(keys)[1]
        self._entries.pop(id(mapping), None)
        for position, (key, item) in enumerate(mapping.value):
            if key.value == singular:
                name = ScalarNode(_QUOTED, plural, key.start_mark, key.end_mark)
                items = SequenceNode(_QUOTED, [item], item.start_mark, item.end_mark, flow_style=True)
                mapping.value[position] = (name, items)

    def _find(self, keys: tuple[str | int, ...]) -> tuple[Node | None, Node, bool]:
        key, node = None, self.root
        for step in keys:
            if isinstance(node, MappingNode):
                entry: tuple[Node | None, Node] | None = self._entry(node, step)
            elif isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
                entry = (None, node.value[step])
            else:
                entry = None
            if entry is None:
                return key, node, False
            key, node = entry
        return key, node, True

    @cached_property
    def _entries(self) -> dict[int, dict[object, tuple[Node, Node]]]:
        """Index each mapping's entries by key; of a duplicate key the first."""
        return {}

    def _entry(self, node: MappingNode, key: object) -> tuple[Node, Node] | None:
        if id(node) not in self._entries:
            self._entries[id(node)] = {entry[0].value: entry for entry in reversed(node.value) if _is_text(entry[0])}
        return self._entries[id(node)].get(key)

    def _of(self, node: Node) -> Place:
        return self.source.place(node.start_mark, node.end_mark)


def _is_text(node: Node) -> bool:
    return isinstance(node.value, str)


def read(path: Path, shown_as: str) -> bytes:
    """The bytes of a regular file of at most ``FILE_BYTES``; waits for nothing but ``STDIN``.

    Raises ``UnreadableManifest`` and ``OverBudget``.
    """
    try:
        given = path == STDIN
        file = os.dup(0) if given else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(file, "rb") as stream:
            if not given and not stat.S_ISREG(os.fstat(file).st_mode):
                raise UnreadableManifest(f"`{excerpt(shown_as)}` is not a regular file")
            raw = stream.read(FILE_BYTES + 1)
    except OSError as error:
        reason = "its links go round in a circle" if error.errno == errno.ELOOP else (error.strerror or "").lower()
        hint = "`runner init` writes it" if error.errno == errno.ENOENT and path.name == ".runner" else None
        raise UnreadableManifest(f"`{excerpt(shown_as)}` cannot be read: {reason}", hint=hint) from error
    if len(raw) > FILE_BYTES:
        raise OverBudget(f"`{excerpt(shown_as)}` is over {FILE_BYTES >> 20} MiB", hint="split it into several files")
    return raw


@contextmanager
def collector_paused() -> Iterator[None]:
    """Thousands of nodes and no cycles: collecting in between doubles the time that reading takes."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


@collector_paused()
def parse(file: str, raw: bytes) -> tuple[list[Tree], list[RunnerError]]:
    """The documents of a file, as far as they can be parsed, and all that is wrong with it as YAML.

    ``file`` is the name that places show. Raises ``BadEncoding`` and ``OverBudget`` for the file as a whole.
    """
    trees: list[Tree] = []
    found: list[RunnerError] = []
    allowance = _Allowance()
    for source in _documents(file, decode(file, raw)):
        composer = _Composer(source, allowance)
        try:
            while composer.check_node():
                root = composer.get_node()
                before = allowance.size
                builder = _Builder(source, allowance)
                data = builder.value(root)
                found += builder.found
                if data is not None:
                    trees.append(Tree(source, root, data, sound=not builder.found, size=before - allowance.size))
        except MarkedYAMLError as error:
            found.append(_syntax(source, error))
        except OverBudget as error:
            found.append(error)
            if allowance.left < 0 or allowance.characters < 0:
                break
        finally:
            composer.dispose()
    return trees, found


def decode(file: str, raw: bytes) -> str:
    """A file's text with line breaks as ``\\n``. Raises ``BadEncoding`` and ``OverBudget``."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = raw[before.rfind(b"\n") + 1 :].split(b"\n", 1)[0].decode(errors="replace")
        column = len(before[before.rfind(b"\n") + 1 :].decode(errors="replace"))
        raise BadEncoding(
            f"byte 0x{error.object[error.start]:02x} is not UTF-8",
            at=Place(file, before.count(b"\n") + 1, column + 1, text=line),
            hint="save the file as UTF-8",
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if odd := _UNPRINTABLE.search(text):
        number = text.count("\n", 0, odd.start())
        column = odd.start() - (text.rfind("\n", 0, odd.start()) + 1)
        raise BadEncoding(
            f"the character U+{ord(odd[0]):04X} is not allowed in YAML text",
            at=Place(file, number + 1, column + 1, text=lines[number]),
            hint="remove it, or write it as an escape in double quotes",
        )
    longest = max(lines, key=len)
    if len(longest) > LINE_CHARACTERS:
        raise OverBudget(
            f"a line has {len(longest)} characters, {LINE_CHARACTERS} are allowed",
            at=Place(file, lines.index(longest) + 1, 1, text=longest),
            hint="break it, or use a block scalar (`|`)",
        )
    return text


def _documents(file: str, text: str) -> Iterator[Source]:
    starts = [marker.start() for marker in _MARKER.finditer(text)]
    if not starts or not _PREAMBLE.fullmatch(text, 0, starts[0]):
        starts.insert(0, 0)
    starts[0] = 0
    line = 0
    starts[1:] = [_preamble(text, before, start) for before, start in pairwise(starts)]
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        yield Source(file, line, text[start:stop])
        line += text.count("\n", start, stop)


def _preamble(text: str, before: int, marker: int) -> int:
    """Return where a document begins: after the end mark of the previous one, if only directives stand between."""
    end = text.find("\n", text.rfind("\n...", before, marker) + 1) + 1
    return end if before < end and _PREAMBLE.fullmatch(text, end, marker) else marker


def _syntax(source: Source, error: MarkedYAMLError) -> RunnerError:
    problem: str = error.problem
    at = source.place(error.problem_mark)
    start = None if error.context_mark is None else source.place(error.context_mark)
    also = () if start is None or start.line == at.line else (start,)
    if "Unicode character escape" in problem:
        return BadEncoding("the escape does not stand for a character", at=at, hint="write the character itself")
    if problem == "second occurrence":
        return BadSyntax("the anchor is defined twice", at=at, hint="rename one of the two", also=also)
    if at.text[at.column - 1 : at.column] == "\t" and "cannot start" in problem:
        problem = "found a tab character that violates indentation"
    message = f"this is not YAML: {problem} {error.context or ''}".rstrip()
    hint = _indentation(source, at) if problem in _OF_INDENTATION else None
    return BadSyntax(message, at=at, hint=hint or _SYNTAX_HINTS.get(problem), also=also)


def _indentation(source: Source, at: Place) -> str | None:
    """The hint for a field that begins in a column where none above it does, if the problem is at its beginning."""
    own = _FIELD.match(at.text)
    if own is None or at.column - 1 > own.end():
        return None
    above: dict[int, str] = {}  # the fields that are open there, by their indentation
    for line in reversed(source.lines[: at.line - 1 - source.line]):
        field = _FIELD.match(line)
        if field is not None and len(field[1]) < min(above, default=len(line)):
            above[len(field[1])] = field[2]
    near = min((abs(indent - len(own[1])) for indent in above), default=0)
    if not near:
        return None
    wanted = sorted(indent for indent in above if abs(indent - len(own[1])) == near)
    columns = " or ".join(str(indent + 1) for indent in wanted)
    names = " and ".join(f"`{excerpt(above[indent])}`" for indent in wanted)
    return f"begin `{excerpt(own[2])}` in column {columns}, as {names} above"


class _Allowance(Struct):
    left: int = NODES
    characters: int = FILE_BYTES  # without aliases, no file has more

    @property
    def size(self) -> int:
        return self.left * _NODE_BYTES + self.characters


def _too_many(place: Place) -> OverBudget:
    hint = "split it into several files, or use fewer aliases"
    return OverBudget(f"the file has more than {NODES // 2} values, each use of an alias counted", at=place, hint=hint)


def _too_long(place: Place) -> OverBudget:
    message = f"the file stands for more than {FILE_BYTES >> 20} MiB of text, each use of an alias counted"
    return OverBudget(message, at=place, hint="split it into several files, or use fewer aliases")


def _too_deep(place: Place) -> OverBudget:
    return OverBudget(f"values are nested more than {DEPTH} deep", at=place, hint="nothing in a manifest is so deep")


def _swapped(found: re.Match[str]) -> str:
    word = found[0]
    if word[0] == "\t":
        return " " * len(word)
    if word == "?" and not _is_inside(found.string, found.start()):
        return word
    return _SWAP.get(word, word)


def _is_inside(text: str, at: int) -> bool:
    """Tell whether the `?` at ``at`` continues a plain scalar."""
    following = text[at + 1 : at + 2]
    before = at
    while before and text[before - 1] in " \t":
        before -= 1
    return (following != "" and following not in " \t\n[]{},") or (before > 0 and text[before - 1] not in _NO_WORD)


def _twins(found: re.Match[str]) -> str:
    return found[1] + found[2].translate(_TWINS) + found[3] + found[4].translate(_TWINS)


def _joined(halves: re.Match[str]) -> str:
    high, low = (ord(half) - 0xE800 & 0x3FF for half in halves.groups())
    return chr(0x10000 + (high << 10) + low)


class _Composer(CParser):  # type: ignore[misc]  # an extension module without types
    """The C composer, with its questions about each node answered for speed and safety."""

    def __init__(self, source: Source, allowance: _Allowance) -> None:
        text = source.text
        if source.swappable:
            text = _INSIDE_WORD.sub(_swapped, text)
        if source.has_pairs:
            text = _PAIR.sub(_twins, text)
        super().__init__(text)
        self._source = source
        self._allowance = allowance
        self._depth = 0

    def resolve(self, kind: type[Node], value: str | None, implicit: Any) -> Tag:
        """The tag of a node that has none."""
        return _PLAIN if kind is ScalarNode and implicit[0] else _QUOTED

    def descend_resolver(self, parent: Any, index: object) -> None:
        """Asked before each node, so that the composer cannot recurse further than we say."""
        self._allowance.left -= 1
        self._depth += 1
        if self._allowance.left < 0:
            raise _too_many(self._source.place(parent.start_mark))
        if self._depth > DEPTH:
            raise _too_deep(self._source.place(parent.start_mark))

    def ascend_resolver(self) -> None:
        self._depth -= 1


class _Builder:
    """Turns one document's nodes into plain values, collecting what is wrong with them."""

    def __init__(self, source: Source, allowance: _Allowance) -> None:
        self.found: list[RunnerError] = []
        self._source = source
        self._allowance = allowance
        self._inside: list[Node] = []  # the collections that the present node is in; never longer than DEPTH

    def value(self, node: Node) -> object:
        self._allowance.left -= 1
        if self._allowance.left < 0:
            raise _too_many(self._place(node))
        if node.ctag is not _PLAIN and node.ctag is not _QUOTED:
            tag = str(node.ctag.suffix).replace("tag:yaml.org,2002:", "!!")
            hint = "leave the tag out; quotes make a value text"
            return self._bad(CustomTag(f"`{excerpt(tag)}`: a manifest has no tags", at=self._place(node), hint=hint))
        if isinstance(node, ScalarNode):
            if self._source.swappable and not node.value.isascii():
                node.value = node.value.translate(_SWAP_BACK)
            if self._source.has_pairs:
                self._join_pairs(node)
            if node.ctag is _PLAIN and self._source.has_bare_tags and self._is_text(node):
                node.ctag = _QUOTED
            return self._scalar(node)
        if any(node is outer for outer in self._inside):
            return self._bad(BadSyntax("the value contains itself through an alias", at=self._place(node)))
        if len(self._inside) == DEPTH:
            return self._bad(_too_deep(self._place(node)))
        self._inside.append(node)
        built = self._mapping(node) if isinstance(node, MappingNode) else [self.value(item) for item in node.value]
        self._inside.pop()
        return built

    def _join_pairs(self, node: ScalarNode) -> None:
        if node.style == '"':
            node.value = _HALVES.sub(_joined, node.value)
        elif "\\u" in node.value:
            node.value = _PAIR_BACK.sub(_twins, node.value)

    def _is_text(self, node: ScalarNode) -> bool:
        """Tell whether the tag `!` makes a scalar text; the composer reports no tag for it."""
        mark = node.start_mark
        return bool(node.style) or _BARE_TAG.match(self._source.lines[mark.line], mark.column) is not None

    def _mapping(self, node: MappingNode) -> dict[str, object]:
        built: dict[str, object] = {}
        keys: dict[str, Node] = {}
        for key, value in node.value:
            name = self._key(key)
            item = self.value(value)
            if name is None:
                continue
            if name in built:
                self._bad(
                    DuplicateKey(
                        f"the key `{excerpt(name)}` is written twice",
                        at=self._place(key),
                        hint="remove one of the two",
                        also=(self._place(keys[name]),),
                    )
                )
            built[name], keys[name] = item, key
        return built

    def _key(self, node: Node) -> str | None:
        at = self._place
        if node.ctag is _PLAIN and node.value == "<<":
            self._bad(BadSyntax("`<<` is not part of YAML 1.2", at=at(node), hint="write the fields out"))
            return None
        before = len(self.found)
        name = self.value(node)
        if isinstance(name, str):
            return name
        if len(self.found) > before:
            return None
        if isinstance(node, ScalarNode):
            key = f"the key `{excerpt(node.value)}`" if node.value else "an empty key"
            self._bad(BadValue(f"{key} is not text", at=at(node), hint="put the key in quotes"))
        else:
            self._bad(BadValue("a list or mapping is not a key", at=at(node), hint=_QUOTE))
        return None

    def _scalar(self, node: ScalarNode) -> object:
        text: str = node.value
        self._allowance.characters -= len(text)
        if self._allowance.characters < 0:
            raise _too_long(self._place(node))
        if node.ctag is _QUOTED:
            if "\0" in text:
                return self._bad(BadEncoding("the value holds a NUL character", at=self._place(node)))
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        number = _NUMBER.fullmatch(text)
        return self._number(node, number) if number else text

    def _number(self, node: ScalarNode, number: re.Match[str]) -> object:
        text: str = node.value
        problem, hint = "is not a number that a manifest can hold", f"{_QUOTE} if it is text"
        if number["whole"] and _LEADING_ZERO.match(text):
            problem, hint = "starts with a zero", "quotes make it text; as a number it has no zero in front"
        elif number["infinite"] or len(text) > 64:
            pass
        elif number["whole"] or number["other"]:
            whole = int(text, 10 if number["whole"] else 0)
            if -(1 << 63) <= whole < 1 << 63:
                return whole
        elif (real := float(text)) not in (float("inf"), float("-inf")):
            return real
        return self._bad(BadValue(f"`{excerpt(text)}` {problem}", at=self._place(node), hint=hint))

    def _bad(self, finding: RunnerError) -> object:
        self.found.append(finding)
        return None

    def _place(self, node: Node) -> Place:
        return self._source.place(node.start_mark, node.end_mark)
