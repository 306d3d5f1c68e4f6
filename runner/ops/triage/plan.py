"""Plan of a triage. Findings name the command line option instead of a line of the generated manifest."""

from __future__ import annotations

import os
import re
from pathlib import Path
from shutil import which

from runner.core.errors import (
    BadKubeconfig,
    ImageMissing,
    NotEnforced,
    ProviderUnavailable,
    Rejected,
    RunnerError,
    Unenforceable,
    UnknownContext,
    UsageError,
)
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.planning.agent_programs import install_hint, shows_host
from runner.ops.planning.make_plan import PlanResult, Request, make_plan
from runner.ops.triage.options import OF_INCIDENT
from runner.ops.triage.place import program_of
from runner.ops.triage.request import TriageRequest

DELEGATED = "systemd-run --user --scope -p Delegate=yes"
_FIELDS = {  # of the manifest, by the option that fills them
    "directory": "workspace", "model": "model", "cli_tools": "tools", "turns": "max_turns", "timeout": "timeout",
    "timeouts": "timeout", "providers": "provider", "base_image": "image", "memory": "memory", "cpu": "cpus",
    "toolchains": "toolchains", "kubeconfig": "kubeconfig", "context": "context", "namespace": "namespace",
}  # fmt: skip
_KEY = re.compile(r"([a-z_]+):(?: |$)")


async def plan_triage(triage: TriageRequest, manifest: Path, settings: Settings) -> PlanResult:
    """Plan a generated manifest. Raises ``Rejected``, and ``UsageError`` when this host lacks the agent's program."""
    try:
        place = str(triage.output_dir) if triage.output_dir is not None else None
        planned = await make_plan(manifest, settings, Request(output_dir=place, output_file=triage.output_file))
    except Rejected as error:
        asked = [one for one in error.findings if triage.memory is not None or not _is_memory_limit(one)]
        for finding in error.findings:
            _name_option(finding, triage)
        raise Rejected(asked or error.findings) from error
    for warning in planned.warnings:
        _name_option(warning, triage)
    if shows_host(triage.providers[0]) and program_of(triage) is None:
        raise UsageError(f"`{excerpt(triage.agent)}` is not on this host", hint=install_hint(triage.agent))
    return planned


def _is_memory_limit(finding: RunnerError) -> bool:
    return isinstance(finding, Unenforceable) and _option_at(finding) == "memory"


def _name_option(finding: RunnerError, triage: TriageRequest) -> None:
    """Report a finding against the command line option, with the hint that helps there."""
    option = _option_at(finding)
    if option is not None:
        finding.message, finding.at = f"{triage.given_as.get(option, option)}: {finding.message}", None
    if isinstance(finding, ImageMissing):
        get = "runner image build" if triage.has_own_image else finding.hint
        finding.hint = f"{get}, or --provider local with the CLIs of this host"
    elif isinstance(finding, ProviderUnavailable) and not shows_host(triage.providers[0]):
        finding.hint = f"{finding.hint or 'see `runner doctor`'}; or --provider local with the CLIs of this host"
    elif isinstance(finding, NotEnforced) and option == "memory" and triage.memory is None:
        finding.message = f"memory is not limited here: {finding.message.rpartition(': ')[2]}"
    elif isinstance(finding, Unenforceable) and option in ("memory", "cpus") and _can_delegate():
        finding.hint = f"start it where systemd lets you limit it: {DELEGATED} runner triage ..."
    elif isinstance(finding, UnknownContext) and triage.given_as.get(option or "") == OF_INCIDENT:
        finding.hint = f"choose one with --context NAME; {finding.hint}"
    elif isinstance(finding, BadKubeconfig) and triage.given_as.get("kubeconfig", "-").isupper():
        finding.hint = f"unset {triage.given_as['kubeconfig']}, or name another with --kubeconfig"


def _can_delegate() -> bool:
    """Tell whether systemd could give this ordinary user a cgroup in which limits can be set."""
    return (
        os.geteuid() != 0 and os.path.exists("/sys/fs/cgroup/cgroup.controllers") and which("systemd-run") is not None
    )


def _option_at(finding: RunnerError) -> str | None:
    """Find the option that filled the field at which the finding is."""
    if finding.at is None:
        return None
    start = finding.at.column - 1
    itself = _KEY.match(finding.at.text, start)
    keys = [itself[1]] if itself else _KEY.findall(finding.at.text[:start])
    return _FIELDS.get(keys[-1]) if keys else None
