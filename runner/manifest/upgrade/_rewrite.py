"""Rewriting a document line by line, so that each line and comment that need not change stays as it is.

A YAML library's round trip would keep the comments too, but moves them between keys, indents and folds anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from runner.core.errors import Place
from runner.manifest.text import Source


@dataclass(eq=False)
class Line:
    """A line of a rewritten document. ``number`` is its line in the source, or for an added one that of a neighbour.

    ``edits`` are source columns from and up to which something else is to stand; then the line moves right
    by ``indent``. All count from 0.
    """

    number: int
    text: str
    added: bool = False
    indent: int = 0
    edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        text = self.text
        for start, stop, by in sorted(self.edits, reverse=True):
            text = text[:start] + by + text[stop:]
        return " " * self.indent + text if text.strip() else text

    def source_column(self, column: int) -> int:
        """Return the source column of the character in this column."""
        column -= self.indent
        for start, stop, by in sorted(self.edits):
            if column < start:
                break
            column = start if column < start + len(by) else column - len(by) + stop - start
        return max(0, column)


class Rewrite:
    """The lines of one document, to be changed in place."""

    def __init__(self, source: Source) -> None:
        self.lines = [Line(number, text) for number, text in enumerate(source.lines)]
        self._source = source

    @property
    def text(self) -> str:
        return "\n".join(map(str, self.lines))

    @property
    def whole(self) -> bool:
        """Tell whether every source line is still there exactly once."""
        kept = sorted(line.number for line in self.lines if not line.added)
        return kept == list(range(len(self._source.lines)))

    def edit(self, node: Node, by: str) -> None:
        """Write something else for a node that stands on one line."""
        start, end = node.start_mark, node.end_mark
        self._at(start.line).edits.append((start.column, end.column, by))

    def written(self, node: Node) -> str:
        """A node on one line, as it is written."""
        line: str = self._source.lines[node.start_mark.line]
        return line[node.start_mark.column : node.end_mark.column]

    def append(self, mapping: MappingNode, after: str, text: str) -> None:
        """Add an entry to a mapping, behind one that it has."""
        key, value = next(entry for entry in mapping.value if entry[0].value == after)
        if mapping.flow_style:
            end = value.end_mark
            self._at(end.line).edits.append((end.column, end.column, f", {text}"))
        else:
            number = _last(key, value)
            position = self.lines.index(self._at(number)) + 1
            self.lines.insert(position, Line(number, text, added=True, indent=key.start_mark.column))

    def entries(self, mapping: MappingNode, start: int) -> dict[str, list[Line]]:
        """The lines of each entry of a block mapping that begins below line ``start``, in order, without gaps.

        Comments directly above a key belong to it. What comes after the last entry is in none.
        """
        column = mapping.value[0][0].start_mark.column
        starts = []
        for key, value in mapping.value:
            number = key.start_mark.line
            while number - 1 > start and self._comment(number - 1, column):
                number -= 1
            starts.append(number)
            start = _last(key, value)
        starts.append(start + 1)
        edges = [bisect_left(self.lines, number, key=lambda line: line.number) for number in starts]
        return {
            key.value: self.lines[first:stop]
            for (key, _), (first, stop) in zip(mapping.value, pairwise(edges), strict=True)
        }

    def spread(self, mapping: MappingNode, column: int) -> Iterator[Line]:
        """The entries of a mapping that is written in braces on one line, as lines of a block."""
        number = mapping.start_mark.line
        text = self._source.lines[number]
        for key, value in mapping.value:
            edits = [(0, key.start_mark.column, ""), (value.end_mark.column, len(text), "")]
            edits += [e for e in self._at(number).edits if key.start_mark.column <= e[0] < value.end_mark.column]
            yield Line(number, text, added=True, indent=column, edits=edits)

    def origin(self, place: Place) -> Place:
        """Return the source place of a place in the rewritten document."""
        line = self.lines[place.line - 1]
        text = self._source.lines[line.number]
        column = min(line.source_column(place.column - 1), max(0, len(text) - 1))
        width = max(1, min(place.width, len(text) - column))
        return Place(place.file, self._source.line + line.number + 1, column + 1, width=width, text=text)

    def _at(self, number: int) -> Line:
        return next(line for line in self.lines if line.number == number and not line.added)

    def _comment(self, number: int, column: int) -> bool:
        text = self._source.lines[number]
        return text.lstrip().startswith("#") and len(text) - len(text.lstrip()) <= column


def aliased(node: Node) -> bool:
    """Tell whether an alias repeats a part of a node."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            return True
        seen.add(id(found))
        if isinstance(found, MappingNode):
            waiting += [part for entry in found.value for part in entry]
        elif isinstance(found, CollectionNode):
            waiting += found.value
    return False


def _last(key: Node, value: Node) -> int:
    """The last line of an entry; comments below it do not count."""
    if isinstance(value, CollectionNode) and not value.flow_style and value.value:
        last = value.value[-1]
        return _last(*last) if isinstance(value, MappingNode) else _last(key, last)
    end = value.end_mark
    block_text = isinstance(value, ScalarNode) and value.style in ("|", ">")  # ends where the next thing begins
    return int(end.line - 1 if block_text and end.column == 0 else end.line)
