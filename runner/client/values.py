"""Values of runs, plans and projects as they are on the wire, in requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class Run(Struct, kw_only=True):
    """A run in a list. ``state`` is its status, ``timed-out``, or ``lost`` when nobody works on it any more.

    A `pending` one `waits` for something, if it is known for what.
    """

    id: str
    name: str
    project: str
    state: str
    exit_code: int | None
    plan: str
    created_at: Moment
    ended_at: Moment | None
    resumes: str | None
    waits: str | None = None


class Runs(Struct):
    """Runs, newest first. ``next`` is the cursor of those after them, ``null`` at the end."""

    runs: list[Run]
    next: str | None


class RunListing(Struct, kw_only=True):
    """A page of the list of runs."""

    state: (
        Literal["pending", "running", "succeeded", "failed", "skipped", "cancelled", "unknown", "lost", "timed-out"]
        | UnsetType
    ) = UNSET
    name: Annotated[str, Meta(description="With `*` for any characters.")] | UnsetType = UNSET
    project: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | UnsetType = UNSET


class Planned(Struct, kw_only=True, forbid_unknown_fields=True):
    """Runs to plan: of the server's manifests, or of those in the request."""

    run: Annotated[str, Meta(description="This one and those that it needs; default: all.")] | None = None
    task: Annotated[dict[str, Any], Meta(description="Fields of the task, over those in the manifest.")] = {}
    manifests: (
        Annotated[
            dict[str, str],
            Meta(description="Texts by file name, with what they name beside them; judged as those of a fork."),
        ]
        | None
    ) = None


class NewRuns(Planned, kw_only=True, forbid_unknown_fields=True):
    """Runs to start: of the server's manifests, of those in the request, or of a plan that was made before."""

    plan: Annotated[str, Meta(description="The `id` of a plan, which is carried out as it is.")] | None = None
    key: (
        Annotated[str, Meta(min_length=1, max_length=200, description="A second request with it starts nothing.")]
        | None
    ) = None


class StartedRun(Struct, kw_only=True):
    """A run that was started; ``attached`` if an earlier request with the same key had started it."""

    id: str
    name: str
    attached: bool


class StartedRuns(Struct):
    runs: list[StartedRun]


class Advice(Struct, kw_only=True):
    """Finding of manifests, or of what the server lacks; ``at`` is FILE:LINE:COLUMN."""

    code: str
    detail: str
    at: str | None
    hint: str | None


class Plan(Struct, kw_only=True):
    """A plan. ``id`` starts it, as long as nothing has changed; without one it lacks what is ``missing``."""

    id: str | None
    digest: str
    plan: Annotated[dict[str, Any], Meta(description="As `runner plan --output json` has it.")]
    warnings: list[Advice]
    missing: list[Advice]


class Form(Struct, kw_only=True):
    """The form of an answer."""

    format: Annotated[str, Meta(pattern="^(json|text|html)$", description="json, text or html.")] = "json"


class Artifact(Struct, kw_only=True):
    """A file that a run has left; ``name`` is its path."""

    name: str
    bytes: int


class Artifacts(Struct):
    artifacts: list[Artifact]


class Logs(Struct, kw_only=True):
    """Output of steps: of one ``step``, or of all."""

    step: str | UnsetType = UNSET


class Project(Struct, kw_only=True):
    """A project. ``manifest`` is the file that it comes from, if any, which alone changes it."""

    name: str
    root: str
    workspace_isolation: bool
    protected_paths: list[str]
    manifest: str | None
    updated_at: Moment


class Projects(Struct):
    projects: list[Project]
