"""What is hidden, in which forms and however it is cut up; and that nothing else changes."""

from __future__ import annotations

import base64
import copy
import gzip
import html
import io
import json
import os
import pickle
import random
import re
import shlex
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from html.entities import codepoint2name
from urllib.parse import quote, quote_plus

import pytest

from runner.core import redact
from runner.core.codec import plain
from runner.core.errors import UnfitSecret
from runner.core.redact import Redactor, Secret, forms_of

TOKEN = b"ghp_Zx81kLq0Vw7TbN4mRc5YdE2sUh9JfA3gPo6i"
ODD = b"p'4ss w$rd\"\\x/y+z%~#7&=Q"
UNICODE = "pä$$wörd-ключ-7".encode()
KEY = b"-----BEGIN KEY-----\n%s\n%s\n-----END KEY-----" % (
    b"MIIEvQIBADANBgkqhkiG9w0B" * 2,
    b"AQEFAASCBKcwggSjAgEAAoIB" * 2,
)
SHORT = b"x7!kQ2"
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

SECRETS = {"TOKEN": TOKEN, "ODD": ODD, "UNICODE": UNICODE, "KEY": KEY, "SHORT": SHORT}


class _Hiding(dict[str, Redactor]):
    """Made when they are wanted, so that a change of what makes them is noticed by the test that wants them first."""

    def __missing__(self, name: str) -> Redactor:
        return self.setdefault(name, Redactor({name: SECRETS[name]}))


HIDING = _Hiding()


def _bash(template: str, value: bytes) -> bytes:
    command = ["bash", "-c", template, "bash", os.fsdecode(value)]
    return subprocess.run(command, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}).stdout


def _json(value: bytes) -> bytes:
    return json.dumps(value.decode(), ensure_ascii=False).encode()[1:-1]


def _go(value: bytes) -> bytes:
    """As Go's encoder writes it, which kubectl, helm and docker print by."""
    return re.sub(rb"[&<>]", lambda found: b"\\u%04x" % found[0][0], _json(value))


def _units(value: bytes, code: str) -> bytes:
    """Each unit of its UTF-16, but for letters and digits."""
    units = value.decode().encode("utf-16-be")
    numbers = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join(chr(n) if n < 128 and chr(n).isalnum() else code % n for n in numbers).encode()


def _entities(value: bytes, code: str) -> bytes:
    return "".join(
        letter if letter.isalnum() and letter.isascii() else code % ord(letter) for letter in value.decode()
    ).encode()


