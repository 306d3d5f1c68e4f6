"""Repositories by URL, reached by the git binary: what a server says of a name, and one commit out of it.

A server is hostile until git has checked its objects. It gets no credentials but those that the user
gave for it (ssh keys; a netrc or a token when the settings say so), is left when it redirects, and has bounds in time,
memory and bytes. Its own words (``remote: ...``) decide nothing. Only what a network does by chance is tried again.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

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
    printable,
)
from runner.core.ids import is_branch, is_commit_id
from runner.core.settings import Settings, Token
from runner.git._profile import environment
from runner.git._run import Ended, Limits, limited, run
from runner.git._secret import lent
from runner.ports.git import Tip
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
_OWN_WORDS = re.compile(r"^remote:.*(\n|$)", re.MULTILINE)


@dataclass(frozen=True)
class Bounds:
    """What a server may take. Seconds of ``stall`` are counted below 1 kB/s; a try again waits longer each time."""

    look_seconds: float = 60
    look_memory_bytes: int = 1 << 30
    look_bytes: int = 1 << 20
    fetch_seconds: float = 3600
    fetch_memory_bytes: int = 8 << 30
    pack_bytes: int = 4 << 30
    tree_bytes: int = 10 << 30
    listing_bytes: int = 256 << 20
    tree_entries: int = 500_000
    stall_seconds: int = 30
    retries: tuple[float, ...] = (1.0, 3.0)  # seconds before each, give or take half


@dataclass(frozen=True)
class Reach:
    """What of this host is used to reach a server: mirrors, ssh, proxies, certificates, a netrc or token if wanted."""

    mirrors: Path
    environment: Mapping[str, str]
    ssh: str | None
    token: Token | None = None
    mirror_limit: int = 10 << 30  # bytes on disk
    bounds: Bounds = Bounds()

    @classmethod
    def of(cls, settings: Settings, path: str) -> Reach:
        """From the settings; ``path`` holds the folders in which ssh is looked for."""
        host = settings.reach
        found = {"PATH": path} | {name: host[name] for name in host.keys() - {"HOME", "SSL_CERT_FILE"}}
        if "SSL_CERT_FILE" in host:
            found.setdefault("GIT_SSL_CAINFO", host["SSL_CERT_FILE"])
        if settings.git_credentials == "netrc":
            found["HOME"] = host.get("HOME", os.devnull)
        ssh = shutil.which("ssh", path=path)
        return cls(settings.home / "mirrors", found, ssh, settings.git_token, settings.mirror_limit)


NOWHERE = Reach(Path(os.devnull), {}, None)  # of an adapter that is for this host's repositories only


class Remotes:
    def __init__(self, program: str, reach: Reach) -> None:
        self._program = program
        self._reach = reach
        self._bounds = reach.bounds
        self._settings = {
            "http.followRedirects": "false",
            "http.lowSpeedLimit": "1000",
            "http.lowSpeedTime": str(reach.bounds.stall_seconds),
            "transfer.bundleURI": "false",
        }
        self._environment = {"GIT_ALLOW_PROTOCOL": "https:ssh", "GIT_SSH_VARIANT": "ssh", **reach.environment}
        if reach.ssh is not None:
            words = [reach.ssh, *(word for option in _SSH for word in ("-o", option))]
            self._environment["GIT_SSH_COMMAND"] = shlex.join(words)

    async def look_up(self, url: str, *, branch: str | None, commit: str | None) -> Tip:
        """See ``Git.look_up``."""
        wanted = "HEAD" if branch is None else f"refs/heads/{branch}"
        bounds = self._bounds
        with trio.move_on_after(bounds.look_seconds) as scope:
            ended = await self._asked(
                url,
                ("ls-remote", "--symref", "--end-of-options"),
                ("HEAD", wanted),
                git=Path(os.devnull),
                limits=(bounds.look_memory_bytes, bounds.look_bytes),
            )
        if scope.cancelled_caught:
            raise RemoteOverLimit(f"`{url}` has not said what it holds within {bounds.look_seconds:g}s")
        tips, default = _advertised(ended.stdout)
        if commit is None and wanted not in tips:
            raise UnknownCommit(f"`{url}` has no {'commit yet' if branch is None else f'branch `{branch}`'}")
        return Tip(commit or tips[wanted], branch or default or "work")

    async def fetch(self, repository: Path, url: str, commit: str, *, depth: int | None) -> None:
        """Add a commit and its history to ``depth`` to a bare repository of ours. Raises as ``Git.fetch_url`` says."""
        bounds = self._bounds
        options = (
            "--quiet",
            "--no-tags",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
            "--no-auto-maintenance",
            "--update-shallow",
            *([f"--depth={depth}"] if depth is not None else []),
            "--end-of-options",
        )
        with trio.move_on_after(bounds.fetch_seconds) as scope:
            await self._asked(
                url,
                ("fetch", *options),
                (f"+{commit}:refs/fetched/{commit}",),  # a ref, so that the next fetch knows what is here
                git=repository,
                limits=(bounds.fetch_memory_bytes, bounds.pack_bytes),
            )
        if scope.cancelled_caught:
            raise RemoteOverLimit(f"`{url}` has not sent {commit} within {bounds.fetch_seconds:g}s")

    async def _asked(
        self, url: str, before: tuple[str, ...], after: tuple[str, ...], *, git: Path, limits: Limits
    ) -> Ended:
        """Ask a server. Some only redirect to the address that ends in ``.git``: that one is tried as well."""
        if fault := judge_url(url):
            raise fault
        if not url.startswith("https:") and self._reach.ssh is None:
            raise UrlUnsupported(f"`{url}` cannot be cloned without ssh", hint="install an ssh client")
        try:
            return await self._insisting(url, before, after, git=git, limits=limits)
        except RemoteRedirects:
            if not url.startswith("https:") or url.endswith(".git"):
                raise
        try:
            return await self._insisting(f"{url.rstrip('/')}.git", before, after, git=git, limits=limits)
        except (RemoteRedirects, NoRepository):
            raise _redirects(url) from None

    async def _insisting(
        self, url: str, before: tuple[str, ...], after: tuple[str, ...], *, git: Path, limits: Limits
    ) -> Ended:
        for pause in (*self._bounds.retries, None):
            ended = await self._run([*limited(limits, mortal=False), self._program, *before, url, *after], url, git)
            if ended.code == 0:
                break
            error = judge_end(url, ended)
            if not isinstance(error, RemoteUnreachable) or pause is None:
                raise error
            await trio.sleep(pause * random.uniform(0.5, 1.5))
        return ended

    async def _run(self, argv: Sequence[str], url: str, git: Path) -> Ended:
        token, host = self._reach.token, host_of(url)
        env = self._environment | {"GIT_DIR": str(git)}
        if token is None or host is None or token.host.lower() != host.lower():
            return await run(argv, env=environment(self._settings) | env)
        with lent(token, host) as (descriptor, helper):
            own = environment(self._settings | {"credential.helper": helper})
            return await run(argv, env=own | env, inherited=(descriptor,))


def _advertised(output: bytes) -> tuple[dict[str, str], str | None]:
    """Of ``ls-remote --symref`` the commit of each ref, and the default branch if it has a plain name."""
    tips: dict[str, str] = {}
    default = None
    for line in output.decode("utf-8", "replace").splitlines():
        value, _, name = line.partition("\t")
        if value.startswith("ref: refs/heads/") and name == "HEAD":
            branch = value.removeprefix("ref: refs/heads/")
            default = branch if is_branch(branch) else None
        elif is_commit_id(value):
            tips.setdefault(name, value)
    return tips, default


def _redirects(url: str) -> RemoteRedirects:
    return RemoteRedirects(f"`{url}` redirects to another address", hint="write the address that it redirects to")


def _denied(url: str) -> RemoteDenied:
    hint = "use an ssh URL and your own keys, or https and RUNNER_GIT_CREDENTIALS"
    return RemoteDenied(f"`{url}` is not open to us: it wants other credentials", hint=hint)


def judge_end(url: str, ended: Ended) -> RunnerError:
    """What a failed conversation with a server was, by git's words and not by the server's."""
    words = _OWN_WORDS.sub("", ended.words)
    for pattern, make in _WORDS:
        if re.search(pattern, words):
            return make(url, words)
    if ended.code < 0:
        return RemoteOverLimit(f"`{url}` sends more than is taken from a server")
    return GitFailed(f"git could not read `{url}`: {printable(words) or f'it ended with {ended.code}'}")


_WORDS: tuple[tuple[str, Callable[[str, str], RunnerError]], ...] = (
    (
        r"File too large|[Oo]ut of memory|unable to create thread|mmap failed|Cannot allocate memory",
        lambda url, words: RemoteOverLimit(
            f"`{url}` sends more than is taken from a server", hint="ask for less history"
        ),
    ),
    (
        r"Operation too slow|transfer rate",
        lambda url, words: RemoteOverLimit(f"`{url}` sends next to nothing", hint="apply again when it is well"),
    ),
    (r"fsck error", lambda url, words: HostileTree(f"`{url}` has objects that git refuses: {printable(words)}")),
    (
        r"not our ref|unadvertised object|couldn't find remote ref|did not send all necessary objects",
        lambda url, words: UnknownCommit(f"`{url}` does not give that commit"),
    ),
    (r"returned error: 30\d|redirection|redirect from", lambda url, words: _redirects(url)),
    (
        r"Host key verification failed",
        lambda url, words: RemoteDenied(
            f"the host of `{url}` is not among your known hosts", hint="connect to it once with ssh"
        ),
    ),
    (
        r"could not read (Username|Password)|Authentication failed|returned error: 40[13]|Permission denied",
        lambda url, words: _denied(url),
    ),
    (
        r"server certificate|SSL certificate|certificate verif",
        lambda url, words: RemoteDenied(
            f"the certificate of `{url}` is not trusted here", hint="name your authority in SSL_CERT_FILE"
        ),
    ),
    (
        r"returned error: 404|repository '[^']*' not found|does not appear to be a git repository",
        lambda url, words: NoRepository(f"`{url}` is no repository, or not one that is shown to us"),
    ),
    (
        r"Could not resolve|Couldn't resolve|[Ff]ailed to connect|Couldn't connect|No route to host"
        r"|Network is unreachable|onnection (refused|reset|timed out|closed)|returned error: (429|5\d\d)|HTTP 5\d\d"
        r"|RPC failed|hung up|early EOF|disconnect|expected flush|Recv failure|Empty reply|TLS connection"
        r"|SSL_ERROR_SYSCALL|Timed? ?out",
        lambda url, words: RemoteUnreachable(f"`{url}` cannot be reached: {printable(words.splitlines()[-1])}"),
    ),
    (
        r"Could not read from remote repository",
        lambda url, words: NoRepository(f"`{url}` is no repository, or not one that is shown to us"),
    ),
)
