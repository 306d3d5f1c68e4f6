"""Work out of a private repository: as a branch of a user's repository, onto a checkout, to a remote.

Needs the git binary. A user's repository is asked and written to with its hooks, and the host's configuration,
switched off. Only a push uses what is the user's own (credential helpers, ssh, proxies, certificates), because it is
the user's deliberate act; hooks are off there as well, nothing prompts, and only https, ssh and files are spoken.
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
    printable,
)
from runner.core.settings import Settings
from runner.git import atomic_apply, disk, open_git, source
from runner.git._run import Ended, run
from runner.git.binary import Binary, _check
from runner.git.common import in_thread
from runner.git.remote import judge_end
from runner.git.tree import check_branch, shown
from runner.ports.git import Entry
from runner.spec.checkout import judge_url

_LENIENT = (  # as for fetching: old histories are full of these, and they harm nobody
    "badTimezone",
    "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail",
    "missingNameBeforeEmail",
    "zeroPaddedFilemode",
    "zeroPaddedDate",
)
_RECEIVING = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "receive.autogc": "false",
    "receive.denyCurrentBranch": "refuse",
    "receive.fsckObjects": "true",
    **{f"receive.fsck.{name}": "ignore" for name in _LENIENT},
}
_PUSHING = {
    "core.hooksPath": os.devnull,
    "gc.auto": "0",
    "http.followRedirects": "initial",
    "push.followTags": "false",
    "push.gpgSign": "false",
    "push.recurseSubmodules": "no",
}
_ACTING = {  # over what is the user's
    "LC_ALL": "C",
    "GIT_ALLOW_PROTOCOL": "https:ssh:file",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_CONFIG_COUNT": str(len(_PUSHING)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_PUSHING)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_PUSHING.values())},
}
_USUAL_DEFAULTS = ("main", "master")

_REMOTE_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)*")
_FILE_URL = re.compile(r"file:///[\w./@+=,-]*", re.ASCII)
_UNKNOWN_USER = re.compile(r"Permission denied|Authentication failed|could not read (Username|Password)|error: 40[13]")


@dataclass(frozen=True)
class Branched:
    """A branch as it stands; ``made`` is false when it was there with this very commit."""

    repository: Path
    branch: str
    commit: str
    made: bool


@dataclass(frozen=True)
class Pushed:
    """A remote's branch as it stands; ``before`` is the commit that it had. ``moved``: it was not there already."""

    url: str
    branch: str
    commit: str
    before: str | None
    moved: bool


@dataclass(frozen=True)
class Applied:
    """``present``: the checkout has all of the work committed already, and nothing was to do."""

    checkout: Path
    paths: tuple[str, ...]
    present: bool = False