def bare(text: bytes) -> bytes:
    """Without what stands around a form and tells nothing: quotes, padding, the second half of UTF-16."""
    return re.sub(rb"[$'=\"\0]", b"", text)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda value: value,
    "hexadecimal": lambda value: value.hex().encode(),
    "upper hexadecimal": lambda value: value.hex().upper().encode(),
    "hexadecimal with spaces": lambda value: value.hex(" ").encode(),
    "wrapped base64": base64.encodebytes,
    "base64 of a line": lambda value: base64.b64encode(value + b"\n"),
    "JSON": lambda value: json.dumps(value.decode()).encode()[1:-1],
    "JSON of any letter": lambda value: json.dumps(value.decode(), ensure_ascii=False).encode()[1:-1],
    "JSON of PHP": lambda value: json.dumps(value.decode()).encode()[1:-1].replace(b"/", b"\\/"),
    "Python bytes": lambda value: repr(value).encode()[2:-1],
    "Python text": lambda value: repr(value.decode()).encode()[1:-1],
    "percent, as in a path": lambda value: quote(value).encode(),
    "percent, as in a form": lambda value: quote_plus(value).encode(),
    "percent, all that is special": lambda value: quote(value, safe="").encode(),
    "percent, lower": lambda value: re.sub(rb"%..", lambda m: m[0].lower(), quote(value, safe="").encode()),
    "percent, every byte": lambda value: "".join(f"%{byte:02X}" for byte in value).encode(),
    "percent, every byte, lower": lambda value: "".join(f"%{byte:02x}" for byte in value).encode(),
    "percent, all marks": lambda value: re.sub(rb"\W", lambda found: b"%%%02X" % found[0][0], value),
    "percent, twice": lambda value: quote(quote(value, safe=""), safe="").encode(),
    "percent, in HTML": lambda value: _entities(quote(value, safe="").encode(), "&#%d;"),
    "shell, by Python": lambda value: shlex.quote(value.decode()).encode().strip(b"'"),
    "shell, %q": lambda value: _bash('printf %q "$1"', value),
    "shell, @Q": lambda value: _bash('printf %s "${1@Q}"', value).strip(b"'"),
    "shell, in double quotes": lambda value: re.sub(rb'(["$`\\])', rb"\\\1", value),
    "shell, traced": lambda value: _bash('exec 2>&1; set -x; : "$1"', value).removeprefix(b"+ : ").strip(b"'\n"),
    "JSON of Go": _go,
    "JSON of .NET": lambda value: _units(value, "\\u%04X"),
    "JSON, lower": lambda value: _units(value, "\\u%04x"),
    "JSON of each byte": lambda value: "".join(f"\\u{ord(letter):04x}" for letter in value.decode()).encode(),
    "JSON in JSON": lambda value: _json(_json(value)),
    "JSON in JSON of Go": lambda value: _go(_go(value)),
    "JSON in JSON in JSON": lambda value: _json(_json(_json(value))),
    "JSON of Python in JSON": lambda value: _json(json.dumps(value.decode()).encode()[1:-1]),
    "HTML": lambda value: html.escape(value.decode()).encode(),
    "HTML in HTML": lambda value: html.escape(html.escape(value.decode())).encode(),
    "HTML of names": lambda value: "".join(
        f"&{codepoint2name[ord(letter)]};" if ord(letter) in codepoint2name else letter for letter in value.decode()
    ).encode(),
    "HTML, decimal": lambda value: _entities(value, "&#%d;"),
    "HTML, decimal with zeros": lambda value: _entities(value, "&#%05d;"),
    "HTML, hexadecimal": lambda value: _entities(value, "&#x%x;"),
    "HTML, upper hexadecimal": lambda value: _entities(value, "&#X%X;"),
    "HTML of each letter": lambda value: "".join(f"&#{ord(letter)};" for letter in value.decode()).encode(),
    "HTML in JSON of Go": lambda value: _go(html.escape(value.decode()).encode()),
    "JSON in HTML": lambda value: html.escape(_json(value).decode()).encode(),
    "base64 in JSON of .NET": lambda value: _units(base64.b64encode(value).rstrip(b"="), "\\u%04X"),
    "hexadecimal with colons": lambda value: value.hex(":").encode(),
    "upper hexadecimal with colons": lambda value: value.hex(":").upper().encode(),
    "escapes of Rust": lambda value: "".join(f"\\u{{{ord(letter):x}}}" for letter in value.decode()).encode(),
    "long escapes of Python": lambda value: "".join(f"\\U{ord(letter):08x}" for letter in value.decode()).encode(),
    "octal escapes": lambda value: "".join(f"\\{byte:03o}" for byte in value).encode(),
    "other line ends": lambda value: value.replace(b"\n", b"\r\n"),
    "indented": lambda value: value.replace(b"\n", b"\n    \t"),
    "UTF-16": lambda value: b"\0".join(value[at : at + 1] for at in range(len(value))),
}


def _dump(content: bytes, address: str, group: int, gap: str, column: str) -> bytes:
    """Sixteen bytes a line, as a program that shows them does."""
    lines = []
    for at in range(0, len(content), 16):
        line = content[at : at + 16]
        digits = " ".join(line[n : n + group].hex() for n in range(0, len(line), group))
        if gap:
            digits = digits[:23] + gap + digits[23:]
        shown = re.sub(rb"[^ -~]", b".", line).decode()
        lines.append(f"{address % at}{digits:<{39 if group == 2 else 48}}  {column % shown}".rstrip() + "\n")
    return "".join(lines).encode()


DUMPS: dict[str, Callable[[bytes], bytes]] = {
    "xxd": lambda content: _dump(content, "%08x: ", 2, "", "%s"),
    "xxd, single bytes": lambda content: _dump(content, "%08x: ", 1, "", "%s"),
    "hexdump -C": lambda content: _dump(content, "%08x  ", 1, " ", "|%s|"),
    "od": lambda content: _od(content, "-vAx", "-tx1"),
    "od with characters": lambda content: _od(content, "-vAx", "-tx1z"),
    "od, octal addresses": lambda content: _od(content, "-v", "-tx1z"),
}


