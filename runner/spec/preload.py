"""Preloaded context: the incident's files that go into the agent's prompt, and faults in asking for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.core.errors import BadValue, PreloadMissing, RunnerError
from runner.spec.model import ContextFile
from runner.spec.select import Selected

SKILL = "k8s-troubleshooter"  # whose script takes the baseline
FILES: Mapping[str, str] = {"incident": "incident.json", "permissions": "incident_cluster_permissions.json"}
MAX_FILE = 1 << 20  # bytes of a file: it is never cut, and what is larger fits no model


def preload_faults(
    selected: Selected, files: Mapping[str, ContextFile] | None, *, cluster: bool
) -> Iterator[RunnerError]:
    """List what cannot be preloaded as errors, and what is empty as warnings.

    ``files`` are the incident's, ``None`` with ``--offline``; ``cluster`` tells whether the run names one.
    """
    run, parts = selected.run, selected.spec.context.preload
    if parts and selected.incident is None:
        message = "there is no incident to put into the prompt"
        hint = "write `incident: {directory: DIRECTORY}`, or leave `context` out"
        yield BadValue(message, at=run.place("context", "preload"), hint=hint)
        return
    for position, part in enumerate(parts):
        at = run.place("context", "preload", position)
        if part == "baseline":
            if SKILL not in selected.agent.skills:
                message = f"agent type `{selected.agent_type.name}` has no skill `{SKILL}`, which collects the baseline"
                yield BadValue(message, at=at, hint=f"write `skills: [{SKILL}]` there, or leave `baseline` out")
            elif not cluster:
                hint = "write `incident.kubeconfig`, or leave `baseline` out"
                yield PreloadMissing("without a cluster there is no baseline", at=at, hint=hint)
            continue
        if files is None or (part == "permissions" and cluster):
            continue
        file = files.get(FILES[part])
        if file is None:
            message = f"the incident has no `{FILES[part]}`, so `{part}` will not be in the prompt"
            yield PreloadMissing(message, at=at, hint=f"write the file, or leave `{part}` out")
        elif file.size > MAX_FILE:
            message = f"`{FILES[part]}` is larger than {MAX_FILE >> 20} MiB, and it would be sent whole"
            kind = BadValue if part == "incident" else PreloadMissing
            yield kind(message, at=at, hint=f"make it smaller, or leave `{part}` out")


def namespace_of(selected: Selected, incident: Mapping[str, object]) -> str | None:
    """Return the incident's namespace; the manifest's comes before the incident's own."""
    written = selected.spec.incident.namespace if selected.spec.incident is not None else None
    told = incident.get("namespace") if written is None else written
    return told if isinstance(told, str) else None
