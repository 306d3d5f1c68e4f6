"""Pages of the documentation as data: headings, links, fences; and the session that their ``console`` blocks are.

CONTRIBUTING.md tells authors the rules.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

_FENCE = re.compile(r"(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<language>[\w+-]*)")
_FILE = re.compile(r"(?:#|//) file: (\S+)")
_COMMENT = re.compile(r"<!-- (given|needs): (.+?) -->")
_CODE = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_EXIT = re.compile(r"\[exit (\d+)\]")
_END = "=====runner-page====="
HOME = "/home/you"  # as pages write it
_VOLATILE = {  # what differs between two runs of one command
    "date": r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::[\d.]+)?(?:Z|[+-]\d\d:?\d\d)?)?",
    "clock": r"\b\d\d:\d\d:\d\d(?:\.\d+)?",
    "port": r"(?<=127\.0\.0\.1:)\d+",
    "id": r"\b[0-9a-hjkmnp-tv-z]{12}\b",
    "digest": r"\b[0-9a-f]{7,64}\b",
    "duration": r"(?<![\w.])(?:\d+d)?(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)? ?(?:ms|[smhd])(?!\w)",
    "size": r"(?<![\w.])\d+(?:\.\d+)? ?(?:[KMGTk]i?B?|bytes|B)(?!\w)",
}
_ANY_VOLATILE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _VOLATILE.items()))


@dataclass(frozen=True)
class Fence:
    """A code block; ``line`` is the number of its first line of text, ``file`` what it is to be written to."""

    language: str
    text: str
    line: int
    file: str | None = None


@dataclass(frozen=True)
class Command:
    """What is typed, and what it is to print and end with; lines ``first`` to ``last`` of the page tell the output."""

    text: str
    output: tuple[str, ...]
    status: int
    first: int
    last: int


@dataclass(frozen=True)
class Page:
    path: Path
    text: str

    @cached_property
    def fences(self) -> list[Fence]:
        return list(_fences(self.text.splitlines()))

    def chosen(self, name: str) -> list[str]:
        """The words of its comments ``<!-- given: -->`` or ``<!-- needs: -->``."""
        found = [words for key, words in _COMMENT.findall(self.text) if key == name]
        return [word.strip() for words in found for word in words.split(",")]

    @property
    def commands(self) -> list[Command]:
        return [command for fence in self.fences if fence.language == "console" for command in _commands(fence)]

    @property
    def prose(self) -> list[str]:
        """Its lines outside of fences, without inline code."""
        inside = {n for fence in self.fences for n in range(fence.line - 1, fence.line + fence.text.count("\n") + 2)}
        lines = enumerate(self.text.splitlines(), start=1)
        return ["" if number in inside else line for number, line in lines]

    @property
    def links(self) -> list[str]:
        return [target for line in self.prose for target in _LINK.findall(_CODE.sub("code", line))]

    @property
    def anchors(self) -> set[str]:
        """Of its headings, as GitHub and MyST make them."""
        seen: Counter[str] = Counter()
        found = set()
        for heading in (line.lstrip("#").strip() for line in self.prose if re.match(r"#{1,6} ", line)):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return found


def read_page(path: Path) -> Page:
    return Page(path, path.read_text())


def _fences(lines: Sequence[str]) -> Iterator[Fence]:
    rest = enumerate(lines, start=1)
    for number, line in rest:
        opened = _FENCE.match(line)
        if opened is None:
            continue
        indent, inside = len(opened["indent"]), []
        for _, text in rest:
            if text.strip() == opened["mark"]:
                break
            inside.append(text[indent:])
        file = _FILE.match(inside[0]) if inside else None
        shown = inside[1:] if file else inside
        name = file[1] if file else None
        yield Fence(opened["language"], "\n".join(shown), number + 1 + bool(file), name)


def _commands(fence: Fence) -> Iterator[Command]:
    lines = [*fence.text.splitlines(), "$ "]
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[0] == 0, f"line {fence.line}: the block does not begin with a command"
    for start, after in pairwise(starts):
        end = start + 1
        while end < after and lines[end].startswith(">"):
            end += 1
        typed = "\n".join(line[2:] for line in lines[start:end])
        output = lines[end:after]
        ended = _EXIT.fullmatch(output[-1]) if output else None
        told = tuple(output[:-1] if ended else output)
        yield Command(typed, told, int(ended[1]) if ended else 0, fence.line + end, fence.line + after)


@dataclass(frozen=True)
class Answer:
    """What a command did print and end with; ``None`` when the session ended before it did."""

    output: str
    status: int | None

    def fits(self, command: Command) -> bool:
        return self.status == command.status and matches(command.output, self.output)

    @property
    def lines(self) -> list[str]:
        """As a page shows it."""
        return [*self.output.rstrip().splitlines(), *([f"[exit {self.status}]"] if self.status else [])]


def matches(expected: Sequence[str], output: str) -> bool:
    """Whether an output is what a page shows, but for what is volatile; nothing shown fits anything."""
    wanted = _squeezed("\n".join(expected)).splitlines()
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else _pattern(line) + r"\n" for line in wanted)
    return not wanted or re.fullmatch(pattern, _squeezed(output) + "\n") is not None


def _pattern(line: str) -> str:
    return ".*".join(map(_literal, line.split("...")))


def _literal(text: str) -> str:
    """A pattern for a text in which anything of its kind may be in the place of what is volatile."""
    pattern, end = "", 0
    for found in _ANY_VOLATILE.finditer(text):
        if found.lastgroup == "id" and found[0].isalpha():
            continue  # a word of a page; an id of an output may have no digit either
        pattern += f"{re.escape(text[end : found.start()])}(?:{_VOLATILE[str(found.lastgroup)]})"
        end = found.end()
    return pattern + re.escape(text[end:])


def _squeezed(text: str) -> str:
    """Without blanks at the ends, and with one in place of several."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def run_page(page: Page, home: Path, env: Mapping[str, str], timeout: float) -> list[tuple[Command, Answer]]:
    """Type all commands of a page into one shell, in the directory ``work`` of ``home``."""
    commands = page.commands
    with tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", _script(page)],
            cwd=home / "work",
            env={**env, "HOME": str(home), "RUNNER_HOME": str(home / ".local/state/runner")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"killed after {timeout:g} s")
        finally:
            with suppress(ProcessLookupError):  # what was started in the background ends with the page
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").replace(str(home), HOME)
    *ended, rest = re.split(rf"\n{_END} (\d+)\n", text)
    answers = [Answer(out, int(status)) for out, status in zip(ended[::2], ended[1::2], strict=True)]
    missing = [Answer(rest, None)] * (len(commands) - len(answers))
    return list(zip(commands, [*answers, *missing], strict=True))


def _script(page: Page) -> str:
    """Its commands, and before them the files that it shows."""
    parts = [f"ended() {{ local status=$?; printf '\\n{_END} %d\\n' $status; return $status; }}"]
    for fence in page.fences:
        if fence.file:
            parts.append(f"mkdir -p \"$(dirname '{fence.file}')\"")
            parts.append(f"cat > '{fence.file}' <<'{_END}'\n{fence.text}\n{_END}")
            parts += [f"chmod +x '{fence.file}'"] if fence.text.startswith("#!") else []
        if fence.language == "console":
            parts += [f"{command.text}\nended" for command in _commands(fence)]
    return "\n".join(parts)


def rewritten(page: Page, answers: Sequence[tuple[Command, Answer]]) -> str:
    """The text of the page with real outputs where they differ."""
    lines = page.text.splitlines()
    for command, answer in reversed(answers):
        if not answer.fits(command):
            typed = lines[command.first - 2]
            indent = typed[: len(typed) - len(typed.lstrip())]
            lines[command.first - 1 : command.last - 1] = [indent + line for line in answer.lines]
    return "\n".join(lines) + "\n"
