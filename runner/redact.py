"""Secrets, and their removal from whatever is shown or kept.

For whoever has a secret, such as the model gateway: the composition root makes one ``Redactor`` a process, which is
``Ports.redact`` in steps. ``redactor.register(name, value)`` before the first byte that might have the value passes;
from then on ``[redacted:NAME]`` stands for it in logs, events, errors, reports and prompts. Nothing is ever
unregistered.

Looked for is each *form* of a secret: as it is; in base64 (both alphabets, at any of three offsets), hexadecimal and
percent-encoding; escaped for JSON, Python and shells. White space, NUL and the colour codes of a terminal may stand
anywhere between the bytes of a form, so that other line ends, indentation, wrapped lines and UTF-16 hide nothing; also
as escapes, ``\\n`` and ``\\u001b[1m``, since what an agent's CLI says of a command's output is JSON.

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
from functools import cached_property, partial
from typing import IO, Literal
from urllib.parse import quote_from_bytes

from runner.errors import UnfitSecret

SHORTEST = 6  # bytes of a secret
MOST_JUNK = 1024  # bytes of white space and codes in the beginning of a secret that more text may follow
MOST_UNPACKED = 256 << 20  # bytes of an archive that are searched
GZIP = b"\x1f\x8b"  # what everything begins with that gzip has packed
_UNPACKED = 1 << 20  # bytes unpacked at a time
_BLOCK = 1 << 16  # bytes searched at a time
_BEGINNING = 4  # bytes of a form that are looked for at the end of a text before the form is compared
_SPACE = b" \t\r\n\v\f\0"
_CODE = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2048}(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>78MDEHc])"
_CODES = re.compile(_CODE)
_PART = rb"\[[0-?]{0,64}[ -/]{0,8}"  # of a code whose end is to come
_HALF_CODE = re.compile(rb"\x1b(?:" + _PART + rb"|\][^\x07\x1b]{0,2048}\x1b?|[()])?\Z")
_JUNK = re.compile(rb"(?:[ \t\r\n\v\f\0]|" + _CODE + rb")+")
_ESCAPE = rb"\\\\*(?:u001[bB]|x1[bB])"
_BEHIND_ONE = rb"(?:[nrt]|u00(?:0[09aAdD]|20)|x(?:0[09aAdD]|20)|(?:u001[bB]|x1[bB])(?:\[[0-?]*[ -/]*[@-~])?)"
_BEHIND = re.compile(_BEHIND_ONE)
_ESCAPED = rb"\\\\*" + _BEHIND_ONE  # one literal first, by which a text is searched fast
_ESCAPES = re.compile(_ESCAPED)
_HALF_ESCAPE = re.compile(
    rb"(?<!\x1b)\\+(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?\Z|" + _ESCAPE + rb"(?:" + _PART + rb")?\Z"
)
_ALL_JUNK = re.compile(rb"(?:[ \t\r\n\v\f\0]|" + _CODE + rb"|" + _ESCAPED + rb")+")
_ONLY_SPACE = re.compile(rb"[ \t\r\n\v\f\0]+")

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
        """Whether there is anything to look for."""
        return bool(self._names)

    def register(self, name: str, value: bytes) -> None:
        """Hide a value from now on, and note it in ``late`` if text has passed already. Raises ``UnfitSecret``."""
        check_fit(name, value)
        found = [form for form in forms_of(value) if form not in self._names]
        if found and self._passed and name not in self.late:
            self.late = (*self.late, name)
        self._names |= dict.fromkeys(found, name)
        self._known = None

    @property
    def _forms(self) -> _Forms:
        if self._known is None:
            self._known = _Forms(dict(self._names))
        return self._known

    def stream(self) -> Stream:
        """For one stream of bytes, such as a command's standard output."""
        return Stream(self)

    def clean(self, content: bytes) -> bytes:
        return self.stream().feed_all(content)

    def text(self, text: str) -> str:
        return self.clean(text.encode(errors="surrogatepass")).decode(errors="surrogatepass") if self else text

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
        """What can be shown by now: all but what may be the beginning of a secret."""
        redactor = self._redactor
        redactor._passed |= bool(chunk)
        if not redactor:
            return chunk
        if len(chunk) <= _BLOCK:
            return self._take(chunk, redactor._forms)
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
    """A text without its junk, and where each of its bytes is in the text."""

    def __init__(self, text: bytes, junk: re.Pattern[bytes]) -> None:
        self.squeezed = junk.sub(b"", text)
        self._text = text
        self._junk = junk

    def origin(self, place: int) -> int:
        """Where in the text a byte of the squeezed one is; of its end, the end."""
        origins, places = self._runs
        run = bisect_right(places, place) - 1
        return origins[run] + place - places[run]

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        """Where, in the text and in the squeezed one, the text goes on after each run of junk."""
        origins, places, left_out = [0], [0], 0
        for found in self._junk.finditer(self._text):
            start, end = found.span()
            left_out += end - start
            origins.append(end)
            places.append(end - left_out)
        return origins, places


