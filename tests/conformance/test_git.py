"""One suite for every adapter of the git port. Fixtures are made with the real git binary."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio

from runner.core.errors import BadRef, BadSource, CheckoutDiffers, GitFailed, HostileTree, UnknownCommit, Untrusted
from runner.git.binary import GitBinary
from runner.git.dulwich import GitDulwich
from runner.policy.paths import PathPolicy
from runner.ports.git import Author, Git, SnapshotOptions, TreeEntry
from runner.runtime.tree_scan import scan
from runner.safefs import trees
from tests.support.folder_contents import put
from tests.support.needs import GIT, ROOT
from tests.support.params import nightly, rows

PROGRAM = shutil.which("git") or ""
pytestmark = GIT.mark

WANTED = SnapshotOptions("work\n\nof an agent", Author("An Agent", "agent@example.org", 1_700_000_000))


class User:
    """A person at a terminal: git with an identity and no configuration but the given."""

    def __init__(self, top: Path, **env: str) -> None:
        self.top = top
        self.env = {
            "PATH": os.defpath,
            "HOME": str(top),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_AUTHOR_NAME": "U",
            "GIT_AUTHOR_EMAIL": "u@example.org",
            "GIT_COMMITTER_NAME": "U",
            "GIT_COMMITTER_EMAIL": "u@example.org",
            "GIT_AUTHOR_DATE": "1600000000 +0000",
            "GIT_COMMITTER_DATE": "1600000000 +0000",
        } | env

    def __call__(self, *argv: str | bytes, stdin: bytes = b"") -> str:
        command = [PROGRAM, "-C", str(self.top), *argv]
        done = subprocess.run(command, env=self.env, input=stdin, capture_output=True, check=True)
        return os.fsdecode(done.stdout).strip()

    def init(self) -> User:
        self.top.mkdir(parents=True, exist_ok=True)
        self("init", "--quiet", "--initial-branch=main")
        return self

    def commit(self, message: str = "change") -> str:
        self("add", "--all")
        self("commit", "--quiet", "--allow-empty", "--message", message)
        return self("rev-parse", "HEAD")

    def blob(self, content: bytes) -> str:
        return self("hash-object", "-w", "--stdin", stdin=content)

    def tree(self, *rows: tuple[str, str, bytes]) -> str:
        """A tree object with any names at all."""
        raw = b"".join(b"%o %s\0%s" % (int(mode, 8), name, bytes.fromhex(id)) for mode, id, name in rows)
        return self("hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=raw)

    def commit_tree(self, tree: str) -> str:
        return self("commit-tree", "-m", "crafted", tree)


@pytest.fixture(params=["git", "dulwich"])
def git(request: pytest.FixtureRequest) -> Git:
    return GitBinary(PROGRAM) if request.param == "git" else GitDulwich()


@pytest.fixture
def user(tmp_path: Path) -> User:
    """A repository with a file, an executable, a link, a folder and an ignore file."""
    user = User(tmp_path / "source").init()
    _fill(user.top)
    user.commit("first")
    return user


def _fill(top: Path) -> None:
    put(top / "src" / "app.py", "print('hello')\n")
    put(top / "run.sh", "#!/bin/sh\n", 0o755)
    (top / "link").symlink_to("/etc/passwd")
    (top / ".gitignore").write_text("*.log\nbuild/\n!keep.log\n")
    (top / "data.bin").write_bytes(bytes(range(256)) * 4)


@pytest.fixture
def head(user: User) -> str:
    return user("rev-parse", "HEAD")


@pytest.fixture
async def private(git: Git, user: User, head: str, tmp_path: Path) -> Path:
    """The runner's own repository, with the head of the source."""
    into = tmp_path / "private"
    await git.fetch(user.top, head, into=into, depth=None)
    return into


@pytest.fixture
async def tree(git: Git, private: Path, head: str, tmp_path: Path) -> Path:
    """An agent's checkout of the head."""
    into = tmp_path / "tree"
    into.mkdir()
    await git.check_out(private, head, into=into, branch="runner/work")
    return into


def listing(root: Path) -> dict[bytes, tuple[int, bytes]]:
    """Path to git's mode and content, of every file and link below ``root`` but ``.git``."""
    found = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        if b".git" in folders:
            folders.remove(b".git")
        for name in files + [f for f in folders if os.path.islink(os.path.join(folder, f))]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content = os.readlink(path) if stat.S_ISLNK(status.st_mode) else Path(os.fsdecode(path)).read_bytes()
            executable = 0o100755 if status.st_mode & stat.S_IXUSR else 0o100644
            mode = 0o120000 if stat.S_ISLNK(status.st_mode) else executable
            found[os.path.relpath(path, os.fsencode(root))] = (mode, content)
    return found


def fsck(repository: Path) -> None:
    User(repository)("fsck", "--strict", "--no-dangling")


# --- inspect, resolve ------------------------------------------------------------------------------


async def test_inspecting_names_top_head_and_branch(git: Git, user: User, head: str) -> None:
    found = await git.inspect(user.top / "src")

    assert (found.top, found.head, found.branch, found.dirty) == (user.top, head, "main", False)


async def test_a_repository_without_commits_has_a_branch_and_no_head(git: Git, tmp_path: Path) -> None:
    found = await git.inspect(User(tmp_path / "new").init().top)

    assert (found.head, found.branch, found.dirty) == (None, "main", False)
    with pytest.raises(UnknownCommit, match="no commit yet"):
        await git.resolve(found.top, branch=None, commit=None)


async def test_a_detached_head_has_no_branch(git: Git, user: User, head: str) -> None:
    user("checkout", "--quiet", "--detach")

    found = await git.inspect(user.top)

    assert (found.head, found.branch) == (head, None)


async def test_a_source_may_be_named_by_a_link(git: Git, user: User, head: str, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(user.top)

    found = await git.inspect(tmp_path / "alias")

    assert (found.top, found.head, found.dirty) == (user.top, head, False)


async def test_a_linked_work_tree_is_a_source(git: Git, user: User, tmp_path: Path) -> None:
    user("worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
    side = User(tmp_path / "side")
    (side.top / "more").write_text("x")
    commit = side.commit()

    found = await git.inspect(side.top)
    await git.fetch(side.top, commit, into=tmp_path / "private", depth=1)

    assert (found.top, found.head, found.branch, found.dirty) == (side.top, commit, "side", False)
    assert {e.path for e in await git.entries(tmp_path / "private", commit)} >= {b"more"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda p: None, "does not exist", id="missing"),
        pytest.param(lambda p: p.write_text(""), "not a directory", id="a file"),
        pytest.param(lambda p: p.mkdir(), "not a git repository", id="no repository"),
    ],
)
async def test_a_source_that_is_none_is_refused(
    git: Git, tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path / "place")

    with pytest.raises(BadSource, match=words):
        await git.inspect(tmp_path / "place")


async def test_a_source_that_borrows_objects_is_refused(git: Git, user: User, head: str, tmp_path: Path) -> None:
    user("clone", "--quiet", "--shared", str(user.top), str(tmp_path / "borrower"))

    for call in (
        git.inspect(tmp_path / "borrower"),
        git.fetch(tmp_path / "borrower", head, into=tmp_path / "p", depth=1),
    ):
        with pytest.raises(BadSource, match="borrows objects"):
            await call
    assert not (tmp_path / "p").exists()


@ROOT.mark
@pytest.mark.parametrize("part", [".", ".git", ".git/objects"])
async def test_a_source_of_another_user_is_refused(git: Git, user: User, part: str) -> None:
    os.chown(user.top / part, 4242, 4242)

    with pytest.raises(BadSource, match="another user"):
        await git.inspect(user.top)


async def test_a_branch_a_commit_or_head_resolve_to_a_commit(git: Git, user: User, head: str) -> None:
    user("checkout", "--quiet", "-b", "feature/auth")
    second = user.commit()
    user("checkout", "--quiet", "main")

    assert await git.resolve(user.top, branch=None, commit=None) == head
    assert await git.resolve(user.top, branch="feature/auth", commit=None) == second
    assert await git.resolve(user.top, branch=None, commit=second) == second


@pytest.mark.parametrize(
    "name",
    [
        *("--upload-pack=x", "-b", "a..b", "@{-1}", "x.lock", "x/y.lock/z", "main\r", "a b", "", "/a", "a/", "a//b"),
        *(".a", "HEAD", "a:b", "a~1", "a^", "a\\b", "a*", "f" * 40, "F" * 40, "f" * 64, "a@{1}", "x\n", "é" * 150),
    ],
)
async def test_a_name_outside_the_grammar_is_refused(git: Git, user: User, name: str) -> None:
    with pytest.raises(BadRef):
        await git.resolve(user.top, branch=name, commit=None)


