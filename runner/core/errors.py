"""All error classes of the product.

A class owns its stable ``code`` (``room.kebab-case``, never reused, never reworded), its process ``exit_code`` and its
``http_status``. Loading and compiling *collect* instances; running *raises* them. Warnings are the same values with
``severity = "warning"``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple

from runner.core.plural import plural
from runner.core.sanitize import excerpt


class Place(NamedTuple):
    """The position of a value: 1-based line and column, ``width`` columns long, ``text`` its source line."""

    file: str
    line: int
    column: int
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class RunnerError(Exception):
    """An error that a user can act on. ``message`` is one sentence without a full stop, values in backticks.

    ``of_host``: this host lacks something that another host may have, so a plan is possible all the same.
    """

    code: ClassVar[str] = "bug.unclassified"
    exit_code: int = 70
    http_status: ClassVar[int] = 500
    of_host: ClassVar[bool] = False
    severity: Literal["error", "warning"] = "error"

    def __init__(
        self,
        message: str,
        *,
        at: Place | None = None,
        hint: str | None = None,
        also: tuple[Place, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.at = at
        self.hint = hint
        self.also = also  # further places the message speaks of, such as the first of two equal keys

    def harden(self) -> None:
        """Make a warning an error of bad input."""
        if self.severity == "warning":
            self.severity, self.exit_code = "error", InputError.exit_code


class Rejected(RunnerError):
    """Several findings reported together; nothing was started. Its exit code is the gravest of theirs."""

    code = "manifest.rejected"
    http_status = 400

    def __init__(self, findings: Iterable[RunnerError]) -> None:
        self.findings = tuple(findings)
        errors = [f for f in self.findings if f.severity == "error"]
        super().__init__(plural(len(errors), "error"))
        # A policy breach (3) is said only when the input is otherwise sound (2).
        self.exit_code = min((e.exit_code for e in errors), default=2)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint for a word that is not among ``choices``: the nearest one, else all of them."""
    from difflib import get_close_matches

    known = sorted(choices)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"valid choices: {', '.join(known)}" if known else "there are none here"


def first_leaf(error: BaseException) -> BaseException:
    """The first of what nurseries have wrapped into groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def distinct(findings: Iterable[RunnerError]) -> list[RunnerError]:
    """Drop findings that repeat another's code, place and message, as of a document that several runs use."""
    return list({(finding.code, finding.at, finding.message): finding for finding in findings}.values())


def in_order(findings: Iterable[RunnerError]) -> list[RunnerError]:
    """Sort findings by file, line and column; those without a place come first."""

    def key(finding: RunnerError) -> tuple[str, int, int]:
        return (finding.at.file, finding.at.line, finding.at.column) if finding.at else ("", 0, 0)

    return sorted(findings, key=key)


# --- families ------------------------------------------------------------------------------------


class InputError(RunnerError):
    exit_code, http_status = 2, 400


class PolicyError(RunnerError):
    exit_code, http_status = 3, 403


class PlatformError(RunnerError):
    """A failure of the platform. ``passes``: the same call may succeed a little later."""

    exit_code, http_status = 4, 503
    passes: ClassVar[bool] = False


class LeaseError(RunnerError):
    exit_code, http_status = 5, 409


class NotFoundError(RunnerError):
    exit_code, http_status = 6, 404


class DamagedError(RunnerError):
    exit_code, http_status = 7, 500


class Advice(RunnerError):
    """A finding that stops nothing; it appears in plan, console and record."""

    exit_code, http_status = 0, 200
    severity = "warning"


# --- command line ----------------------------------------------------------------------------------


class UsageError(InputError):
    code = "cli.usage"


class NotLinux(InputError):
    code = "host.not-linux"


class FileExists(InputError):
    code = "init.exists"


class FileNotWritten(InputError):
    code = "init.not-written"


class ReportNotWritten(InputError):
    code = "report.not-written"


# --- manifests -------------------------------------------------------------------------------------


class UnreadableManifest(InputError):
    code = "manifest.unreadable"


class BadEncoding(InputError):
    code = "manifest.encoding"


class BadSyntax(InputError):
    code = "manifest.syntax"


class DuplicateKey(InputError):
    code = "manifest.duplicate-key"


