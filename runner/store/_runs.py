"""The rows of runs; find the one that a person means, or the one that has a key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from runner.core.errors import NotFoundError, RunExists, RunOver, UnknownRun
from runner.core.model import Status
from runner.core.sanitize import excerpt
from runner.events.events import RunStarted, RunSubmitted
from runner.ports.store import Cursor, RunRow, WorkspaceRow
from runner.store._database import Connection
from runner.store._rows import as_rows, storable, where

_COLUMNS = "id, name, status, exit_code, plan, created, ended, resumes, rehearsal, manifests, runner, project"
_NEWEST = "ORDER BY created DESC, id DESC"
ALL = (1 << 63) - 1  # rows
CANDIDATES = 8  # that an error lists

R = TypeVar("R", RunRow, WorkspaceRow)


def submit_run(connection: Connection, run: str, submitted: RunSubmitted, at: int, runner: str | None) -> None:
    """Make the row of a pending run. Raises ``RunExists`` when there is one."""
    query = (
        "INSERT INTO runs (id, name, status, plan, created, key, manifests, project, runner)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
    )
    manifests = submitted.manifests and storable(submitted.manifests)
    values = (manifests, storable(submitted.project), runner)
    if not connection.execute(
        query, (run, submitted.name, Status.PENDING, submitted.plan, at, submitted.key, *values)
    ).rowcount:
        raise run_exists_error(run, submitted)


def require_pending(connection: Connection, run: str) -> None:
    """Raise ``RunOver`` for a run that has begun, or never will; until this is written nobody begins it."""
    query = "UPDATE runs SET status = status WHERE id = ? AND status = ?"
    if not connection.execute(query, (run, Status.PENDING)).rowcount:
        raise not_pending_error(run)


def start_run(connection: Connection, run: str, started: RunStarted, at: int, runner: str | None) -> None:
    """Make the row of a run that begins, or change that of a pending one. Raises ``RunOver`` for one that has ended."""
    sources = started.resumes, started.rehearsal, started.manifests, started.project
    query = (
        "INSERT INTO runs (id, name, status, plan, created, key, resumes, rehearsal, manifests, project, runner)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE"
        " SET status = excluded.status, runner = excluded.runner WHERE runs.status = ?"
    )
    values = (run, started.name, Status.RUNNING, started.plan, at, started.key)
    changed = connection.execute(
        query, (*values, *(said and storable(said) for said in sources), runner, Status.PENDING)
    ).rowcount
    ended = "SELECT 1 FROM runs WHERE id = ? AND ended IS NOT NULL"
    if not changed and connection.execute(ended, (run,)).fetchone():
        raise not_pending_error(run)


def not_pending_error(run: str) -> RunOver:
    return RunOver(f"run `{run}` is not pending any more")


def read_runs(
    connection: Connection,
    *,
    status: str | None = None,
    exit_code: int | None = None,
    name: str | None = None,
    since: int | None = None,
    projects: Sequence[str] | None = None,
    before: Cursor | None = None,
    limit: int | None = None,
) -> list[RunRow]:
    clause, values = where(
        ("status = ?", None if status is None else (status,)),
        ("exit_code = ?", None if exit_code is None else (exit_code,)),
        ("glob(?, name)", None if name is None else (glob_of(name),)),
        ("created >= ?", None if since is None else (since,)),
        (f"project IN ({', '.join('?' * len(projects or ())) or 'NULL'})", projects),
        ("(created, id) < (?, ?)", before),
    )
    query = f"SELECT {_COLUMNS} FROM runs {clause} {_NEWEST} LIMIT ?"
    return list(as_rows(RunRow, connection.execute(query, (*values, ALL if limit is None else limit))))


def find_run(connection: Connection, text: str) -> RunRow:
    """Return the run whose id starts with ``text``, or the newest for ``last``. Raises ``UnknownRun``."""
    if text == "last" and (newest := read_runs(connection, limit=1)):
        return newest[0]
    found = find_by_prefix(connection, "runs", _COLUMNS, "created", text)
    return one_run(as_rows(RunRow, (values[:-1] for values in found)), count_of(found), text)


def find_by_prefix(connection: Connection, table: str, columns: str, age: str, text: str) -> list[tuple[Any, ...]]:
    """Read rows whose ids start with ``text``, as many as an error lists; the last column is the number of all."""
    query = (
        f"SELECT {columns}, count(*) OVER () FROM {table} WHERE id >= ?1 AND id < ?2"
        f" ORDER BY id = ?1 DESC, {age} DESC, id DESC LIMIT {CANDIDATES}"
    )
    first = storable(text)
    return connection.execute(query, (first, f"{first}\U0010ffff")).fetchall()


def count_of(found: Sequence[Sequence[Any]]) -> int:
    return int(found[0][-1]) if found else 0


def one_run(found: Iterable[RunRow], count: int, text: str) -> RunRow:
    """Return the run that ``text`` means; see ``only``. Raises ``UnknownRun``."""
    return only({f"{row.id} ({row.name})": row for row in found}, count, text, _RUN)


class Noun(Struct, frozen=True):
    """A kind of rows in messages, and the command that ``lists`` them."""

    word: str
    error: type[NotFoundError]
    lists: str


_RUN = Noun("run", UnknownRun, "runner runs list")


def only(found: Mapping[str, R], count: int, text: str, noun: Noun) -> R:
    """Return the row whose id is ``text``, or the only one whose id starts with it.

    ``found`` are the first of ``count`` such rows by what an error calls them, an equal id before the others.
    """
    word, error = noun.word, noun.error
    if not text:
        raise error(f"the id of the {word} is empty", hint="look at the variable that it comes from")
    if not found:
        raise error(f"there is no {word} `{excerpt(text)}`", hint=f"`{noun.lists}` shows all")
    first = next(iter(found.values()))
    if count == 1 or first.id == text:
        return first
    more = f", and {count - CANDIDATES} more" if count > CANDIDATES else ""
    hint = f"name one of: {', '.join([*found][:CANDIDATES])}{more}"
    raise error(f"`{excerpt(text)}` may be any of {count} {word}s", hint=hint)


def begin_with(rows: Iterable[R], text: str) -> list[R]:
    """Return the rows whose ids start with ``text``, an equal id before the others."""
    found = [row for row in rows if row.id.startswith(text)]
    return sorted(found, key=lambda row: row.id != text)


def glob_of(name: str) -> str:
    """Turn a name, in which only ``*`` stands for others, into a pattern that globs take."""
    return re.sub(r"[\[?]", r"[\g<0>]", name)


def run_exists_error(run: str, started: RunSubmitted | RunStarted) -> RunExists:
    return RunExists(f"run `{run}` has the name `{started.name}` and the key `{excerpt(started.key or '')}`", run=run)
