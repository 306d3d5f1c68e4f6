"""See ``plan``. Missing context is a warning, not a failure: an agent that knows less is better than none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import trio

from runner.core.errors import BaselineFailed, ContextLarge, FewRights, PreloadMissing, RightsDiffer, WorkspaceLost
from runner.core.ids import is_name
from runner.core.model import Outcome, succeeded
from runner.core.sanitize import excerpt
from runner.events import events as ev
from runner.ports.cluster import ClusterSession
from runner.ports.provider import Workspace
from runner.runtime.cluster import open_cluster
from runner.runtime.context import RunContext, read_input
from runner.runtime.exec import open_logs, run_command
from runner.spec.model import ContextFile
from runner.spec.preload import FILES, SKILL
from runner.steps.preload.plan import PreloadBody
from runner.triage.baseline import MAX_BYTES, cleaned, headline
from runner.triage.budget import LARGE, sizes
from runner.triage.incident import incident_text, read_incident
from runner.triage.permissions import (
    Permissions,
    both_texts,
    differences,
    permissions_of,
    permissions_text,
    read_permissions,
)
from runner.triage.prompt import preloaded

STEP = "preload"
REPORT = "triage/baseline.txt"  # in the output directory: all that the script printed, as text

_OBJECT = re.compile(r"[A-Za-z]+/[a-z0-9][-a-z0-9.]*")  # what the script takes for a resource
_WRITE = ("sh", "-c", 'mkdir -p -- "${1%/*}" && cat > "$1"', "sh")
_ERROR = 300  # characters of the last line of what a script complains about


async def perform(body: PreloadBody, run: RunContext) -> Outcome:
    files, found = dict(body.files), dict[str, str]()
    whole = ""
    if (file := files.get("incident")) is not None:
        found["incident"] = incident_text(read_incident(await _content(file)))
    if body.asks:
        workspace = await run.open(body.mount_plan)
        async with open_cluster(run, workspace, STEP, body.cluster) as session:
            assert session is not None  # there is a cluster
            if "permissions" in body.parts:
                probed, text = await _probed(run, workspace, session)
                if (file := files.get("permissions")) is not None:
                    text = await _with_stated(run, probed, text, await _content(file))
                found["permissions"] = text
            if "baseline" in body.parts:
                text, whole = await _baseline(body, run, workspace)
                found |= {"baseline": text} if text else {}
    elif (file := files.get("permissions")) is not None:
        found["permissions"] = await _stated(run, await _content(file))
    for part in body.parts:
        if part not in found and not (part == "baseline" and body.asks):
            lacking = f"there is no `{FILES[part]}` to send" if part in FILES else "there is no cluster to take it from"
            await _warn(run, PreloadMissing.code, f"`{part}` is not in the prompt: {lacking}")
    return await _assemble(found, whole, run)


async def _assemble(found: Mapping[str, str], whole: str, run: RunContext) -> Outcome:
    context = preloaded(found, boundary=run.deps.random_hex(16), whole=whole)
    run.results.context = context.text.encode()
    total = sum(context.parts.values())
    about = headline(found["baseline"]) if "baseline" in found else ""
    run.events.pending.append(
        ev.ContextPreloaded(step=STEP, parts=dict(context.parts), tokens=total, cut=context.cut, headline=about)
    )
    if context.whole_tokens > LARGE:
        cut = f"; the last {context.cut:,} characters of the baseline were left out" if context.cut else ""
        message = f"the context comes to {context.whole_tokens:,} tokens (estimated), more than {LARGE:,}{cut}"
        await _warn(run, ContextLarge.code, message)
    return succeeded(sizes(context.parts))


async def _content(file: ContextFile) -> bytes:
    return await trio.to_thread.run_sync(read_input, file)


async def _warn(run: RunContext, code: str, message: str) -> None:
    await run.emit(ev.WarningIssued(code, message, STEP))


async def _stated(run: RunContext, content: bytes) -> str:
    """The rights as somebody wrote them down; what is not in their form is passed on as it is."""
    try:
        permissions, document = read_permissions(content)
    except ValueError as error:
        await _warn(run, FewRights.code, f"{error}; it is in the prompt as plain text")
        return cleaned(content)
    for complaint in permissions.complaints():
        await _warn(run, FewRights.code, complaint)
    return permissions_text(document)


async def _with_stated(run: RunContext, probed: Permissions, text: str, content: bytes) -> str:
    """Both the rights that were probed, as ``text``, and those that somebody wrote down; where they differ is told."""
    try:
        stated, document = read_permissions(content)
    except ValueError as error:
        await _warn(run, FewRights.code, f"{error}; it is in the prompt as plain text")
        return both_texts(text, cleaned(content), ())
    differing = differences(stated, document, probed)
    if differing:
        message = f"{FILES['permissions']} differs from what the cluster answers, which holds: {'; '.join(differing)}"
        await _warn(run, RightsDiffer.code, message)
    return both_texts(text, permissions_text(document), differing)


async def _probed(run: RunContext, workspace: Workspace, session: ClusterSession) -> tuple[Permissions, str]:
    """The rights as the cluster says that they are now, kept with the output too."""
    rights = await session.permissions()
    now = datetime.fromtimestamp(run.deps.now() // 1_000_000, UTC)
    document = rights.document(now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    permissions = permissions_of(document)
    for complaint in permissions.complaints():
        await _warn(run, FewRights.code, complaint)
    text = permissions_text(document)
    await workspace.run((*_WRITE, f"{workspace.paths.output}/{FILES['permissions']}"), stdin=f"{text}\n".encode())
    return permissions, text


async def _baseline(body: PreloadBody, run: RunContext, workspace: Workspace) -> tuple[str, str]:
    """Run the skill's script on the cluster. Returns its output, and where that is kept for the agent.

    Of a script that fails or is stopped it is the output so far.
    """
    argv = (
        f"{workspace.paths.skills}/{SKILL}/scripts/incident_triage.sh",
        *_options(body, run.plan.values.get("incident")),
    )
    if body.namespace is not None and not is_name(body.namespace):
        message = f"`{excerpt(body.namespace)}` is not a namespace, so the triage script gets none"
        await _warn(run, BaselineFailed.code, message)
    output, error, end = await _printed(body, run, workspace, argv)
    text = cleaned(output)
    if not text and end is None:
        end = "printed nothing"
    if end is not None:
        said = f": {error}" if error else ""
        rest = "; what it had printed is in the prompt" if text else "; the prompt is without a baseline"
        await _warn(run, BaselineFailed.code, f"the triage script {end}{said}{rest}")
        text = f"[runner: the script {end}; this is what it had printed]\n{text}" if text else ""
    if not text or end == _LOST:
        return text, "the logs of this run"
    place = f"{workspace.paths.output}/{REPORT}"
    await workspace.run((*_WRITE, place), stdin=f"{text}\n".encode())
    return text, place


_LOST = "was ended with its sandbox"


async def _printed(
    body: PreloadBody, run: RunContext, workspace: Workspace, argv: tuple[str, ...]
) -> tuple[bytes, str, str | None]:
    """Return a command's output, its last complaint, and how it ended, if not well."""
    end: str | None = None
    logs = run.paths.logs / f"{STEP}.stdout", run.paths.logs / f"{STEP}.stderr"
    before = [path.stat().st_size if path.exists() else 0 for path in logs]  # of another provider's turn
    with open_logs(run.paths.logs, STEP, limit=max(before) + MAX_BYTES) as opened:
        try:
            env = run.variables(workspace.paths)
            try:
                exit = await run_command(run, workspace, argv, opened, env=env, seconds=body.baseline_seconds)
            except trio.TooSlowError:
                end = f"was stopped after {body.baseline_seconds:g}s"
            else:
                end = None if exit.ok else str(exit)
        except* WorkspaceLost:
            end = _LOST
    output, complaints = (path.read_bytes()[start:] for path, start in zip(logs, before, strict=True))
    last = next(iter(reversed(cleaned(complaints).split("\n"))), "")
    return output, last[:_ERROR], end


def _options(body: PreloadBody, incident: object) -> list[str]:
    """A little less time than the script has, and the namespace and resource when those are names."""
    options = [f"--timeout={max(int(body.baseline_seconds * 0.8), 1)}s"]
    if body.namespace is not None and is_name(body.namespace):
        options.append(f"--namespace={body.namespace}")
    resource = incident.get("resource") if isinstance(incident, Mapping) else None
    if isinstance(resource, Mapping):
        name = f"{resource.get('kind')}/{resource.get('name')}"
        options += [f"--resource={name}"] if _OBJECT.fullmatch(name) else []
    return options
