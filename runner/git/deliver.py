"""Deliver work from a private repository: as a branch of a user's repository, onto a checkout, to a remote.

Requires the git binary. A user's repository is read and written with its hooks, and the host's configuration, switched
off. Only a push uses the user's own credential helpers, ssh, proxies and certificates, because it is the user's
deliberate act; hooks are off there as well, nothing prompts, and only https, ssh and files are allowed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.core.errors import (
    BadRemote,
    BadSource,
    BaseMissing,
    BranchTaken,
    DefaultBranch,
    GitFailed,
    GitMissing,
    HostileTree,
    PatchConflict,
    PushRejected,
    RemoteDenied,
    RunnerError,
    WouldOverwrite,
)
from runner.core.plural import plural
from runner.core.sanitize import printable_path, sanitize
from runner.core.settings import Settings
from runner.git import atomic_apply, disk, open_git, source
from runner.git._run import GitResult, run
from runner.git.binary import GitBinary
from runner.git.commands import check_exit
from runner.git.common import in_thread
from runner.git.remote import classify_failure
from runner.git.tree import check_branch
from runner.ports.git import TreeEntry
from runner.spec.checkout import judge_url

_IGNORED_FSCK = (  # as for fetching: old histories are full of these, and they harm nobody
    "badTimezone",
    "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail",
    "missingNameBeforeEmail",
    "zeroPaddedFilemode",
    "zeroPaddedDate",
)
_RECEIVE_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "receive.autogc": "false",
    "receive.denyCurrentBranch": "refuse",
    "receive.fsckObjects": "true",
    **{f"receive.fsck.{name}": "ignore" for name in _IGNORED_FSCK},
}
_PUSH_SETTINGS = {
    "core.hooksPath": os.devnull,
    "gc.auto": "0",
    "http.followRedirects": "initial",
    "push.followTags": "false",
    "push.gpgSign": "false",
    "push.recurseSubmodules": "no",
}
_PUSH_ENVIRONMENT = {  # over what is the user's
    "LC_ALL": "C",
    "GIT_ALLOW_PROTOCOL": "https:ssh:file",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_CONFIG_COUNT": str(len(_PUSH_SETTINGS)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_PUSH_SETTINGS)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_PUSH_SETTINGS.values())},
}
_USUAL_DEFAULTS = ("main", "master")

_REMOTE_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)*")
_FILE_URL = re.compile(r"file:///[\w./@+=,-]*", re.ASCII)
_UNKNOWN_USER = re.compile(r"Permission denied|Authentication failed|could not read (Username|Password)|error: 40[13]")


@dataclass(frozen=True)
class DeliveredBranch:
    """A branch as delivered; ``made`` is false when it already had this commit."""

    repository: Path
    branch: str
    commit: str
    made: bool


@dataclass(frozen=True)
class PushResult:
    """A remote's branch after a push; ``before`` is the commit that it had. ``moved`` is false when it already had
    ``commit``.
    """

    url: str
    branch: str
    commit: str
    before: str | None
    moved: bool


@dataclass(frozen=True)
class ApplyResult:
    """The files of an apply. ``present``: the checkout had all of the work committed, and nothing was changed."""

    checkout: Path
    paths: tuple[str, ...]
    present: bool = False


class Delivery(GitBinary):
    """Cancelling any call ends every process that it started."""

    async def branch(self, repository: Path, commit: str, *, into: Path, name: str) -> DeliveredBranch:
        """Make the branch ``name`` at ``commit`` in the user's repository that contains ``into``.

        Objects go into a quarantine, are checked there (fsck, connectivity) and become the repository's own only then;
        the branch is created if it is absent at that moment. HEAD, index, work tree, hooks and every other branch are
        not touched; a branch that turns out to exist at the last moment may leave unreachable objects. Raises
        ``BranchTaken``, ``BadRef``, and ``BaseMissing`` when the private history is shallow and the repository lacks
        the rest.
        """
        check_branch(name)
        await self.check_commit(repository, commit)
        local = await in_thread(source.find_repository, into)
        found = await self.find_commit(local.git, f"refs/heads/{name}")
        if found == commit:
            return DeliveredBranch(local.top, name, commit, made=False)
        if found is not None:
            raise _branch_taken(f"`{name}` of `{local.top}` is at {found[:12]}")
        if await self.current_branch(local) == name:
            raise _branch_taken(f"`{name}` is the branch of HEAD of `{local.top}`, which has no commit yet")
        settings = [word for key, value in _RECEIVE_SETTINGS.items() for word in ("-c", f"{key}={value}")]
        ended = await self.run_git(
            repository,
            "push",
            "--porcelain",
            "--no-verify",
            f"--receive-pack={shlex.join([self.program, *settings, 'receive-pack'])}",
            f"--force-with-lease=refs/heads/{name}:",
            "--end-of-options",
            os.fsencode(local.common),
            f"{commit}:refs/heads/{name}",
        )
        if ended.code:
            raise _branch_error(local.top, name, ended)
        return DeliveredBranch(local.top, name, commit, made=True)

    async def remote_url(self, to: str, *, repository: Path | None) -> str:
        """Return the URL that ``to`` means: itself, or the push URL of the remote of that name in ``repository``.

        Raises ``BadRemote`` for an unknown remote, and ``BadUrl`` for any other protocol, for credentials in a URL, and
        for a text that is not a URL.
        """
        if _REMOTE_NAME.fullmatch(to):
            to = await self._url_of_remote(to, repository)
        if os.path.isabs(to):
            return to
        if _FILE_URL.fullmatch(to) is None and (fault := judge_url(to)):
            raise fault
        return to

    async def push(
        self, repository: Path, commit: str, *, url: str, branch: str, explicit: bool, person: Mapping[str, str]
    ) -> PushResult:
        """Set a remote's ``branch`` to ``commit``, if that is a fast-forward of what it has at that moment.

        ``person`` is the part of the environment that git and ssh need to act for the user. A branch that may be the
        remote's default one is refused unless it was named (``explicit``). A cancelled push may or may not have
        arrived; repeating it is then a no-op. Raises ``DefaultBranch``, ``BranchTaken``, ``PushRejected``,
        ``RemoteDenied``, ``RemoteUnreachable``.
        """
        check_branch(branch)
        await self.check_commit(repository, commit)
        default, before = await self._remote_state(repository, url, branch, person)
        if not explicit and branch in (default, *_USUAL_DEFAULTS):
            raise DefaultBranch(
                f"`{branch}` may be the default branch of `{url}`", hint=f"name it if you mean it: --branch {branch}"
            )
        if before == commit:
            return PushResult(url, branch, commit, before, moved=False)
        if before is not None and not await self._leads_to(repository, before, commit):
            raise _branch_taken(f"`{branch}` of `{url}` is at {before[:12]}, which the work is not built on")
        ended = await self._as_person(
            repository,
            person,
            "push",
            "--porcelain",
            "--no-verify",
            "--no-follow-tags",
            f"--force-with-lease=refs/heads/{branch}:{before or ''}",
            "--end-of-options",
            url,
            f"{commit}:refs/heads/{branch}",
        )
        if ended.code:
            raise _push_error(url, branch, ended)
        return PushResult(url, branch, commit, before, moved=True)

    async def apply(self, patch: Path, base: str | None, *, into: Path, scratch: Path, check: bool) -> ApplyResult:
        """Apply ``patch`` to the work tree of the checkout that contains ``into``; index and HEAD stay as they are.

        The patch is tried first, in the empty directory ``scratch``, on copies of the files that it names. Everything
        is refused before anything is written: a HEAD without ``base`` (``BaseMissing``), a file that differs from HEAD
        or is in the way (``WouldOverwrite``), a path that leads through a link or to something special
        (``UnsafePath``), and a patch that does not fit (``PatchConflict``). Files that git converts on checkout count
        as changed. ``atomic_apply`` has the guarantees while files are being replaced, also through a crash; the next
        apply undoes an interrupted one. ``check`` ends before anything is written.
        """
        local = await in_thread(source.find_repository, into)
        if local.bare:
            raise BadSource(f"`{local.top}` has no work tree", hint="take the work as a branch: runner runs branch")
        if check:
            atomic_apply.check_not_interrupted(local.git)
            return (await self._attempt(patch, base, local, scratch))[0]
        with atomic_apply.locked(local.git, local.top) as folder:
            applied, changes = await self._attempt(patch, base, local, scratch)
            await in_thread(atomic_apply.replace_files, local.top, folder, scratch / "tree", changes)
        return applied

    async def _attempt(
        self, patch: Path, base: str | None, local: source.LocalRepository, scratch: Path
    ) -> tuple[ApplyResult, list[atomic_apply.Replacement]]:
        head = await self.find_commit(local.git, "HEAD")
        if base is not None and (head is None or not await self._leads_to(local.git, base, head)):
            raise BaseMissing(
                f"HEAD of `{local.top}` does not contain {base[:12]}, which the work is built on",
                hint="check out a branch that contains it, or take the work as a branch: runner runs branch",
            )
        await in_thread(disk.init_private, scratch / "git", like=head or "0" * 40)
        tree = scratch / "tree"
        tree.mkdir()
        listed = await self._apply_to(scratch, "--numstat", "-z", patch)
        check_exit("apply --numstat", listed)
        paths = sorted({row.split(b"\t", 2)[2] for row in listed.stdout.split(b"\0")[:-1]})
        dirty = await self._staged(local, head, paths)
        seen, changed = await in_thread(atomic_apply.stage_files, local.top, tree, dirty.committed, paths)
        if wrong := sorted(dirty.paths | changed):
            raise WouldOverwrite(
                f"{_count(wrong)} of `{local.top}` that the patch changes {'is' if len(wrong) == 1 else 'are'} not as "
                f"committed: {_names(wrong)}",
                hint="commit or stash first, then apply again",
            )
        names = tuple(printable_path(path) for path in paths)
        ended = await self._apply_to(scratch, patch)
        if ended.code:
            if not (await self._apply_to(scratch, "--check", "--reverse", patch)).code:
                return ApplyResult(local.top, names, present=True), []
            raise PatchConflict(
                f"the patch does not fit `{local.top}`: {_conflicts(ended.stderr)}",
                hint="take the work as a branch and merge it: runner runs branch",
            )
        return ApplyResult(local.top, names), await in_thread(atomic_apply.plan_replacements, local.top, tree, seen)

    async def _staged(self, local: source.LocalRepository, head: str | None, paths: Sequence[bytes]) -> _IndexState:
        """Return HEAD's entries of the paths, and the paths whose entry in the index differs from HEAD's."""
        entries = {entry.path: entry for entry in (await self.tree_entries(local.common, head) if head else [])}
        listed = await self.git(local.git, "ls-files", "--stage", "-z")
        index: dict[bytes, bytes] = {}
        for row in listed.stdout.split(b"\0")[:-1]:
            what, _, path = row.partition(b"\t")
            index[path] = what
        committed = {path: entries[path] for path in paths if path in entries}
        wanted = {path: b"%o %s 0" % (entry.mode, entry.id.encode()) for path, entry in committed.items()}
        return _IndexState(committed, {path for path in paths if index.get(path) != wanted.get(path)})

    async def _apply_to(self, scratch: Path, *argv: str | Path) -> GitResult:
        """Run ``git apply`` on the copies."""
        words = [os.fspath(word) for word in argv]
        return await self.run_git(
            scratch / "git", "-C", str(scratch / "tree"), "apply", "--whitespace=nowarn", *words, tree=scratch / "tree"
        )

    async def _leads_to(self, git: Path, ancestor: str, commit: str) -> bool:
        """Tell whether ``ancestor`` exists and is in the history of ``commit``."""
        if await self.find_commit(git, ancestor) != ancestor:
            return False
        return not (await self.git(git, "merge-base", "--is-ancestor", ancestor, commit, accept=(0, 1))).code

    async def _url_of_remote(self, name: str, repository: Path | None) -> str:
        if repository is None:
            raise BadRemote(f"`{name}` is not a URL, and the run has no repository here with remotes")
        local = await in_thread(source.find_repository, repository)
        for key in ("pushurl", "url"):
            ended = await self.git(local.git, "config", "-z", "--get-all", f"remote.{name}.{key}", accept=(0, 1))
            urls = ended.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
            if len(urls) > 1:
                raise BadRemote(f"remote `{name}` of `{local.top}` has {len(urls)} URLs", hint="name one of them")
            if urls:
                is_relative = urls[0].startswith(("./", "../"))
                return str(local.top / urls[0]) if is_relative else urls[0]
        raise BadRemote(f"`{local.top}` has no remote `{name}`", hint=f"git -C {local.top} remote -v")

    async def _remote_state(
        self, repository: Path, url: str, branch: str, person: Mapping[str, str]
    ) -> tuple[str | None, str | None]:
        """Return the remote's default branch and the commit of ``branch``, as far as the remote lists them."""
        ref = f"refs/heads/{branch}"
        ended = await self._as_person(
            repository, person, "ls-remote", "--symref", "--quiet", "--end-of-options", url, "HEAD", ref
        )
        if ended.code:
            raise _remote_error(url, ended)
        default = before = None
        for line in ended.stdout.decode("utf-8", "surrogateescape").splitlines():
            what, _, name = line.partition("\t")
            if what.startswith("ref: ") and name == "HEAD":
                default = what.removeprefix("ref: refs/heads/")
            elif name == ref:
                before = what
        return default, before

    async def _as_person(self, repository: Path, person: Mapping[str, str], *argv: str) -> GitResult:
        env = {**person, **_PUSH_ENVIRONMENT, "GIT_DIR": str(repository)}
        if "SSL_CERT_FILE" in env:  # which some builds of git do not look at
            env.setdefault("GIT_SSL_CAINFO", env["SSL_CERT_FILE"])
        return await run([self.program, *argv], env=env)


