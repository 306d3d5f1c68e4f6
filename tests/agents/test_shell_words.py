import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.errors import SubRunnerContract
from runner.runtime.shell_words import split

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def bash(script: str, *args: str, cwd: Path | None = None, locale: str = "C.UTF-8") -> bytes:
    argv = ["bash", "--noprofile", "--norc", "-c", script, "bash", *args]
    return subprocess.run(argv, cwd=cwd, env={"LC_ALL": locale}, capture_output=True, check=True).stdout


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(TEXT, min_size=1, max_size=20))
def test_words_that_bash_quoted_come_back(locale: str, words: list[str]) -> None:
    line = bash("printf '%q ' \"$@\"", "command", *words, locale=locale).decode()

    assert split(line) == ["command", *words]


def test_every_single_character_comes_back() -> None:
    words = [chr(code) for code in [*range(1, 0x180), 0x202E, 0xFEFF, 0x1F600]]
    words += [f"{word}a" for word in words] + [f"a{word}" for word in words] + [f"a={word}" for word in words]

    assert split(bash("printf '%q ' command \"$@\"", *words).decode()) == ["command", *words]


def test_an_accepted_line_means_to_bash_what_it_means_here(tmp_path: Path) -> None:
    source = random.Random(4821)
    alphabet = [*"aZ10=:~#-,%@+/ \t'\"\\$`;|&<>(){}*?[]!^é", "'a'", "$'", '"', "\\", " ", "\\x41", "\\u00e9", "\\101"]
    lines: dict[str, list[str]] = {}
    while len(lines) < 3000:
        line = "".join(source.choices(alphabet, k=source.randint(1, 8)))
        try:
            lines[line] = split(line)
        except SubRunnerContract:
            continue

    script = "words() { printf '%s\\0' $# \"$@\"; }\n" + "".join(f"words {line}\n" for line in lines)
    read = bash(script, cwd=tmp_path).decode().split("\0")[:-1]

    assert read == [item for words in lines.values() for item in (str(len(words)), *words)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        (" \t ", []),
        ("claude -p  --model\tx ", ["claude", "-p", "--model", "x"]),
        ("''", [""]),
        (r"a\ b 'c d' "+ '"e f"', ["a b", "c d", "e f"]),
        ("a'b'\"c\"$'d'\\e", ["abcde"]),
        (r'"\$ \` \" \\ \a"', [r"$ ` " + '"' + r" \ \a"]),
        (r"$'\n\t\r\a\b\E\f\v\\\'\"'", ["\n\t\r\a\b\x1b\f\v\\'\""]),
        (r"$'\303\251\x41\u20ac\U1F600\1012'", ["é" + "A" + "€" + "😀" + "A2"]),
        ("x --a=b:c a#b a~b 50% a,b @c ^d +e", ["x", "--a=b:c", "a#b", "a~b", "50%", "a,b", "@c", "^d", "+e"]),
        ("x FOO=bar", ["x", "FOO=bar"]),
        ("'FOO=bar' x", ["FOO=bar", "x"]),
        (r"\~ '#' \;", ["~", "#", ";"]),
    ],
    ids=[
        "nothing", "blanks", "plain", "empty word", "three quotings", "one word of five parts",
        "escapes in double quotes", "letters", "bytes and characters", "harmless marks",
        "assignment as argument", "quoted assignment", "escaped",
    ],
)  # fmt: skip
def test_quoting_is_read(line: str, words: list[str]) -> None:
    assert split(line) == words


@pytest.mark.parametrize(
    ("line", "column", "meaning"),
    [
        ("a; b", 2, "`;` is an operator"),
        ("a && b", 3, "`&` is an operator"),
        ("a | b", 3, "`|` is an operator"),
        ("a (b)", 3, "`(` is an operator"),
        ("a 2>&1", 4, "`>` is a redirection"),
        ("a < b", 3, "`<` is a redirection"),
        ("a $HOME", 3, "`$` is an expansion"),
        ('a $"b"', 3, "`$` is an expansion"),
        ("a `b`", 3, "``` is an expansion"),
        ('a "$HOME"', 3, '`"` is a quote that is not closed, or holds an expansion'),
        ('a "`b`"', 3, '`"` is a quote that is not closed, or holds an expansion'),
        ("a 'b", 3, "`'` is a quote that is not closed"),
        ("a $'b", 3, "`$` is an expansion"),
        ("a *.py", 3, "`*` is a glob pattern"),
        ("a ?", 3, "`?` is a glob pattern"),
        ("a [b]", 3, "`[` is a glob pattern"),
        ("a {b,c}", 3, "`{` is a brace expansion"),
        ("a !!", 3, "`!` is a history expansion"),
        ("a ~/b", 3, "`~` is an expansion"),
        ("a b=~", 5, "`~` is an expansion"),
        ("a b=c:~/d", 7, "`~` is an expansion"),
        ("a # b", 3, "`#` starts a comment"),
        ("GOOSE=1 goose", 1, "an assignment before the command is not a word"),
        ("A+=1 goose", 1, "an assignment before the command is not a word"),
        ("a\\", 2, "`\\` is an escape of nothing"),
        ("a\nb", 2, "`\\n` is a control character"),
        ("a 'b\nc'", 3, "`'` is a quote that is not closed"),
        ("a b\r", 4, "`\\r` is a control character"),
        ("a\0", 2, "`\\x00` is a control character"),
        (r"a $'b\0'", 3, "the word holds NUL"),
        (r"a $'b\q'", 6, "`\\q` is not an escape that `printf %q` writes"),
        (r"a $'\777'", 5, "`\\777` is not a character"),
        (r"a $'\U110000'", 5, "`\\U110000` is not a character"),
        (r"a $'\ud800'", 5, "a lone surrogate is not text"),
        ("a '\ud800'", 3, "a lone surrogate is not text"),
        (r"a b$'\xff'", 3, "the word is not UTF-8"),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else None,
)
def test_what_bash_would_do_more_than_read_is_refused(line: str, column: int, meaning: str) -> None:
    with pytest.raises(SubRunnerContract) as caught:
        split(line)

    assert f", at column {column} of" in caught.value.message
    assert meaning in caught.value.message


@pytest.mark.parametrize("name", ['x";touch pwn;"', "$(touch pwn)", "`touch pwn`", "a\nb", "-rf ~", "\x1b]52;c;x\a"])
def test_a_hostile_branch_name_is_one_word(name: str, tmp_path: Path) -> None:
    line = bash("printf '%q ' agent --branch \"$1\"", name, cwd=tmp_path).decode()

    assert split(line) == ["agent", "--branch", name]
    assert list(tmp_path.iterdir()) == []
