"""Faults that keep runs from being Jobs of a cluster: everything that is on this host only, all at once."""

from __future__ import annotations

from collections.abc import Iterator

from runner.cluster.clusters import workspace_place
from runner.core.errors import Place, Rejected, RunnerError, UnfitForJob
from runner.core.sanitize import excerpt
from runner.core.settings import Settings, without_secrets
from runner.ops.planning.files import incident_texts, texts_of
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_file import MAX_CARRIED
from runner.plan.model import RunPlan
from runner.spec.cluster import KEYS
from runner.spec.model import FromFile, FromKeyring
from runner.steps.clone.plan import CloneBody

PROVIDER = "kubernetes"


def job_faults(planned: PlanResult, settings: Settings) -> list[RunnerError]:
    """List what keeps the runs of a plan from being Jobs."""
    found = [*planned.missing, *settings_faults(settings)]
    texts = texts_of(planned.facts, *(run.name for run in planned.plan.runs))
    for run in planned.plan.runs:
        found += _of_places(run)
        found += _of_files(run, planned, texts, settings)
        found += _of_secrets(run, planned)
    return found


def check_server(settings: Settings) -> None:
    """Raise ``Rejected`` for what keeps every run of a server from being a Job."""
    if found := [*settings_faults(settings)]:
        raise Rejected(found)


def store_faults(settings: Settings) -> Iterator[RunnerError]:
    """Yield why the run of a plan on this host could not be seen from another one."""
    if settings.database_url is None or not settings.database_url.startswith("postgres"):
        message = f"store `{without_secrets(settings.database_url or settings.store_url)}` is seen by one host only"
        yield UnfitForJob(message, hint="name a PostgreSQL that hosts share in RUNNER_DATABASE_URL")
    if settings.artifacts is None:
        hint = "name one in RUNNER_ARTIFACTS, such as s3://BUCKET/PREFIX"
        yield UnfitForJob("no store of artifacts is named, and other hosts see nothing of a run's files", hint=hint)


def settings_faults(settings: Settings) -> Iterator[RunnerError]:
    """Yield what keeps every run from being a Job."""
    yield from store_faults(settings)
    if settings.artifacts is not None and settings.artifacts.startswith("file:"):
        message = f"a Job sees nothing of `{without_secrets(settings.artifacts)}`, a folder"
        yield UnfitForJob(message, hint="name a bucket in RUNNER_ARTIFACTS: s3://BUCKET/PREFIX")
    if settings.worker_image is None:
        hint = "name one that has `runner` on its PATH in RUNNER_WORKER_IMAGE"
        yield UnfitForJob("no image is named for the workers of Jobs", hint=hint)
    try:
        workspace_place(settings)
    except RunnerError as error:
        yield error


def _of_places(run: RunPlan) -> Iterator[RunnerError]:
    if others := [name for name in run.providers if name != PROVIDER]:
        message = f"run `{run.name}` may get its workspace from `{others[0]}`, and a Job can only make pods"
        yield UnfitForJob(message, hint=f"write `providers: [{PROVIDER}]`")
    clone = run.body(CloneBody)
    if clone is not None and clone.path is not None:
        message = f"run `{run.name}` takes its code from `{clone.path}`, which a Job does not see"
        yield UnfitForJob(message, hint="write `repo_source: {type: fixed, url: https://...}`")


def _of_files(run: RunPlan, planned: PlanResult, texts: dict[str, str], settings: Settings) -> Iterator[RunnerError]:
    """Yield the files and directories of this host that the run needs, but those that its plan brings along."""
    want, facts = planned.wanted[run.name], planned.facts.of(run.name)
    here = "is on this host, and a Job does not see it"
    if want.incident is not None:
        at = _place(run, planned, ("incident", "directory"), ("matrix", "incident"))
        files = facts.incident_files or {}
        carried = incident_texts(files, MAX_CARRIED)
        if left := [name for name, file in files.items() if file.sha256 not in carried]:
            hint = f"make it a text; all of them together may have {MAX_CARRIED >> 10} KiB, which a plan brings along"
            message = f"`{excerpt(left[0])}` of incident `{want.incident}` {here}"
            yield UnfitForJob(message, at=at, hint=hint)
    if want.cluster is not None and settings.worker_kubeconfig is None:
        message = f"kubeconfig `{want.cluster.kubeconfig}` of run `{run.name}` {here}"
        hint = "name a Secret that has it as `config` in RUNNER_WORKER_KUBECONFIG"
        yield UnfitForJob(message, at=_place(run, planned, KEYS), hint=hint)
    for path in (*want.toolchains, *want.dependencies):
        hint = "have it in the image of the workspace"
        yield UnfitForJob(f"`{path}`, which commands of run `{run.name}` see, {here}", hint=hint)
    for file in (facts.script, facts.agents_file):
        if file is not None and file.sha256 not in texts:
            hint = "make it a text of at most 64 KiB, which a plan brings along"
            yield UnfitForJob(f"`{file.path}` of run `{run.name}` {here}", hint=hint)
    for server in want.mcp_servers:
        if others := [name for name in server.providers if name != PROVIDER]:
            message = f"MCP server `{server.name}` of run `{run.name}` may run by `{others[0]}`, not in a pod"
            yield UnfitForJob(message, hint="write `provider: kubernetes` and an image in its manifest")


def _place(run: RunPlan, planned: PlanResult, *fields: tuple[str, ...]) -> Place | None:
    """Return the place in the run's manifest of the first of some fields that is written there."""
    document = planned.documents.get(f"IncidentRun {run.group}")
    found = (document.place(*keys) for keys in fields if document.wrote(*keys)) if document is not None else ()
    return next(iter(found), None)


def _of_secrets(run: RunPlan, planned: PlanResult) -> Iterator[RunnerError]:
    hint = "write `from: {env: NAME}`, with NAME in the Secret of RUNNER_WORKER_SECRET, or `from: {command: [...]}`"
    for secret in planned.secrets.get(run.name, ()):
        match secret.source:
            case FromFile(path):
                message = f"secret `{secret.name}` of run `{run.name}` is in `{path}`, which a Job does not see"
                yield UnfitForJob(message, at=secret.at, hint=hint)
            case FromKeyring():
                message = f"secret `{secret.name}` of run `{run.name}` is in a keyring, which a Job does not have"
                yield UnfitForJob(message, at=secret.at, hint=hint)