@dataclass(frozen=True)
class _IndexState:
    committed: Mapping[bytes, TreeEntry]
    paths: set[bytes]


def open_delivery(settings: Settings) -> Delivery:
    """Raises ``GitMissing`` when this host has no git binary that will do."""
    git = open_git(settings)
    if not isinstance(git, GitBinary):
        raise GitMissing("delivering work needs the git program, 2.32 or newer", hint="apt install git")
    return Delivery(git.program, git.remote_access)


def _branch_taken(what: str) -> BranchTaken:
    return BranchTaken(what, hint="name another branch")


def _rejection(ended: GitResult) -> str:
    """Return the reason in ``push --porcelain`` for which a ref was not updated; empty when the push failed before
    that.
    """
    found = re.search(rb"^!\t[^\t]*\t\[[\w ]+\](?: \((.*)\))?", ended.stdout, re.MULTILINE)
    return (found[1] or b"rejected").decode("utf-8", "replace") if found else ""


def _branch_error(top: Path, name: str, ended: GitResult) -> RunnerError:
    why = _rejection(ended)
    if "shallow" in why:
        return BaseMissing(f"`{top}` lacks the history that the work is built on", hint="git fetch --unshallow there")
    if "unpacker" in why:
        return HostileTree(f"git refuses the objects of the work: {sanitize(ended.stderr)}")
    if why:
        return _branch_taken(f"`{top}` does not take a branch `{name}`: {sanitize(why)}")
    return GitFailed(f"`git push` ended with {ended.code}: {ended.stderr}")