class Delivery(Binary):
    """Cancelling any call ends every process that it started."""

    async def branch(self, repository: Path, commit: str, *, into: Path, name: str) -> Branched:
        """Make the branch ``name`` at ``commit`` in the user's repository that ``into`` is in.

        Objects go into a quarantine, are checked there (fsck, connectivity) and become the repository's own only
        then; the branch is created if it is absent at that moment. HEAD, index, work tree, hooks and every other
        branch stay out of it; a branch that turns out to be taken at the last moment may leave objects that no name
        leads to. Raises ``BranchTaken``, ``BadRef``, and ``BaseMissing`` when the private history is
        shallow and the repository lacks the rest.
        """
        check_branch(name)
        await self.check_commit(repository, commit)
        place = await in_thread(source.find, into)
        found = await self.find_commit(place.git, f"refs/heads/{name}")
        if found == commit:
            return Branched(place.top, name, commit, made=False)
        if found is not None:
            raise _taken(f"`{name}` of `{place.top}` is at {found[:12]}")
        if await self.current_branch(place) == name:
            raise _taken(f"`{name}` is what HEAD of `{place.top}` waits for")
        settings = [word for key, value in _RECEIVING.items() for word in ("-c", f"{key}={value}")]
        ended = await self.on(
            repository,
            "push",
            "--porcelain",
            "--no-verify",
            f"--receive-pack={shlex.join([self._program, *settings, 'receive-pack'])}",
            f"--force-with-lease=refs/heads/{name}:",
            "--end-of-options",
            os.fsencode(place.common),
            f"{commit}:refs/heads/{name}",
        )
        if ended.code:
            raise _not_branched(place.top, name, ended)
        return Branched(place.top, name, commit, made=True)

    async def remote_url(self, to: str, *, repository: Path | None) -> str:
        """The URL that ``to`` means: itself, or where the remote of that name in ``repository`` is pushed to.

        Raises ``BadRemote`` for a remote that is not there, and ``BadUrl`` for any other protocol, for credentials in
        a URL, and for what is none.
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
    ) -> Pushed:
        """Make a remote's ``branch`` have ``commit``, if that is a step forward from what it has at that moment.

        ``person`` is the part of the environment that git and ssh need to act for the user. A branch that may be the
        remote's default one is refused unless it is asked for by name (``explicit``). A cancelled push may or may
        not have arrived; the same push again is then a no-op. Raises ``DefaultBranch``, ``BranchTaken``,
        ``PushRejected``, ``RemoteDenied``, ``RemoteUnreachable``.
        """
        check_branch(branch)
        await self.check_commit(repository, commit)
        default, before = await self._remote_state(repository, url, branch, person)
        if not explicit and branch in (default, *_USUAL_DEFAULTS):
            raise DefaultBranch(
                f"`{branch}` may be the default branch of `{url}`", hint=f"name it if you mean it: --branch {branch}"
            )
        if before == commit:
            return Pushed(url, branch, commit, before, moved=False)
        if before is not None and not await self._leads_to(repository, before, commit):
            raise _taken(f"`{branch}` of `{url}` is at {before[:12]}, which the work is not built on")
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
            raise _not_pushed(url, branch, ended)
        return Pushed(url, branch, commit, before, moved=True)

    async def apply(self, patch: Path, base: str | None, *, into: Path, scratch: Path, check: bool) -> Applied:
        """Change the work tree of the checkout that ``into`` is in as ``patch`` says; index and HEAD stay as they are.

        The patch is tried first, in the empty directory ``scratch``, on copies of the files that it names. Whatever
        is refused is refused before anything is written: a HEAD without ``base`` (``BaseMissing``), a file that is
        not as HEAD has it or is in the way (``WouldOverwrite``), a path that leads through a link or to something
        special (``UnsafePath``), and a patch that does not fit (``PatchConflict``). Files that git converts on
        checkout count as changed. What holds while files are being replaced, also through a crash, ``atomic_apply``
        says; an apply that was cut short is undone by the next one. ``check`` ends before anything is written.
        """
        place = await in_thread(source.find, into)
        if place.bare:
            raise BadSource(f"`{place.top}` has no work tree", hint="take the work as a branch: runner runs branch")
        if check:
            atomic_apply.refuse_interrupted(place.git)
            return (await self._attempt(patch, base, place, scratch))[0]
        with atomic_apply.exclusively(place.git, place.top) as folder:
            applied, changes = await self._attempt(patch, base, place, scratch)
            await in_thread(atomic_apply.replace, place.top, folder, scratch / "tree", changes)
        return applied

    async def _attempt(
        self, patch: Path, base: str | None, place: source.Place, scratch: Path
    ) -> tuple[Applied, list[atomic_apply.Replacement]]:
        head = await self.find_commit(place.git, "HEAD")
        if base is not None and (head is None or not await self._leads_to(place.git, base, head)):
            raise BaseMissing(
                f"HEAD of `{place.top}` does not contain {base[:12]}, which the work is built on",
                hint="check out a branch that contains it, or take the work as a branch: runner runs branch",
            )
        await in_thread(disk.make_private, scratch / "git", like=head or "0" * 40)
        tree = scratch / "tree"
        tree.mkdir()
        listed = await self._apply_to(scratch, "--numstat", "-z", patch)
        _check("apply --numstat", listed)
        paths = sorted({row.split(b"\t", 2)[2] for row in listed.stdout.split(b"\0")[:-1]})
        dirty = await self._staged(place, head, paths)
        seen, changed = await in_thread(atomic_apply.look, place.top, tree, dirty.committed, paths)
        if wrong := sorted(dirty.paths | changed):
            raise WouldOverwrite(
                f"{_count(wrong)} of `{place.top}` that the patch changes {'is' if len(wrong) == 1 else 'are'} not as "
                f"committed: {_names(wrong)}",
                hint="commit or stash first, then apply again",
            )
        names = tuple(shown(path) for path in paths)
        ended = await self._apply_to(scratch, patch)
        if ended.code:
            if not (await self._apply_to(scratch, "--check", "--reverse", patch)).code:
                return Applied(place.top, names, present=True), []
            raise PatchConflict(
                f"the patch does not fit `{place.top}`: {_conflicts(ended.words)}",
                hint="take the work as a branch and merge it: runner runs branch",
            )
        return Applied(place.top, names), await in_thread(atomic_apply.plan, place.top, tree, seen)

    async def _staged(self, place: source.Place, head: str | None, paths: Sequence[bytes]) -> _Staged:
        """What HEAD has of the paths, and those of them that the index has otherwise."""
        leaves = {leaf.path: leaf for leaf in (await self.leaves(place.common, head) if head else [])}
        listed = await self._git(place.git, "ls-files", "--stage", "-z")
        index: dict[bytes, bytes] = {}
        for row in listed.stdout.split(b"\0")[:-1]:
            what, _, path = row.partition(b"\t")
            index[path] = what
        committed = {path: leaves[path] for path in paths if path in leaves}
        wanted = {path: b"%o %s 0" % (leaf.mode, leaf.id.encode()) for path, leaf in committed.items()}
        return _Staged(committed, {path for path in paths if index.get(path) != wanted.get(path)})

    async def _apply_to(self, scratch: Path, *argv: str | Path) -> Ended:
        """``git apply`` on the copies."""
        words = [os.fspath(word) for word in argv]
        return await self.on(
            scratch / "git", "-C", str(scratch / "tree"), "apply", "--whitespace=nowarn", *words, tree=scratch / "tree"
        )

    async def _leads_to(self, git: Path, ancestor: str, commit: str) -> bool:
        """Whether ``ancestor`` is there and in the history of ``commit``."""
        if await self.find_commit(git, ancestor) != ancestor:
            return False
        return not (await self._git(git, "merge-base", "--is-ancestor", ancestor, commit, accept=(0, 1))).code

    async def _url_of_remote(self, name: str, repository: Path | None) -> str:
        if repository is None:
            raise BadRemote(f"`{name}` is no URL, and the run has no repository here with remotes")
        place = await in_thread(source.find, repository)
        for key in ("pushurl", "url"):
            ended = await self._git(place.git, "config", "-z", "--get-all", f"remote.{name}.{key}", accept=(0, 1))
            urls = ended.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
            if len(urls) > 1:
                raise BadRemote(f"remote `{name}` of `{place.top}` has {len(urls)} URLs", hint="name one of them")
            if urls:
                local = urls[0].startswith(("./", "../"))
                return str(place.top / urls[0]) if local else urls[0]
        raise BadRemote(f"`{place.top}` has no remote `{name}`", hint=f"git -C {place.top} remote -v")

    async def _remote_state(
        self, repository: Path, url: str, branch: str, person: Mapping[str, str]
    ) -> tuple[str | None, str | None]:
        """The remote's default branch and the commit of ``branch``, as far as it says."""
        ref = f"refs/heads/{branch}"
        ended = await self._as_person(
            repository, person, "ls-remote", "--symref", "--quiet", "--end-of-options", url, "HEAD", ref
        )
        if ended.code:
            raise _failure(url, ended)
        default = before = None
        for line in ended.stdout.decode("utf-8", "surrogateescape").splitlines():
            what, _, name = line.partition("\t")
            if what.startswith("ref: ") and name == "HEAD":
                default = what.removeprefix("ref: refs/heads/")
            elif name == ref:
                before = what
        return default, before

    async def _as_person(self, repository: Path, person: Mapping[str, str], *argv: str) -> Ended:
        env = {**person, **_ACTING, "GIT_DIR": str(repository)}
        if "SSL_CERT_FILE" in env:  # which some builds of git do not look at
            env.setdefault("GIT_SSL_CAINFO", env["SSL_CERT_FILE"])
        return await run([self._program, *argv], env=env)


