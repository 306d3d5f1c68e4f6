"""What a triage script printed becomes text: nothing that a terminal obeys is left, and nothing that hides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runner.triage.baseline import MAX_HEADLINE, cleaned, headline

OUTPUTS = Path(__file__).parents[1] / "skills" / "outputs"


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        pytest.param(b"\x1b[1mBold\x1b[0m \x1b[38;5;196mred\x1b[m", "Bold red", id="colours"),
        pytest.param(b"\x1b]8;;http://x\x07link\x1b]8;;\x1b\\ \x1b]0;title\x07.", "link .", id="links and titles"),
        pytest.param(b"a\x1bPq#0\x1b\\b\x1b(Bc\x1b7d\x1b", "abcd", id="other codes, and half a code"),
        pytest.param("a\x9b31mb\x9d0;x\x9cc".encode(), "abc", id="codes of one character"),
        pytest.param(b"a\rb\r\nc\x0bd\x0ce", "a\nb\nc\nd\ne", id="other ends of lines"),
        pytest.param(b"a\x00b\x08c\x7fd\te", "abcd\te", id="controls"),
        pytest.param("a\u202eb\u2066c\u200bd\ufeffe\U000e0041f".encode(), "abcdef", id="hidden marks"),
        pytest.param("a\ue000b\u0378c".encode(), "abc", id="letters of nobody"),
        pytest.param(b"a\xff\xfeb\xe2\x82", "a\ufffd\ufffdb\ufffd", id="not UTF-8, and half a character"),
        pytest.param("pödé 文 😀".encode(), "pödé 文 😀", id="letters of the world"),
        pytest.param(b"\n\n  a  \n\n\n\n\nb\n\n", "  a\n\nb", id="blank lines"),
        pytest.param(b"\nX\n", "X", id="a letter"),
        pytest.param(b"\x1b]0;what follows", "0;what follows", id="a title without end"),
    ],
)
def test_an_output_as_text(printed: bytes, text: str) -> None:
    assert cleaned(printed) == text


def test_whatever_is_printed_comes_out_as_plain_lines_and_stays_so() -> None:
    seeded = random.Random(34)
    for _ in range(500):
        text = cleaned(seeded.randbytes(seeded.randrange(200)) + seeded.choice([b"", b"\x1b[", b"\x1b]", b"\xc2\x9b"]))

        assert text.replace("\n", "").replace("\t", "").isprintable()
        assert cleaned(text.encode()) == text


def test_the_skill_s_own_reports_lose_nothing() -> None:
    for path in sorted(OUTPUTS.glob("*.incident_triage.txt")):
        lines = path.read_text().strip("\n").split("\n")
        assert cleaned(path.read_bytes()).split("\n") == [line.rstrip() for line in lines], path.name


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            "TRIAGE\nblast radius: single-workload  (pods 2)\n\n1. oom-killed  Deployment/checkout  2 of 3 pods\n",
            "single-workload; oom-killed Deployment/checkout 2 of 3 pods",
            id="reach and first symptom",
        ),
        pytest.param(" something else \nmore\nof it", "something else", id="another script's"),
        pytest.param("x" * MAX_HEADLINE, "x" * MAX_HEADLINE, id="a line that fits"),
        pytest.param("x" * 500, "x" * (MAX_HEADLINE - 3) + "...", id="a long line"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_the_headline_of_a_report(text: str, line: str) -> None:
    assert headline(text) == line
