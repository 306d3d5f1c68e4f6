"""The agent's home directory before its CLI starts: that CLI's own files, and its skills where it looks for them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.ports.agent import Preparation
from runner.ports.provider import Paths
from runner.settings import shipped

_TRIAGE = "k8s-troubleshooter"  # the skill that the files in ``runners/context`` are about

# One command for all: each program that is started in a sandbox takes longer than what it does here.
_FURNISH = """
umask 077
home=$1 skills=$2 files=$3; shift 3
into() { [ -d "$1" ] || mkdir -p -- "$1"; }
while [ "$files" -gt 0 ]; do
    file=$home/$1
    into "${file%/*}" && printf %s "$2" > "$file" || exit
    shift 2; files=$((files - 1))
done
[ $# -gt 0 ] || exit 0
for place in "$home/.claude/skills" "$home/.agents/skills"; do
    into "$place" || exit
    for name; do ln -sfn -- "$skills/$name" "$place/$name" || exit; done
done
"""


def furnish(prepared: Preparation, paths: Paths, skills: Sequence[str]) -> Sequence[str]:
    """The command that does it; no words when there is nothing to do."""
    files = dict(prepared.files)
    if _TRIAGE in skills:
        files |= {place: _context(name, paths) for place, name in prepared.context.items()}
    if not files and not skills:
        return ()
    written = [word for pair in files.items() for word in pair]
    return ("sh", "-c", _FURNISH, "sh", paths.home, paths.skills, str(len(files)), *written, *skills)


def _context(name: str, paths: Paths) -> str:
    """A shipped file, with the places that it names as they are for these commands."""
    text = (shipped("runners") / "context" / name).read_text(encoding="utf-8")
    for documented, real in (("/skills", paths.skills), ("/output", paths.output), ("/workspace", paths.workspace)):
        text = text.replace(f"`{documented}", f"`{real}")
    return text
