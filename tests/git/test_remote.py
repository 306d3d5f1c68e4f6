"""Repositories by URL: git's own back end behind https, sshd, and servers that mean harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core import errors
from runner.core.settings import Settings
from runner.git.binary import GitBinary
from runner.git.dulwich import GitDulwich
from runner.git.mirror import Mirror
from runner.git.remote import RemoteAccess, RemoteLimits
from runner.ports.git import ResolvedRef
from runner.safefs import trees
from tests.conformance.test_git import User, listing
from tests.support.git_servers import Handler, Https, Sshd, https, sshd
from tests.support.needs import GIT, SSHD

PROGRAM = shutil.which("git") or ""
pytestmark = GIT.mark

BOUNDS = RemoteLimits(retries=(0.01, 0.01))
IMPATIENT = replace(BOUNDS, stall_seconds=1)


@pytest.fixture
def user(tmp_path: Path) -> User:
    """A repository `org/repo` with two commits on main and one on feature/auth."""
    user = User(tmp_path / "served" / "org" / "repo").init()
    (user.top / "a").write_text("one\n")
    user.commit("first")
    (user.top / "a").write_text("two\n")
    user.commit("second")
    user("checkout", "--quiet", "-b", "feature/auth")
    (user.top / "b").write_text("auth\n")
    user.commit("third")
    user("tag", "v1")
    user("checkout", "--quiet", "main")
    return user


@pytest.fixture
def server(user: User, tmp_path: Path) -> Iterator[Https]:
    with https(tmp_path / "served", tmp_path) as server:
        yield server


def adapter(home: Path, bounds: RemoteLimits = BOUNDS, **env: str) -> GitBinary:
    env = {"PATH": os.environ["PATH"], "RUNNER_HOME": str(home / "state")} | env
    return GitBinary(PROGRAM, replace(RemoteAccess.of(Settings.from_env(env), env["PATH"]), limits=bounds))


@pytest.fixture
def git(server: Https, tmp_path: Path) -> GitBinary:
    return adapter(tmp_path, **server.env)


def url(server: Https | Sshd, path: str = "org/repo") -> str:
    return f"{server.url}/{path}"


def tip(user: User, name: str = "main") -> str:
    return user("rev-parse", name)


def count(repository: Path, commit: str) -> int:
    return int(User(repository)("rev-list", "--count", commit))


# --- looking up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branch", "found"), [(None, "main"), ("feature/auth", "feature/auth")], ids=["default branch", "a branch"]
)
async def test_a_name_is_looked_up(server: Https, git: GitBinary, user: User, branch: str | None, found: str) -> None:
    assert await git.resolve_url(url(server), branch=branch, commit=None) == ResolvedRef(tip(user, found), found)


async def test_a_branch_named_like_the_end_of_another_is_not_taken_for_it(
    server: Https, git: GitBinary, user: User
) -> None:
    user("update-ref", "refs/heads/x/refs/heads/gone", tip(user))

    with pytest.raises(errors.UnknownCommit, match="no branch `gone`"):
        await git.resolve_url(url(server), branch="gone", commit=None)


async def test_a_commit_is_taken_at_its_word_and_fetched_by_its_id(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    wanted = tip(user, "main~1")
    assert await git.resolve_url(url(server), branch="gone", commit=wanted) == ResolvedRef(wanted, "gone")

    await git.fetch_url(url(server), wanted, into=tmp_path / "p", depth=1)

    assert await git.find_commit(tmp_path / "p", wanted) == wanted


async def test_an_empty_repository_has_no_commit(server: Https, git: GitBinary, tmp_path: Path) -> None:
    User(tmp_path / "served" / "empty").init()

    with pytest.raises(errors.UnknownCommit, match="no commit yet"):
        await git.resolve_url(url(server, "empty"), branch=None, commit=None)


@pytest.mark.parametrize("bad", ["--upload-pack=x", "a..b", "x.lock"])
async def test_a_name_outside_the_grammar_is_not_asked_for(server: Https, git: GitBinary, bad: str) -> None:
    with pytest.raises(errors.BadRef):
        await git.resolve_url(url(server), branch=bad, commit=None)
    assert server.asked == 0


async def test_a_url_outside_the_grammar_is_not_asked(git: GitBinary, user: User, tmp_path: Path) -> None:
    for address in (f"file://{user.top}", str(user.top), "http://localhost/x", f"ext::touch {tmp_path}/canary"):
        with pytest.raises(errors.BadUrl):
            await git.resolve_url(address, branch=None, commit=None)
        with pytest.raises(errors.BadUrl):
            await git.fetch_url(address, tip(user), into=tmp_path / "p", depth=1)
    assert not (tmp_path / "canary").exists()


# --- fetching --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "commits"), [(1, 1), (2, 2), (None, 3)])
async def test_exactly_a_commit_and_its_history_to_a_depth_are_fetched(
    server: Https, git: GitBinary, user: User, tmp_path: Path, depth: int | None, commits: int
) -> None:
    commit = tip(user, "feature/auth")

    await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=depth)

    assert count(tmp_path / "p", commit) == commits
    assert User(tmp_path / "p")("for-each-ref") == ""
    assert await git.find_commit(tmp_path / "p", tip(user, "main")) == (None if depth == 1 else tip(user, "main"))
    User(tmp_path / "p")("fsck", "--strict")


async def test_what_was_fetched_is_not_asked_for_again(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    asked = server.asked

    await git.fetch_url(url(server), tip(user), into=tmp_path / "q", depth=1)

    assert server.asked == asked
    assert await git.entries(tmp_path / "q", tip(user)) == await git.entries(tmp_path / "p", tip(user))


@pytest.mark.parametrize("depth", [1, 2, None])
async def test_the_next_commit_is_fetched_onto_what_is_there(
    server: Https, git: GitBinary, user: User, tmp_path: Path, depth: int | None
) -> None:
    first = tip(user)
    await git.fetch_url(url(server), first, into=tmp_path / "p", depth=depth)
    (user.top / "a").write_text("three\n")
    second = user.commit()

    await git.fetch_url(url(server), second, into=tmp_path / "q", depth=depth)
    await git.fetch_url(url(server), first, into=tmp_path / "r", depth=depth)

    assert count(tmp_path / "q", second) == (depth or 3)
    assert count(tmp_path / "r", first) == (depth or 2)
    assert await git.find_commit(tmp_path / "r", second) is None


async def test_a_private_repository_outlives_its_mirror(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    assert not (tmp_path / "p" / "objects" / "info" / "alternates").exists()

    trees.remove(tmp_path / "state" / "mirrors")

    User(tmp_path / "p")("fsck", "--strict")


@pytest.mark.parametrize("what", ["ready", "repository", "half made"])
async def test_a_damaged_mirror_is_made_anew(
    server: Https, git: GitBinary, user: User, tmp_path: Path, what: str
) -> None:
    first = tip(user)
    await git.fetch_url(url(server), first, into=tmp_path / "p", depth=None)
    mirror = Mirror.for_url(tmp_path / "state" / "mirrors", url(server), None)
    match what:
        case "ready":
            damage(next((mirror.path / "ready" / first / "pack").glob("*.pack")))
        case "repository":
            damage(next((mirror.repository / "objects" / "pack").glob("*.pack")))
            first = tip(user, "feature/auth")
        case _:
            trees.remove(mirror.path / "ready")

    await git.fetch_url(url(server), first, into=tmp_path / "q", depth=None)

    User(tmp_path / "q")("fsck", "--strict")


def damage(pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    content[20:-20] = bytes(len(content) - 40)
    pack.chmod(0o600)
    pack.write_bytes(content)


async def test_two_that_fetch_at_once_share_one_fetch(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        for name in "abcd":
            fetch = adapter(tmp_path, **server.env).fetch_url
            nursery.start_soon(lambda n=name, f=fetch: f(url(server), tip(user), into=tmp_path / n, depth=1))

    assert len([path for path in server.server.seen if "info/refs" in path]) == 1
    for name in "abcd":
        User(tmp_path / name)("fsck", "--strict")


@pytest.mark.nightly
async def test_a_mirror_keeps_few_commits_ready(server: Https, git: GitBinary, user: User, tmp_path: Path) -> None:
    for number in range(7):
        await git.fetch_url(url(server), user.commit(str(number)), into=tmp_path / str(number), depth=1)

    ready = Mirror.for_url(tmp_path / "state" / "mirrors", url(server), 1).path / "ready"
    assert len(list(ready.iterdir())) == 4


async def test_mirrors_that_nobody_holds_go_when_all_are_over_their_limit(
    server: Https, user: User, tmp_path: Path
) -> None:
    others = [user.top.with_name(name) for name in ("first", "second")]
    for other in others:
        shutil.copytree(user.top, other)
    git = adapter(tmp_path, RUNNER_MIRROR_LIMIT="1", **server.env)
    first, second, third = (Mirror.for_url(tmp_path / "state" / "mirrors", url(server, f"org/{name}"), 1)
                            for name in ("first", "second", "repo"))  # fmt: skip

    await git.fetch_url(url(server, "org/first"), tip(user), into=tmp_path / "p", depth=1)
    async with first.lock():
        await git.fetch_url(url(server, "org/second"), tip(user), into=tmp_path / "q", depth=1)
    there = [mirror.path.is_dir() for mirror in (first, second)]
    await git.fetch_url(url(server), tip(user), into=tmp_path / "r", depth=1)

    assert there == [True, True]
    assert [mirror.path.is_dir() for mirror in (first, second, third)] == [False, False, True]
    User(tmp_path / "p")("fsck", "--strict")


async def test_a_checkout_follows_its_origin(server: Https, git: GitBinary, user: User, tmp_path: Path) -> None:
    commit = tip(user, "feature/auth")
    await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=1)
    (tmp_path / "t").mkdir()

    await git.check_out(tmp_path / "p", commit, into=tmp_path / "t", branch="feature/auth", origin=url(server))

    agent = User(tmp_path / "t")
    assert agent("rev-parse", "--abbrev-ref", "@{upstream}") == "origin/feature/auth"
    assert agent("remote", "get-url", "origin") == url(server)
    assert agent("rev-parse", "origin/feature/auth") == commit
    assert agent("status", "--porcelain", "--branch") == "## feature/auth...origin/feature/auth"
    assert agent("tag") == ""


async def test_files_of_another_program_stay_pointers(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
    (user.top / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (user.top / "big.bin").write_bytes(pointer)
    commit = user.commit()
    await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=1)
    (tmp_path / "t").mkdir()

    await git.check_out(tmp_path / "p", commit, into=tmp_path / "t", branch="main", origin=url(server))

    assert listing(tmp_path / "t")[b"big.bin"] == (0o100644, pointer)


# --- servers of other kinds ------------------------------------------------------------------------


async def test_a_server_of_the_old_protocol_gives_its_tips(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    server.server.version = 0

    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    with pytest.raises(errors.UnknownCommit):
        await git.fetch_url(url(server), tip(user, "main~1"), into=tmp_path / "q", depth=1)

    assert count(tmp_path / "p", tip(user)) == 1


async def test_a_commit_that_the_server_does_not_have_is_unknown(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    with pytest.raises(errors.UnknownCommit, match="does not give that commit"):
        await git.fetch_url(url(server), "a" * 40, into=tmp_path / "p", depth=1)
    assert not (tmp_path / "p").exists()


async def test_a_commit_is_not_any_object(server: Https, git: GitBinary, user: User, tmp_path: Path) -> None:
    with pytest.raises(errors.RunnerError):
        await git.fetch_url(url(server), tip(user, "main^{tree}"), into=tmp_path / "p", depth=1)


@SSHD.mark
async def test_ssh_uses_the_keys_of_the_user(user: User, tmp_path: Path) -> None:
    with sshd(tmp_path / "ssh") as server:
        git = adapter(tmp_path, PATH=f"{server.folder}:{os.environ['PATH']}")
        for address in (f"{server.url}{user.top}",):
            assert (await git.resolve_url(address, branch="feature/auth", commit=None)).commit == tip(
                user, "feature/auth"
            )
            await git.fetch_url(address, tip(user, "feature/auth"), into=tmp_path / "p", depth=1)
        assert count(tmp_path / "p", tip(user, "feature/auth")) == 1

        (tmp_path / "ssh" / "known_hosts").write_text("")
        with pytest.raises(errors.RemoteDenied, match="not in the known hosts of ssh"):
            await git.resolve_url(f"{server.url}{user.top}", branch=None, commit=None)


@SSHD.mark
async def test_ssh_that_wants_other_keys_does_not_ask(user: User, tmp_path: Path) -> None:
    with sshd(tmp_path / "ssh") as server:
        (tmp_path / "ssh" / "user.pub").write_text("")
        git = adapter(tmp_path, PATH=f"{server.folder}:{os.environ['PATH']}")
        with pytest.raises(errors.RemoteDenied, match="was denied"):
            await git.resolve_url(f"{server.url}{user.top}", branch=None, commit=None)


async def test_without_ssh_its_urls_need_it(tmp_path: Path) -> None:
    git = adapter(tmp_path, PATH="/nowhere")
    with pytest.raises(errors.UrlUnsupported, match="without ssh"):
        await git.resolve_url("git@git.example.org:org/repo", branch=None, commit=None)


async def test_the_library_takes_no_urls(tmp_path: Path) -> None:
    with pytest.raises(errors.UrlUnsupported, match="without git"):
        await GitDulwich().resolve_url("https://git.example.org/org/repo", branch=None, commit=None)
    with pytest.raises(errors.UrlUnsupported, match="without git"):
        await GitDulwich().fetch_url("https://git.example.org/org/repo", "a" * 40, into=tmp_path / "p", depth=1)


# --- servers that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [2, 3], ids=["for a while", "for ever"])
async def test_a_server_that_fails_is_asked_again(server: Https, git: GitBinary, user: User, failures: int) -> None:
    def fail(handler: Handler) -> bool:
        if server.asked > failures:
            return False
        handler.start(503)
        return True

    server.server.answer = fail
    if failures == 3:
        with pytest.raises(errors.RemoteUnreachable, match="503"):
            await git.resolve_url(url(server), branch=None, commit=None)
        assert server.asked == 3
    else:
        assert (await git.resolve_url(url(server), branch=None, commit=None)).commit == tip(user)


@pytest.mark.parametrize(
    ("status", "error"), [(401, errors.RemoteDenied), (403, errors.RemoteDenied), (404, errors.NoRepository)], ids=str
)
async def test_a_refusal_is_final_and_nobody_is_asked_for_a_password(
    server: Https, git: GitBinary, status: int, error: type[errors.RunnerError]
) -> None:
    def refuse(handler: Handler) -> bool:
        handler.start(status, WWW_Authenticate='Basic realm="x"')
        return True

    server.server.answer = refuse
    with trio.fail_after(60), pytest.raises(error):
        await git.resolve_url(url(server), branch=None, commit=None)
    assert server.asked == 1


@pytest.mark.parametrize("wanted", [True, False], ids=["when the settings say so", "else not"])
async def test_a_netrc_is_read(server: Https, user: User, tmp_path: Path, wanted: bool) -> None:
    (tmp_path / ".netrc").write_text("machine localhost login me password hunter2\n")
    setting = {"RUNNER_GIT_CREDENTIALS": "netrc"} if wanted else {}
    git = adapter(tmp_path, HOME=str(tmp_path), **setting, **server.env)

    def guard(handler: Handler) -> bool:
        if handler.headers.get("Authorization") == "Basic bWU6aHVudGVyMg==":
            return False
        handler.start(401, WWW_Authenticate='Basic realm="x"')
        return True

    server.server.answer = guard
    if not wanted:
        with pytest.raises(errors.RemoteDenied):
            await git.resolve_url(url(server), branch=None, commit=None)
        return
    assert (await git.resolve_url(url(server), branch=None, commit=None)).commit == tip(user)
    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    (tmp_path / "t").mkdir()
    await git.check_out(tmp_path / "p", tip(user), into=tmp_path / "t", branch="main", origin=url(server))
    for place in ("p", "t", "state"):
        assert subprocess.run(["grep", "-rq", "hunter2", str(tmp_path / place)], check=False).returncode == 1


async def test_a_certificate_of_nobody_is_refused(server: Https, tmp_path: Path) -> None:
    with pytest.raises(errors.RemoteDenied, match="certificate"):
        await adapter(tmp_path).resolve_url(url(server), branch=None, commit=None)


async def test_a_host_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    for address in ("https://127.0.0.1:1/a", "https://nowhere.invalid/a"):
        with pytest.raises(errors.RemoteUnreachable):
            await adapter(tmp_path).resolve_url(address, branch=None, commit=None)


async def test_the_proxy_of_the_host_is_used(server: Https, tmp_path: Path) -> None:
    git = adapter(tmp_path, **server.env, https_proxy="http://127.0.0.1:1")
    with pytest.raises(errors.RemoteUnreachable):
        await git.resolve_url(url(server), branch=None, commit=None)
    assert server.asked == 0


async def test_the_git_configuration_of_the_user_is_not_read(
    server: Https, user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text('[url "https://nowhere.invalid/"]\n\tinsteadOf = https://\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    git = adapter(tmp_path, HOME=str(tmp_path), RUNNER_GIT_CREDENTIALS="netrc", **server.env)

    assert (await git.resolve_url(url(server), branch=None, commit=None)).commit == tip(user)


# --- servers that mean harm ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["file:///etc", "http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "ssh://-oX/x"])
async def test_a_redirect_is_not_followed(server: Https, git: GitBinary, target: str) -> None:
    def redirect(handler: Handler) -> bool:
        handler.start(302, Location=f"{target}/info/refs?service=git-upload-pack")
        return True

    server.server.answer = redirect
    with pytest.raises(errors.RemoteRedirects):
        await git.resolve_url(url(server), branch=None, commit=None)


@pytest.mark.parametrize("name", ["http-alternates", "alternates"])
async def test_objects_that_a_server_has_elsewhere_are_not_fetched(
    server: Https, git: GitBinary, user: User, tmp_path: Path, name: str
) -> None:
    """A server of plain files may name others that lend it objects, such as one that only this host reaches."""
    commit = tip(user, "main")

    def files(handler: Handler) -> bool:
        path = handler.path.partition("?")[0]
        answers = {
            "/r/info/refs": f"{commit}\trefs/heads/main\n",
            "/r/HEAD": "ref: refs/heads/main\n",
            f"/r/objects/info/{name}": f"{server.url}/lent/objects\n" if name[0] == "h" else "/lent/objects\n",
        }
        handler.start(200 if path in answers else 404)
        handler.wfile.write(answers.get(path, "").encode())
        return True

    server.server.answer = files
    with pytest.raises(errors.RunnerError):
        await git.fetch_url(f"{server.url}/r", commit, into=tmp_path / "p", depth=None)

    assert f"/r/objects/{commit[:2]}/{commit[2:]}" in server.server.seen
    assert not [path for path in server.server.seen if path.startswith("/lent")]


async def test_a_bundle_that_a_server_advises_is_not_fetched(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    settings = {"uploadpack.advertiseBundleURIs": "true", "bundle.version": "1", "bundle.mode": "all"}
    settings["bundle.one.uri"] = f"{server.url}/lent/one.bundle"
    for name, value in settings.items():
        user("config", name, value)

    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=None)

    assert server.server.seen
    assert not [path for path in server.server.seen if "lent" in path]


async def test_an_address_that_ends_in_git_is_tried_when_the_other_redirects(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    """As some forges do; a task of their CI names the address without."""
    user.top.rename(user.top.with_name("repo.git"))
    user.top = user.top.with_name("repo.git")

    def redirect(handler: Handler) -> bool:
        if ".git/" in handler.path:
            return False
        handler.start(301, Location=handler.path.replace("/repo/", "/repo.git/"))
        return True

    server.server.answer = redirect
    assert (await git.resolve_url(url(server), branch=None, commit=None)).commit == tip(user)
    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)


def packets(*lines: bytes) -> bytes:
    return b"".join(b"%04x%s" % (len(line) + 4, line) for line in lines)


def advertise(handler: Handler, stop: threading.Event, pace: float, refs: int) -> None:
    """An advertisement of the old protocol, in lines that come at a pace."""
    handler.start(200, Content_Type="application/x-git-upload-pack-advertisement")
    out = handler.wfile
    out.write(packets(b"# service=git-upload-pack\n") + b"0000")
    out.write(packets(b"%040x HEAD\0side-band-64k ofs-delta\n" % 1))
    block = 1 if pace else 1000
    for start in range(0, refs, block):
        out.write(packets(*(b"%040x refs/heads/%d\n" % (1, n) for n in range(start, start + block))))
        if pace and stop.wait(pace):
            return


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [IMPATIENT, RemoteLimits(resolve_seconds=1.5)], ids=["stalled", "out of time"])
async def test_a_server_that_drips_is_left(
    server: Https, tmp_path: Path, stop: threading.Event, bounds: RemoteLimits
) -> None:
    def drip(handler: Handler) -> bool:
        advertise(handler, stop, 0.2, 10_000)
        return True

    server.server.answer = drip
    with trio.fail_after(60), pytest.raises(errors.RemoteOverLimit):
        await adapter(tmp_path, bounds, **server.env).resolve_url(url(server), branch=None, commit=None)


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_server_that_names_refs_without_end_is_left(
    server: Https, tmp_path: Path, stop: threading.Event
) -> None:
    def flood(handler: Handler) -> bool:
        advertise(handler, stop, 0, 100_000_000)
        return True

    server.server.answer = flood
    git = adapter(tmp_path, replace(BOUNDS, resolve_memory_bytes=256 << 20), **server.env)
    with trio.fail_after(60), pytest.raises(errors.RemoteOverLimit):
        await git.resolve_url(url(server), branch=None, commit=None)


@pytest.mark.nightly
async def test_a_million_refs_are_borne(server: Https, git: GitBinary, user: User, stop: threading.Event) -> None:
    def many(handler: Handler) -> bool:
        advertise(handler, stop, 0, 1_000_000)
        handler.wfile.write(b"0000")
        return True

    server.server.answer = many
    assert (await git.resolve_url(url(server), branch="999999", commit=None)).commit == f"{1:040x}"


async def test_a_server_can_not_name_another_commit(
    server: Https, git: GitBinary, user: User, tmp_path: Path, stop: threading.Event
) -> None:
    """It says so when asked for the branch, and then does not have it."""

    def lie(handler: Handler) -> bool:
        if handler.command == "POST":
            return False
        advertise(handler, stop, 0, 1)
        handler.wfile.write(b"0000")
        return True

    server.server.answer = lie
    found = await git.resolve_url(url(server), branch=None, commit=None)
    with pytest.raises(errors.RunnerError):
        await git.fetch_url(url(server), found.commit, into=tmp_path / "p", depth=1)
    assert not (tmp_path / "p").exists()


async def test_a_pack_that_is_too_large_is_refused_and_removed(server: Https, user: User, tmp_path: Path) -> None:
    (user.top / "noise").write_bytes(os.urandom(4 << 20))
    commit = user.commit()
    git = adapter(tmp_path, replace(BOUNDS, pack_bytes=1 << 20), **server.env)

    with pytest.raises(errors.RemoteOverLimit):
        await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=1)

    left = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".lock"]


@pytest.mark.parametrize("bounds", [replace(BOUNDS, tree_bytes=1 << 20), replace(BOUNDS, tree_entries=1)])
async def test_a_tree_that_unpacks_to_too_much_is_refused(
    server: Https, user: User, tmp_path: Path, bounds: RemoteLimits
) -> None:
    (user.top / "zeros").write_bytes(bytes(2 << 20))
    commit = user.commit()

    with pytest.raises(errors.RemoteOverLimit, match="2 files of 2 MiB"):
        await adapter(tmp_path, bounds, **server.env).fetch_url(url(server), commit, into=tmp_path / "p", depth=1)


async def test_a_tree_that_names_itself_a_billion_times_is_refused(server: Https, user: User, tmp_path: Path) -> None:
    below = user("rev-parse", "HEAD:a")
    for kind in ("100644", *["40000"] * 8):
        below = user.tree(*((kind, below, b"%d" % n) for n in range(10)))
    commit = user("commit-tree", below, "-m", "bomb")
    user("update-ref", "refs/heads/bomb", commit)
    git = adapter(tmp_path, replace(BOUNDS, listing_bytes=1 << 20), **server.env)

    with trio.fail_after(60), pytest.raises(errors.RemoteOverLimit):
        await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=1)


@pytest.mark.slow
async def test_a_pack_that_stalls_is_left(server: Https, user: User, tmp_path: Path) -> None:
    stop = threading.Event()

    def stall(handler: Handler) -> bool:
        if handler.command == "GET":
            return False
        handler.start(200, Content_Type="application/x-git-upload-pack-result")
        handler.wfile.write(packets(b"packfile\n", b"\1PACK\0\0\0\2\0\0\0\7"))
        stop.wait(20)
        return True

    server.server.answer = stall
    fetch = adapter(tmp_path, IMPATIENT, **server.env).fetch_url
    with trio.fail_after(60), pytest.raises(errors.RemoteOverLimit):
        await fetch(url(server), tip(user), into=tmp_path / "p", depth=1)
    stop.set()


@pytest.mark.slow
async def test_cancelling_a_fetch_leaves_a_mirror_that_works(
    server: Https, git: GitBinary, user: User, tmp_path: Path
) -> None:
    stop = threading.Event()

    def hang(handler: Handler) -> bool:
        if handler.command == "GET":
            return False
        stop.wait(20)
        return True

    server.server.answer = hang
    with trio.move_on_after(0.5):
        await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    stop.set()
    server.server.answer = None

    await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)


HOSTILE = {
    **{f"a folder {name!a}": ("40000", name) for name in (b".git", b".GIT", b"..", b"git~1", ".g\u200cit".encode())},
    "a link in place of .gitmodules": ("120000", b".gitmodules"),
}


@pytest.mark.parametrize(("mode", "name"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_tree_is_refused(
    server: Https, git: GitBinary, user: User, tmp_path: Path, mode: str, name: bytes
) -> None:
    file = user.blob(b"[core]\n")
    leaf = user.tree(("100644", file, b"config")) if mode == "40000" else file
    commit = user.commit_tree(user.tree((mode, leaf, name)))
    user("update-ref", "refs/heads/hostile", commit)

    with pytest.raises(errors.HostileTree):
        await git.fetch_url(url(server), commit, into=tmp_path / "p", depth=1)
    assert not (tmp_path / "p").exists()


async def test_the_words_of_a_server_decide_nothing(server: Https, git: GitBinary, user: User, tmp_path: Path) -> None:
    def speak(handler: Handler) -> bool:
        if handler.command == "GET":
            return False
        handler.body()
        handler.start(200, Content_Type="application/x-git-upload-pack-result")
        handler.wfile.write(packets(b"packfile\n", b"\2fsck error, returned error: 401\n", b"\3nonsense\n") + b"0000")
        return True

    server.server.answer = speak
    with pytest.raises((errors.GitFailed, errors.RemoteUnreachable)) as caught:
        await git.fetch_url(url(server), tip(user), into=tmp_path / "p", depth=1)
    assert not isinstance(caught.value, errors.HostileTree | errors.RemoteDenied)