def _unescaped(squeezed: bytes) -> bytes:
    """Without white space and codes that are written as escapes, and without what else is a backslash."""
    first, *parts = squeezed.split(b"\\")
    return first + b"".join([part[found.end() :] if (found := _BEHIND.match(part)) else part for part in parts])


def _views(text: bytes) -> list[_View]:
    """Without white space; and without the terminal's codes as well, which may have text of their own inside; and
    without what is either, written as escapes."""
    views = [_View(text, _ONLY_SPACE)]
    views += [_View(text, _JUNK)] if b"\x1b" in text else []
    return [*views, _View(text, _ALL_JUNK)] if _ESCAPES.search(text) else views


@dataclass
class _Forms:
    """What to look for. Not changed once it is made."""

    names: Mapping[bytes, str]
    ordered: list[bytes] = field(init=False)
    longest: int = field(init=False)
    pieces: frozenset[int] = field(init=False)
    unescaped: frozenset[int] = field(init=False)
    starts: re.Pattern[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.ordered = sorted(self.names)
        lengths = [len(form) for form in self.names]
        least = [len(_unescaped(form)) for form in self.names]
        self.longest = max(lengths, default=0)
        shortest = min(least, default=0)
        fitting = ((kind, step) for least, kind, step in _FILTERS if shortest >= least)
        self._type: _Piece | None
        self._type, self._step = next(fitting, (None, 0))
        self._size = 8 if self._type == "Q" else 4
        self.pieces = frozenset(piece for form in self.names for piece in self._pieces(form))
        self.unescaped = frozenset(piece for form in self.names for piece in self._pieces(_unescaped(form)))
        begun = {re.escape(form[:size]) + rb"\Z" for form in self.names for size in range(1, _BEGINNING)}
        begun |= {re.escape(form[:_BEGINNING]) for form in self.names}
        self.starts = re.compile(b"|".join(sorted(begun)))

    def _pieces(self, form: bytes) -> Iterator[int]:
        """Those of a stretch in the middle of a form, so long that every sampling meets one; a key has its headers."""
        stride, size = self._step * self._size, self._size
        start = (len(form) - stride - size + 1) // 2
        for at in range(start, start + stride):
            yield int.from_bytes(form[at : at + size], sys.byteorder)

    def _may_be_in(self, squeezed: bytes, pieces: frozenset[int] | None = None) -> bool:
        if self._type is None:
            return True
        whole = memoryview(squeezed)[: len(squeezed) // self._size * self._size]
        return not (pieces or self.pieces).isdisjoint(whole.cast(self._type)[:: self._step])

    def _may_be_escaped_in(self, squeezed: bytes) -> bool:
        """Of a text in which white space or codes are written as escapes: of any other all is known already."""
        plain = _unescaped(squeezed)
        return len(plain) + squeezed.count(b"\\") < len(squeezed) and self._may_be_in(plain, self.unescaped)

    def spans(self, text: bytes) -> list[tuple[int, int, str]]:
        """What is to be replaced: start, end and the name of the longest of what overlaps, in order."""
        squeezed = text.translate(None, _SPACE)
        bare = _CODES.sub(b"", text).translate(None, _SPACE) if b"\x1b" in text else squeezed
        if not (
            self._may_be_in(squeezed)
            or (bare is not squeezed and self._may_be_in(bare))
            or (b"\\" in bare and self._may_be_escaped_in(bare))
        ):
            return []
        found = sorted({span for view in _views(text) for span in self._whole(view)})
        joined: list[tuple[int, int, str]] = []
        longest = 0
        for start, end, name in found:
            if joined and start < joined[-1][1]:
                before = joined.pop()
                name = name if end - start > longest else before[2]
                longest = max(longest, end - start)
                joined.append((before[0], max(before[1], end), name))
            else:
                longest = end - start
                joined.append((start, end, name))
        return joined

    def _whole(self, view: _View) -> Iterator[tuple[int, int, str]]:
        for form, name in self.names.items():
            at = view.squeezed.find(form)
            while at >= 0:
                yield view.origin(at), view.origin(at + len(form) - 1) + 1, name
                at = view.squeezed.find(form, at + 1)

    def hold(self, text: bytes) -> int:
        """Where the first thing begins that more text may make a form, or a code of a terminal, of."""
        tail = max(0, len(text) - self.longest - MOST_JUNK)
        end = text[tail:]
        halves = [half.start() for pattern in (_HALF_CODE, _HALF_ESCAPE) if (half := pattern.search(end))]
        if not halves and b"\x1b" not in end:
            squeezed = end.translate(None, _SPACE)
            forms = {squeezed, _ESCAPES.sub(b"", squeezed)} if b"\\" in end else {squeezed}
            if all(self._unfinished(each) == len(each) for each in forms):
                return len(text)
        stop = min(halves, default=len(end))
        return tail + min(view.origin(self._unfinished(view.squeezed)) for view in _views(end[:stop]))

    def _unfinished(self, squeezed: bytes) -> int:
        """Where the first form begins that the text ends in the middle of; else where the text ends."""
        at = max(0, len(squeezed) - self.longest + 1)
        while found := self.starts.search(squeezed, at):
            at = found.start()
            rest = squeezed[at:]
            following = bisect_left(self.ordered, rest)
            if following < len(self.ordered) and self.ordered[following].startswith(rest):
                return at
            at += 1
        return len(squeezed)


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
    squeezed |= {_ESCAPES.sub(b"", form) for form in squeezed if b"\\" in form}
    return frozenset(form for form in squeezed if len(form) >= SHORTEST)


# What encoders of URLs leave as it is, apart from letters, digits and ``_.-~``.
_SAFE = ("", "/", "!'()*", "!'()*/", "!'()*;,/?:@&=+$#", "!$&'()*+,;=:@/?")


def _encoded(body: bytes) -> Iterator[bytes]:
    yield body
    yield body.hex().encode()
    yield body.hex().upper().encode()
    alone = (b64encode(body + end).rstrip(b"=") for end in (b"", b"\n"))
    inside = (
        b64encode(bytes(offset) + body)[(offset * 8 + 5) // 6 : (offset + len(body)) * 8 // 6] for offset in range(3)
    )
    for coded in (*alone, *inside):
        for alphabet in (coded, coded.translate(bytes.maketrans(b"+/", b"-_"))):
            yield alphabet
            yield alphabet.replace(b"/", b"\\/")
            yield from _percented(alphabet)
    yield from _percented(body)
    for code in ("%%%02X", "%%%02x", "\\x%02x"):
        yield "".join(code % byte for byte in body).encode()
    yield from _escaped(body)


def _percented(body: bytes) -> Iterator[bytes]:
    for safe in _SAFE:
        coded = quote_from_bytes(body, safe).encode()
        lower = re.sub(rb"%..", lambda code: code[0].lower(), coded)
        yield from (coded, lower, coded.replace(b"%20", b"+"), lower.replace(b"%20", b"+"))


def _escaped(body: bytes) -> Iterator[bytes]:
    text = body.decode(errors="surrogateescape")
    for ascii_only in (True, False):
        coded = json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode(errors="surrogateescape")
        yield coded
        yield coded.replace(b"/", b"\\/")
    yield repr(body)[2:-1].encode()
    yield repr(text)[1:-1].encode(errors="surrogateescape")
    yield body.replace(b"'", b"'\\''")
    yield body.replace(b"'", b"'\"'\"'")
    yield re.sub(rb'(["$`\\])', rb"\\\1", body)
    yield re.sub(rb"""([ !"$&'()*,;<>?\[\\\]^`{|}]|(?:^|(?<=[:=]))~|^#)""", rb"\\\1", body)
    for code in (partial(_ansi_c, keep=b""), partial(_ansi_c, keep=bytes(range(128, 256)))):
        yield re.sub(rb"[^ -&(-\[\]-~]", code, body)


_ANSI_C = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 27: b"\\E"}


def _ansi_c(found: re.Match[bytes], keep: bytes) -> bytes:
    """A byte inside Bash's ``$'...'``."""
    byte = found[0]
    if byte in keep:
        return byte
    return b"\\" + byte if byte in b"'\\" else _ANSI_C.get(byte[0], b"\\%03o" % byte[0])
