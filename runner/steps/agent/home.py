"""The agent's home directory before its CLI starts: that CLI's own files, and its skills where it looks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.ports.agent import Preparation
from runner.ports.provider import Paths
from runner.settings import shipped

_TRIAGE = "k8s-troubleshooter"  # the skill that the files in ``runners/context`` are about

_WRITE = ("sh", "-c", 'umask 077; mkdir -p -- "${1%/*}" && cat > "$1"', "sh")
_LINK = """
home=$1 skills=$2; shift 2
for place in "$home/.claude/skills" "$home/.agents/skills"; do
    mkdir -p -- "$place" || exit
    for name; do ln -sfn -- "$skills/$name" "$place/$name" || exit; done
done
"""


def furnish(prepared: Preparation, paths: Paths, skills: Sequence[str]) -> Iterator[tuple[Sequence[str], bytes]]:
    """The commands that do it, each with its standard input."""
    files = dict(prepared.files)
    if _TRIAGE in skills:
        files |= {place: _context(name, paths) for place, name in prepared.context.items()}
    for name, content in files.items():
        yield (*_WRITE, f"{paths.home}/{name}"), content.encode()
    if skills:
        yield ("sh", "-c", _LINK, "sh", paths.home, paths.skills, *skills), b""


def _context(name: str, paths: Paths) -> str:
    """A shipped file, with the places that it names as they are for these commands."""
    text = (shipped("runners") / "context" / name).read_text(encoding="utf-8")
    for documented, real in (("/skills", paths.skills), ("/output", paths.output), ("/workspace", paths.workspace)):
        text = text.replace(f"`{documented}", f"`{real}")
    return text
