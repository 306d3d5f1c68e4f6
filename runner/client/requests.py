"""Requests to a server as values, each with the type of its answer; sending them is the clients' affair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import UNSET, Struct

from runner.client.values import Artifacts, NewRuns, Plan, Planned, Projects, RunListing, Runs, StartedRuns

T = TypeVar("T")


class Ask(Struct, Generic[T], frozen=True, kw_only=True):
    """A request. ``answer`` is the type of its answer: a value, ``str``, ``bytes``, or ``None`` for nothing."""

    method: str
    path: str
    answer: type[T]
    body: object = None
    query: Mapping[str, object] = {}

    @property
    def target(self) -> str:
        given = urlencode(self.query)
        return f"/api/v1{self.path}" + (f"?{given}" if given else "")

    def read(self, content: bytes) -> T:
        """Return the value of an answer. Raises ``ValueError`` for one of another form."""
        answer: Any = self.answer
        if answer is bytes:
            return content  # type: ignore[return-value]  # it is T
        if answer is str:
            return content.decode(errors="replace")  # type: ignore[return-value]
        return msgspec.json.decode(content or b"null", type=answer)  # type: ignore[no-any-return]


def _query(value: Struct) -> dict[str, object]:
    return {name: given for name, given in msgspec.structs.asdict(value).items() if given is not UNSET}


def list_runs(wanted: RunListing) -> Ask[Runs]:
    return Ask(method="GET", path="/runs", query=_query(wanted), answer=Runs)


def start_runs(wanted: NewRuns) -> Ask[StartedRuns]:
    return Ask(method="POST", path="/runs", body=wanted, answer=StartedRuns)


def planned(wanted: NewRuns) -> Planned:
    """Return what is to be planned of runs that are to be started."""
    return Planned(run=wanted.run, task=wanted.task, manifests=wanted.manifests)


def make_plan(wanted: Planned) -> Ask[Plan]:
    """Ask for a plan, whose ``id`` starts it."""
    return Ask(method="POST", path="/plans", body=wanted, answer=Plan)


def show_plan(wanted: Planned, form: str) -> Ask[str]:
    """Ask for a plan as ``text`` or ``html``."""
    return Ask(method="POST", path="/plans", query={"format": form}, body=wanted, answer=str)


def get_record(run: str) -> Ask[dict[str, Any]]:
    return Ask(method="GET", path=f"/runs/{_part(run)}", answer=dict[str, Any])


def get_report(run: str) -> Ask[str]:
    return Ask(method="GET", path=f"/runs/{_part(run)}/report", answer=str)


def get_logs(run: str, step: str | None = None) -> Ask[str]:
    query = {} if step is None else {"step": step}
    return Ask(method="GET", path=f"/runs/{_part(run)}/logs", query=query, answer=str)


def cancel_run(run: str) -> Ask[None]:
    """End the work of a run; asked again, end its finalize phase too."""
    return Ask(method="POST", path=f"/runs/{_part(run)}/cancel", answer=type(None))


def list_artifacts(run: str) -> Ask[Artifacts]:
    return Ask(method="GET", path=f"/runs/{_part(run)}/artifacts", answer=Artifacts)


def get_artifact(run: str, name: str) -> Ask[bytes]:
    return Ask(method="GET", path=f"/runs/{_part(run)}/artifacts/{quote(name)}", answer=bytes)


def list_projects() -> Ask[Projects]:
    return Ask(method="GET", path="/projects", answer=Projects)


def _part(id: str) -> str:
    return quote(id, safe="")
