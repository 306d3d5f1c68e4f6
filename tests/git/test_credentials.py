"""A token for one https server: it is given when that server asks, and is nowhere else."""

from __future__ import annotations

import os
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runner.core.errors import RemoteDenied, RemoteRedirects, UsageError
from runner.core.settings import Settings
from runner.spec.checkout import uses_keys
from tests.conformance.test_git import User
from tests.git.test_remote import adapter, tip, url, user
from tests.support.git_servers import Handler, Https, https
from tests.support.situations import Project

__all__ = ["user"]

TOKEN = "ghp_" + "s3cret" * 6


@dataclass
class Guard:
    """Lets in who has the token, and looks at every process while one asks."""

    user: str = "x-access-token"
    asked: list[str | None] = field(default_factory=list)
    exposed: list[str] = field(default_factory=list)

    def __call__(self, handler: Handler) -> bool:
        said = handler.headers.get("Authorization")
        self.asked.append(said)
        self.exposed += [name for name in exposing() if name != f"/proc/{os.getpid()}/environ"]
        if said == f"Basic {b64encode(f'{self.user}:{TOKEN}'.encode()).decode()}":
            return False
        handler.start(401, WWW_Authenticate='Basic realm="x"')
        return True


def exposing() -> list[str]:
    """What of the processes of this machine shows the token to others."""
    found = []
    for folder in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                content = (folder / name).read_bytes() if folder.name.isdigit() else b""
            except OSError:
                continue
            if TOKEN.encode() in content and b"git" in content:
                found.append(str(folder / name))
    return found


@pytest.fixture
def server(user: User, tmp_path: Path) -> Iterator[Https]:
    with https(tmp_path / "served", tmp_path) as server:
        server.server.answer = Guard()
        yield server


def host(server: Https) -> str:
    return server.url.removeprefix("https://")


def guard(server: Https) -> Guard:
    assert isinstance(server.server.answer, Guard)
    return server.server.answer


def written(folder: Path) -> list[str]:
    done = subprocess.run(["grep", "-rl", TOKEN, str(folder)], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("where", ["env", "file", "file with a user"])
async def test_a_token_opens_its_server_and_shows_nowhere(
    server: Https, user: User, tmp_path: Path, where: str
) -> None:
    file = tmp_path / "token"
    file.write_text(f"me:{TOKEN}\n" if "user" in where else f"{TOKEN}\n")
    guard(server).user = "me" if "user" in where else "x-access-token"
    place = "env:FORGE" if where == "env" else f"file:{file}"
    env = {"FORGE": TOKEN} if where == "env" else {}
    git = adapter(tmp_path, RUNNER_GIT_CREDENTIALS=f"{host(server)}={place}", **env, **server.env)

    found = await git.resolve_url(url(server), branch=None, commit=None)
    await git.fetch_url(url(server), found.commit, into=tmp_path / "p", depth=1)
    file.unlink()

    assert found.commit == tip(user)
    assert len([said for said in guard(server).asked if said]) >= 3
    assert guard(server).exposed == []
    assert written(tmp_path) == []


async def test_another_server_gets_nothing_even_when_it_asks(server: Https, tmp_path: Path) -> None:
    git = adapter(tmp_path, RUNNER_GIT_CREDENTIALS="git.example.org=env:FORGE", FORGE=TOKEN, **server.env)

    with pytest.raises(RemoteDenied):
        await git.resolve_url(url(server), branch=None, commit=None)

    assert guard(server).asked == [None]


async def test_a_redirect_takes_no_token_along(server: Https, user: User, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with https(tmp_path / "served", tmp_path / "other") as other:
        other.server.answer = Guard()

        def redirect(handler: Handler) -> bool:
            if guard_(handler):
                return True
            handler.start(302, Location=f"{other.url}{handler.path}")
            return True

        guard_ = guard(server)
        server.server.answer = redirect
        setting = f"{host(server)}=env:FORGE"
        git = adapter(tmp_path, RUNNER_GIT_CREDENTIALS=setting, FORGE=TOKEN, **server.env)
        with pytest.raises(RemoteRedirects):
            await git.resolve_url(url(server), branch=None, commit=None)

    assert guard_.asked[-1] is not None
    assert other.asked == 0


async def test_a_token_that_is_refused_is_given_once_and_not_repeated_in_the_error(
    server: Https, tmp_path: Path
) -> None:
    guard(server).user = "somebody else"
    git = adapter(tmp_path, RUNNER_GIT_CREDENTIALS=f"{host(server)}=env:FORGE", FORGE=TOKEN, **server.env)

    with pytest.raises(RemoteDenied) as refused:
        await git.resolve_url(url(server), branch=None, commit=None)

    assert [said is not None for said in guard(server).asked] == [False, True]
    assert TOKEN not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file"), ("", "has no credentials"), (f"{TOKEN}\nusername=root", "has no")]
)
async def test_a_secret_that_can_not_be_had_is_said_before_anything_is_asked(
    server: Https, tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "token").write_text(text)
    setting = f"{host(server)}=file:{tmp_path}/token"
    git = adapter(tmp_path, RUNNER_GIT_CREDENTIALS=setting, **server.env)

    with pytest.raises(RemoteDenied, match=reason) as refused:
        await git.resolve_url(url(server), branch=None, commit=None)

    assert TOKEN not in str(refused.value)
    assert server.asked == 0


@pytest.mark.parametrize("text", ["token", "env:X", "host=X", "host=env:", "host=file:relative", "h'=env:X"])
def test_what_is_no_setting_is_said(text: str) -> None:
    with pytest.raises(UsageError):
        Settings.from_env({"HOME": "/", "RUNNER_GIT_CREDENTIALS": text})


def test_settings_show_where_a_token_is_and_not_the_token() -> None:
    settings = Settings.from_env({"HOME": "/", "RUNNER_GIT_CREDENTIALS": "git.example.org=env:FORGE", "FORGE": TOKEN})

    assert ("RUNNER_GIT_CREDENTIALS", "git.example.org=env:FORGE", "environment") in settings.rows()
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ("address", "setting", "uses"),
    [
        ("https://git.example.org/a", "none", False),
        ("https://git.example.org/a", "netrc", True),
        ("https://git.example.org/a", "git.example.org=env:X", True),
        ("https://GIT.example.org/a", "git.example.org=env:X", True),
        ("https://git.example.org:444/a", "git.example.org=env:X", False),
        ("https://example.org/a", "git.example.org=env:X", False),
        ("git@git.example.org:a", "none", True),
    ],
)
def test_whether_a_url_is_reached_with_what_is_the_users(address: str, setting: str, uses: bool) -> None:
    assert uses_keys(address, setting) is uses


def test_a_run_reaches_its_server_with_a_token_and_an_untrusted_one_does_not(
    project: Project, server: Https, user: User
) -> None:
    project.env |= {"RUNNER_GIT_CREDENTIALS": f"{host(server)}=env:FORGE", "FORGE": TOKEN, **server.env}
    project.script("cat a; env", workspace=f"repo_source: {{type: fixed, url: '{url(server)}'}}")

    refused = project.runner("plan", str(project.folder), "--untrusted")
    asked = server.asked
    done, _ = project.apply()

    assert (refused.code, "error[policy.untrusted]" in refused.err, asked) == (3, True, 0)
    assert done.code == 0, done.out + done.err
    assert project.logs("agent").startswith("two\n")
    assert TOKEN not in done.out + done.err + project.logs("agent")
    assert written(project.home) == []
