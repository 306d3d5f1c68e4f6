"""Secrets, and their removal from whatever is shown or kept.

Each process has one ``Redactor``; steps reach it as ``RunDependencies.redact``. Call ``redactor.register(name, value)``
before the first byte that might have the value passes; from then on ``[redacted:NAME]`` stands for it in logs, events,
errors, reports and prompts. Nothing is ever unregistered.

Looked for is each *form* of a secret: as it is; in base64 (both alphabets, at any of three offsets) and hexadecimal
(with colons, too); with ``+`` for blanks; quoted for JSON, Python and shells. White space, NUL and the colour codes of
a terminal may stand anywhere between the bytes of a form, so that other line ends, indentation, wrapped lines and
UTF-16 hide nothing; also as escapes, ``\\n`` and ``\\u001b[1m``, since what an agent's CLI says of a command's output
is JSON.

Any byte of a form may be written as an escape, however often escapes were escaped: ``\\u0026`` as Go writes ``&``,
``\\\\\"`` as JSON in JSON does, ``\\x26`` and ``\\046``, ``&amp;``, ``&#38;``, ``&#x26;`` and ``%26``. So both are also
compared *decoded*: each escape is what it stands for, and no backslash is left. A hexadecimal dump by lines (``xxd``,
``hexdump -C``, ``od -A x -t x1``) is read twice, as its bytes and as its column of characters, in the first 64 KiB of
what is dumped.

Theory of operation. Text is *squeezed*: white space is deleted. No form can be in the squeezed text unless one of
its fixed-size pieces stands at a multiple of the stride, for stride and piece are chosen so that the shortest form
covers a whole sampled piece. All sampled pieces at once are compared with a set, in C, and only a block where one is
known is searched for whole forms. At the end of a chunk, what may be the beginning of a form is held back.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Literal
from urllib.parse import quote_from_bytes

from runner.core.errors import UnfitSecret
from runner.core.patterns import pattern

SHORTEST = 6  # bytes of a secret
MOST_JUNK = 1024  # bytes of white space and codes in the beginning of a secret that more text may follow
MOST_UNPACKED = 256 << 20  # bytes of an archive that are searched
GZIP = b"\x1f\x8b"  # what everything begins with that gzip has packed
_UNPACKED = 1 << 20  # bytes unpacked at a time
_BLOCK = 1 << 16  # bytes searched at a time
_BEGINNING = 4  # bytes of a form that are looked for at the end of a text before the form is compared
_SPACE = b" \t\r\n\v\f\0"
_CODE = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2048}(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>78MDEHc])"
_CODES = pattern(_CODE)
_PART = rb"\[[0-?]{0,64}[ -/]{0,8}"  # of a code whose end is to come
_HALF_CODE = pattern(rb"\x1b(?:" + _PART + rb"|\][^\x07\x1b]{0,2048}\x1b?|[()])?\Z")
_JUNK = pattern(rb"(?:[ \t\r\n\v\f\0]|" + _CODE + rb")+")
_ESCAPE = rb"\\\\*(?:u001[bB]|x1[bB])"
_BEHIND_ONE = rb"(?:[nrt]|u00(?:0[09aAdD]|20)|x(?:0[09aAdD]|20)|(?:u001[bB]|x1[bB])(?:\[[0-?]*[ -/]*[@-~])?)"
_HEXADECIMAL = rb"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})"
_CODED = rb"(?:" + _HEXADECIMAL + rb"|([0-3][0-7]{2})|([abefvE]))"
_BEHIND = pattern(_BEHIND_ONE + rb"|" + _CODED)
# All backslashes of a row, from its first on, or a long row would be looked through from each. One literal comes first,
# by which a text is searched fast; that at the end of a terminal's code begins no row.
_ROW = rb"\\(?<!(?<!\x1b)\\\\)\\*"
_ESCAPED = _ROW + _BEHIND_ONE
_HALF_ESCAPE = pattern(
    rb"(?<!\x1b)\\+(?:u(?:[0-9a-fA-F]{0,3}|\{[0-9a-fA-F]{0,6})|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[0-3][0-7]?)?\Z|"
    + _ESCAPE
    + rb"(?:"
    + _PART
    + rb")?\Z"
)
_ENTITIES = pattern(rb"&(?:amp;)*(?:#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6})|([A-Za-z]{2,8}[0-9]{0,2}));")
_HALF_ENTITY = pattern(rb"&(?:amp;)*(?:#[0-9]{0,7}|#[xX][0-9a-fA-F]{0,6}|[A-Za-z]{1,8}[0-9]{0,2})?\Z")
_PERCENTED = pattern(rb"%(?:25)*([0-9a-fA-F]{2})")
_HALF_PERCENT = pattern(rb"%(?:25)*[0-9a-fA-F]?\Z")
_ONLY_SPACE = pattern(rb"[ \t\r\n\v\f\0]+")
_WRITTEN = pattern(  # a mark behind a backslash is taken with it; of a letter nobody knows whether it is
    _ESCAPED + rb"|\\\\*(?:" + _CODED + rb"|([!-/:-@\[\]-`{-~]))|\\\\*"
)
_ADDRESS = rb"(?:\r?\n|\\{1,16}n)[ \t]{0,16}[0-9a-fA-F]{6,16}:?[ \t]{1,4}"
_DUMP = pattern(rb"0000(?<![0-9a-fA-F]0000)[0-9a-fA-F]{2,12}:?[ \t]{1,4}[0-9a-fA-F]{2,8}[ \t]")
_DUMPED = (  # between the bytes of two lines, and between their characters
    rb"(?:[ \t]{0,48}[|>][^\r\n]{1,64}?[|<]|[ \t]{2,48}[^\r\n]{1,40}?)?" + _ADDRESS,
    rb"[|<]?" + _ADDRESS + rb"(?:[0-9a-fA-F]{2,8}[ \t]{1,2}){1,16}[ \t]{0,48}[|>]?",
)
_BETWEEN_LINES = [pattern(between + rb"|" + _JUNK.pattern) for between in _DUMPED]
_LINE_OF_DUMP = 120  # bytes, at most

# How much of a form a filter needs: its fewest bytes, the piece's size as a type, and which of those are sampled.
_Piece = Literal["I", "Q"]
_FILTERS: tuple[tuple[int, _Piece, int], ...] = ((39, "Q", 4), (23, "Q", 2), (15, "Q", 1), (11, "I", 2), (7, "I", 1))

_COMMON = frozenset(
    b"""
    123456 1234567 12345678 123456789 1234567890 abc123 abcdef abcdefgh access account action address admin123
    administrator agent always anthropic api_key apikey authorization base64 basic bearer branch build cancelled
    changed changeme charset client commit config content credential credentials database default deploy development
    disabled docker dragon dummy enabled errors example failed failure false-positive function github gitlab goodbye
    google guest123 hello123 hunter2 import install iloveyou kubernetes letmein linux localhost message missing
    monkey number object openai optional output package passed passphrase passwd password password1 password123
    placeholder postgres private production project prompt public python qwerty qwerty123 redacted refused release
    report request required response return running runner secret secrets server service session shadow staging
    string succeeded success system testing test123 timeout token1 unknown update username username1 version visible
    warning welcome workspace
    """.split()
)


class Secret:
    """A value that only ``reveal`` shows: no ``repr``, traceback, JSON or pickle does."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str, value: bytes) -> None:
        self.name = name
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not copied")