async def test_a_branch_named_like_a_commit_never_stands_in_for_it(git: Git, user: User, head: str) -> None:
    other = user.commit("other")
    user("update-ref", f"refs/heads/{head}", other)

    assert await git.resolve(user.top, branch=None, commit=head) == head
    with pytest.raises(BadRef):
        await git.resolve(user.top, branch=head, commit=None)


async def test_a_branch_that_is_not_there_is_unknown(git: Git, user: User) -> None:
    with pytest.raises(UnknownCommit, match="nowhere"):
        await git.resolve(user.top, branch="nowhere", commit=None)


@pytest.mark.parametrize("commit", ["--output=x", "HEAD", "abc", "main"])
async def test_a_commit_is_a_full_id(git: Git, user: User, commit: str) -> None:
    with pytest.raises(BadRef):
        await git.resolve(user.top, branch=None, commit=commit)


async def test_ids_that_are_no_commits_are_unknown(git: Git, user: User, private: Path, tmp_path: Path) -> None:
    user("tag", "--annotate", "--message", "t", "t")
    ids = ["0" * 40, user("rev-parse", "HEAD^{tree}"), user("rev-parse", "HEAD:run.sh"), user("rev-parse", "t")]

    for id in ids:
        with pytest.raises(UnknownCommit):
            await git.resolve(user.top, branch=None, commit=id)
        with pytest.raises(UnknownCommit):
            await git.fetch(user.top, id, into=tmp_path / "p", depth=None)


# --- a repository that a stranger's manifest names ---------------------------------------------------


class Asked:
    """The directory that the user named, with a repository `repo`, and a `victim` beside it with a secret."""

    def __init__(self, tmp_path: Path) -> None:
        self.within = tmp_path / "named"
        self.repo = User(self.within / "repo").init()
        (self.repo.top / "file").write_text("public\n")
        self.head = self.repo.commit()
        self.victim = User(tmp_path / "victim").init()
        (self.victim.top / "secret").write_text("the secret\n")
        self.secret = self.victim.commit()


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def _replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def _link(name: str) -> Callable[[Asked], Path]:
    """A part of the repository that is a link to the same part of the victim's."""

    def make(asked: Asked) -> Path:
        for user in (asked.victim, asked.repo):
            user("pack-refs", "--all", "--no-prune")
        (asked.victim.top / ".git" / "shallow").touch()
        _replace_by_link(asked.repo.top / ".git" / name, asked.victim.top / ".git" / name)
        return asked.repo.top

    return make


def _link_below(pattern: str) -> Callable[[Asked], Path]:
    """A link that has a place of its own among refs or objects."""

    def make(asked: Asked) -> Path:
        if "pack" in pattern:
            asked.victim("gc", "--quiet")
        for found in list((asked.victim.top / ".git").glob(pattern)):
            link = asked.repo.top / ".git" / found.relative_to(asked.victim.top / ".git")
            link.parent.mkdir(exist_ok=True)
            _replace_by_link(link, found)
        return asked.repo.top

    return make


def _git_file(asked: Asked) -> Path:
    shutil.rmtree(asked.repo.top / ".git")
    (asked.repo.top / ".git").write_text(f"gitdir: {asked.victim.top}/.git\n")
    return asked.repo.top


def _git_file_to_a_link(asked: Asked) -> Path:
    (asked.within / "way").symlink_to(asked.victim.top)
    shutil.rmtree(asked.repo.top / ".git")
    (asked.repo.top / ".git").write_text("gitdir: ../way/.git\n")
    return asked.repo.top


def _git_link(asked: Asked) -> Path:
    _replace_by_link(asked.repo.top / ".git", asked.victim.top / ".git")
    return asked.repo.top


def _commondir(asked: Asked) -> Path:
    (asked.repo.top / ".git" / "commondir").write_text(f"{asked.victim.top}/.git\n")
    return asked.repo.top


def _bare(asked: Asked) -> Path:
    """A bare repository as anybody can commit it: links, and a file for HEAD."""
    bare = asked.repo.top / "docs"
    put(bare / "HEAD", "ref: refs/heads/main\n")
    for name in ("objects", "refs"):
        (bare / name).symlink_to(asked.victim.top / ".git" / name)
    return bare


def _bare_with_a_commondir(asked: Asked) -> Path:
    bare = asked.repo.top / "docs"
    (bare / "objects").mkdir(parents=True)
    (bare / "refs").mkdir()
    (bare / "HEAD").write_text("ref: refs/heads/main\n")
    (bare / "commondir").write_text(f"{asked.victim.top}/.git\n")
    return bare


def _bare_without_links(asked: Asked) -> Path:
    asked.repo("init", "--quiet", "--bare", "docs")
    return asked.repo.top / "docs"


def _a_work_tree_of_the_victim(asked: Asked) -> Path:
    asked.victim("worktree", "add", "--quiet", str(asked.within / "side"))
    return asked.within / "side"


def _above(asked: Asked) -> Path:
    """No repository itself, in one that the user did not name."""
    asked.within = asked.victim.top / "below"
    asked.within.mkdir()
    return asked.within


def _reftable(asked: Asked) -> Path:
    (asked.repo.top / ".git" / "reftable").mkdir()
    return asked.repo.top


ELSEWHERE: dict[str, Callable[[Asked], Path]] = {
    "a .git file": _git_file,
    "a .git file through a link": _git_file_to_a_link,
    "a .git link": _git_link,
    "commondir": _commondir,
    "a bare repository of links": _bare,
    "a bare repository with a commondir": _bare_with_a_commondir,
    "a bare repository": _bare_without_links,
    "a linked work tree": _a_work_tree_of_the_victim,
    "a repository above": _above,
    "a reftable": _reftable,
    **{f"a link for {name}": _link(name) for name in ("HEAD", "index", "packed-refs", "shallow", "refs", "objects")},
    "a link for a branch": _link_below("refs/heads/main"),
    "a link for branches": _link("refs/heads"),
    "a link for objects/info": _link("objects/info"),
    "a link for packs": _link("objects/pack"),
    "links for loose objects": _link_below("objects/??"),
    "links for each loose object": _link_below("objects/??/*"),
    "links for each pack": _link_below("objects/pack/*"),
    "a link for info": _link("info"),
    "a link for info/exclude": _link("info/exclude"),
}


BY_DAY = (
    "a .git file",
    "a .git link",
    "commondir",
    "a bare repository of links",
    "a link for objects",
    "a link for refs",
)


@pytest.mark.parametrize("make", rows(ELSEWHERE, by_day=BY_DAY))
async def test_a_repository_that_leads_out_of_what_was_named_is_not_read(
    git: Git, asked: Asked, make: Callable[[Asked], Path], tmp_path: Path
) -> None:
    """So the author of a pull request cannot read what only its reviewer can."""
    path, into = make(asked), tmp_path / "into"
    (tmp_path / "tree").mkdir()

    for call in (
        git.inspect(path, within=asked.within),
        git.resolve(path, branch=None, commit=None, within=asked.within),
        git.resolve(path, branch="main", commit=None, within=asked.within),
        git.resolve(path, branch=None, commit=asked.secret, within=asked.within),
        git.read_file(path, asked.secret, "secret", limit=1000, within=asked.within),
        git.fetch(path, asked.secret, into=into, depth=1, within=asked.within),
        git.copy_uncommitted(path, into=tmp_path / "tree", within=asked.within),
    ):
        with pytest.raises(Untrusted):
            await call
    assert not into.exists()
    assert not any((tmp_path / "tree").iterdir())


async def test_a_repository_within_what_was_named_is_read(git: Git, asked: Asked, tmp_path: Path) -> None:
    """Its hooks are nobody's concern, and a submodule has its git directory in that of the whole."""
    (asked.repo.top / ".git" / "hooks").mkdir(exist_ok=True)
    (asked.repo.top / ".git" / "hooks" / "pre-commit").symlink_to("/bin/true")
    inner = User(asked.repo.top / "inner").init()
    commit = inner.commit()
    (asked.repo.top / ".git" / "modules").mkdir()
    (inner.top / ".git").rename(asked.repo.top / ".git" / "modules" / "inner")
    (inner.top / ".git").write_text("gitdir: ../.git/modules/inner\n")

    assert (await git.inspect(asked.repo.top, within=asked.within)).head == asked.head
    assert (await git.inspect(asked.repo.top / "inner", within=asked.repo.top)).head == commit
    await git.fetch(asked.repo.top, asked.head, into=tmp_path / "p", depth=1, within=asked.within)
    assert [entry.path for entry in await git.entries(tmp_path / "p", asked.head)] == [b"file"]


