"""The report of an agent, rendered from Markdown: text only, with references to lines as links into the page.

Its HTML is shown as text, its links are text with their target, its pictures are their description: nothing in it leads
anywhere else, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from runner.core.sanitize import escape_unprintable, sanitize
from runner.triage.references import places

if TYPE_CHECKING:
    from markdown_it.token import Token
    from markupsafe import Markup

MOST = 200_000  # characters
_WIDEST = 4_000  # characters of a line
_ABOVE = 2  # levels of heading that the page has above those of a report


class CitedLines(Struct, frozen=True, kw_only=True):
    """Lines that a report cites: their numbers and texts, with some around them. ``cited`` are the numbers meant."""

    id: str
    place: str
    lines: Sequence[tuple[int, str]]
    cited: frozenset[int]
    omitted: int = 0


def render_report(report: str, links: Mapping[str, str]) -> Markup:
    """Render a report; ``links`` maps places, such as ``pods.txt:3-7``, to the ids of their lines in the page."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    source = "\n".join(sanitize(line.expandtabs(4), _WIDEST) for line in report[:MOST].splitlines())
    tokens = list(_harmless(parser.parse(source), links))
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # it has escaped all of it


def _harmless(tokens: Sequence[Token], links: Mapping[str, str]) -> Iterator[Token]:
    level = _ABOVE
    for token in tokens:
        token.attrs = {name: value for name, value in token.attrs.items() if name == "start"}
        token.info = ""
        if token.type in ("fence", "code_block"):
            token.content = "\n".join(map(escape_unprintable, token.content.split("\n")))
        if token.type == "heading_open":
            level = min(int(token.tag[1]) + _ABOVE, level + 1, 6)
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{level}"
        if token.children is not None:
            token.children = [each for child in _spans(token.children) for each in _linked(child, links)]
        yield token


def _spans(tokens: Sequence[Token]) -> Iterator[Token]:
    """Replace links and pictures by text."""
    targets: list[Any] = []
    for token in tokens:
        if token.type == "link_open":
            targets.append(token.attrs.get("href", ""))
        elif token.type == "link_close":
            yield _text(f" ({targets.pop()})")
        elif token.type == "image":
            yield _text(f"[picture: {token.content} ({token.attrs.get('src', '')})]")
        else:
            yield token


def _linked(token: Token, links: Mapping[str, str]) -> Iterator[Token]:
    """Escape a piece of text, and split it where it names lines."""
    from markdown_it.token import Token

    if token.type not in ("text", "code_inline"):
        yield token
        return
    at = 0
    for start, end in places(token.content):
        if id := links.get(token.content[start:end]):
            yield from _piece(token, at, start)
            yield Token("link_open", "a", 1, attrs={"href": f"#{id}"})
            yield from _piece(token, start, end)
            yield Token("link_close", "a", -1)
            at = end
    yield from _piece(token, at, len(token.content))


def _piece(token: Token, start: int, end: int) -> Iterator[Token]:
    if start < end:
        yield token.copy(content=escape_unprintable(token.content[start:end]))


def _text(content: str) -> Token:
    from markdown_it.token import Token

    return Token("text", "", 0, content=content)