class Redactor:
    """Knows secrets by name; a name may have several values. One for all that a process writes."""

    def __init__(self, secrets: Mapping[str, bytes] | None = None) -> None:
        self._names: dict[bytes, str] = {}  # by form
        self._known: _Forms | None = None  # of all of them; made when it is wanted
        self._passed = False
        self.late: tuple[str, ...] = ()  # registered after text had passed, which may have shown them
        for name, value in (secrets or {}).items():
            self.register(name, value)

    def __repr__(self) -> str:
        return f"Redactor({sorted(set(self._names.values()))})"

    def __bool__(self) -> bool:
        """Tell whether there is anything to look for."""
        return bool(self._names)

    def register(self, name: str, value: bytes, *, fresh: bool = False) -> None:
        """Hide a value from now on, and note it in ``late`` if text has passed already, unless it is too ``fresh`` for
        any text to have it. Raises ``UnfitSecret``.
        """
        check_fit(name, value)
        found = [form for form in forms_of(value) if form not in self._names]
        if found and self._passed and not fresh and name not in self.late:
            self.late = (*self.late, name)
        self._names |= dict.fromkeys(found, name)
        self._known = None

    @property
    def _forms(self) -> _Forms:
        if self._known is None:
            self._known = _Forms(dict(self._names))
        return self._known

    def stream(self) -> Stream:
        """Return a filter for one stream of bytes, such as a command's standard output."""
        return Stream(self)

    def clean(self, content: bytes) -> bytes:
        return self.stream().feed_all(content)

    def text(self, text: str) -> str:
        return self.clean(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def names_in(self, content: bytes) -> frozenset[str]:
        """The secrets that some bytes show."""
        stream = self.stream()
        stream.feed_all(content)
        return frozenset(stream.found)

    def names_packed(self, file: IO[bytes], look_up: Callable[[], object], most: int = MOST_UNPACKED) -> frozenset[str]:
        """The names of the secrets that show in what gzip has packed; ``look_up`` is called now and then and may raise.

        Raises ``ValueError`` with the reason when nobody can say: it is more than ``most`` bytes, or not whole.
        """
        import gzip
        import zlib

        stream = self.stream()
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                while chunk := unpacked.read(_UNPACKED):
                    look_up()
                    most -= len(chunk)
                    if most < 0:
                        raise ValueError("that is too large to be searched")
                    stream.feed(chunk)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"that cannot be read: {error}") from error
        stream.end()
        return frozenset(stream.found)


