"""The rows of runner processes, and of the runs that they take over."""

from __future__ import annotations

from runner.lifecycle.liveness import FORGET_AFTER
from runner.ports.store import RunnerRow
from runner.store._database import Connection
from runner.store._rows import as_rows

_COLUMNS = "id, host, boot, home, pid, ticks, started, heartbeat"


def read_runners(connection: Connection) -> list[RunnerRow]:
    return list(as_rows(RunnerRow, connection.execute(f"SELECT {_COLUMNS} FROM runners ORDER BY started, id")))


def write_runner(connection: Connection, runner: RunnerRow, at: int) -> None:
    """Record that a runner lives."""
    values = (runner.id, runner.host, runner.boot, runner.home, runner.pid, runner.ticks, at, at)
    connection.execute(
        f"INSERT INTO runners ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET heartbeat = excluded.heartbeat",
        values,
    )


def drop_runner(connection: Connection, id: str, at: int) -> None:
    """Remove a runner, and those of which nothing was heard for long."""
    connection.execute("DELETE FROM runners WHERE id = ? OR heartbeat < ?", (id, at - round(FORGET_AFTER * 1e6)))


def replace_runner(connection: Connection, run: str, before: str | None, runner: RunnerRow, at: int) -> bool:
    """Change the runner of a run in one statement, so that no other comes between."""
    write_runner(connection, runner, at)
    query = "UPDATE runs SET runner = ? WHERE id = ? AND coalesce(runner, '') = ?"
    return connection.execute(query, (runner.id, run, before or "")).rowcount == 1


def is_runner(connection: Connection, run: str, id: str) -> bool:
    """Tell whether a run has the runner with this id."""
    return connection.execute("SELECT 1 FROM runs WHERE id = ? AND runner = ?", (run, id)).fetchone() is not None