def _push_error(url: str, branch: str, ended: GitResult) -> RunnerError:
    why = _rejection(ended)
    if "stale info" in why or "non-fast-forward" in why or "fetch first" in why:
        return _branch_taken(f"`{branch}` of `{url}` has moved meanwhile")
    if why:
        said = _server_message(ended.stderr)
        return PushRejected(
            f"`{url}` does not take `{branch}`: {sanitize(why)}", hint=f"it said: {said}" if said else None
        )
    return _remote_error(url, ended)


def _server_message(words: str) -> str:
    """Return the lines that the server printed."""
    lines = [line.removeprefix("remote:").strip() for line in words.splitlines() if line.startswith("remote:")]
    return sanitize("; ".join(line for line in lines if line))


def _remote_error(url: str, ended: GitResult) -> RunnerError:
    """Return the error for a failed conversation with a remote, judged by git's own messages."""
    if _UNKNOWN_USER.search(ended.stderr):
        hint = "load the key into the ssh agent, or configure a credential helper of git; nothing prompts here"
        return RemoteDenied(f"`{url}` does not let this user in", hint=hint)
    return classify_failure(url, ended)


def _conflicts(words: str) -> str:
    lines = [line.removeprefix("error: ") for line in words.splitlines() if line.startswith("error: ")]
    named = [line for line in lines if not line.startswith("patch failed: ")] or lines
    return sanitize("; ".join(named[:5])) or sanitize(words)


def _count(paths: Sequence[bytes]) -> str:
    return plural(len(paths), "file")


def _names(paths: Sequence[bytes]) -> str:
    return ", ".join(f"`{printable_path(path)}`" for path in paths[:5]) + (", ..." if len(paths) > 5 else "")