def _od(content: bytes, *flags: str) -> bytes:
    return subprocess.run(["od", *flags], input=content, capture_output=True, check=True).stdout


def test_a_secret_has_these_forms_and_no_others() -> None:
    """Squeezed, as they are compared. What is not here is found because escapes are decoded."""
    assert forms_of(b" a'~b \xff\xbf\xf0$\x1b\n") == {
        b"a'~b\xff\xbf\xf0$\x1b", b"a'~b\xff\xbf\xf0$", b"a'~b+\xff\xbf\xf0$\x1b",
        b"61277e6220ffbff0241b", b"61277E6220FFBFF0241B",
        b"61:27:7e:62:20:ff:bf:f0:24:1b", b"61:27:7E:62:20:FF:BF:F0:24:1B",
        b"YSd+YiD/v/AkGw", b"YSd-YiD_v_AkGw", b"YSd+YiD/v/AkGwo", b"YSd-YiD_v_AkGwo",
        b"YSd+YiD/v/AkG", b"YSd-YiD_v_AkG", b"EnfmIg/7/wJB", b"EnfmIg_7_wJB", b"hJ35iIP+/8CQb", b"hJ35iIP-_8CQb",
        rb"a'~b\udcff\udcbf\udcf0$\u001b", rb"a'~b\udcff\udcbf\udcf0$\x1b", b"a%27~b%20%FF%BF%F0%24%1B",
        b"a'\\''~b\xff\xbf\xf0$\x1b", b"a'\"'\"'~b\xff\xbf\xf0$\x1b",
        b"a'~b\xff\xbf\xf0\\$\x1b", b"a\\'~b\\\xff\xbf\xf0\\$\x1b",
    }  # fmt: skip
    assert b"x7%2F%25kQ2" in forms_of(b"x7/%kQ2")


def test_a_secret_of_several_lines_has_those_of_each_kind_of_their_ends() -> None:
    forms = forms_of(b"\r\nab\rcd\n")

    assert {b"61620d6364", b"61620a6364", b"61620d0a6364"} <= forms
    assert not any(form.startswith((b"0d", b"0D")) or form.endswith((b"0a", b"0A")) for form in forms)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"abcabc\xff", {b"abcabc."}),
        (b"abcabc\xff\n\xff", {b"abcabc...", b"abcabc...."}),
        (b"abcab\xff\xff", set()),
        (b"abababa\xff", set()),
    ],
    ids=["just enough", "lines", "too few letters", "too few different ones"],
)
def test_a_dump_s_column_of_characters_is_looked_for_if_it_tells_enough(value: bytes, shown: set[bytes]) -> None:
    assert {form for form in forms_of(value) if b"." in form} == shown


# Where a text is sampled depends on the length of the shortest form.
@pytest.mark.parametrize("length", [6, 7, 10, 11, 14, 15, 22, 23, 38, 39, 40, 64])
def test_a_secret_of_any_length_is_found_at_any_place(length: int) -> None:
    value = random.Random(length).sample(LETTERS, length)
    redactor = Redactor({"NAME": bytes(value)})

    for at in range(33):
        for text in (b"^" * at + bytes(value) + b"^" * 40, b"\\n" + b"^" * at + _units(bytes(value), "\\u%04x")):
            assert redactor.names_in(text) == {"NAME"}, at
        assert not redactor.names_in(b"^" * at + bytes(value[:-1]) + b"^" * 40)


