"""Checkout of a run: the code that it starts from, and the URLs that are allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import BadUrl
from runner.core.model import Checkout
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.core.settings import without_secrets

URL_DEPTH = 1  # commits of history from a URL, unless a manifest says how many

_USER = r"[A-Za-z0-9_][\w.-]*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
_PATH = r"(?!-)[\w~+@=,.-]+(?:/[\w~+@=,.-]+)*/?"
_PORT = r"(?::[0-9]{1,5})?"
_URL = pattern(
    rf"https://{_HOST}{_PORT}/{_PATH}|ssh://(?:{_USER}@)?{_HOST}{_PORT}/{_PATH}|(?:{_USER}@)?{_HOST}:/?{_PATH}",
    re.ASCII,
)
_USER_ONLY = pattern(r"(?:ssh://)?[^/@:]*@", re.IGNORECASE)
_USER_AND_PASSWORD = pattern(r"[^/@]*:[^/]+@")
_URL_CHARACTERS = 2000
SECRET_IN_URL = "a URL holds no user name or password, since everyone sees it"


class RepoSource(Struct, frozen=True, kw_only=True):
    """The agent type's side. ``path`` is absolute; ``depth`` ``None`` means all of a path, ``URL_DEPTH`` of a URL."""

    type: Literal["task_context", "fixed", "local", "none"]
    url: str | None = None
    path: Path | None = None
    branch: str | None = None
    depth: int | None = None
    include_dirty: bool = False
    submodules: bool = False
    lfs: bool = False


class TaskContext(Struct, frozen=True, kw_only=True):
    """The task's side; what the agent reads as ``task.json`` and ``RUNNER_TASK_*``."""

    repository_url: str | None = None
    branch: str | None = None
    base_branch: str | None = None
    pull_request_number: int | None = None
    commit: str | None = None


def resolve_checkout(source: RepoSource, task: TaskContext) -> Checkout | None:
    """Decide what to clone; ``None`` means start from an empty workspace.

    A fixed or local source ignores the task's repository, and with it the task's branch and commit,
    which speak of that repository. A task without a repository is not an error: the agent simply
    starts in an empty directory.
    """
    checkout = Checkout(
        url=source.url,
        path=source.path,
        branch=source.branch,
        depth=source.depth if source.type == "local" else source.depth or URL_DEPTH,
        include_dirty=source.include_dirty,
        submodules=source.submodules,
        lfs=source.lfs,
    )
    match source.type:
        case "none":
            return None
        case "fixed" | "local":
            return checkout
        case "task_context":
            if task.repository_url is None:
                return None
            return replace(checkout, url=task.repository_url, branch=task.branch or source.branch, commit=task.commit)


def judge_url(url: str) -> BadUrl | None:
    """Return why a URL is refused, or ``None``: only https and ssh, names without escapes.

    A URL that holds a password is not repeated in the text.
    """
    if holds_secret(url):
        hint = "use an ssh URL and your own keys, or https and RUNNER_GIT_CREDENTIALS"
        return BadUrl(SECRET_IN_URL, hint=hint)
    parts = url.split("://")[-1].replace(":", "/").split("/")
    if len(url) > _URL_CHARACTERS or ".." in parts or "." in parts or not _URL.fullmatch(url):
        return BadUrl(
            f"`{excerpt(without_secrets(url))}` is not a URL that can be cloned",
            hint="write https://HOST/PATH, ssh://USER@HOST/PATH or USER@HOST:PATH; for a directory, `type: local`",
        )
    return None


def holds_secret(url: str) -> bool:
    """Tell whether a URL, even a malformed one, may hold a password or token before its host."""
    if _URL.fullmatch(url):  # of which only the short form of ssh may have something before a colon
        return _USER_AND_PASSWORD.match(url) is not None
    return "@" in url and not _USER_ONLY.match(url)


def uses_keys(url: str, credentials: str) -> bool:
    """Tell whether this ``RUNNER_GIT_CREDENTIALS`` lets the server see credentials of this host's user."""
    host = host_of(url)
    return host is None or credentials == "netrc" or credentials.partition("=")[0].lower() == host.lower()


def host_of(url: str) -> str | None:
    """The host of an https URL as written, with its port; ``None`` for ssh."""
    return url.split("/")[2] if url.startswith("https://") else None