class Stream:
    """Bytes on their way. ``found`` has the names of what was replaced so far."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = b""
        self._hidden = 0  # bytes of ``_held`` that a replacement stands for already
        self.found: set[str] = set()

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be shown by now: everything but a possible beginning of a secret."""
        redactor = self._redactor
        redactor._passed |= bool(chunk)
        if not redactor:
            return chunk
        blocks = (chunk[at : at + _BLOCK] for at in range(0, len(chunk), _BLOCK))
        return b"".join([self._take(block, redactor._forms) for block in blocks])

    def end(self) -> bytes:
        """The rest."""
        return self.feed_all(b"")

    def feed_all(self, chunk: bytes) -> bytes:
        """``feed`` of the last chunk, and the rest."""
        return self._take(chunk, self._redactor._forms, last=True) if self._redactor else chunk

    def _take(self, chunk: bytes, forms: _Forms, *, last: bool = False) -> bytes:
        text = self._held + chunk
        spans = forms.spans(text)
        hold = len(text) if last else forms.hold(text)
        shown, at = [], self._hidden
        for start, end, name in spans:
            if start >= hold:
                break
            if end > at:
                shown += [text[at:start], b"[redacted:%s]" % name.encode()]
                self.found.add(name)
                at = end
        shown.append(text[at:hold])
        self._held, self._hidden = text[hold:], max(0, at - hold)
        return b"".join(shown)


class _View:
    """A text without its junk, and where each of its bytes is in the text. With ``stands_for``, which says what a piece
    of junk is replaced by (``None`` for one that is none), it is a view of another view, ``below``."""

    def __init__(
        self,
        text: bytes,
        junk: re.Pattern[bytes],
        stands_for: Callable[[re.Match[bytes]], bytes | None] | None = None,
        below: _View | None = None,
    ) -> None:
        self._text = text
        self._junk = junk
        self._stands_for = stands_for
        self._below = below
        self.squeezed = _replaced(text, junk, stands_for) if stands_for else junk.sub(b"", text)

    def start(self, place: int) -> int:
        """Return where in the text a byte of the squeezed one begins; for its end, the end."""
        origins, places, ends = self._runs
        run = bisect_right(places, place) - 1
        at = origins[run] + (0 if ends[run] else place - places[run])
        return self._below.start(at) if self._below else at

    def end(self, place: int) -> int:
        """Return where in the text a byte of the squeezed one ends."""
        origins, places, ends = self._runs
        run = bisect_right(places, place) - 1
        at = ends[run] or origins[run] + place - places[run] + 1
        return self._below.end(at - 1) if self._below else at

    @cached_property
    def _runs(self) -> tuple[list[int], list[int], list[int]]:
        """List where each run begins, in the text and in the squeezed one; and where in the text it ends, if something
        else stands for it in the squeezed one, else 0."""
        origins, places, ends, left_out = [0], [0], [0], 0
        for found in self._junk.finditer(self._text):
            by = self._stands_for(found) if self._stands_for else b""
            if by is None:
                continue
            start, end = found.span()
            if by:
                origins.append(start)
                places.append(start - left_out)
                ends.append(end)
            left_out += end - start - len(by)
            origins.append(end)
            places.append(end - left_out)
            ends.append(0)
        return origins, places, ends