class CustomTag(InputError):
    code = "manifest.tag"


class OverBudget(InputError):
    code = "manifest.too-large"


class UnknownVersion(InputError):
    code = "manifest.api-version"


class RequiresRunner(InputError):
    code = "manifest.requires-runner"


class UnknownKind(InputError):
    code = "manifest.unknown-kind"


class UnknownField(InputError):
    code = "manifest.unknown-field"


class MissingField(InputError):
    code = "manifest.missing-field"


class BadValue(InputError):
    code = "manifest.bad-value"


class BadName(InputError):
    code = "manifest.name"


class DuplicateName(InputError):
    code = "manifest.duplicate-name"


class NotConvertible(InputError):
    code = "manifest.not-convertible"


class UnwritableManifest(InputError):
    code = "manifest.unwritable"


class EmptyManifest(Advice):
    code = "manifest.empty"


class NothingToRun(InputError):
    code = "manifest.nothing-to-run"


class UnknownReference(InputError):
    code = "manifest.unknown-reference"


class BadTemplate(InputError):
    code = "manifest.template"


class PathEscape(PolicyError):
    code = "manifest.path-escape"


# --- plan and compile ------------------------------------------------------------------------------


class Cycle(InputError):
    code = "plan.cycle"


class Unenforceable(InputError):
    code = "plan.unenforceable"


class WorkspaceDisabled(InputError):
    code = "plan.workspace-disabled"


class StalePlan(InputError):
    code = "plan.stale"


class InputChanged(InputError):
    code = "plan.input-changed"


class OpenPlan(InputError):
    code = "plan.open"


class OverCost(InputError):
    code = "plan.over-cost"


class BadPlanFile(InputError):
    code = "plan.unreadable"


class NotEnforced(Advice):
    code = "plan.not-enforced"


class Attached(Advice):
    code = "run.attached"


class NotTold(Advice):
    code = "run.not-told"


class NotResumable(InputError):
    code = "run.not-resumable"


class WorkMissing(DamagedError):
    code = "run.work-missing"


class RunElsewhere(LeaseError):
    code = "run.elsewhere"


class DefaultsDropped(Advice):
    code = "policy.defaults-dropped"


class NetworkIgnored(Advice):
    code = "policy.network-ignored"


class ProtectedIgnored(Advice):
    code = "policy.protected-ignored"


# --- policy ----------------------------------------------------------------------------------------


class ProviderForbidden(PolicyError):
    code = "policy.provider"


class NetworkForbidden(PolicyError):
    code = "policy.network"


class SecretForbidden(PolicyError):
    code = "policy.secret"


class IsolationTooWeak(PolicyError):
    code = "policy.isolation"


class ProtectedLink(PolicyError):
    code = "policy.protected-link"


class Untrusted(PolicyError):
    code = "policy.untrusted"


# --- providers -------------------------------------------------------------------------------------


class UnknownPlugin(InputError):
    code = "plugin.unknown"


class PluginBroken(PlatformError):
    code = "plugin.broken"


class ProviderUnavailable(PlatformError):
    code = "provider.unavailable"
    of_host = True


class ProviderFailed(PlatformError):
    code = "provider.failed"


class ProviderBusy(ProviderFailed):
    code = "provider.busy"
    passes = True


class VolumeFailed(ProviderFailed):
    """The cluster gives a workspace no volume that limits its disk as planned."""

    code = "provider.volume"


class ImageMissing(PlatformError):
    code = "provider.image-missing"
    of_host = True


class RegistryDenied(ImageMissing):
    code = "provider.registry-denied"


class RegistryUnreachable(ImageMissing):
    code = "provider.registry-unreachable"
    passes = True


class CredentialHelperFailed(PlatformError):
    code = "provider.credential-helper"
    of_host = True


class PullFailed(ProviderFailed):
    code = "provider.pull-failed"


class ToolchainMissing(InputError):
    code = "provider.toolchain-missing"
    of_host = True


class BaseImageMissing(PlatformError):
    code = "image.base-missing"


class MirrorUnreachable(PlatformError):
    code = "image.mirror-unreachable"


class ImageBuildFailed(PlatformError):
    code = "image.build-failed"


class ContextNotWritten(InputError):
    code = "image.not-written"