STREAMS: dict[str, tuple[dict[str, bytes], list[bytes], bytes]] = {
    "the beginning begins anew": ({"N": b"aaaabcdefg"}, [b"aaaaa", b"bcdefg"], b"a[redacted:N]"),
    "two beginnings": ({"N": b"ababcabd-7"}, [b"ababcab", b"abcabd-7"], b"ababc[redacted:N]"),
    "behind every other": ({"N": b"zyx-7365", "M": b"abc-1234"}, [b"zyxa ", b"zyx-9", b"."], b"zyxa zyx-9."),
    "one letter": ({"N": b"x7!kQ2"}, [b"x", b"", b"7!kQ2"], b"[redacted:N]"),
    "one letter is missing": ({"N": b"x7!kQ2"}, [b"78:37:21:6b:51:3", b"2"], b"[redacted:N]"),
    "nearly the longest": ({"N": b"x7!kQ2"}, [b"-78:37:21:6b:51:3", b"."], b"-78:37:21:6b:51:3."),
    "beside each other": ({"N": b"x7!kQ2", "M": b"abc-1234"}, [b"x7!kQ2abc-1234"], b"[redacted:N][redacted:M]"),
    "four times": (
        {"N": b"x7!kQ2"},
        [b"x7!kQ2" * 2 + b"." + b"x7!kQ2" * 2],
        b"[redacted:N]" * 2 + b"." + b"[redacted:N]" * 2,
    ),
    "across itself": ({"N": b"abcdabcd"}, [b"abcdabcdabcd."], b"[redacted:N]."),
    "the end of one shown, which may begin another": (
        {"OUTER": b"ab2defgh1", "INNER": b"defgh1", "LONG": b"defgh1-and-more"},
        [b"ab2defgh1", b"."],
        b"[redacted:OUTER].",
    ),
    "one that may be a longer one": (
        {"BEGINS": b"ab2def", "OUTER": b"ab2defgh1ijk"},
        [bytes([letter]) for letter in b"[ab2defgh1ijk]"],
        b"[[redacted:OUTER]]",
    ),
    "the longest of three": (
        {"ONE": b"abc-efgh", "TWO": b"gh-1234567890", "THREE": b"890xyz"},
        [b"abc-efgh-1234567890xyz"],
        b"[redacted:TWO]",
    ),
    "half a code": ({"N": b"x7!kQ2"}, [b"x7!\x1b[3", b"1mkQ2", b"."], b"[redacted:N]."),
    "a code, and half a secret": ({"N": b"x7!kQ2"}, [b"\x1b[1mx7!", b"kQ2"], b"\x1b[1m[redacted:N]"),
    "half an escape": ({"N": b"x7!kQ2"}, [b"x7\\u00", b"21kQ2"], b"[redacted:N]"),
    "half an escape, octal": ({"N": b"x7!kQ2"}, [b"x7\\04", b"1kQ2"], b"[redacted:N]"),
    "half an entity": ({"N": b"x7!kQ2"}, [b"x7&exc", b"l;kQ2"], b"[redacted:N]"),
    "half a percent": ({"N": b"x7!kQ2"}, [b"x7%2", b"1kQ2"], b"[redacted:N]"),
    "half a secret behind an escape": ({"N": b"x7!kQ2"}, [b"%78%37!", b"kQ2"], b"[redacted:N]"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_pieces_of_a_stream(case: str) -> None:
    secrets, pieces, wanted = STREAMS[case]
    stream = Redactor(secrets).stream()

    assert b"".join(map(stream.feed, pieces)) + stream.end() == wanted
    assert stream.found == {name for name in secrets if b"[redacted:%s]" % name.encode() in wanted}


ESCAPES: dict[str, tuple[bytes, bytes, bytes]] = {
    "percent behind percent": (b"x7-kQ2ab", b"%%78%37%2d%6bQ%32%61b.", b"%[redacted:N]."),
    "percent at the beginning": (b"x7-kQ2ab", b"%78%37-%6BQ2ab.", b"[redacted:N]."),
    "one percent between others": (b"x7%kQ2ab", b"x7%%6BQ2ab%.", b"[redacted:N]%."),
    "one percent": (b"x7-kQ2ab", b"x7-%6BQ2ab.", b"[redacted:N]."),
    "percent at the end": (b"x7-kQ2a%", b"x%37-%6BQ2a%", b"[redacted:N]"),
    "ampersand at the end": (b"x7-kQ2a&", b"x&#55;-&#107;Q2a&", b"[redacted:N]"),
    "percent of white space": (b"x7-kQ2ab", b"x%37%20%0a%09%0B-kQ2ab", b"[redacted:N]"),
    "entities of white space": (b"x7-kQ2ab", b"x&Tab;7&NewLine;-&#32;k&#xA;Q2ab", b"[redacted:N]"),
    "escapes of white space": (
        b"x7-kQ2ab", rb"x\f7\v-\x0ck\x0bQ\0142\013\u{20}a\U0000000a\u000cb", b"[redacted:N]",
    ),
    "controls": (b"\a7\b-\x1bkQ2b", rb"\a7\b-\ekQ2b.\a7\b-\EkQ2b.\0077\010-\033kQ2b.", b"[redacted:N]." * 3),
    "an escape of white space at the beginning": (b"x7-kQ2ab", rb"\nx7-\u006bQ2\u0061b", rb"\n[redacted:N]"),
    "the last letter": ("x7-\U0010ffffQ2".encode(), rb"x7-\U0010ffffQ2.x7-&#1114111;Q2.", b"[redacted:N]." * 2),
    "a letter beyond the last": (b"x7-kQ2ab", rb"x7-&#9999999;\UFFFFFFFFkQ2ab", rb"x7-&#9999999;\UFFFFFFFFkQ2ab"),
    "half a letter": (b"x7-kQ2ab", rb"\ud83dx7-kQ2\u0061b", rb"\ud83d[redacted:N]"),
    "an emoji": ("x-\U0001f511Q2".encode(), rb"x-\ud83d\udd11Q2.x-\U0001f511Q2.x-\u{1f511}Q2.", b"[redacted:N]." * 3),
    "an entity of two letters": (b"jx7-kQ2f", b"&fjlig;x7-kQ2&fjlig;", b"[redacted:N]"),
    "an entity of no name": (b"x7-kQ2&nosuch;", b"%78&#55;-kQ2&nosuch;", b"[redacted:N]"),
    "not UTF-8": (b"x7-\xff\xfeQ2ab", json.dumps(os.fsdecode(b"x7-\xff\xfeQ2ab")).encode(), b'"[redacted:N]"'),
    "an escape in a secret": (b"x7-%41&lt;\\n\\x41Q2", b"x7-%2541%26lt%3B%5Cn%5Cx41Q2", b"[redacted:N]"),
    "an escape in a secret, in HTML": (b"x7-%41\\x41Q2", b"x7-&#37;41&#92;x41Q2", b"[redacted:N]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ESCAPES)
def test_escapes_are_decoded(case: str) -> None:
    value, text, wanted = ESCAPES[case]

    assert Redactor({"N": value}).clean(text) == wanted


@pytest.mark.parametrize("at", [*range((1 << 16) - 60, (1 << 16) + 20, 7), (2 << 16) - 20])
def test_a_secret_across_the_blocks_of_a_long_chunk_is_hidden(at: int) -> None:
    stream = HIDING["TOKEN"].stream()

    assert stream.feed(b"." * at + TOKEN + b"," * 100_000) + stream.end() == (
        b"." * at + b"[redacted:TOKEN]" + b"," * 100_000
    )


def test_a_key_in_a_dump_that_is_cut_is_hidden_whole_and_what_follows_is_not_held() -> None:
    dump = DUMPS["hexdump -C"](KEY)
    stream = HIDING["KEY"].stream()

    shown = b"".join(stream.feed(dump[at : at + 90]) for at in range(0, len(dump), 90)) + stream.feed(b"." * 250)

    assert b"MII" not in shown
    assert shown.endswith(b"." * 250)
    assert stream.found == {"KEY"}


def test_what_passed_before_a_secret_was_known_makes_it_late() -> None:
    for passed, fresh, late in (
        ([b"x"], False, True),
        ([b"x", b""], False, True),
        ([b""], False, False),
        ([b"x"], True, False),
    ):
        redactor = Redactor({"EARLY": b"early-7365"})
        stream = redactor.stream()
        for chunk in passed:
            stream.feed(chunk)
        redactor.register("NAME", TOKEN, fresh=fresh)
        redactor.register("NAME", UNICODE, fresh=fresh)
        redactor.register("AGAIN", b"early-7365")
        assert redactor.late == (("NAME",) if late else ()), (passed, fresh)
        assert redactor.names_in(TOKEN + UNICODE + b"early-7365") == {"EARLY", "NAME"}


def test_without_secrets_everything_is_shown_at_once() -> None:
    redactor = Redactor()
    stream = redactor.stream()

    assert (bool(redactor), stream.feed(b"gh"), stream.end(), redactor.clean(b"x"), redactor.text("ü")) == (
        False, b"gh", b"", b"x", "ü",
    )  # fmt: skip
    redactor.register("TOKEN", TOKEN)
    assert (bool(redactor), stream.feed(TOKEN), stream.end()) == (True, b"", b"[redacted:TOKEN]")


def _packed(content: bytes) -> io.BytesIO:
    return io.BytesIO(gzip.compress(content, 1))


def test_secrets_that_are_packed_are_named() -> None:
    looks: list[None] = []
    content = b"." * ((2 << 20) - 7) + TOKEN + b"." * 10 + UNICODE[:-1]

    found = HIDING["TOKEN"].names_packed(_packed(content), lambda: looks.append(None), most=len(content))

    assert (found, len(looks)) == ({"TOKEN"}, 3)
    assert HIDING["TOKEN"].names_packed(_packed(TOKEN), lambda: None) == {"TOKEN"}
    with pytest.raises(ValueError, match="that is too large to be searched"):
        HIDING["TOKEN"].names_packed(_packed(content), lambda: None, most=len(content) - 1)


@pytest.mark.parametrize(
    "spoil", [lambda packed: packed[:-9], lambda packed: b"x" + packed, lambda packed: packed[:-5] + b"xx"]
)
def test_what_cannot_be_unpacked_is_told(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match=r"^that cannot be read: [A-Z]"):
        HIDING["TOKEN"].names_packed(io.BytesIO(spoil(_packed(TOKEN * 99).getvalue())), lambda: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SECRETS)
def test_each_form_is_hidden_whole(name: str, form: str) -> None:
    coded = FORMS[form](SECRETS[name]).strip()

    hidden = HIDING[name].clean(b"before: " + coded + b" :after")

    assert bare(hidden) == b"before: [redacted:%s] :after" % name.encode(), coded


@pytest.mark.parametrize("written", [bytes, _json, lambda text: _json(_json(text))], ids=["as it is", "JSON", "twice"])
@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("name", SECRETS)
def test_nothing_of_it_is_left_in_a_dump(name: str, dump: str, written: Callable[[bytes], bytes]) -> None:
    value = SECRETS[name]
    for offset in (0, 1, 7, 10, 15):
        text = written(DUMPS[dump](b"^" * offset + value + b"^" * 20))
        whole = HIDING[name].clean(text)
        for cut in range(7 + offset, len(text), 41) if written is bytes else ():
            stream = HIDING[name].stream()
            assert stream.feed(text[:cut]) + stream.feed(text[cut:]) + stream.end() == whole, (text, cut)
        left = re.sub(rb"(^|\n|\\+n)0[0-9a-f]{5,7}\b:?", b"", whole.replace(b"[redacted:%s]" % name.encode(), b""))
        assert not re.sub(rb"5e|[\^|<>\s]|\\+n", b"", left), (whole, left)


@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("coder", [base64.b64encode, base64.urlsafe_b64encode], ids=["standard", "for URLs"])
@pytest.mark.parametrize("name", SECRETS)
def test_base64_of_a_longer_text_shows_at_most_a_letter_of_the_secret_on_each_side(
    name: str, coder: Callable[[bytes], bytes], offset: int
) -> None:
    value = SECRETS[name].strip()
    coded = coder(b"?" * offset + value + b"~~~~~~")

    hidden = HIDING[name].clean(coded)

    left, _, right = hidden.partition(b"[redacted:%s]" % name.encode())
    assert len(left) == (offset * 8 + 5) // 6
    assert len(right) == len(coded) - (offset + len(value)) * 8 // 6


@pytest.mark.parametrize("size", range(1, len(TOKEN) + 1))
def test_writes_of_any_size_hide_nothing(size: int) -> None:
    text = b"key=" + TOKEN + b"\r\n" + TOKEN[:20] + b"\r\n" + TOKEN[20:] + b"."
    stream = HIDING["TOKEN"].stream()

    shown = b"".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size)) + stream.end()

    assert shown == b"key=[redacted:TOKEN]\r\n[redacted:TOKEN]."
    assert stream.found == {"TOKEN"}


@pytest.mark.parametrize(
    "code",
    [b"\x1b[31m", b"\x1b[38;2;255;0;1m", b"\x1b]8;;http://example.org\x1b\\", b"\x1b]0;t\x07", b"\x1b(B", b"\x1b[K"],
    ids=["colour", "true colour", "link", "title", "charset", "erase"],
)
@pytest.mark.parametrize("size", [1, 7])
def test_codes_of_a_terminal_between_its_letters_hide_nothing(code: bytes, size: int) -> None:
    text = b"a " + code.join(TOKEN[at : at + 1] for at in range(len(TOKEN))) + b" b"
    stream = HIDING["TOKEN"].stream()

    shown = b"".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size)) + stream.end()

    assert shown == b"a [redacted:TOKEN] b"