def _replaced(text: bytes, junk: re.Pattern[bytes], stands_for: Callable[[re.Match[bytes]], bytes | None]) -> bytes:
    return junk.sub(lambda found: found[0] if (by := stands_for(found)) is None else by, text)


def _letter(number: int) -> bytes:
    """A character by its number; white space is junk here, too."""
    return chr(min(number, sys.maxunicode)).encode(errors="surrogatepass").translate(None, _SPACE)


_CONTROLS = {b"a": b"\a", b"b": b"\b", b"e": b"\x1b", b"f": b"", b"v": b"", b"E": b"\x1b"}


def _escape(found: re.Match[bytes]) -> bytes:
    """Decode what follows backslashes, as ``_BEHIND`` and ``_WRITTEN`` find it."""
    match found.lastindex:
        case None:
            return b""
        case 1:
            return _byte(found)
        case 5:
            return bytes([int(found[5], 8)]).translate(None, _SPACE)
        case 6:
            return _CONTROLS[found[6]]
        case 7:
            return found[7]
        case index:
            return _letter(int(found[index], 16))


def _entity(found: re.Match[bytes]) -> bytes | None:
    """Decode an HTML entity; ``None`` for an unknown name."""
    number, hexadecimal, name = found.groups()
    if name is None:
        return _letter(int(number) if number else int(hexadecimal, 16))
    from html.entities import html5  # its table is large, and rarely wanted

    shown = html5.get(f"{name.decode()};")
    return None if shown is None else shown.encode().translate(None, _SPACE)


def _unescaped(squeezed: bytes) -> bytes:
    """Decode all backslash escapes, dropping those of white space and codes; no backslash is left."""
    first, *parts = squeezed.split(b"\\")
    shown = [
        (_escape(found) if found.lastindex else b"") + part[found.end() :] if (found := _BEHIND.match(part)) else part
        for part in parts
    ]
    return first + b"".join(shown)


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes.fromhex(found[1].decode()).translate(None, _SPACE)


# How bytes are escaped, outermost first: what an escape begins with, what may be the beginning of one, a whole one, and
# what that stands for.
_STAGES = (
    (b"\\", _HALF_ESCAPE, _WRITTEN, _escape),
    (b"&", _HALF_ENTITY, _ENTITIES, _entity),
    (b"%", _HALF_PERCENT, _PERCENTED, _byte),
)


def _decoded(squeezed: bytes) -> bytes:
    """Decode all escapes like ``_decode``, without their positions, which is faster."""
    plain = _unescaped(squeezed)
    for mark, _, escape, stands_for in _STAGES[1:]:
        if _has(mark, escape, plain):
            plain = _replaced(plain, escape, stands_for)
    return plain


def _has(mark: bytes, escape: re.Pattern[bytes], text: bytes) -> bool:
    """Tell whether such an escape occurs; where ``mark`` is rare, looking for it alone is faster."""
    at = text.find(mark)
    while at >= 0 and not escape.match(text, at):
        at = text.find(mark, at + 1)
    return at >= 0


def _decode(view: _View, *, whole: bool = True) -> _View:
    """A view in which each escape is what it stands for; ``whole``, or up to what may be the beginning of one."""
    for _, half, escape, stands_for in _STAGES:
        found = None if whole else half.search(view.squeezed)
        view = _View(view.squeezed[: found.start()] if found else view.squeezed, escape, stands_for, view)
    return view


def _dumps(text: bytes) -> Iterator[_View]:
    """Yield dumps reduced to their bytes, and to their characters."""
    if _DUMP.search(text):
        yield from (_View(text, between) for between in _BETWEEN_LINES)


def _glances(text: bytes) -> Iterator[bytes]:
    """Yield what a text is in each of its views, but without positions, which is faster; the most frequent first."""
    squeezed = bare = text.translate(None, _SPACE)
    yield squeezed
    if b"\x1b" in text:
        bare = _CODES.sub(b"", text).translate(None, _SPACE)
        yield bare
    plain = _decoded(bare)
    if plain is not bare:
        yield plain
    if b"0000" in squeezed:
        yield from (_decoded(view.squeezed) for view in _dumps(text))