@dataclass(frozen=True)
class _Staged:
    committed: Mapping[bytes, Entry]
    paths: set[bytes]


def open_delivery(settings: Settings) -> Delivery:
    """Raises ``GitMissing`` when this host has no git binary that will do."""
    git = open_git(settings)
    if not isinstance(git, Binary):
        raise GitMissing("delivering work needs the git program, 2.32 or newer", hint="apt install git")
    return Delivery(git._program, git._reach)


def _taken(what: str) -> BranchTaken:
    return BranchTaken(what, hint="name another branch")


def _refusal(ended: Ended) -> str:
    """Why a ref was not updated, of ``push --porcelain``; empty when it never came to that."""
    found = re.search(rb"^!\t[^\t]*\t\[[\w ]+\](?: \((.*)\))?", ended.stdout, re.MULTILINE)
    return (found[1] or b"rejected").decode("utf-8", "replace") if found else ""


def _not_branched(top: Path, name: str, ended: Ended) -> RunnerError:
    why = _refusal(ended)
    if "shallow" in why:
        return BaseMissing(f"`{top}` lacks the history that the work is built on", hint="git fetch --unshallow there")
    if "unpacker" in why:
        return HostileTree(f"git refuses the objects of the work: {printable(ended.words)}")
    if why:
        return _taken(f"`{top}` does not take a branch `{name}`: {printable(why)}")
    return GitFailed(f"`git push` ended with {ended.code}: {ended.words}")


