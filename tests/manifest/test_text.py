"""YAML text: what its scalars mean, where its values are, what is refused and how fast."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from runner.core.errors import RunnerError
from runner.manifest import text
from runner.manifest.load import load


def found_in(raw: str | bytes) -> list[RunnerError]:
    try:
        return text.parse("f", raw if isinstance(raw, bytes) else raw.encode())[1]
    except RunnerError as error:
        return [error]


def value_of(scalar: str) -> object:
    trees, found = text.parse("f", f"value: {scalar}\n".encode())
    assert not found
    assert isinstance(trees[0].data, dict)
    return trees[0].data["value"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("FALSE", False),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("0b1", "0b1"),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1.10", 1.1),
        (".5", 0.5),
        ("1e3", 1000.0),
        ('"010"', "010"),
        ("'true'", "true"),
        ("https://example.org/a?b=c", "https://example.org/a?b=c"),
    ],
)
def test_scalars_mean_what_the_core_schema_of_yaml_1_2_says(written: str, meant: object) -> None:
    value = value_of(written)

    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize("written", ["https://e.org/a?b=c", "1:30", "node:22@sha256:ab", "a?b", "?.py", "C:x"])
def test_colons_and_question_marks_inside_a_word_need_no_quotes_in_brackets(written: str) -> None:
    assert value_of(f"[{written}, {{k: {written}}}]") == [written, {"k": written}]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("[a ? b]", ["a ? b"]),
        ("[a ?, b]", ["a ?", "b"]),
        ("[x ? y : z]", [{"x ? y": "z"}]),
        ("{a ? b: 1}", {"a ? b": 1}),
        ("[? a : b, ? c]", [{"a": "b"}, {"c": None}]),
        ("{? a : b, c}", {"a": "b", "c": None}),
        ("a ? b", "a ? b"),
        ("\n  ? a ? b\n  : c", {"a ? b": "c"}),
        ("['x ? y', \"a ? b\"]", ["x ? y", "a ? b"]),
    ],
)
def test_a_question_mark_by_itself_begins_a_key_only_where_nothing_is_before_it(written: str, meant: object) -> None:
    assert value_of(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\uD83D\uDE00\udbff\udfff"', "\U0001f600\U0010ffff"),
        (r'{"\ud800\udc00": "x\\\ud83d\ude00"}', {"\U00010000": "x\\\U0001f600"}),
        (r'"\\ud83d\\ude00"', r"\ud83d\ude00"),
        (r"'\ud83d\ude00'", r"\ud83d\ude00"),
        (r"\ud83d\ude00", r"\ud83d\ude00"),
        ("|\n  \\ud83d\\ude00", "\\ud83d\\ude00\n"),
        (r'"\ue83d\uee00"', "\ue83d\uee00"),
        (r'"\ue000"', "\ue000"),
        (r"'\ue83d\uee00'", r"\ue83d\uee00"),
    ],
    ids=ascii,
)
def test_the_two_escapes_of_a_character_in_json_are_that_character(written: str, meant: object) -> None:
    assert value_of(written) == meant


def test_what_json_writes_is_read_as_it_was() -> None:
    rng = random.Random(18)
    some = "aZ \\\"'/ud8\t\n\u0085\u00e9\u2028\ufeff\ue000\uffff\U0001f600\U0010ffff:?,[]{}&*!|>%#-"
    for indent in (None, 2, "\t"):
        for _ in range(300):
            words = ["".join(rng.choices(some, k=rng.randint(0, 6))) for _ in range(4)]
            data = {"a": words, **{f"{word}x": {word: rng.choice([None, True, 1.5, -3, [], {}])} for word in words}}

            trees, found = text.parse("f", json.dumps(data, indent=indent).encode())

            assert not found
            assert trees[0].data == data


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ("a: 1\n\t\nb: 2\n", {"a": 1, "b": 2}),
        ("\t\na: 1\n\t", {"a": 1}),
        ("a:\n  - 1\n\t \t\n  - 2\n", {"a": [1, 2]}),
        ("a: 1\n\t# a comment: \t?\nb: 2\n", {"a": 1, "b": 2}),
        ("a: |\n  x\n  \t\n  y\n", {"a": "x\n\t\ny\n"}),
        ('a: "x\n\t\n\ty"\n', {"a": "x\ny"}),
    ],
    ids=ascii,
)
def test_a_line_that_holds_only_a_tab_is_empty(raw: str, meant: object) -> None:
    trees, found = text.parse("f", raw.encode())

    assert not found
    assert trees[0].data == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("! 12", "12"),
        ("&a ! true", "true"),
        ("! &a ~", "~"),
        ('! "12"', "12"),
        ("! |\n  12", "12\n"),
        ("[! 1, 1, ! , a! ]", ["1", 1, "", "a!"]),
        ("! {a: 1}", {"a": 1}),
    ],
)
def test_a_bare_tag_makes_text(written: str, meant: object) -> None:
    assert value_of(written) == meant


def test_a_directive_is_of_the_document_that_it_stands_before() -> None:
    raw = b"%TAG !e! tag:example.org,2000:a?\n---\na: 1\n...\n# next\n%YAML 1.2\n---\nb: 2\n--- \nc: !e!x 3\n"

    trees, found = text.parse("f", raw)

    assert [tree.data for tree in trees] == [{"a": 1}, {"b": 2}]
    assert [(error.code, str(error.at)) for error in found] == [("manifest.syntax", "f:10:4")]


def test_a_tag_that_a_directive_names_is_refused_like_any_other() -> None:
    (error,) = found_in("%TAG !e! tag:example.org,2000:\n---\na: !e!x 1\n")

    assert (error.code, str(error.at)) == ("manifest.tag", "f:3:4")


def test_private_characters_of_a_text_stay_what_they_are() -> None:
    assert value_of("\ue000\ue001 a:b") == "\ue000\ue001 a:b"


@pytest.mark.parametrize(
    "written", ["010", "-007", "00", "1e400", "-.inf", ".NaN", "9" * 20, "1" * 5000, "0x" + "f" * 20]
)
def test_a_number_that_would_surprise_is_refused(written: str) -> None:
    (error,) = found_in(f"value: {written}")

    assert error.code == "manifest.bad-value"
    assert "quotes" in (error.hint or "")


@pytest.mark.parametrize(
    ("raw", "code", "place"),
    [
        pytest.param("a: 1\nb:\n  c: 2\n  c: 3\n", "duplicate-key", "f:4:3", id="duplicate key below"),
        pytest.param("a: !!python/object/apply:os.system [x]\n", "tag", "f:1:4", id="python tag"),
        pytest.param("a: !!str 1\n", "tag", "f:1:4", id="core tag"),
        pytest.param("!<plain> 010\n", "tag", "f:1:1", id="tag that looks like ours"),
        pytest.param("a: !%zz x\n", "syntax", "f:1:5", id="tag with a broken escape"),
        pytest.param("!x a: 1\n", "tag", "f:1:1", id="tag on a key"),
        pytest.param("a: &x {b: 1}\nc:\n  <<: *x\n", "syntax", "f:3:3", id="merge key"),
        pytest.param("1: a\n", "bad-value", "f:1:1", id="number as key"),
        pytest.param("true: a\n", "bad-value", "f:1:1", id="boolean as key"),
        pytest.param("~: a\n", "bad-value", "f:1:1", id="null as key"),
        pytest.param("? [a]\n: b\n", "bad-value", "f:1:3", id="list as key"),
        pytest.param("a: &a [*a]\n", "syntax", "f:1:4", id="recursive alias"),
        pytest.param("a: &a 1\nb: &a 2\n", "syntax", "f:2:4", id="anchor twice"),
        pytest.param("a: **/.env\n", "syntax", "f:1:5", id="unquoted glob"),
        pytest.param("a:\tb: c\n", "syntax", "f:1:5", id="colon in a value"),
        pytest.param("a: [1, 2\n", "syntax", "f:1:9", id="open bracket"),
        pytest.param("a: [1, 2", "syntax", "f:1:9", id="open bracket in a last line without a break"),
        pytest.param("a: b".encode("utf-16"), "encoding", "f:1:1", id="UTF-16 with BOM"),
        pytest.param("a: b".encode("utf-16-le"), "encoding", "f:1:2", id="UTF-16 without BOM"),
        pytest.param("é: 1\nb: é".encode() + b"\xff", "encoding", "f:2:5", id="invalid byte"),
        pytest.param(b"a: \xed\xa0\x80", "encoding", "f:1:4", id="lone surrogate"),
        pytest.param('a: "\\ud800"', "encoding", "f:1:7", id="escaped lone surrogate"),
        pytest.param('{"a": "\\ude00\\ud83d"}', "encoding", "f:1:10", id="escaped surrogates in the wrong order"),
        pytest.param('a: "\\ud83d\\\n  \\ude00"', "encoding", "f:1:7", id="escaped surrogates apart"),
        pytest.param("a: b\0c", "encoding", "f:1:5", id="NUL"),
        pytest.param('a: "b\\0c"', "encoding", "f:1:4", id="escaped NUL"),
        pytest.param("# x\na: b\x1b[2J", "encoding", "f:2:5", id="terminal control"),
        pytest.param("# a comment\u2028enabled: true", "encoding", "f:1:12", id="line break of some readers"),
    ],
)
def test_what_is_refused_has_a_code_and_a_place(raw: str | bytes, code: str, place: str) -> None:
    (error,) = found_in(raw)

    assert error.code == f"manifest.{code}"
    assert str(error.at) == place


@pytest.mark.parametrize("raw", ["a:\n\tb: c\n", "a:\n  b: c\n\td: e\n"])
def test_a_tab_is_said_to_be_one(raw: str) -> None:
    (error,) = found_in(raw)

    assert error.hint == "indent with spaces"
    assert "tab" in error.message


def test_a_duplicate_key_shows_both_places() -> None:
    (error,) = found_in("key: 1\nother: 2\nkey: 3\n")

    assert [str(place) for place in (error.at, *error.also)] == ["f:3:1", "f:1:1"]


def bomb() -> str:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{n}: &{n} [{','.join(f'*{o}' for _ in range(9))}]" for o, n in zip("abcdefgh", "bcdefghi", strict=True)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(bomb, id="alias bomb of 306 bytes"),
        pytest.param(lambda: "[" * 10_000, id="10,000 brackets"),
        pytest.param(lambda: "- " * 10_000, id="10,000 dashes"),
        pytest.param(lambda: "{a:\n" * 10_000, id="10,000 mappings"),
        pytest.param(
            lambda: "a: &a0 [x]\n" + "".join(f"b{i}: &a{i + 1} [*a{i}]\n" for i in range(100)), id="alias tower"
        ),
        pytest.param(lambda: "a: " + "x" * (1 << 20), id="line of 1 MiB"),
        pytest.param(lambda: "- a\n" * 1_000_000, id="a million items"),
        pytest.param(lambda: "[" + "a,\n" * 1_000_000, id="a million items in brackets"),
    ],
)
def test_hostile_sizes_are_refused_within_a_second(build: Callable[[], str]) -> None:
    raw = build().encode()

    before = time.process_time()
    found = found_in(raw)

    assert found[0].code == "manifest.too-large"
    print(f"{time.process_time() - before:.2f} s CPU")


def test_a_long_prompt_in_a_block_scalar_is_allowed() -> None:
    line = "  a line of a prompt: with a colon, and so on\n"

    trees, found = text.parse("f", b"prompt: |\n" + line.encode() * (5 * (1 << 20) // len(line)))

    assert not found
    assert isinstance(trees[0].data, dict)
    assert len(trees[0].data["prompt"]) > 4_500_000


def test_a_broken_document_does_not_hide_the_others() -> None:
    trees, found = text.parse("f", b"%YAML 1.2\n# first\n---\na: 1\n---\nb: [\n---\nc: !x 1\n---\nd: 1\n")

    assert [tree.data for tree in trees if tree.sound] == [{"a": 1}, {"d": 1}]
    assert [(error.code, error.at and error.at.line) for error in found] == [
        ("manifest.syntax", 6),
        ("manifest.tag", 8),
    ]


def test_too_deep_a_document_does_not_hide_the_others() -> None:
    trees, found = text.parse("f", b"[" * 100 + b"\n---\nd: 1\n")

    assert [tree.data for tree in trees] == [{"d": 1}]
    assert [error.code for error in found] == ["manifest.too-large"]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_columns_count_characters(mark: str, newline: str) -> None:
    trees, _ = text.parse("f", f"{mark}# é{newline}日本: {{é: [x, 'yé ']}}{newline}".encode())

    place = trees[0].place("日本", "é", 1)

    assert (place.line, place.column, place.width) == (2, 13, 5)
    assert place.text == "日本: {é: [x, 'yé ']}"


PLACES = """\
spec:
  a: xyz
  b: {x: [1]}
  c:
    d: |
      text
  e:
    - 'b'
    - k: v
      l: w