async def test_a_commondir_without_a_work_tree_of_its_own_is_followed_as_git_does(
    git: Git, asked: Asked, tmp_path: Path
) -> None:
    """By a user who may read both, and by every reader alike."""
    path = _commondir(asked)

    assert (await git.inspect(path)).head == asked.secret
    await git.fetch(path, asked.secret, into=tmp_path / "p", depth=1)
    with pytest.raises(UnknownCommit):
        await git.fetch(path, asked.head, into=tmp_path / "p2", depth=1)


CONFIGURATIONS = {
    "an include that never ends": "[include]\n\tpath = {tmp}/fifo\n",
    "an include of what is none": "[include]\n\tpath = {tmp}/text\n",
    "another work tree": "[core]\n\tworktree = {victim}\n",
    "a work tree's own": "[extensions]\n\tworktreeConfig = true\n",
    "an unknown extension": "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tmade = up\n",
    "programs": (
        "[core]\n\tfsmonitor = touch {canary}\n\thooksPath = {tmp}/hooks\n\tsshCommand = touch {canary}\n"
        "\tgitProxy = touch {canary}\n\talternateRefsCommand = touch {canary}\n\tpager = touch {canary}\n"
        '[filter "f"]\n\tclean = touch {canary}; cat\n\tsmudge = touch {canary}; cat\n\tprocess = touch {canary}\n'
        '\trequired\n[remote "r"]\n\turl = ext::touch {canary}\n\tpromisor\n'
        "[uploadpack]\n\tpackObjectsHook = touch {canary}; cat\n[diff]\n\texternal = touch {canary}\n"
        "[credential]\n\thelper = !touch {canary}\n"
    ),
    "no configuration at all": "[core\n",
}


@pytest.mark.parametrize("text", rows(CONFIGURATIONS, by_day=("an include that never ends", "programs")))
async def test_the_configuration_of_a_source_is_not_read(git: Git, asked: Asked, text: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("not a configuration\n")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("reference-transaction", "post-index-change", "post-checkout"):
        put(hooks / name, f"#!/bin/sh\ntouch {tmp_path}/canary\n", 0o755)
    (asked.repo.top / "file").write_text("changed\n")
    top, head, tree = asked.repo.top, asked.head, tmp_path / "tree"
    (top / ".git" / "info" / "attributes").write_text("* filter=f diff=f\n")
    (top / ".git" / "config").write_text(text.format(tmp=tmp_path, victim=asked.victim.top, canary=tmp_path / "canary"))
    tree.mkdir()

    found = await git.inspect(top, within=asked.within)
    assert (found.top, found.head, found.branch, found.dirty) == (top, head, "main", True)
    assert await git.resolve(top, branch="main", commit=None, within=asked.within) == head
    assert await git.read_file(top, head, "file", limit=100, within=asked.within) == b"public\n"
    await git.fetch(top, head, into=tmp_path / "p", depth=1, within=asked.within)
    await git.check_out(tmp_path / "p", head, into=tree, branch="b")
    assert await git.copy_uncommitted(top, into=tree, within=asked.within) == 1
    assert listing(tree) == {b"file": (0o100644, b"changed\n")}
    assert not (tmp_path / "canary").exists()


async def test_what_a_source_lacks_is_not_fetched_from_elsewhere(git: Git, asked: Asked, tmp_path: Path) -> None:
    """A partial clone names where the rest is, and a program that gets it."""
    top, secret = asked.repo.top, asked.victim("rev-parse", "HEAD:secret")
    tree = asked.repo.tree(("100644", secret, b"stolen"))
    commit = asked.repo.commit_tree(tree)
    with (top / ".git" / "config").open("a") as config:
        config.write(
            f'[extensions]\n\tpartialClone = r\n[remote "r"]\n\turl = {asked.victim.top}\n\tpromisor = true\n'
            f"\tuploadpack = touch {tmp_path}/canary; git-upload-pack\n"
        )

    for call in (
        git.read_file(top, commit, "stolen", limit=100, within=asked.within),
        git.fetch(top, commit, into=tmp_path / "p", depth=1, within=asked.within),
    ):
        with pytest.raises(GitFailed):
            await call
    assert not (tmp_path / "canary").exists()


async def test_history_is_what_the_objects_say(git: Git, asked: Asked, tmp_path: Path) -> None:
    """Replacements and grafts are a user's view of it; a run would not have them."""
    first, top = asked.head, asked.repo.top
    (top / "file").write_text("second\n")
    second = asked.repo.commit()
    asked.repo("replace", first, second)
    (top / ".git" / "info" / "grafts").write_text(f"{second}\n")

    assert await git.read_file(top, first, "file", limit=100) == b"public\n"
    await git.fetch(top, second, into=tmp_path / "p", depth=None)

    assert User(tmp_path / "p")("rev-list", second).split() == [second, first]


async def test_a_list_of_cuts_that_is_none_is_not_told(git: Git, asked: Asked, tmp_path: Path) -> None:
    """Git would repeat the first line of whatever file that is."""
    (asked.repo.top / ".git" / "shallow").write_text("root:x:0:0\n")

    with pytest.raises(BadSource) as caught:
        await git.fetch(asked.repo.top, asked.head, into=tmp_path / "p", depth=1)

    assert ":x:" not in caught.value.message


NO_NAMES = {
    "out of the repository": "ref: refs/heads/../../../../victim/.git/refs/heads/main\n",
    "an absolute path": "ref: /etc/passwd\n",
    "no ref": "ref: config\n",
    "itself": "ref: refs/heads/main\n",
    "words": "the secret\n",
    "a zero byte": "ref: refs/heads/\0\n",
}


@pytest.mark.parametrize("text", rows(NO_NAMES, by_day=("itself", "words")))
async def test_a_name_that_stands_for_nothing_here_is_refused_without_its_content(
    git: Git, asked: Asked, text: str
) -> None:
    (asked.repo.top / ".git" / "refs" / "heads" / "main").write_text(text)

    for call in (
        git.resolve(asked.repo.top, branch="main", commit=None),
        git.inspect(asked.repo.top),
    ):
        with pytest.raises(BadSource) as caught:
            await call
        assert "secret" not in caught.value.message


async def test_a_fifo_in_a_source_is_not_waited_for(git: Git, asked: Asked) -> None:
    head = asked.repo.top / ".git" / "refs" / "heads" / "main"
    head.unlink()
    os.mkfifo(head)

    with trio.fail_after(20), pytest.raises(UnknownCommit):
        await git.resolve(asked.repo.top, branch="main", commit=None)


async def test_packed_names_are_found(git: Git, user: User, head: str) -> None:
    user("branch", "side")
    user("pack-refs", "--all", "--prune")
    user("tag", "--annotate", "--message", "t", "t")
    user("pack-refs", "--all", "--prune")

    assert (await git.inspect(user.top)).head == head
    assert await git.resolve(user.top, branch="side", commit=None) == head
    with pytest.raises(UnknownCommit):
        await git.resolve(user.top, branch="sid", commit=None)
    with pytest.raises(UnknownCommit):
        await git.resolve(user.top, branch="heads/side", commit=None)


# --- fetch -----------------------------------------------------------------------------------------


async def test_fetching_takes_history_to_the_depth(git: Git, user: User, tmp_path: Path) -> None:
    commits = [user.commit(str(number)) for number in range(3)]

    for depth, count in ((None, 4), (1, 1), (2, 2), (9, 4)):
        into = tmp_path / f"depth-{depth}"
        await git.fetch(user.top, commits[-1], into=into, depth=depth)
        assert User(into)("rev-list", "--count", commits[-1]) == str(count)
        fsck(into)


async def test_a_shallow_source_can_be_fetched_whole(git: Git, user: User, tmp_path: Path) -> None:
    tip = user.commit()
    user("clone", "--quiet", "--depth=1", user.top.as_uri(), str(tmp_path / "shallow"))

    await git.fetch(tmp_path / "shallow", tip, into=tmp_path / "p", depth=None)

    assert User(tmp_path / "p")("rev-list", "--count", tip) == "1"


async def test_merges_are_cut_where_git_cuts_them(git: Git, user: User, tmp_path: Path) -> None:
    user("checkout", "--quiet", "-b", "side")
    user.commit("side 1")
    user.commit("side 2")
    user("checkout", "--quiet", "main")
    user.commit("main 1")
    user("merge", "--quiet", "--no-edit", "side")
    tip = user("rev-parse", "HEAD")
    user("clone", "--quiet", "--bare", "--depth=3", user.top.as_uri(), str(tmp_path / "theirs"))

    await git.fetch(user.top, tip, into=tmp_path / "p", depth=3)

    assert User(tmp_path / "p")("rev-list", tip) == User(tmp_path / "theirs")("rev-list", tip)


async def test_a_private_repository_shares_no_file_and_has_no_refs(git: Git, user: User, private: Path) -> None:
    user("gc", "--quiet")
    theirs = {p.stat().st_ino for p in user.top.rglob("*") if p.is_file()}

    assert not theirs & {p.stat().st_ino for p in private.rglob("*") if p.is_file()}
    assert User(private)("for-each-ref") == ""
    assert not (private / "objects/info/alternates").exists()
    assert not (private / "hooks").exists()


async def test_odd_places_are_fetched_from(git: Git, user: User, head: str, tmp_path: Path) -> None:
    place = tmp_path / "-o x:%41 'q' $(touch canary)\n"
    shutil.copytree(user.top, place, symlinks=True)

    await git.fetch(place, head, into=tmp_path / "p", depth=1)

    assert (await git.inspect(place)).head == head
    assert len(await git.entries(tmp_path / "p", head)) == 5
    assert not list(tmp_path.rglob("canary"))


HOSTILE_NAMES = {
    "dot-git": b".git",
    "upper-case": b".GIT",
    "short-name": b"git~1",
    "dot-dot": b"..",
    "dot": b".",
    "dropped-code-point": ".g\u200cit".encode(),
    "trailing-dot": b".git.",
    "trailing-space": b".git ",
    "stream": b".git::$INDEX_ALLOCATION",
    "backslash": b"a\\.git\\config",
    "slash": b"a/../../b",
}


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
async def test_a_tree_with_a_hostile_name_is_refused(
    git: Git, user: User, name: bytes, folder: bool, tmp_path: Path
) -> None:
    file = user.blob(b"[core]\n\tfsmonitor = false\n")
    leaf = ("040000", user.tree(("100644", file, b"config")), name) if folder else ("100644", file, name)
    commit = user.commit_tree(user.tree(("040000", user.tree(leaf), b"sub")))

    with pytest.raises(HostileTree):
        await git.fetch(user.top, commit, into=tmp_path / "p", depth=1)


async def test_a_name_of_no_letters_is_refused(git: Git, user: User, tmp_path: Path) -> None:
    commit = user.commit_tree(user.tree(("100644", user.blob(b"x"), b"")))

    with pytest.raises((HostileTree, GitFailed)):  # git does not even send it
        await git.fetch(user.top, commit, into=tmp_path / "p", depth=1)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param((b"README", b"readme"), id="case"),
        pytest.param(("café".encode(), "cafe\u0301".encode()), id="normalisation"),
        pytest.param((b"STRASSE", "straße".encode()), id="folded letters"),
    ],
)
async def test_names_equal_but_for_case_are_refused(
    git: Git, user: User, names: tuple[bytes, bytes], tmp_path: Path
) -> None:
    file = user.blob(b"x")
    folders = [("040000", user.tree(("100644", file, name)), name) for name in sorted(names)]
    crafted = [user.tree(*(("100644", file, name) for name in sorted(names))), user.tree(*folders)]

    for number, tree in enumerate(crafted):
        with pytest.raises(HostileTree):
            await git.fetch(user.top, user.commit_tree(tree), into=tmp_path / f"p{number}", depth=1)