def _not_pushed(url: str, branch: str, ended: Ended) -> RunnerError:
    why = _refusal(ended)
    if "stale info" in why or "non-fast-forward" in why or "fetch first" in why:
        return _taken(f"`{branch}` of `{url}` has moved meanwhile")
    if why:
        said = _said(ended.words)
        return PushRejected(
            f"`{url}` does not take `{branch}`: {printable(why)}", hint=f"it said: {said}" if said else None
        )
    return _failure(url, ended)


def _said(words: str) -> str:
    """What the server printed."""
    lines = [line.removeprefix("remote:").strip() for line in words.splitlines() if line.startswith("remote:")]
    return printable("; ".join(line for line in lines if line))


def _failure(url: str, ended: Ended) -> RunnerError:
    """Why a remote could not be talked to, by git's own words."""
    if _UNKNOWN_USER.search(ended.words):
        hint = "load the key into the ssh agent, or configure a credential helper of git; nothing prompts here"
        return RemoteDenied(f"`{url}` does not let this user in", hint=hint)
    return judge_end(url, ended)


def _conflicts(words: str) -> str:
    lines = [line.removeprefix("error: ") for line in words.splitlines() if line.startswith("error: ")]
    named = [line for line in lines if not line.startswith("patch failed: ")] or lines
    return printable("; ".join(named[:5])) or printable(words)


def _count(paths: Sequence[bytes]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"


def _names(paths: Sequence[bytes]) -> str:
    return ", ".join(f"`{shown(path)}`" for path in paths[:5]) + (", ..." if len(paths) > 5 else "")