def test_a_secret_inside_of_a_title_is_hidden() -> None:
    assert HIDING["TOKEN"].clean(b"\x1b]0;" + TOKEN + b"\x07") == b"\x1b]0;[redacted:TOKEN]\x07"


def test_of_secrets_inside_each_other_the_longest_is_named() -> None:
    redactor = Redactor({"INNER": b"b2defgh1", "OUTER": b"ab2defgh1ijk", "BEGINS": b"ab2def"})

    assert redactor.clean(b"[ab2defgh1ijk b2defgh1 ab2def ab2defg]") == (
        b"[[redacted:OUTER] [redacted:INNER] [redacted:BEGINS] [redacted:BEGINS]g]"
    )


@pytest.mark.parametrize("size", range(1, 20))
def test_of_secrets_that_overlap_no_letter_is_shown(size: int) -> None:
    redactor = Redactor({"ONE": b"abcdefgh12", "TWO": b"gh12zyxwvu98"})
    text, stream = b"<abcdefgh12zyxwvu98>", redactor.stream()

    shown = b"".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size)) + stream.end()

    assert re.fullmatch(rb"<(\[redacted:(ONE|TWO)\])+>", shown)


def test_a_secret_that_is_known_late_is_hidden_from_then_on_and_noted() -> None:
    redactor = Redactor({"EARLY": b"early-7365"})
    stream = redactor.stream()
    shown = stream.feed(b"minted-8812 early-7365 ")
    redactor.register("MINTED", b"minted-8812")
    shown += stream.feed(b"minted-8812") + stream.end()

    assert shown == b"minted-8812 [redacted:EARLY] [redacted:MINTED]"
    assert redactor.late == ("MINTED",)