class WorkspaceLost(PlatformError):
    code = "provider.workspace-lost"


class OutOfMemory(WorkspaceLost):
    """The kernel killed a whole sandbox that had run out of memory."""

    code = "provider.out-of-memory"


class IsolationMismatch(PlatformError):
    code = "provider.isolation-mismatch"


class Escaped(PlatformError):
    code = "provider.escaped"


# Paths that may not be followed or are too long, and what there is no more of: no fault of the code that asks.
_REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EIO),
}


class HostRefused(PlatformError):
    code = "host.refused"

    @classmethod
    def of(cls, error: OSError) -> HostRefused:
        """Wrap an error of this host, such as a full disk."""
        where = f": `{excerpt(os.fsdecode(error.filename), 200)}`" if isinstance(error.filename, str | bytes) else ""
        hint = "raise the limit: `ulimit -n 1024`" if error.errno == errno.EMFILE else None
        return cls(f"{error.strerror}{where}", hint=hint)

    @classmethod
    def in_any(cls, error: BaseException) -> HostRefused | None:
        """Wrap an error of this host, also out of a group; ``None`` for any other error."""
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            return cls.of(error)
        return next((found for one in inner if (found := cls.in_any(one))), None)


class CleanUpIncomplete(PlatformError):
    code = "provider.clean-up"
    passes = True


# --- git -------------------------------------------------------------------------------------------


class BadSource(InputError):
    code = "git.source"


class BadRef(InputError):
    code = "git.ref"


class UrlUnsupported(InputError):
    code = "git.url-unsupported"


class BadUrl(InputError):
    code = "git.url"


class RemoteRedirects(InputError):
    code = "git.redirect"


class RemoteDenied(PlatformError):
    code = "git.denied"


class RemoteUnreachable(PlatformError):
    code = "git.unreachable"
    passes = True


class RemoteOverLimit(LeaseError):
    code, http_status = "git.over-limit", 429


class NoRepository(NotFoundError):
    code = "git.no-repository"


class UnknownCommit(NotFoundError):
    code = "git.unknown-commit"


class HostileTree(PolicyError):
    code = "git.hostile-tree"


class CheckoutDiffers(PlatformError):
    code = "git.checkout-differs"


class GitFailed(PlatformError):
    code = "git.failed"


class GitMissing(PlatformError):
    code = "git.missing"


# --- delivery --------------------------------------------------------------------------------------


class NothingPublished(NotFoundError):
    code = "deliver.nothing-published"


class Withheld(PolicyError):
    code = "deliver.withheld"


class Unverified(PolicyError):
    code = "deliver.unverified"


class PatchChanged(DamagedError):
    code = "deliver.patch-changed"


class CommitsDiffer(InputError):
    code = "deliver.commits-differ"


class BranchTaken(InputError):
    code = "deliver.branch-taken"


class BaseMissing(InputError):
    code = "deliver.base-missing"


class PatchConflict(InputError):
    code = "deliver.conflict"


class WouldOverwrite(InputError):
    code = "deliver.would-overwrite"


class UnsafePath(PolicyError):
    code = "deliver.unsafe-path"


class ApplyInterrupted(LeaseError):
    code = "deliver.interrupted"


class BadRemote(InputError):
    code = "deliver.remote"


class DefaultBranch(PolicyError):
    code = "deliver.default-branch"


class PushRejected(PolicyError):
    code = "deliver.rejected"


class PushTimedOut(PlatformError):
    code = "deliver.timeout"
    exit_code = 124


class TargetExists(InputError):
    code = "deliver.exists"


# --- agents ----------------------------------------------------------------------------------------


class SubRunnerContract(PlatformError):
    code = "agent.sub-runner"


class KeyInside(Advice):
    code = "agent.key-inside"


class NoWriter(Advice):
    code = "agent.no-writer"


class CliMissing(PlatformError):
    code = "agent.cli-missing"


# --- models ----------------------------------------------------------------------------------------


class KeyMissing(InputError):
    code = "gateway.key-missing"


class Unpriced(InputError):
    code = "gateway.unpriced"


# --- triage ----------------------------------------------------------------------------------------


class PreloadMissing(Advice):
    code = "triage.preload-missing"


class ContextLarge(Advice):
    code = "triage.context-large"


