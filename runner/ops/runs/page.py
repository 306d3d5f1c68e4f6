"""Contents of a run's page: read once from its directory and the incident, bounded, and without secrets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.artifacts.export import MAX_FILE_BYTES, list_files
from runner.artifacts.run_files import read_account
from runner.core.errors import HostileTree, UnknownCommit
from runner.core.model import Status
from runner.core.settings import Settings
from runner.events.events import with_texts
from runner.events.record import RunRecord
from runner.git import open_git
from runner.ops.runs.header import header_of
from runner.ops.runs.history import StoredRun
from runner.ops.runs.previous_attempt import commands_of, result_of
from runner.ops.runs.secret_values import make_redactor
from runner.ops.runs.step_output import StepOutput, translator_of
from runner.ops.runs.watch import planned
from runner.ops.triage.place import flags_of
from runner.report import progress, triage
from runner.report.html.excerpt import Excerpt, end_of, start_of
from runner.report.html.investigation import CitedLines
from runner.report.html.run import RunContents, StoredFile
from runner.report.triage import Header
from runner.safefs.safe_open import open_beneath
from runner.steps.verify.citations import Evidence
from runner.triage.references import Reference, fault_in, references

PAGE = "index.html"
_OUTPUT = (2_000, 256 << 10)  # lines and characters of what an agent says; of another step, less is ever returned
_PATCH = (5_000, 512 << 10)
_PATCH_LINE = 1 << 20  # bytes that are read as one
_COMMANDS = 500
_FILES = 500
_CITED = 200  # references whose lines are shown
_CITED_BYTES = 16 << 20  # of one file in a commit
_CITED_ROOM = 64 << 20  # characters of all files that are looked into
_LINES = 40  # of one
_AROUND = 2  # lines before and after
_WIDE = 500  # characters of a cited line


async def read_page(stored: StoredRun, settings: Settings, *, archived: bool = False) -> RunContents:
    """Read all that the page of a run shows; ``archived`` when it will lie in an archive, which has checksums."""
    return await trio.to_thread.run_sync(partial(_read, stored, settings, archived=archived))


def _read(stored: StoredRun, settings: Settings, *, archived: bool) -> RunContents:
    record, directory, plan = stored.record, stored.directory, planned(stored)
    header = replace(header_of(plan), flags=flags_of(plan, settings))
    result = result_of(record, header, directory)
    contents = RunContents(
        account=read_account(record, directory),
        result=result,
        actions=[*_actions(record, header)],
        printed={name: lines for name in record.steps if (lines := _printed(stored, name, header.agent)).lines},
        commands=[*islice(commands_of(header.agent, directory), _COMMANDS)],
        patch=_patch(record, directory),
        cited=[*_cited(result.report or "", _Sources(stored, header.incident, settings))],
        files=None if archived else [*_files(directory)],
    )
    return with_texts(contents, make_redactor(settings).text)


def _actions(record: RunRecord, header: Header) -> Iterator[tuple[str, str]]:
    if record.status is Status.RUNNING:
        yield "follow it", f"runner runs attach {record.id}"
        return
    if record.status is Status.LOST or record.left_behind:
        yield "save its work and clean up", f"runner recover {record.id}"
    if record.status is Status.LOST:
        return
    if header.incident is not None:
        yield from triage.actions(record, header, str(header.incident))
    else:
        yield from progress.actions(record)


def _printed(stored: StoredRun, step: str, agent: str) -> Excerpt:
    say = translator_of(agent) if stored.record.steps[step].kind == "agent" else None
    return end_of(StepOutput(stored.directory, step, say).end(), *_OUTPUT)


def _patch(record: RunRecord, directory: Path) -> Excerpt:
    if record.saved_work is None or record.saved_work.patch is None:
        return Excerpt()
    try:
        with open(open_beneath(directory, record.saved_work.patch), "rb") as file:
            lines = iter(partial(file.readline, _PATCH_LINE), b"")
            return start_of((line.decode(errors="replace").removesuffix("\n") for line in lines), *_PATCH)
    except FileNotFoundError:
        return Excerpt()


class _Sources:
    """The files that a report can cite, as they are now: of the incident, the output, and the commit of the run."""

    def __init__(self, stored: StoredRun, incident: Path | None, settings: Settings) -> None:
        record = stored.record
        seen = {"/output": stored.directory / "output"} | ({"/incident": incident} if incident is not None else {})
        self._evidence = Evidence(seen)
        self._git = open_git(settings)
        self._repository = stored.repository
        self._commit = record.snapshot.commit if record.snapshot is not None else record.base

    def texts(self, path: str) -> Iterator[str]:
        yield from (text for text in self._evidence.texts(path) if text is not None)
        name = path.removeprefix("/workspace/")
        if self._commit is None or name.startswith("/") or not self._repository.is_dir():
            return
        read = partial(self._git.read_file, self._repository, self._commit, name, limit=_CITED_BYTES)
        with suppress(HostileTree, UnknownCommit):  # it is no file that can be shown, or git has removed the commit
            content = trio.from_thread.run(read)
            yield from [content.decode(errors="replace")] if content is not None else []


def _cited(report: str, sources: _Sources) -> Iterator[CitedLines]:
    room = _CITED_ROOM
    for number, reference in enumerate(references(report)[:_CITED], start=1):
        for text in sources.texts(reference.path):
            room -= len(text)
            if room < 0:
                return
            if fault_in(reference, text) is None:
                yield _lines(reference, text, f"lines-{number}")
                break


def _lines(reference: Reference, text: str, id: str) -> CitedLines:
    lines = text.removesuffix("\n").split("\n")
    ranges = [range(first, last + 1) for first, last in reference.lines]
    cited = frozenset(islice(chain.from_iterable(ranges), _LINES))
    near = {number + by for number in cited for by in range(-_AROUND, _AROUND + 1)}
    return CitedLines(
        id=id,
        place=reference.text,
        lines=[(number, lines[number - 1][:_WIDE]) for number in sorted(near) if 1 <= number <= len(lines)],
        cited=cited,
        omitted=max(0, sum(map(len, ranges)) - _LINES),
    )


def _files(directory: Path) -> Iterator[StoredFile]:
    """Yield the regular files of a run's directory with their digests, but for the page itself."""
    sources, _ = list_files(directory)
    for name in sorted(sources.keys() - {PAGE}, key=os.fsencode)[:_FILES]:
        with sources[name]() as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest() if size <= MAX_FILE_BYTES else None  # type: ignore[arg-type]  # it has readinto
        yield StoredFile(name, size, digest)