def test_no_more_is_held_back_than_what_may_become_a_secret() -> None:
    stream = HIDING["TOKEN"].stream()

    assert stream.feed(b"progress 10 \r") == b"progress 10 \r"
    assert stream.feed(b"gh") == b""
    assert stream.feed(b"i") == b"ghi"
    assert stream.feed(TOKEN[:-1]) == b""
    assert len(stream.feed(b" " * 100_000)) >= 100_000 - redact.MOST_JUNK
    assert stream.end().strip() == b""


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        *((value, "has fewer than 6 bytes", "") for value in (b"12345", b"a b c\nd", b"", b" " * 50)),
        *((v, "is a common word", "; change it") for v in (b"password", b"Pass Word", b"aaaaaaaaaa", b"ababababab")),
    ],
)
def test_what_would_hide_other_text_is_refused(value: bytes, words: str, hint: str) -> None:
    with pytest.raises(UnfitSecret, match=f"^secret `NAME` {words}$") as caught:
        Redactor().register("NAME", value)

    assert caught.value.hint == f"hiding it would hide other text{hint}"
    assert Redactor({"NAME": b"abcabc"}).clean(b"abcabc") == b"[redacted:NAME]"


def test_a_secret_is_shown_by_nothing_but_reveal() -> None:
    secret = Secret("TOKEN", TOKEN)

    def fail(given: Secret) -> None:
        raise ValueError(given)

    try:
        fail(secret)
    except ValueError as error:
        text = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    shown = f"{secret!r} {secret} {HIDING['TOKEN']!r} {vars(Redactor)} {text}"
    assert TOKEN.decode() not in shown
    assert "Secret('TOKEN')" in text
    for spread in (copy.deepcopy, pickle.dumps, plain, json.dumps):
        with pytest.raises(TypeError, match="a secret is not copied" if spread is copy.deepcopy else None):
            spread(secret)
    assert secret.reveal() == TOKEN