@dataclass
class _Lexicon:
    """Forms by name, to be found in a view."""

    names: Mapping[bytes, str]
    ordered: list[bytes] = field(init=False)
    longest: int = field(init=False)
    starts: re.Pattern[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.ordered = sorted(self.names)
        self.longest = max(map(len, self.names))
        begun = {re.escape(form[:size]) + rb"\Z" for form in self.names for size in range(1, _BEGINNING)}
        begun |= {re.escape(form[:_BEGINNING]) for form in self.names}
        self.starts = re.compile(b"|".join(sorted(begun)))

    def whole(self, view: _View) -> Iterator[tuple[int, int, str]]:
        """Start, end and name of each form in the text of a view."""
        for form, name in self.names.items():
            at = view.squeezed.find(form)
            while at >= 0:
                yield view.start(at), view.end(at + len(form) - 1), name
                at = view.squeezed.find(form, at + 1)

    def unfinished(self, squeezed: bytes) -> int:
        """Return where the first form begins that the end of the text cuts off; else the end of the text."""
        at = max(0, len(squeezed) - self.longest + 1)
        while found := self.starts.search(squeezed, at):
            at = found.start()
            rest = squeezed[at:]
            following = bisect_left(self.ordered, rest)
            if following < len(self.ordered) and self.ordered[following].startswith(rest):
                return at
            at += 1
        return len(squeezed)


@dataclass
class _Forms:
    """Forms of the secrets to look for; immutable once made."""

    names: Mapping[bytes, str]
    raw: _Lexicon = field(init=False)
    decoded: _Lexicon = field(init=False)
    pieces: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        plain = {shown: name for form, name in self.names.items() for shown in _stages_of(form)}
        self.raw = _Lexicon(self.names)
        self.decoded = _Lexicon({form: name for form, name in plain.items() if len(form) >= SHORTEST})
        shortest = len(min(self.decoded.names, key=len))
        fitting = ((kind, step) for least, kind, step in _FILTERS if shortest >= least)
        self._type: _Piece | None
        self._type, self._step = next(fitting, (None, 0))
        self._size = 8 if self._type == "Q" else 4
        self.pieces = frozenset(piece for form in self.decoded.names for piece in self._pieces(form))

    def _pieces(self, form: bytes) -> Iterator[int]:
        """Return pieces from the middle of a form, so long that every sampling meets one; of a key its headers too."""
        stride, size = self._step * self._size, self._size
        start = (len(form) - stride - size + 1) // 2
        for at in range(start, start + stride):
            yield int.from_bytes(form[at : at + size], sys.byteorder)

    def _may_be_in(self, squeezed: bytes) -> bool:
        if self._type is None:
            return True
        whole = memoryview(squeezed)[: len(squeezed) // self._size * self._size]
        return not self.pieces.isdisjoint(whole.cast(self._type)[:: self._step])

    def spans(self, text: bytes) -> list[tuple[int, int, str]]:
        """List what to replace, in order: start, end, and the name of the longest of overlapping secrets."""
        if not any(map(self._may_be_in, _glances(text))):
            return []
        spans = {*self.raw.whole(_View(text, _ONLY_SPACE))}  # a terminal's code may have text of its own inside
        for view in (_View(text, _JUNK), *_dumps(text)):
            spans.update(self.decoded.whole(_decode(view)))
        joined: list[tuple[int, int, tuple[int, str]]] = []
        for start, end, name in sorted(spans):
            longest = (end - start, name)
            if joined and start < joined[-1][1]:
                start, before, other = joined.pop()
                end, longest = max(before, end), max(other, longest)
            joined.append((start, end, longest))
        return [(start, end, name) for start, end, (_, name) in joined]

    def hold(self, text: bytes) -> int:
        """Return where the first thing begins that more text may complete to a form or a terminal code."""
        tail = max(0, len(text) - self.raw.longest - MOST_JUNK)
        end = text[tail:]
        dumped = self._dumped(text)
        if b"\x1b" not in end and self._is_settled(end.translate(None, _SPACE)):
            return dumped
        half = _HALF_CODE.search(end)
        begun = end[: half.start()] if half else end
        raw, plain = _View(begun, _ONLY_SPACE), _decode(_View(begun, _JUNK), whole=False)
        stop = min(raw.start(self.raw.unfinished(raw.squeezed)), plain.start(self.decoded.unfinished(plain.squeezed)))
        return min(dumped, tail + stop)

    def _is_settled(self, squeezed: bytes) -> bool:
        """Tell whether the text ends in the middle of nothing."""
        if self.raw.unfinished(squeezed) < len(squeezed):
            return False
        plain = squeezed
        for mark, half, escape, stands_for in _STAGES:
            if mark in plain:
                if half.search(plain):
                    return False
                plain = _replaced(plain, escape, stands_for)
        return plain is squeezed or self.decoded.unfinished(plain) == len(plain)

    def _dumped(self, text: bytes) -> int:
        """Return where the lines of a dump begin that the end of a text may be in the middle of; else the end."""
        # A byte is five in a dump, and at most three in a form.
        window = text[-2 * self.raw.longest - MOST_JUNK :]
        if b"0000" not in window or not _DUMP.search(window, len(window) - 2 * _LINE_OF_DUMP):
            return len(text)
        return len(text) - len(window) + next(_DUMP.finditer(window)).start()


def _stages_of(form: bytes) -> set[bytes]:
    """Every way in which decoding may leave a form: what it decodes first, it does not see in what it decodes later."""
    left = [form]
    for position in range(len(_STAGES)):
        plain = form
        for _, _, escape, stands_for in _STAGES[position:]:
            plain = _replaced(plain, escape, stands_for)
        left.append(plain)
    return {*left}


def check_fit(name: str, value: bytes) -> None:
    """Raise ``UnfitSecret`` for a value that would hide much of what is no secret."""
    squeezed = value.translate(None, _SPACE)
    if len(squeezed) < SHORTEST:
        raise UnfitSecret(f"secret `{name}` has fewer than {SHORTEST} bytes", hint="hiding it would hide other text")
    if squeezed.lower() in _COMMON or len(set(squeezed)) < 3:
        raise UnfitSecret(f"secret `{name}` is a common word", hint="hiding it would hide other text; change it")


def forms_of(value: bytes) -> frozenset[bytes]:
    """Every form of a secret, squeezed."""
    lines = value.strip().splitlines()
    bodies = {value.strip(), b"\n".join(lines), b"\r\n".join(lines)}
    found = (form for body in bodies for form in _encoded(body))
    squeezed = {form.translate(None, _SPACE) for form in found}
    return frozenset(form for form in squeezed if len(form) >= SHORTEST)


def _encoded(body: bytes) -> Iterator[bytes]:
    yield body
    if len(seen := re.sub(rb"[^!-~]", b"", body)) >= SHORTEST and len(set(seen)) > 2:
        yield re.sub(rb"[^ -~]", b".", body)  # as dumps show it
    for digits in (body.hex().encode(), body.hex(":").encode()):
        yield from (digits, digits.upper())
    alone = (b64encode(body + end).rstrip(b"=") for end in (b"", b"\n"))
    inside = (
        b64encode(bytes(offset) + body)[(offset * 4 + 2) // 3 : (offset + len(body)) * 4 // 3] for offset in range(3)
    )
    for coded in (*alone, *inside):
        yield from (coded, coded.translate(bytes.maketrans(b"+/", b"-_")))
    yield body.replace(b" ", b"+")  # in what a form on the web sends
    yield body.replace(b"\x1b", b"")  # which begins a terminal's code, and is nothing where it is an escape
    yield from _quoted(body)


def _quoted(body: bytes) -> Iterator[bytes]:
    """Yield forms with escapes where some secrets decode to something else, or without a backslash at an end."""
    text = body.decode(errors="surrogateescape")
    yield json.dumps(text)[1:-1].encode()  # two escapes for one letter, such as an emoji
    yield repr(text)[1:-1].encode()  # here ``\xad`` is a letter
    yield quote_from_bytes(body, "").encode()  # a `%` in it may begin what is decoded
    yield body.replace(b"'", b"'\\''")
    yield body.replace(b"'", b"'\"'\"'")
    yield re.sub(rb'(["$`\\])', rb"\\\1", body)
    yield re.sub(rb"""([ !"$&'()*,;<>?\[\\\]^`{|}]|(?:^|(?<=[:=]))~|^#)""", rb"\\\1", body)
