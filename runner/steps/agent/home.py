"""The agent's home directory before its CLI starts: that CLI's own files, and its skills where it looks for them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.core.settings import shipped
from runner.ports.agent import AgentSetup
from runner.ports.provider import Paths

_TRIAGE = "k8s-troubleshooter"  # the skill that the files in ``runners/context`` are about

# One command for all, and few programs: each that is started in a sandbox takes longer than what it does here.
_FURNISH = """
umask 077
folders=$3 files=$4 skills=$2 places=$5
cd -- "$1" && shift 5 && mkdir -p -- $folders || exit
while [ "$files" -gt 0 ]; do
    printf %s "$2" > "$1" || exit
    shift 2; files=$((files - 1))
done
[ $# -gt 0 ] || exit 0
for name; do set -- "$@" "$skills/$name"; shift; done
for place in $places; do ln -sfn -- "$@" "$place/" || exit; done
"""


def furnish(prepared: AgentSetup, paths: Paths, skills: Sequence[str]) -> Sequence[str]:
    """Return the command that furnishes the home directory; empty when there is nothing to do."""
    files = dict(prepared.files)
    if _TRIAGE in skills:
        files |= {place: _context(name, paths) for place, name in prepared.context.items()}
    if not files and not skills:
        return ()
    folders = {place.rpartition("/")[0] or "." for place in files}.union(prepared.skill_folders if skills else ())
    written = [word for pair in files.items() for word in pair]
    given = (paths.home, paths.skills, " ".join(sorted(folders)), str(len(files)), " ".join(prepared.skill_folders))
    return ("sh", "-c", _FURNISH, "sh", *given, *written, *skills)


def _context(name: str, paths: Paths) -> str:
    """A shipped file, with the places that it names as they are for these commands."""
    text = (shipped("runners") / "context" / name).read_text(encoding="utf-8")
    for documented, real in (("/skills", paths.skills), ("/output", paths.output), ("/workspace", paths.workspace)):
        text = text.replace(f"`{documented}", f"`{real}")
    return text