class BaselineFailed(Advice):
    code = "triage.baseline"


class FewRights(Advice):
    code = "triage.rights"


class ClaimNotRun(Advice):
    code = "report.command-not-run"


class RightsDiffer(Advice):
    code = "triage.rights-differ"


class IncidentLarge(Advice):
    code = "triage.large"


class IncidentLeftOut(Advice):
    code = "triage.left-out"


class NoIncident(InputError):
    code = "triage.no-incident"


class ForbiddenIncident(PolicyError):
    code = "triage.forbidden-incident"


# --- clusters --------------------------------------------------------------------------------------


class BadKubeconfig(InputError):
    code = "kubeconfig.unreadable"


class UnknownContext(InputError):
    code = "kubeconfig.context"


class KubeconfigRefused(PolicyError):
    code = "kubeconfig.refused"


class KubeconfigExposed(Advice):
    code = "kubeconfig.exposed"


class ClusterUnreachable(PlatformError):
    code = "cluster.unreachable"
    passes = True


class ClusterDenied(PlatformError):
    code = "cluster.denied"


class ClusterAway(Advice):
    code = "cluster.away"


class CredentialFailed(PlatformError):
    code = "cluster.credential"


# --- Jobs ------------------------------------------------------------------------------------------


class UnfitForJob(InputError):
    code = "job.unfit"


class JobWaits(Advice):
    code = "job.waits"


class JobNotStarted(PlatformError):
    code = "job.not-started"


class JobLost(PlatformError):
    code = "job.lost"


# --- secrets ---------------------------------------------------------------------------------------


class UnfitSecret(InputError):
    code = "secret.unfit"


class SecretMissing(InputError):
    code = "secret.missing"


class SecretExposed(InputError):
    code = "secret.exposed"


class McpServerForbidden(PolicyError):
    code = "policy.mcp-server"


# --- leases ----------------------------------------------------------------------------------------


class LeaseHeld(LeaseError):
    code = "lease.held"


class PoolKept(LeaseError):
    code = "pool.kept"


class UnknownPool(NotFoundError):
    code = "pool.unknown"


class NoPool(InputError):
    code = "pool.none"


class LeaseLost(LeaseError):
    code = "lease.lost"


class LeaseTakenOver(Advice):
    code = "lease.taken-over"


# --- workspaces ------------------------------------------------------------------------------------


class WorkspaceState(LeaseError):
    code = "workspace.state"


class UnknownSession(NotFoundError):
    code = "session.unknown"


class SessionState(LeaseError):
    code = "session.state"


class SessionDegraded(LeaseError):
    code = "session.degraded"


class SessionNotProvisioned(Advice):
    code = "session.not-provisioned"


class WorkspaceAttachedElsewhere(LeaseError):
    code = "workspace.attached"


class WorkspaceLimit(LeaseError):
    code, http_status = "workspace.limit", 429


class BadDirectory(InputError):
    code = "workspace.directory"


class WorkspaceExpired(Advice):
    code = "workspace.expired"


class NoWorkspace(NotFoundError):
    code = "workspace.disabled"


class SetupFailed(InputError):
    code = "workspace.setup-failed"


class SetupIncomplete(Advice):
    code = "workspace.setup"


class KilledForMemory(Advice):
    code = "workspace.out-of-memory"


class UnsavedWork(InputError):
    code = "workspace.unsaved"


class ForbiddenFiles(PolicyError):
    code = "workspace.forbidden-files"


class ClockJumped(Advice):
    code = "workspace.clock"


# --- server ----------------------------------------------------------------------------------------


class ServerMissing(PlatformError):
    code = "server.missing"


class ExposedListener(InputError):
    code = "server.exposed"


class FewConnections(Advice):
    code = "server.few-connections"


class UnknownToken(NotFoundError):
    code = "server.unknown-token"


class Unauthorized(PolicyError):
    code, http_status = "server.unauthorized", 401


class OutOfScope(PolicyError):
    code = "server.scope"


class BadOrigin(PolicyError):
    code = "server.origin"


class NoRoute(NotFoundError):
    code = "server.no-route"