def test_text_of_any_kind_is_itself_again() -> None:
    text = "a \udcff\ud800 ключ\0\x1b[31"

    assert Redactor(SECRETS).text(text) == text


# --- fuzz -----------------------------------------------------------------------------------------

_WORDS = (b"error", b"INFO", b"\x1b[32m", b"\x1b[0m", b"ghp_", b"2026-11-22T07:28:34Z", b"\n", b"  ", b"%41", b"-----")
_BETWEEN = (b"", b"", b"", b"\r\n", b"\n  ", b"\x1b[1m", b"\x1b[0;31m", b"\n\x1b[K\t")
_WRITTEN = (rb"\n", rb"\r\n", rb"\n    ", rb"\\n", rb"\\\\n", rb"\u001b[1m", rb"\u001b[0;31m", rb"\t", rb"\x1b[m")


def _cases(seed: int, count: int) -> Iterator[tuple[bytes, bytes, list[bytes], str]]:
    """Text with one secret in it, the text that is right, the chunks, and the secret's name."""
    luck = random.Random(seed)
    coded = {
        name: [form(value).strip().removeprefix(b"$'").strip(b"'\"=") for form in FORMS.values()]
        for name, value in SECRETS.items()
    }
    for _ in range(count):
        name = luck.choice(list(SECRETS))
        form = luck.choice(coded[name])
        cut = sorted(luck.randrange(1, len(form)) for _ in range(luck.randrange(4)))
        pieces = [form[a:b] for a, b in zip([0, *cut], [*cut, len(form)], strict=True)]
        between = (*_BETWEEN, *_WRITTEN) if b"\\" not in form else _BETWEEN  # else nobody can tell whose it is
        dirty = pieces[0] + b"".join(luck.choice(between) + piece for piece in pieces[1:])
        before, after = (b"".join(luck.choices(_WORDS, k=luck.randrange(6))) + b"," for _ in range(2))
        text = before + dirty + after
        cuts = sorted(luck.randrange(len(text)) for _ in range(luck.randrange(8)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        yield before, after, chunks, name


def _fuzz(seed: int, count: int) -> None:
    for before, after, chunks, name in _cases(seed, count):
        stream = HIDING[name].stream()
        shown = b"".join(map(stream.feed, chunks)) + stream.end()
        assert bare(shown) == bare(before + b"[redacted:%s]" % name.encode() + after), chunks


@pytest.mark.parametrize(
    "row", [b"\\", b"&", b"&amp;", b"&#1", rb"\u0026", rb"\ud83d", b" ", b"|a", b"\n0000000000", b"00 "]
)
def test_rows_of_what_may_begin_an_escape_do_not_hold_up(row: bytes) -> None:
    """A command that had the secret could stop its own run's output for minutes by a row of backslashes."""
    dump = b"00000010: 6768 705f 5a78 3831 6b4c 7130 5677 3754  ghp_Zx81kLq0Vw7T\n"
    text = b"<" + TOKEN + b"\n" + dump + row * ((1 << 16) // len(row))
    began = time.process_time()

    hidden = HIDING["TOKEN"].clean(text)

    assert time.process_time() - began < 2
    assert hidden.startswith(b"<[redacted:TOKEN]\n")


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("written", [base64.b64encode, bytes])
def test_wrapped_lines_in_json_hide_nothing(written: Callable[[bytes], bytes], levels: int) -> None:
    for name, value in SECRETS.items():
        lines = written(value).decode()
        text = "\n".join(lines[at : at + 20] for at in range(0, len(lines), 20))
        for _ in range(levels):
            text = json.dumps(f"key: \x1b[1m{text}\x1b[0m\n")
        for cut in range(1, len(text), 7):
            stream = HIDING[name].stream()
            shown = stream.feed(text[:cut].encode()) + stream.feed(text[cut:].encode()) + stream.end()
            assert b"[redacted:%s]" % name.encode() in shown, (name, text, shown)


def test_however_it_is_written_and_cut_up_it_is_hidden_and_nothing_else() -> None:
    _fuzz(12, 1_000)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_a_million_ways_to_write_it_are_hidden(seed: int) -> None:
    _fuzz(100 + seed, 250_000)


def test_clean_text_is_byte_for_byte_the_same_however_it_is_cut_up() -> None:
    luck, everything = random.Random(3), Redactor(SECRETS)
    for _ in range(300):
        text = b"".join(luck.choices((*_WORDS, luck.randbytes(9), TOKEN[:20], KEY[:30]), k=luck.randrange(40)))
        cuts = sorted(luck.randrange(len(text) + 1) for _ in range(luck.randrange(8)))
        stream = everything.stream()
        shown = [stream.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert b"".join(shown) + stream.end() == text
