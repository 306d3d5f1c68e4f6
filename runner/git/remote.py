"""Read repositories by URL with the git binary: resolve a name on a server, fetch one commit.

A server is hostile until git has checked its objects. It gets only the credentials that the user gave for it (ssh
keys; a netrc or a token when the settings say so), no redirect is followed, and time, memory and bytes are limited.
Its own messages (``remote: ...``) decide nothing. Only failures of the network are retried.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio
from msgspec import Struct

from runner.core.errors import (
    GitFailed,
    HostileTree,
    NoRepository,
    RemoteDenied,
    RemoteOverLimit,
    RemoteRedirects,
    RemoteUnreachable,
    RunnerError,
    UnknownCommit,
    UrlUnsupported,
)
from runner.core.home import MIRRORS
from runner.core.ids import is_branch, is_commit_id
from runner.core.sanitize import sanitize
from runner.core.settings import Settings, Token
from runner.git._profile import fetch_arguments, git_environment
from runner.git._run import GitResult, ProcessLimits, run, with_limits
from runner.git._secret import credential_helper
from runner.ports.git import ResolvedRef
from runner.spec.checkout import host_of, judge_url

_SSH = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ForwardAgent=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "ControlMaster=no",
    "ControlPath=none",
    "ConnectTimeout=20",
    "ServerAliveInterval=10",
)
_SERVER_MESSAGES = re.compile(r"^remote:.*(\n|$)", re.MULTILINE)


class RemoteLimits(Struct, frozen=True, kw_only=True):
    """Limits of a server. ``stall_seconds`` count below 1 kB/s; ``retries`` are the pauses, give or take half."""

    resolve_seconds: float = 60
    resolve_memory_bytes: int = 1 << 30
    resolve_bytes: int = 1 << 20
    fetch_seconds: float = 3600
    fetch_memory_bytes: int = 8 << 30
    pack_bytes: int = 4 << 30
    tree_bytes: int = 10 << 30
    listing_bytes: int = 256 << 20
    tree_entries: int = 500_000
    stall_seconds: int = 30
    retries: tuple[float, ...] = (1.0, 3.0)  # seconds


class RemoteAccess(Struct, frozen=True, kw_only=True):
    """Host settings for remote access: mirrors, ssh, proxy, certificates, credentials."""

    mirrors: Path
    environment: Mapping[str, str]
    ssh: str | None
    token: Token | None = None
    credentials: str = ""  # as the settings name them
    mirror_limit: int = 10 << 30  # bytes on disk
    limits: RemoteLimits = RemoteLimits()

    @classmethod
    def of(cls, settings: Settings, path: str) -> RemoteAccess:
        """Build it from the settings; ``path`` holds the folders in which ssh is looked for."""
        host = settings.reach
        found = {"PATH": path} | {name: host[name] for name in host.keys() - {"HOME", "SSL_CERT_FILE"}}
        if "SSL_CERT_FILE" in host:
            found.setdefault("GIT_SSL_CAINFO", host["SSL_CERT_FILE"])
        if settings.git_credentials == "netrc":
            found["HOME"] = host.get("HOME", os.devnull)
        ssh = shutil.which("ssh", path=path)
        return cls(
            mirrors=settings.home / MIRRORS,
            environment=found,
            ssh=ssh,
            token=settings.git_token,
            credentials=settings.git_credentials,
            mirror_limit=settings.mirror_limit,
        )


NO_REMOTES = RemoteAccess(
    mirrors=Path(os.devnull), environment={}, ssh=None
)  # for an adapter of this host's repositories only


class RemoteClient:
    def __init__(self, program: str, access: RemoteAccess) -> None:
        self._program = program
        self._access = access
        self._limits = access.limits
        self._settings = {
            "http.followRedirects": "false",
            "http.lowSpeedLimit": "1000",
            "http.lowSpeedTime": str(access.limits.stall_seconds),
            "transfer.bundleURI": "false",
        }
        self._environment = {"GIT_ALLOW_PROTOCOL": "https:ssh", "GIT_SSH_VARIANT": "ssh", **access.environment}
        if access.ssh is not None:
            words = [access.ssh, *(word for option in _SSH for word in ("-o", option))]
            self._environment["GIT_SSH_COMMAND"] = shlex.join(words)

    async def resolve(self, url: str, *, branch: str | None, commit: str | None) -> ResolvedRef:
        """See ``Git.resolve_url``."""
        wanted = "HEAD" if branch is None else f"refs/heads/{branch}"
        limits = self._limits
        with trio.move_on_after(limits.resolve_seconds) as scope:
            result = await self._ask(
                url,
                ("ls-remote", "--symref", "--end-of-options"),
                ("HEAD", wanted),
                git=Path(os.devnull),
                limits=ProcessLimits(limits.resolve_memory_bytes, limits.resolve_bytes),
            )
        if scope.cancelled_caught:
            raise RemoteOverLimit(f"`{url}` did not list its refs within {limits.resolve_seconds:g}s")
        commits, default = _parse_refs(result.stdout)
        if commit is None and wanted not in commits:
            raise UnknownCommit(f"`{url}` has no {'commit yet' if branch is None else f'branch `{branch}`'}")
        return ResolvedRef(commit or commits[wanted], branch or default or "work")

    async def fetch(self, repository: Path, url: str, commit: str, *, depth: int | None) -> None:
        """Add a commit and its history to ``depth`` to a private repository. Raises as ``Git.fetch_url`` says."""
        limits = self._limits
        with trio.move_on_after(limits.fetch_seconds) as scope:
            await self._ask(
                url,
                fetch_arguments(depth),
                (f"+{commit}:refs/fetched/{commit}",),  # a ref, so that the next fetch knows what is here
                git=repository,
                limits=ProcessLimits(limits.fetch_memory_bytes, limits.pack_bytes),
            )
        if scope.cancelled_caught:
            raise RemoteOverLimit(f"`{url}` did not send {commit} within {limits.fetch_seconds:g}s")

    async def fetch_lfs(self, repository: Path, url: str, commit: str, *, into: Path, most: int) -> None:
        """Bring all content of LFS that a commit points to below ``into``, by git-lfs. ``most`` bytes has a file.

        Nothing that the repository says of other servers and programs holds.
        """
        limits = ProcessLimits(self._limits.fetch_memory_bytes, most + 1024)
        program = find_git_lfs(self._access.environment.get("PATH", ""))
        if program is None:
            raise lfs_missing(url)
        settings = self._settings | {
            "lfs.url": url if not url.startswith("https:") else f"{url.rstrip('/').removesuffix('.git')}.git/info/lfs",
            "lfs.storage": str(into / "lfs"),
            "lfs.basictransfersonly": "true",
            "lfs.activitytimeout": str(self._limits.stall_seconds),
        }
        argv = [*with_limits(limits, die_on_file_size=False), program, "fetch", "--include=", "--exclude=", url, commit]
        with trio.move_on_after(self._limits.fetch_seconds) as scope:
            result = await self._run(argv, url, repository, settings)
            if result.code:
                raise classify_failure(url, result, limits)
        if scope.cancelled_caught:
            raise RemoteOverLimit(f"`{url}` did not send files of LFS within {self._limits.fetch_seconds:g}s")

    async def _ask(
        self, url: str, before: tuple[str, ...], after: tuple[str, ...], *, git: Path, limits: ProcessLimits
    ) -> GitResult:
        """Ask a server. If it redirects, ask the address that ends in ``.git`` too: to it some redirect."""
        if fault := judge_url(url):
            raise fault
        if not url.startswith("https:") and self._access.ssh is None:
            raise UrlUnsupported(f"`{url}` cannot be cloned without ssh", hint="install an ssh client")
        try:
            return await self._ask_with_retries(url, before, after, git=git, limits=limits)
        except RemoteRedirects:
            if not url.startswith("https:") or url.endswith(".git"):
                raise
        try:
            return await self._ask_with_retries(f"{url.rstrip('/')}.git", before, after, git=git, limits=limits)
        except (RemoteRedirects, NoRepository):
            raise RemoteRedirects(_REDIRECTS.format(url=url), hint=_REDIRECT_HINT) from None

    async def _ask_with_retries(
        self, url: str, before: tuple[str, ...], after: tuple[str, ...], *, git: Path, limits: ProcessLimits
    ) -> GitResult:
        for pause in (*self._limits.retries, None):
            argv = [*with_limits(limits, die_on_file_size=False), self._program, *before, url, *after]
            result = await self._run(argv, url, git)
            if result.code == 0:
                break
            error = classify_failure(url, result, limits)
            if not isinstance(error, RemoteUnreachable) or pause is None:
                raise error
            await trio.sleep(pause * random.uniform(0.5, 1.5))
        return result

    async def _run(
        self, argv: Sequence[str], url: str, git: Path, settings: Mapping[str, str] | None = None
    ) -> GitResult:
        own = self._settings if settings is None else {**settings}
        token, host = self._access.token, host_of(url)
        env = self._environment | {"GIT_DIR": str(git)}
        if token is None or host is None or token.host.lower() != host.lower():
            return await run(argv, env=git_environment(own) | env)
        with credential_helper(token, host) as (descriptor, helper):
            asking = git_environment(own | {"credential.helper": helper})
            return await run(argv, env=asking | env, inherited=(descriptor,))


def find_git_lfs(path: str) -> str | None:
    return shutil.which("git-lfs", path=path)


def lfs_missing(url: str) -> UrlUnsupported:
    return UrlUnsupported(f"files of LFS of `{url}` cannot be fetched without git-lfs", hint="install git-lfs")


def _parse_refs(output: bytes) -> tuple[dict[str, str], str | None]:
    """Return the commit of each ref that ``ls-remote --symref`` lists, and the default branch if its name is plain."""
    commits: dict[str, str] = {}
    default = None
    for line in output.decode("utf-8", "replace").splitlines():
        value, _, name = line.partition("\t")
        if value.startswith("ref: refs/heads/") and name == "HEAD":
            branch = value.removeprefix("ref: refs/heads/")
            default = branch if is_branch(branch) else None
        elif is_commit_id(value):
            commits.setdefault(name, value)
    return commits, default


def classify_failure(url: str, result: GitResult, limits: ProcessLimits | None = None) -> RunnerError:
    """Return the error for a failed conversation with a server, judged by git's messages and not by the server's."""
    message = _SERVER_MESSAGES.sub("", result.stderr)
    if limits is not None and (result.code < 0 or _TOO_MUCH.search(message)):
        most = f"{limits.file_bytes >> 20:,} MiB, or needs more than {limits.memory_bytes >> 20:,} MiB of memory"
        return RemoteOverLimit(f"`{url}` sends more than {most}", hint="ask for less history")
    for pattern, kind, template, hint in _FAILURES:
        if re.search(pattern, message):
            last = sanitize(message.splitlines()[-1])
            return kind(template.format(url=url, message=sanitize(message), last=last), hint=hint)
    return GitFailed(f"git could not read `{url}`: {sanitize(message) or f'it ended with {result.code}'}")


_TOO_MUCH = re.compile(r"File too large|[Oo]ut of memory|unable to create thread|mmap failed|Cannot allocate memory")
_REDIRECTS = "`{url}` redirects to another address"
_REDIRECT_HINT = "write the address that it redirects to"
_NOT_FOUND = "`{url}` is not a repository, or access to it was denied"
_FAILURES: tuple[tuple[str, type[RunnerError], str, str | None], ...] = (
    (
        r"Operation too slow|transfer rate",
        RemoteOverLimit,
        "download from `{url}` stalled: below 1 kB/s for too long",
        "try again when the server or the network is faster",
    ),
    (r"fsck error", HostileTree, "`{url}` has objects that git refuses: {message}", None),
    (
        r"not our ref|unadvertised object|couldn't find remote ref|did not send all necessary objects",
        UnknownCommit,
        "`{url}` does not give that commit",
        None,
    ),
    (r"returned error: 30\d|redirection|redirect from", RemoteRedirects, _REDIRECTS, _REDIRECT_HINT),
    (
        r"Host key verification failed",
        RemoteDenied,
        "the host of `{url}` is not in the known hosts of ssh",
        "connect to it once with ssh",
    ),
    (
        r"could not read (Username|Password)|Authentication failed|returned error: 40[13]|Permission denied",
        RemoteDenied,
        "access to `{url}` was denied",
        "use an ssh URL and your own keys, or https and RUNNER_GIT_CREDENTIALS",
    ),
    (
        r"server certificate|SSL certificate|certificate verif",
        RemoteDenied,
        "the certificate of `{url}` is not trusted on this host",
        "name its certificate authority in SSL_CERT_FILE",
    ),
    (
        r"returned error: 404|repository '[^']*' not found|does not appear to be a git repository",
        NoRepository,
        _NOT_FOUND,
        None,
    ),
    (
        r"Could not resolve|Couldn't resolve|[Ff]ailed to connect|Couldn't connect|No route to host"
        r"|Network is unreachable|onnection (refused|reset|timed out|closed)|returned error: (429|5\d\d)|HTTP 5\d\d"
        r"|RPC failed|hung up|early EOF|disconnect|expected flush|Recv failure|Empty reply|TLS connection"
        r"|SSL_ERROR_SYSCALL|Timed? ?out",
        RemoteUnreachable,
        "`{url}` cannot be reached: {last}",
        None,
    ),
    (r"Could not read from remote repository", NoRepository, _NOT_FOUND, None),
)
