"""Compare the citations of an incident's report with the evidence: lines of files with the files that the agent saw,
and commands with its transcript.

A missing line fails the check. A command that did not run is a warning: the same can be asked for in many words.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import trio

from runner.core.errors import ClaimNotRun
from runner.core.model import Check, CheckKind, CommandStatus, Exit
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.ports.agent import AgentResult, ModelAgent
from runner.runtime.context import RunContext
from runner.safefs.safe_open import read_beneath
from runner.steps.agent.plan import AgentBody
from runner.triage.references import Reference, claimed, fault, not_run, references

_LARGEST = 16 << 20  # bytes of a file that is read
_MOST = 10_000  # files that are found by their names alone
_NAMED = 5  # references that are wrong and named
_WIDEST = 600  # characters of what is found
_AS_SEEN = {"/incident": "incident", "/output": "output", "/skills": "skills"}


async def check_citations(path: str, run: RunContext) -> list[Check]:
    """The check of a report's references, if it has any; a claimed command that did not run is warned of."""
    _, handle = run.workspace.require()
    roots = {seen: handle.private / name for seen, name in _AS_SEEN.items()}
    evidence = Evidence(roots | {"/workspace": handle.tree})
    (report,) = evidence.texts(f"/output/{path}") or [None]
    if report is None:
        return []  # which has failed a check already
    await _tell_claims(report, evidence, run)
    cited = references(report)
    if not cited:
        return []
    wrong = await trio.to_thread.run_sync(evidence.faults, cited)
    found = f"{len(cited)} hold"
    if wrong:
        found = f"{len(wrong)} of {len(cited)} are wrong: {'; '.join(wrong[:_NAMED])}"
        found += f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return [Check(kind=CheckKind.REFERENCE, what="report references", ok=not wrong, found=sanitize(found, _WIDEST))]


async def _tell_claims(report: str, evidence: Evidence, run: RunContext) -> None:
    bodies = (step.body for step in run.plan.steps)
    agent = next((run.deps.agent(body.agent) for body in bodies if isinstance(body, AgentBody)), None)
    out, err = (run.paths.logs / f"agent.{stream}" for stream in ("stdout", "stderr"))
    claims = claimed(report)
    if not claims or not isinstance(agent, ModelAgent) or not out.exists():
        return
    commands = await trio.to_thread.run_sync(agent.commands, AgentResult(Exit(), out, err))
    shown = evidence.texts("/output/triage/baseline.txt")
    ran = [command.text for command in commands if command.status is not CommandStatus.DENIED]
    missing = not_run(claims, ran, (shown or [""])[0] or "")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"the report claims a command that its agent did not run: `{missing[0]}`{more}"
        await run.emit(ev.WarningIssued(ClaimNotRun.code, sanitize(text, _WIDEST), "verify"))


class Evidence:
    """The files that an agent saw, as they are now: ``roots`` maps the directories as it saw them to those of this
    host. Blocking.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = roots

    def faults(self, cited: list[Reference]) -> list[str]:
        folders = {name.split("/")[0] for names in self._by_name.values() for _, name in names if "/" in name}
        found = ((reference, fault(reference, self.texts, folders)) for reference in cited)
        return [f"`{reference.text}`: {why}" for reference, why in found if why is not None]

    def texts(self, path: str) -> list[str | None]:
        """The texts of the files that a path can mean; ``None`` of one that is too large."""
        texts: list[str | None] = []
        for root, name in self._candidates(path):
            try:
                texts.append(read_beneath(root, name, _LARGEST).decode(errors="replace"))
            except OSError as error:
                texts += [None] if error.errno == errno.EFBIG else []
        return texts

    def _candidates(self, path: str) -> list[tuple[Path, str]]:
        for seen, root in self._roots.items():
            if path.startswith(f"{seen}/"):
                return [(root, path.removeprefix(f"{seen}/"))]
        if path.startswith("/"):
            return []
        below = [(root, path) for root in self._roots.values() if os.path.lexists(root / path)]
        return below or [(root, name) for root, name in self._by_name[path] if "/" not in path]

    @cached_property
    def _by_name(self) -> defaultdict[str, list[tuple[Path, str]]]:
        """Files of the incident and the output by their names, for an agent may have gone into their directory."""
        found: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)
        left = _MOST
        for root in (self._roots[seen] for seen in ("/incident", "/output") if seen in self._roots):
            for folder, _, names in os.walk(root):
                for name in names[: max(left, 0)]:
                    found[name].append((root, os.path.relpath(os.path.join(folder, name), root)))
                left -= len(names)
        return found