class NoMethod(InputError):
    """A path does not take a method; ``allowed`` are those that it takes."""

    code, http_status = "server.method", 405

    def __init__(self, message: str, *, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(message, hint=f"use {self.allowed}")


class BadRequest(InputError):
    code = "server.request"


class NotJson(InputError):
    code, http_status = "server.media-type", 415


class BodyTooLarge(InputError):
    code, http_status = "server.too-large", 413


class BodyTooSlow(InputError):
    code, http_status = "server.too-slow", 408


class TwoLengths(InputError):
    code = "server.two-lengths"


class UnknownAgentType(NotFoundError):
    code = "server.unknown-agent-type"


class AgentTypeExists(LeaseError):
    code = "server.agent-type-exists"


class AgentTypeChanged(LeaseError):
    code, http_status = "server.changed", 412


class BadConfig(InputError):
    code = "server.config"


class NoManifests(NotFoundError):
    code = "server.no-manifests"


class ServerFailed(PlatformError):
    code = "server.failed"


class WebhookLimit(LeaseError):
    code, http_status = "server.webhook-limit", 503  # which Alertmanager takes for a reason to send it again


class UnknownPlan(NotFoundError):
    code = "server.unknown-plan"


class ServerBusy(LeaseError):
    code, http_status = "server.busy", 429


class TooManyRequests(LeaseError):
    code, http_status = "server.rate", 429


class ServerStopping(PlatformError):
    code = "server.stopping"


# --- tools -----------------------------------------------------------------------------------------


class UnknownTool(InputError):
    code = "tool.unknown"


class ToolNotEnabled(PolicyError):
    code = "tool.not-enabled"


class ToolArgument(InputError):
    code = "tool.argument"


class NoSuchFile(NotFoundError):
    code = "tool.no-file"


class OutsideWorkspace(PolicyError):
    code = "tool.outside"


class ToolFailed(RunnerError):
    code, exit_code, http_status = "tool.failed", 1, 409


class ToolStopped(LeaseError):
    code = "tool.stopped"


class UnknownMcpServer(NotFoundError):
    code = "mcp.unknown-server"


class McpServerExists(LeaseError):
    code = "mcp.exists"


class McpServerUnhealthy(RunnerError):
    code, exit_code, severity = "mcp.unhealthy", 1, "warning"


class McpSession(NotFoundError):
    code = "mcp.session"


class McpServerFailed(PlatformError):
    """A server of a run cannot be started, or is not what was approved."""

    code = "mcp.failed"


# --- store -----------------------------------------------------------------------------------------


class TelemetryUnusable(InputError):
    code = "telemetry.unusable"


class TelemetryUnsent(PlatformError):
    code = "telemetry.unsent"


class BadArtifactsUrl(InputError):
    code = "artifacts.bad-url"


class ArtifactsUnreachable(PlatformError):
    code = "artifacts.unreachable"
    passes = True


class ArtifactsRefused(PlatformError):
    code = "artifacts.refused"


class ArtifactsMissing(NotFoundError):
    code = "artifacts.missing"


class ArtifactsDamaged(DamagedError):
    code = "artifacts.damaged"


class UnknownRun(NotFoundError):
    code = "store.unknown-run"


class RunExists(LeaseError):
    """The store already has a run, ``run``, with the key of the one that was to start."""

    code = "store.run-exists"

    def __init__(self, message: str, *, run: str) -> None:
        super().__init__(message)
        self.run = run


class UnknownWorkspace(NotFoundError):
    code = "store.unknown-workspace"


class UnknownSnapshot(NotFoundError):
    code = "store.unknown-snapshot"


class BadStoreUrl(InputError):
    code = "store.bad-url"


class UnknownProject(NotFoundError):
    code = "store.unknown-project"


class ProjectOwned(InputError):
    code = "store.project-owned"


class RunUnfinished(LeaseError):
    code = "store.run-unfinished"


class StoreBusy(LeaseError):
    code = "store.busy"


class RunOver(LeaseError):
    code = "store.run-over"


class StoreFailed(PlatformError):
    code = "store.failed"


class StoreDamaged(DamagedError):
    code = "store.damaged"


class StoreTooOld(StoreDamaged):
    code = "store.too-old"


class StoreTooNew(DamagedError):
    code = "store.too-new"


class StoreNotEmpty(InputError):
    code = "store.not-empty"


class BadExport(InputError):
    code = "store.bad-export"