A_FEW = PathPolicy(("**",), ("**/nothing",), 1 << 20)
ODD_NAMES: dict[str, list[bytes]] = {
    **{name: [spelling] for name, spelling in HOSTILE_NAMES.items() if spelling not in (b".", b"..", b"a/../../b")},
    "short name in capitals": [b"GIT~1"],
    "short name with a stream": [b"git~1::$DATA"],
    "file of submodules": [b".gitmodules"],
    "its short name": [b"GITMOD~4"],
    "its shorter name": [b"gi7eba~1"],
    "attributes": [b".gitattributes"],
    "their short name": [b"gitatt~1"],
    "what git takes for an end": [b".git\xff"],
    "what git takes for an end, too": [b".git\xef\xbf\xbe"],
    "case": [b"README", b"readme"],
    "case of letters that ASCII lacks": ["É".encode(), "é".encode()],
    "composition": ["caf\u00e9".encode(), "cafe\u0301".encode()],
    "folded letters": [b"STRASSE", "stra\u00dfe".encode()],
    "skipped by HFS+": [b"ab", "a\u200db".encode()],
    "skipped by eyes": ["\u2764".encode(), "\u2764\ufe0f".encode()],
    "case and no text": [b"A\xff", b"a\xff"],
    "no text": [b"\xff", b"\xfe"],
    "half a character": [b"\xc3", b"\xed\xa0\x80"],
    "controls": [b"a\nb", b"\x1b[31m", b"\x7f", b"\t"],
    "spaces and dots": [b" ", b"a ", b"a.", b"...", b"-rf"],
    "of Windows": [b"CON", b"nul.txt", b"a:b", b"a\\b", b"<>|?*"],
    "long": [b"n" * 255],
    "like git's": [b"git", b"git~2", b".gitx", b".git-x", b"gitmod~1"],
}


async def _refuses(git: Git, top: Path, commit: str, into: Path) -> bool:
    try:
        await git.fetch(top, commit, into=into, depth=1)
    except HostileTree:
        return True
    return False


async def _judged(git: Git, names: Sequence[bytes], folder: bool, place: Path) -> tuple[bool, bool, bool]:
    """Whether a tree with these names is refused when it is fetched, on the disk, and when what was made is fetched."""
    user = User(place / "user").init()
    blob = user.blob(b"x")
    inner = user.tree(("100644", blob, b"f"))
    row = ("040000", inner) if folder else ("100644", blob)
    order = sorted(names, key=lambda name: name + b"/" * folder)
    crafted = user.commit_tree(user.tree(("040000", user.tree(*((*row, name) for name in order)), b"sub")))
    tree = os.fsencode(place / "tree" / "sub")
    os.makedirs(tree)
    for name in names:
        if folder:
            os.mkdir(tree + b"/" + name)
        with open(tree + b"/" + name + b"/f" * folder, "wb") as file:
            file.write(b"x")
    await git.create_empty(place / "private")
    made = await git.snapshot(place / "private", place / "tree", None, WANTED)
    on_disk = bool(scan(place / "tree", A_FEW).violations or made.collisions)
    fetched = await _refuses(git, user.top, crafted, place / "fetched")
    return fetched, on_disk, await _refuses(git, place / "private", made.commit, place / "again")


ODD_BY_DAY = ("short-name", "stream", "case", "composition", "no text", "of Windows", "what git takes for an end")


@pytest.mark.parametrize("folder", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["folder", "file"])
@pytest.mark.parametrize("names", rows(ODD_NAMES, by_day=ODD_BY_DAY))
async def test_a_name_is_judged_alike_when_fetched_scanned_and_published(
    git: Git, names: list[bytes], folder: bool, tmp_path: Path
) -> None:
    """So what a run publishes, the next can start from."""
    fetched, on_disk, again = await _judged(git, names, folder, tmp_path)

    assert fetched == on_disk
    assert again <= on_disk


@pytest.mark.parametrize(
    "name", [b".gitmodules", b".GITMODULES", b"gitmod~3", b".git", b"link", b".gitignore", b".gitattributes"]
)
async def test_a_link_is_judged_alike_when_fetched_scanned_and_published(
    git: Git, user: User, name: bytes, tmp_path: Path
) -> None:
    commit = user.commit_tree(user.tree(("120000", user.blob(b"f"), name)))
    tree = os.fsencode(tmp_path / "tree" / "sub")
    os.makedirs(tree)
    os.symlink(b"f", tree + b"/" + name)
    on_disk = bool(scan(tmp_path / "tree", A_FEW).violations)

    fetched = await _refuses(git, user.top, commit, tmp_path / "p")

    assert fetched == on_disk == (name not in (b"link", b".gitignore", b".gitattributes"))