"""


@pytest.mark.parametrize(
    ("keys", "place", "width"),
    [
        pytest.param(("spec", "a"), "f:2:6", 3, id="scalar"),
        pytest.param(("spec", "b"), "f:3:6", 8, id="flow mapping"),
        pytest.param(("spec", "b", "x", 0), "f:3:11", 1, id="item in it"),
        pytest.param(("spec", "c"), "f:4:3", 1, id="block mapping by its key"),
        pytest.param(("spec", "c", "d"), "f:5:8", 1, id="block scalar at its mark"),
        pytest.param(("spec", "e", 0), "f:8:7", 3, id="list item"),
        pytest.param(("spec", "e", 1), "f:9:7", 4, id="mapping in a list by its first line"),
        pytest.param(("spec", "c", "missing", "more"), "f:4:3", 1, id="nearest written ancestor"),
        pytest.param(("spec", "e", 7), "f:7:3", 1, id="list that is too short"),
        pytest.param((), "f:1:1", 5, id="the document"),
    ],
)
def test_values_are_where_they_are_written(keys: tuple[str | int, ...], place: str, width: int) -> None:
    trees, _ = text.parse("f", PLACES.encode())

    at = trees[0].place(*keys)

    assert (str(at), at.width) == (place, width)


@pytest.fixture
def odd_files(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "device").symlink_to("/dev/zero")
    return tmp_path


@pytest.mark.parametrize("name", ["fifo", "folder", "loop", "dangling", "device", "absent"])
def test_only_regular_files_are_read_and_nothing_waits(odd_files: Path, name: str) -> None:
    with pytest.raises(RunnerError) as caught:
        text.read(odd_files / name, name)

    assert caught.value.code == "manifest.unreadable"
    assert name in caught.value.message


@pytest.fixture
def forbidden(ordinary_user: None) -> Iterator[Path]:
    """A folder, and a file beside it, that their owner may not read."""
    with TemporaryDirectory() as name:
        (Path(name) / "folder").mkdir(mode=0)
        (Path(name) / "file").touch(mode=0)
        yield Path(name)


@pytest.mark.parametrize("name", ["file", "folder", "folder/file"])
def test_what_may_not_be_read_is_unreadable(forbidden: Path, name: str) -> None:
    _, (error,) = load(forbidden / name)

    assert error.code == "manifest.unreadable"
    assert "permission denied" in error.message


def test_a_file_of_50_mib_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(50 << 20)

    with pytest.raises(RunnerError) as caught:
        text.read(tmp_path / "big", "big")

    assert caught.value.code == "manifest.too-large"