FOR_GIT = {
    "an url that is an option": (".gitmodules", b'[submodule "s"]\n\tpath = s\n\turl = -x\n'),
    "a path that is an option": (".gitmodules", b'[submodule "s"]\n\tpath = -s\n\turl = https://h/x\n'),
    "a name that leads up": (".gitmodules", b'[submodule "../s"]\n\tpath = s\n\turl = https://h/x\n'),
    "a command": (".gitmodules", b'[submodule "s"]\n\tpath = s\n\turl = https://h/x\n\tupdate = !sh\n'),
    "a short name": ("gitmod~1", b'[submodule "s"]\n\tpath = s\n\turl = -x\n'),
    "submodules as usual": (".gitmodules", b'[submodule "s"]\n\tpath = s\n\turl = https://h/x\n'),
    "no configuration": (".gitmodules", b"[submodule\n"),
    "an attribute without an end": (".gitattributes", b"* " + b"x" * 3000 + b"\n"),
    "attributes as usual": (".gitattributes", b"*.sh eol=lf\n"),
    "something else": ("README", b'[submodule "s"]\n\tpath = s\n\turl = -x\n'),
}


@pytest.mark.parametrize(("name", "content"), rows(FOR_GIT, by_day=("a short name", "submodules as usual")))
async def test_a_file_that_git_reads_is_judged_alike_when_fetched_and_published(
    git: Git, name: str, content: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "tree" / "sub" if name == ".gitattributes" else tmp_path / "tree"
    folder.mkdir(parents=True)
    for one in (name, "harmless"):
        (folder / one).write_bytes(content)
    await git.create_empty(tmp_path / "private")
    made = await git.snapshot(tmp_path / "private", tmp_path / "tree", None, WANTED)
    changes = await git.changes(tmp_path / "private", None, made.commit)

    refused = await git.rejected_files(tmp_path / "private", changes)

    assert await _refuses(git, tmp_path / "private", made.commit, tmp_path / "into") == bool(refused)
    assert refused.keys() <= {os.fsencode((folder / name).relative_to(tmp_path / "tree"))}


PIECES = [
    *(
        ".gitmodules",
        ".gitattributes",
        ".git",
        ".GIT",
        "git~1",
        "::$DATA",
        ".",
        " ",
        "\\",
        "\n",
        "\udcff",
        "\U0001f600",
    ),
    *("a", "A", "I", "i", "\u0130", "\u0131", "k", "\u212a", "\u00e9", "e\u0301", "\u00c9", "ss", "\u00df", "\u1e9e"),
    *("fi", "\ufb01", "\u200c", "\ufeff", "\u00ad"),
]


@pytest.mark.parametrize("seed", [*range(5), *map(nightly, range(5, 300))])
async def test_any_names_are_judged_alike(git: Git, seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    made = ("".join(source.choices(PIECES, k=source.randrange(1, 4))) for _ in range(source.randrange(1, 5)))
    names = {name.encode("utf-8", "surrogateescape") for name in made} - {b".", b".."}
    if not names:
        return

    fetched, on_disk, again = await _judged(git, sorted(names), source.random() < 0.5, tmp_path)

    assert fetched == on_disk, names
    assert again <= on_disk, names


async def test_a_path_is_too_long_alike_when_fetched_and_scanned(git: Git, user: User, tmp_path: Path) -> None:
    for length, refused in ((4000, False), (4001, True)):
        first = length - 15 * 251 - 2
        names = [b"d" * 250] * 15 + [b"e" * first, b"f"]
        tree = user.tree(("100644", user.blob(b"x"), names[-1]))
        for name in reversed(names[:-1]):
            tree = user.tree(("040000", tree, name))
        commit, root = user.commit_tree(tree), tmp_path / f"root-{length}"
        root.mkdir()
        holder = os.open(root, os.O_RDONLY)
        for name in names[:-1]:
            os.mkdir(name, dir_fd=holder)
            below = os.open(name, os.O_RDONLY, dir_fd=holder)
            os.close(holder)
            holder = below
        os.close(os.open(b"f", os.O_CREAT | os.O_WRONLY, dir_fd=holder))
        os.close(holder)

        rules = [violation.rule for violation in scan(root, A_FEW).violations]
        assert rules == ["scan-limit"] * refused
        if refused:
            with pytest.raises(HostileTree, match="too long"):
                await git.fetch(user.top, commit, into=tmp_path / "p", depth=1)
        else:
            await git.fetch(user.top, commit, into=tmp_path / "q", depth=1)
        assert trees.remove(root) == []


async def test_a_link_and_a_folder_of_one_name_are_refused(git: Git, user: User, tmp_path: Path) -> None:
    link = ("120000", user.blob(os.fsencode(tmp_path)), b"a")
    folder = ("040000", user.tree(("100644", user.blob(b"x"), b"escaped")), b"a")

    with pytest.raises(HostileTree):
        await git.fetch(user.top, user.commit_tree(user.tree(link, folder)), into=tmp_path / "p", depth=1)


async def test_submodules_are_not_followed(git: Git, user: User, head: str, tmp_path: Path) -> None:
    (user.top / ".gitmodules").write_text('[submodule "s"]\n\tpath = s\n\turl = ext::sh -c "touch canary"\n')
    user("update-index", "--add", "--cacheinfo", f"160000,{head},s")
    user("add", ".gitmodules")
    user("commit", "--quiet", "-m", "submodule")
    commit = user("rev-parse", "HEAD")
    if await _refuses(git, user.top, commit, tmp_path / "p"):
        return  # git itself refuses such an address
    tree = tmp_path / "t"
    tree.mkdir()
    await git.check_out(tmp_path / "p", commit, into=tree, branch="b")

    assert b"s" not in {e.path for e in await git.entries(tmp_path / "p", commit)}
    assert not any((tree / "s").iterdir())
    made = await git.snapshot(tmp_path / "p", tree, commit, WANTED)
    assert await git.changes(tmp_path / "p", commit, made.commit) == []


@pytest.fixture
def hostile_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose configuration runs things; yields the canary."""
    canary = tmp_path / "canary"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction", "pre-commit"):
        put(hooks / name, f"#!/bin/sh\ntouch {canary}\n", 0o755)
    config = tmp_path / "hostile-config"
    config.write_text(
        f"[core]\n\thooksPath = {hooks}\n\tfsmonitor = touch {canary}\n\tattributesFile = {tmp_path}/attributes\n"
        f'[url "/nowhere/"]\n\tinsteadOf = /\n[init]\n\ttemplateDir = {hooks}\n'
        f'[filter "f"]\n\tclean = touch {canary}; cat\n\tsmudge = touch {canary}; cat\n'
        f"[diff]\n\texternal = touch {canary}; false\n[core]\n\tautocrlf = true\n"
    )
    (tmp_path / "attributes").write_text("* filter=f text eol=crlf diff=f\n")
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(config, home / ".gitconfig")
    monkeypatch.setenv("HOME", str(home))
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, str(config))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {canary}")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    return canary


async def test_configuration_of_the_host_has_no_effect(
    git: Git, user: User, head: str, hostile_host: Path, tmp_path: Path
) -> None:
    private, tree, clean = tmp_path / "p", tmp_path / "t", tmp_path / "c"
    tree.mkdir()
    clean.mkdir()

    await git.inspect(user.top)
    await git.fetch(user.top, head, into=private, depth=None)
    await git.check_out(private, head, into=tree, branch="b")
    (tree / "new.txt").write_bytes(b"one\r\ntwo\n")
    made = await git.snapshot(private, tree, head, WANTED)
    await git.patch(private, head, made.commit, tmp_path / "patch")
    await git.materialise(private, made.commit, clean)

    assert listing(clean) == listing(tree)
    assert (clean / "new.txt").read_bytes() == b"one\r\ntwo\n"
    assert not (tree / ".git" / "hooks").exists()
    assert not hostile_host.exists()


# --- check_out -------------------------------------------------------------------------------------


async def test_a_checkout_is_a_clean_repository_of_its_own(git: Git, user: User, head: str, tree: Path) -> None:
    agent = User(tree)

    assert agent("rev-parse", "HEAD") == head
    assert agent("symbolic-ref", "HEAD") == "refs/heads/runner/work"
    assert agent("status", "--porcelain") == ""
    assert agent("remote") == ""
    assert agent("log", "--format=%s") == "first"
    assert listing(tree) == listing(user.top)
    assert {path.name for path in (tree / ".git").iterdir()} == {"HEAD", "config", "index", "objects", "refs"}
    agent("commit", "--quiet", "--allow-empty", "-m", "the agent can commit")
    fsck(tree)


async def test_a_checkout_shares_no_file_with_the_private_repository(private: Path, tree: Path) -> None:
    ours = {path.stat().st_ino for path in private.rglob("*") if path.is_file()}

    assert not ours & {path.stat().st_ino for path in tree.rglob("*") if path.is_file()}


async def test_a_shallow_checkout_is_whole(git: Git, user: User, tmp_path: Path) -> None:
    tip = user.commit()
    tree = tmp_path / "tree"
    tree.mkdir()
    await git.fetch(user.top, tip, into=tmp_path / "p", depth=1)

    await git.check_out(tmp_path / "p", tip, into=tree, branch="b")

    assert User(tree)("rev-list", "--count", "HEAD") == "1"
    fsck(tree)


async def test_modes_do_not_depend_on_the_umask(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    places = [tmp_path / "tree", tmp_path / "clean"]
    for place in places:
        place.mkdir()
    before = os.umask(0o077)
    try:
        await git.check_out(private, head, into=places[0], branch="b")
        await git.materialise(private, head, places[1])
    finally:
        os.umask(before)

    for place in places:
        assert {name: stat.S_IMODE((place / name).stat().st_mode) for name in ("run.sh", "data.bin", "src")} == {
            "run.sh": 0o755,
            "data.bin": 0o644,
            "src": 0o755,
        }


async def test_checking_out_over_something_is_refused(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "run.sh").symlink_to(tmp_path / "outside")

    for call in (
        git.check_out(private, head, into=tmp_path / "t", branch="b"),
        git.materialise(private, head, tmp_path / "t"),
    ):
        with pytest.raises(GitFailed, match="not empty"):
            await call
    assert not (tmp_path / "outside").exists()


async def test_a_checkout_on_a_branch_outside_the_grammar_is_refused(
    git: Git, private: Path, head: str, tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(BadRef):
        await git.check_out(private, head, into=tmp_path / "t", branch="../../escaped")


# --- add_dirty -------------------------------------------------------------------------------------


async def test_uncommitted_changes_are_copied(git: Git, user: User, tree: Path) -> None:
    top = user.top
    (top / "src" / "app.py").write_text("edited\n")
    (top / "data.bin").unlink()
    (top / "run.sh").chmod(0o644)
    (top / "link").unlink()
    put(top / "link" / "inside", "a folder now\n")
    (top / "staged").write_text("staged\n")
    user("add", "staged")
    (top / "forced.log").write_text("ignored but staged\n")
    user("add", "--force", "forced.log")
    (top / "keep.log").write_text("not ignored\n")
    (top / "noise.log").write_text("ignored\n")
    put(top / "build" / "out", "ignored\n")
    (top / "new link").symlink_to("/nowhere")

    count = await git.copy_uncommitted(top, into=tree)

    assert count == 9
    expected = {path: what for path, what in listing(top).items() if path not in (b"noise.log", b"build/out")}
    assert listing(tree) == expected
    assert (await git.inspect(top)).dirty


async def test_files_that_were_only_touched_are_not_dirty(git: Git, user: User) -> None:
    os.utime(user.top / "src" / "app.py")

    assert not (await git.inspect(user.top)).dirty


async def test_the_exclude_file_of_a_source_is_honoured(git: Git, user: User) -> None:
    (user.top / ".git" / "info" / "exclude").write_text("scratch\n")
    (user.top / "scratch").write_text("")

    assert not (await git.inspect(user.top)).dirty


# --- snapshot --------------------------------------------------------------------------------------


async def test_a_snapshot_holds_the_tree_byte_for_byte(git: Git, private: Path, head: str, tree: Path) -> None:
    _work(tree)

    made = await git.snapshot(private, tree, head, WANTED)

    expected = {path: what for path, what in listing(tree).items() if path not in (b"debug.log", b"build/out")}
    found = {entry.path: (entry.mode, _content(private, entry)) for entry in await git.entries(private, made.commit)}
    assert found == expected
    assert (made.base, made.entries, made.ignored) == (head, len(expected), 2)
    shown = User(private)("cat-file", "commit", made.commit).splitlines()
    assert shown[1:4] == [
        f"parent {head}",
        "author An Agent <agent@example.org> 1700000000 +0000",
        "committer An Agent <agent@example.org> 1700000000 +0000",
    ]
    assert shown[5:] == ["work", "", "of an agent"]
    fsck(private)


def _work(tree: Path) -> None:
    """What an agent may leave behind."""
    root = os.fsencode(tree)
    for name in (b"raw \xff\xfe", b"new\nline", b"-leading", b'quo"te\\', b" ", "ünï".encode()):
        Path(os.fsdecode(root + b"/" + name)).write_bytes(b"named oddly\n")
    (tree / "crlf.txt").write_bytes(b"a\r\nb\n")
    (tree / "empty").write_bytes(b"")
    put(tree / "tool", b"#!\n", 0o777)
    put(tree / "secret", b"s", 0o600)
    (tree / "dangling").symlink_to("../outside")
    (tree / "loop").symlink_to(".")
    (tree / "void").mkdir()
    (tree / "data.bin").unlink()
    put(tree / "data.bin" / "part", bytes(range(256)))
    shutil.rmtree(tree / "src")
    (tree / "src").write_bytes(b"a file now\n")
    (tree / "debug.log").write_text("ignored by the base\n")
    put(tree / "build" / "out", "ignored by the base\n")
    (tree / ".gitignore").write_text("*\n")


def _content(repository: Path, entry: TreeEntry) -> bytes:
    command = [PROGRAM, "--git-dir", str(repository), "cat-file", "blob", entry.id]
    return subprocess.run(command, env={}, capture_output=True, check=True).stdout


async def test_both_adapters_make_the_same_commit(user: User, head: str, tmp_path: Path) -> None:
    commits = set()
    for git in (GitBinary(PROGRAM), GitDulwich()):
        private, tree = tmp_path / f"{git.name}-p", tmp_path / f"{git.name}-t"
        tree.mkdir()
        await git.fetch(user.top, head, into=private, depth=None)
        await git.check_out(private, head, into=tree, branch="b")
        _work(tree)
        commits.add(await git.snapshot(private, tree, head, WANTED))

    assert len(commits) == 1


async def test_equal_input_gives_equal_commits_within_a_second(git: Git, private: Path, head: str, tree: Path) -> None:
    first = await git.snapshot(private, tree, head, WANTED)
    (tree / "run.sh").write_text("#!/bin/SH\n")  # of the same length, in the same second
    second = await git.snapshot(private, tree, head, WANTED)
    (tree / "run.sh").write_text("#!/bin/sh\n")
    third = await git.snapshot(private, tree, head, WANTED)

    assert first == third
    assert first.commit != second.commit


async def test_a_change_of_nothing_is_a_commit_of_the_same_tree(git: Git, private: Path, head: str, tree: Path) -> None:
    made = await git.snapshot(private, tree, head, WANTED)

    assert made.tree == User(private)("rev-parse", head + "^{tree}")
    assert await git.changes(private, head, made.commit) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda t: (t / "data.bin").chmod(0o755), [(b"data.bin", "M")], id="mode"),
        pytest.param(
            lambda t: (t / "data.bin").rename(t / "DATA.bin"), [(b"DATA.bin", "A"), (b"data.bin", "D")], id="case"
        ),
        pytest.param(
            lambda t: ((t / "link").unlink(), (t / "link").write_text("/etc/passwd")), [(b"link", "T")], id="type"
        ),
        pytest.param(lambda t: shutil.rmtree(t / "src"), [(b"src/app.py", "D")], id="deletion"),
    ],
)
async def test_small_changes_are_seen(
    git: Git, private: Path, head: str, tree: Path, change: Callable[[Path], object], expected: list[tuple[bytes, str]]
) -> None:
    change(tree)

    made = await git.snapshot(private, tree, head, WANTED)

    assert [(c.path, c.status) for c in await git.changes(private, head, made.commit)] == expected
    assert all((c.entry is None) == (c.status == "D") for c in await git.changes(private, head, made.commit))


async def test_what_the_base_tracks_is_never_ignored(git: Git, user: User, tmp_path: Path) -> None:
    put(user.top / "build" / "tracked", "1")
    user("add", "--force", "build/tracked")
    commit = user.commit()
    private, tree = tmp_path / "p", tmp_path / "t"
    tree.mkdir()
    await git.fetch(user.top, commit, into=private, depth=None)
    await git.check_out(private, commit, into=tree, branch="b")
    (tree / "build" / "tracked").write_text("2")
    (tree / "build" / "other").write_text("ignored")

    made = await git.snapshot(private, tree, commit, WANTED)

    assert [c.path for c in await git.changes(private, commit, made.commit)] == [b"build/tracked"]
    assert made.ignored == 1


async def test_ignore_files_that_the_agent_wrote_do_not_count(git: Git, private: Path, head: str, tree: Path) -> None:
    (tree / ".gitignore").write_text("hidden\n")
    (tree / "src" / ".gitignore").write_text("*\n")
    (tree / "hidden").write_text("")
    (tree / "src" / "evil").write_text("")

    made = await git.snapshot(private, tree, head, WANTED)

    paths = {entry.path for entry in await git.entries(private, made.commit)}
    assert paths >= {b"hidden", b"src/evil", b"src/.gitignore"}


async def test_what_no_tree_may_hold_is_left_out(git: Git, private: Path, head: str, tree: Path) -> None:
    nested = User(tree / "nested").init()
    (nested.top / "file").write_text("kept")
    nested.commit()
    put(tree / "GIT~1" / "config", "")
    os.mkfifo(tree / "fifo")
    (tree / ".gitmodules").symlink_to("file")

    made = await git.snapshot(private, tree, head, WANTED)

    assert [c.path for c in await git.changes(private, head, made.commit)] == [b"nested/file"]
    assert made.ignored == 4


async def test_excluded_paths_stay_as_the_base_has_them(git: Git, private: Path, head: str, tree: Path) -> None:
    (tree / "run.sh").write_text("overwritten")
    shutil.rmtree(tree / "src")
    (tree / "mask").write_text("a placeholder")
    (tree / "other").write_text("")
    wanted = SnapshotOptions("m", WANTED.author, frozenset({b"run.sh", b"src", b"mask"}))

    made = await git.snapshot(private, tree, head, wanted)

    assert [c.path for c in await git.changes(private, head, made.commit)] == [b"other"]
    assert (made.entries, made.ignored) == (6, 0)


async def test_a_workspace_that_starts_from_nothing_is_snapshot_whole(git: Git, tmp_path: Path) -> None:
    private, tree = tmp_path / "p", tmp_path / "t"
    put(tree / ".gitignore", "*\n")
    (tree / "a").write_text("a")
    await git.create_empty(private)

    made = await git.snapshot(private, tree, None, WANTED)
    again = await git.snapshot(private, tree, made.commit, WANTED)

    assert (made.base, made.entries, again.base) == (None, 2, made.commit)
    assert [c.status for c in await git.changes(private, None, made.commit)] == ["A", "A"]
    fsck(private)


async def test_an_empty_tree_can_be_snapshot(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()

    made = await git.snapshot(private, tmp_path / "t", head, WANTED)

    assert (made.entries, await git.entries(private, made.commit)) == (0, [])


async def test_a_lock_left_by_a_killed_call_is_no_obstacle(git: Git, private: Path, head: str, tree: Path) -> None:
    (private / "index.lock").write_text("")
    (private / "index.lock").touch()

    assert (await git.snapshot(private, tree, head, WANTED)).entries == 5


async def test_the_agents_git_directory_is_never_read(git: Git, private: Path, head: str, tree: Path) -> None:
    canary = tree.parent / "canary"
    (tree / ".git" / "config").write_text(
        f"[core]\n\tfsmonitor = touch {canary}\n\tworktree = /\n\thooksPath = {tree}\n\tpager = touch {canary}\n"
        f'[filter "f"]\n\tclean = touch {canary}; cat\n\tsmudge = touch {canary}; cat\n\trequired\n'
        f"[diff]\n\texternal = touch {canary}; false\n[include]\n\tpath = /dev/zero\n"
        f"[gpg]\n\tprogram = touch {canary}\n"
        f'[diff "f"]\n\ttextconv = touch {canary}; cat\n\tcommand = touch {canary}\n[commit]\n\tgpgSign = true\n'
    )
    put(tree / ".git" / "info" / "attributes", "* filter=f diff=f\n")
    (tree / ".git" / "index.lock").write_text("")
    (tree / ".git" / "index").unlink()
    os.mkfifo(tree / ".git" / "index")
    (tree / ".gitattributes").write_text("* filter=f diff=f text eol=crlf ident working-tree-encoding=UTF-16\n")
    (tree / "new").write_text("$Id$\r\n")
    clean = tree.parent / "clean"
    clean.mkdir()

    with trio.fail_after(30):
        made = await git.snapshot(private, tree, head, WANTED)
        await git.patch(private, head, made.commit, tree.parent / "patch")
        await git.materialise(private, made.commit, clean)

    assert [c.path for c in await git.changes(private, head, made.commit)] == [b".gitattributes", b"new"]
    assert (clean / "new").read_text() == "$Id$\r\n" or (clean / "new").read_bytes() == b"$Id$\r\n"
    assert not canary.exists()


@ROOT.mark
async def test_files_of_another_user_are_snapshot(git: Git, private: Path, head: str, tree: Path) -> None:
    put(tree / "theirs", "x", 0o600)
    for path in (tree, *tree.rglob("*")):
        os.lchown(path, 4242, 4242)

    made = await git.snapshot(private, tree, head, WANTED)

    assert [c.path for c in await git.changes(private, head, made.commit)] == [b"theirs"]


async def test_a_tree_deeper_than_paths_can_say_is_refused(git: Git, private: Path, head: str, tree: Path) -> None:
    above = os.open(tree, os.O_DIRECTORY)
    for _ in range(600):
        os.mkdir("folder-", dir_fd=above)
        below = os.open("folder-", os.O_DIRECTORY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)

    try:
        with pytest.raises(HostileTree, match="too long"):
            await git.snapshot(private, tree, head, WANTED)
    finally:
        trees.remove(tree)


@pytest.mark.slow
async def test_a_large_file_is_streamed(git: Git, tmp_path: Path) -> None:
    private, tree = tmp_path / "p", tmp_path / "t"
    tree.mkdir()
    with (tree / "large").open("wb") as file:
        file.truncate(100_000_000)
    await git.create_empty(private)

    made = await git.snapshot(private, tree, None, WANTED)

    assert [e.size for e in await git.entries(private, made.commit)] == [100_000_000]


# --- entries, materialise, compare -----------------------------------------------------------------


@pytest.mark.scenario("WSM-21")
async def test_a_snapshot_extracts_to_files_that_match_byte_for_byte(
    git: Git, private: Path, head: str, tree: Path, tmp_path: Path
) -> None:
    _work(tree)
    made = await git.snapshot(private, tree, head, WANTED)
    clean = tmp_path / "clean"
    clean.mkdir()

    entries = await git.materialise(private, made.commit, clean)

    expected = {path: what for path, what in listing(tree).items() if path not in (b"debug.log", b"build/out")}
    found = listing(clean)
    assert {p: c for p, (_, c) in found.items()} == {p: c for p, (_, c) in expected.items()}
    assert {p: m for p, (m, _) in found.items()} == {e.path: e.mode for e in entries}
    assert await git.compare(private, made.commit, clean) == {}


@pytest.mark.scenario("WSM-22", only="no .git in the clean checkout")
async def test_a_clean_checkout_has_no_git_directory(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()

    await git.materialise(private, head, tmp_path / "clean")

    assert not (tmp_path / "clean" / ".git").exists()
    assert {p.name for p in (tmp_path / "clean").iterdir()} == {".gitignore", "data.bin", "link", "run.sh", "src"}


async def test_attributes_of_a_tree_do_not_change_the_clean_checkout(git: Git, user: User, tmp_path: Path) -> None:
    put(user.top / "tests" / "test_it.py", "assert False\n")
    (user.top / "version").write_bytes(b"$Format:%H$ $Id$\n")
    (user.top / "text").write_bytes(b"one\ntwo\r\n")
    before = listing(user.top)
    user.commit()
    attributes = b"tests export-ignore\nversion export-subst ident\n* text eol=crlf filter=f\n"
    attributes += b"text working-tree-encoding=UTF-16\n"
    rows = user("ls-tree", "-z", "HEAD") + f"100644 blob {user.blob(attributes)}\t.gitattributes\0"
    commit = user.commit_tree(user("mktree", "-z", stdin=rows.encode()))
    clean, tree = tmp_path / "clean", tmp_path / "tree"
    clean.mkdir()
    tree.mkdir()
    await git.fetch(user.top, commit, into=tmp_path / "p", depth=1)

    await git.materialise(tmp_path / "p", commit, clean)
    await git.check_out(tmp_path / "p", commit, into=tree, branch="b")

    assert listing(clean) == listing(tree) == before | {b".gitattributes": (0o100644, attributes)}


@pytest.mark.scenario("WSM-24")
@pytest.mark.parametrize("id", ["--output=x", "HEAD", "abc", "0" * 40, "{tree}", "{blob}", "{tag}"])
async def test_an_unknown_commit_is_said_before_anything_is_written(
    git: Git, user: User, private: Path, head: str, tmp_path: Path, id: str
) -> None:
    own = User(private)
    tag = own("mktag", stdin=f"object {head}\ntype commit\ntag t\ntagger U <u@example.org> 1 +0000\n\nt\n".encode())
    id = id.format(tree=own("rev-parse", head + "^{tree}"), blob=own("rev-parse", head + ":run.sh"), tag=tag)
    (tmp_path / "clean").mkdir()

    for call in (
        git.entries(private, id),
        git.materialise(private, id, tmp_path / "clean"),
        git.compare(private, id, tmp_path / "clean"),
        git.patch(private, head, id, tmp_path / "patch"),
        git.changes(private, head, id),
        git.check_out(private, id, into=tmp_path / "clean", branch="b"),
    ):
        with pytest.raises(UnknownCommit, match="commit"):
            await call
    assert not any((tmp_path / "clean").iterdir())
    assert not (tmp_path / "patch").exists()


async def test_entries_are_the_leaves_in_gits_order(git: Git, private: Path, head: str) -> None:
    entries = await git.entries(private, head)

    assert [(e.path, oct(e.mode), e.size) for e in entries] == [
        (b".gitignore", "0o100644", 23),
        (b"data.bin", "0o100644", 1024),
        (b"link", "0o120000", 11),
        (b"run.sh", "0o100755", 10),
        (b"src/app.py", "0o100644", 15),
    ]


async def test_comparing_names_every_difference(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    await git.materialise(private, head, clean)
    (clean / "data.bin").write_bytes(b"other")
    (clean / "run.sh").chmod(0o644)
    (clean / ".gitignore").unlink()
    (clean / "link").unlink()
    (clean / "link").write_text("/etc/passwd")
    (clean / "src").rename(clean / "moved")
    (clean / "src").symlink_to("moved")
    (clean / ".git").mkdir()

    assert await git.compare(private, head, clean) == {
        b"data.bin": "content",
        b"run.sh": "mode",
        b".gitignore": "missing",
        b"link": "mode",
        b"src/app.py": "missing",
        b"src": "extra",
        b"moved": "extra",
        b".git": "extra",
    }


# --- patch -----------------------------------------------------------------------------------------


async def test_a_patch_makes_the_snapshot_out_of_the_base(
    git: Git, private: Path, head: str, tree: Path, tmp_path: Path
) -> None:
    _work(tree)
    (tree / "run.sh").chmod(0o644)
    (tree / "link").unlink()
    (tree / "link").write_text("no newline at the end")
    (tree / ".gitignore").write_text("edited\nbuild/\n!keep.log\nand more")
    (tree / "random").write_bytes(os.urandom(5000))
    made = await git.snapshot(private, tree, head, WANTED)
    other = User(tmp_path / "other").init()
    (other.top / ".git" / "objects" / "info" / "alternates").write_text(f"{private / 'objects'}\n")
    other("reset", "--quiet", "--hard", head)

    size = await git.patch(private, head, made.commit, tmp_path / "patch")
    other("apply", "--index", str(tmp_path / "patch"))

    assert other("write-tree") == made.tree
    assert size == (tmp_path / "patch").stat().st_size
    other("apply", "--index", "--reverse", str(tmp_path / "patch"))
    assert other("write-tree") == other("rev-parse", head + "^{tree}")


async def test_a_patch_from_nothing_makes_everything(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    other = User(tmp_path / "other").init()

    await git.patch(private, None, head, tmp_path / "patch")
    other("apply", "--index", str(tmp_path / "patch"))

    assert other("write-tree") == User(private)("rev-parse", head + "^{tree}")


async def test_a_patch_of_text_can_be_read(git: Git, private: Path, head: str, tree: Path, tmp_path: Path) -> None:
    (tree / "src" / "app.py").write_text("print('goodbye')\n")
    made = await git.snapshot(private, tree, head, WANTED)

    await git.patch(private, head, made.commit, tmp_path / "patch")

    assert "\n-print('hello')\n+print('goodbye')\n" in (tmp_path / "patch").read_text()


async def test_a_patch_of_no_change_is_empty(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    assert await git.patch(private, head, head, tmp_path / "patch") == 0


# --- faults ----------------------------------------------------------------------------------------


async def test_a_missing_object_is_a_failure(git: Git, private: Path, head: str, tmp_path: Path) -> None:
    shutil.rmtree(private / "objects")
    (private / "objects").mkdir()
    (tmp_path / "clean").mkdir()

    with pytest.raises((GitFailed, UnknownCommit)):
        await git.materialise(private, head, tmp_path / "clean")


@pytest.mark.parametrize("damage", ["missing", "garbage", "another"])
async def test_a_damaged_object_is_noticed(git: Git, tmp_path: Path, damage: str) -> None:
    private, clean = tmp_path / "p", tmp_path / "clean"
    clean.mkdir()
    await git.create_empty(private)
    own = User(private)
    good, other = own.blob(b"good"), own.blob(b"evil")
    commit = own.commit_tree(own.tree(("100644", good, b"file")))
    place = private / "objects" / good[:2] / good[2:]
    place.unlink()
    if damage == "garbage":
        place.write_bytes(b"garbage")
    if damage == "another":
        shutil.copyfile(private / "objects" / other[:2] / other[2:], place)

    with pytest.raises((CheckoutDiffers, GitFailed)):
        await git.materialise(private, commit, clean)


async def test_a_source_with_sha256_ids_works_or_says_what_it_needs(git: Git, tmp_path: Path) -> None:
    user = User(tmp_path / "source")
    user.top.mkdir()
    user("init", "--quiet", "--object-format=sha256")
    _fill(user.top)
    commit = user.commit()
    tree, clean = tmp_path / "tree", tmp_path / "clean"
    tree.mkdir()
    clean.mkdir()
    if git.name == "dulwich":
        with pytest.raises(BadSource, match="SHA-256"):
            await git.inspect(user.top)
        return

    assert not (await git.inspect(user.top)).dirty
    await git.fetch(user.top, commit, into=tmp_path / "p", depth=1)
    await git.check_out(tmp_path / "p", commit, into=tree, branch="b")
    (tree / "link").unlink()
    made = await git.snapshot(tmp_path / "p", tree, commit, WANTED)
    await git.materialise(tmp_path / "p", made.commit, clean)

    assert await git.patch(tmp_path / "p", None, made.commit, tmp_path / "patch")
    assert listing(clean) == listing(tree)


@pytest.mark.parametrize("depth", [None, 1])
async def test_a_private_repository_travels_as_a_bundle_that_git_can_clone(
    git: Git, tmp_path: Path, depth: int | None
) -> None:
    user = User(tmp_path / "source").init()
    for number in range(3):
        (user.top / "a.txt").write_text(f"{number}\n")
        base = user.commit()
    await git.fetch(user.top, base, into=tmp_path / "private", depth=depth)
    (user.top / "new.txt").write_text("done\n")
    kept = await git.snapshot(tmp_path / "private", user.top, base, WANTED)
    cut = tmp_path / "private" / "shallow"

    await git.bundle(tmp_path / "private", [kept.commit, base], tmp_path / "it.bundle")
    await git.unbundle(tmp_path / "it.bundle", cut if cut.is_file() else None, into=tmp_path / "there")

    assert {e.path for e in await git.entries(tmp_path / "there", kept.commit)} == {b"a.txt", b"new.txt"}
    await git.fetch(tmp_path / "there", kept.commit, into=tmp_path / "resumed", depth=None)
    assert [change.path for change in await git.changes(tmp_path / "resumed", base, kept.commit)] == [b"new.txt"]
    if depth is None:
        subprocess.run([PROGRAM, "clone", "-q", "-b", "run-0", tmp_path / "it.bundle", tmp_path / "clone"], check=True)
        assert (tmp_path / "clone" / "new.txt").read_text() == "done\n"


@pytest.mark.parametrize(
    "damage", [b"", b"# v2 git bundle\n", b"# v2 git bundle\n" + b"0" * 40 + b" refs/heads/x\n\nPACK"]
)
async def test_a_bundle_that_is_damaged_is_refused(git: Git, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "it.bundle").write_bytes(damage)

    with pytest.raises(GitFailed):
        await git.unbundle(tmp_path / "it.bundle", None, into=tmp_path / "there")
