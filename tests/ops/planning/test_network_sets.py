"""Hosts that tools use: asked of the real tools with a home of the test's own, and read from a repository."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.core.errors import BadValue
from runner.core.hosts import NetworkSpec
from runner.ops.planning.network_sets import Look, find_network_sets
from tests.support.needs import program
from tests.support.situations import Project, git

MINE, THEIRS, DEFAULT = "this host's configuration", "of the repository", "default"


async def found(
    tool: str,
    home: Path,
    *,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    source: str | None = None,
) -> NetworkSpec:
    async def read(name: str) -> bytes | None:
        return files[name].encode() if files and name in files else None

    variables = {"PATH": os.environ["PATH"], "HOME": str(home), **(env or {})}
    return (await find_network_sets([tool], Look(variables=variables, read=read, source=source)))[tool]


PIP_CONF = (
    "[global]\nindex-url = https://one.test/simple\n[install]\nindex-url = http://me:secret@two.test:8080/simple\n"
)
UV = '[[index]]\nurl = "https://uv.test/simple"\ndefault = true\n[[index]]\nname = "more"\nurl = "https://more.test/"\n'
CARGO = """
[source.crates-io]
replace-with = "mirror"
[source.mirror]
registry = "sparse+https://crates.test/index/"
[registries.in-house]
index = "https://token@registry.test/git/index"
"""
GITMODULES = '[submodule "a"]\n\turl = https://sub.test/a.git\n[submodule "b"]\n\turl = ../b.git\n'


@pytest.mark.parametrize(
    ("tool", "own", "env", "files", "hosts", "environment"),
    [
        (
            "pip",
            {".config/pip/pip.conf": PIP_CONF},
            {},
            {"requirements.txt": "--extra-index-url https://theirs.test/simple\nsix\n"},
            {"two.test:8080": MINE, "theirs.test:443": f"requirements.txt {THEIRS}"},
            {"PIP_INDEX_URL": "http://two.test:8080/simple"},
        ),
        (
            "pip",
            {},
            {"PIP_EXTRA_INDEX_URL": "file:///opt/wheels https://extra.test/simple", "PIP_TRUSTED_HOST": "extra.test"},
            {},
            {"pypi.org:443": DEFAULT, "files.pythonhosted.org:443": DEFAULT, "extra.test:443": MINE},
            {"PIP_EXTRA_INDEX_URL": "https://extra.test/simple", "PIP_TRUSTED_HOST": "extra.test"},
        ),
        (
            "uv",
            {".config/uv/uv.toml": UV},
            {},
            {},
            {"uv.test:443": MINE, "more.test:443": MINE},
            {"UV_DEFAULT_INDEX": "https://uv.test/simple", "UV_INDEX": "https://more.test/"},
        ),
        (
            "uv",
            {},
            {},
            {"pyproject.toml": "[tool.uv]\nindex-url = 'https://theirs.test/simple'\n"},
            {"theirs.test:443": f"uv.toml or pyproject.toml {THEIRS}"},
            {},
        ),
        (
            "npm",
            {".npmrc": "registry=http://npm.test:4873/\n//npm.test:4873/:_authToken=secret\n@in:registry=https://in.test/\n"},
            {},
            {".npmrc": "@out:registry = https://out.test\n"},
            {"npm.test:4873": MINE, "in.test:443": MINE, "out.test:443": f".npmrc {THEIRS}"},
            {"npm_config_registry": "http://npm.test:4873/"},
        ),
        (
            "npm",
            {".npmrc": "registry=http://npm.test:4873/\n"},
            {},
            {".npmrc": "registry=https://theirs.test/"},
            {"theirs.test:443": f".npmrc {THEIRS}"},
            {},
        ),
        (
            "cargo",
            {".cargo/config.toml": CARGO},
            {},
            {},
            {"crates.test:443": MINE, "registry.test:443": MINE},
            {"CARGO_REGISTRIES_IN_HOUSE_INDEX": "https://registry.test/git/index"},
        ),
        ("cargo", {}, {}, {}, {"index.crates.io:443": DEFAULT, "static.crates.io:443": DEFAULT}, {}),
        (
            "go",
            {},
            {"GOPROXY": "https://me:secret@go.test|direct", "GOSUMDB": "off", "GOINSECURE": "corp.test"},
            {},
            {"go.test:443": MINE},
            {"GOPROXY": "https://go.test|direct", "GOSUMDB": "off", "GOINSECURE": "corp.test"},
        ),
        (
            "git",
            {},
            {},
            {".gitmodules": GITMODULES, ".lfsconfig": "[lfs]\n\turl = https://lfs.test/x\n"},
            {"git.test:22": MINE, "sub.test:443": f".gitmodules {THEIRS}", "lfs.test:443": f".lfsconfig {THEIRS}"},
            {},
        ),
    ],
    ids=[
        "pip's section wins, without its password", "pip's variables, without directories", "uv's own file",
        "uv's project", "npm's scopes", "npm's project wins", "cargo's mirror", "cargo alone", "go", "git",
    ],
)  # fmt: skip
async def test_a_tools_hosts_are_those_that_it_is_configured_to_use(
    tmp_path: Path,
    tool: str,
    own: Mapping[str, str],
    env: Mapping[str, str],
    files: Mapping[str, str],
    hosts: Mapping[str, str],
    environment: Mapping[str, str],
) -> None:
    if tool in ("npm", "go"):
        program(tool).require()
    for name, text in own.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {"GOENV": "off", **env}
    extra = {"PIP_CONFIG_FILE": str(tmp_path / ".config/pip/pip.conf")} if tool == "pip" and own else {}
    clean = {"PIP_CONFIG_FILE": "/dev/null"} if tool == "pip" and not own else extra

    network = await found(tool, tmp_path, env={**clean, **env}, files=files, source="git@git.test:team/a.git")

    assert {str(rule): rule.origin for rule in network.rules} == hosts
    assert {str(rule) for rule in network.rules if rule.private} == {
        host for host, origin in hosts.items() if not origin.endswith(THEIRS)
    }
    assert network.environment == environment


async def test_the_hosts_of_git_are_those_of_the_remotes_of_a_directory(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "repo")
    git(tmp_path / "repo", "remote", "add", "origin", "https://remote.test/a.git")

    network = await found("git", tmp_path, source=str(tmp_path / "repo"))

    assert [str(rule) for rule in network.rules] == ["remote.test:443"]


@pytest.mark.parametrize(
    ("tool", "files"),
    [
        ("cargo", {".cargo/config.toml": "= 1"}),
        ("cargo", {".cargo/config.toml": "source = 'crates-io'"}),
        ("uv", {"pyproject.toml": "tool = 1"}),
        ("uv", {"uv.toml": "[[index]]\nname = 'no url'"}),
        ("uv", {"uv.toml": f"index = {'[' * 100_000}"}),
        ("npm", {".npmrc": "registry=https://0x7f000001/"}),
        ("npm", {".npmrc": "registry=https://${HOST}/"}),
        ("git", {".gitmodules": "url = https://[::1/x"}),
    ],
    ids=["a broken file", "text", "a number", "no URL", "too deep", "a host in hexadecimal", "a variable", "brackets"],
)
async def test_configuration_that_cannot_be_read_is_an_error(
    tmp_path: Path, tool: str, files: Mapping[str, str]
) -> None:
    with pytest.raises(BadValue):
        await found(tool, tmp_path, files=files)


@pytest.mark.parametrize("tool", ["npm", "apt"])
async def test_without_a_tool_and_its_configuration_nobody_guesses_its_hosts(tmp_path: Path, tool: str) -> None:
    with pytest.raises(BadValue, match=f"nothing on this host says which hosts `{tool}` uses"):
        await found(tool, tmp_path, env={"PATH": str(tmp_path)})


def test_a_set_is_pinned_and_a_ceiling_is_not_raised_by_the_repository(project: Project, repository: Path) -> None:
    program("npm").require()
    (project.home / ".npmrc").write_text("registry=http://npm.test:4873/\n")
    team = 'spec: {allow: [npm, "*.team.test"]}'
    network = "repo_source: {type: local, path: repo}\nnetwork: {setup: {allow: [npm, team]}}\nsetup_commands: ['true']"

    def planned(policy: str) -> tuple[int, str]:
        project.script("true", workspace=network, policy=f"network: {policy}")
        (project.folder / "team.runner.yaml").write_text(
            f"apiVersion: runner/v1\nkind: NetworkSet\nmetadata: {{name: team}}\n{team}\n"
        )
        done = project.runner("plan", ".", "--output", "json")
        return done.code, done.out if done.code == 0 else done.err

    code, told = planned("{setup: {allow: [team]}}")
    assert code == 0, told
    (setup,) = [step for step in json.loads(told)["runs"][0]["steps"] if step["id"] == "setup"]
    rules = {f"{rule['host']}:{rule['port']}": rule["origin"] for rule in setup["body"]["network"]["rules"]}
    assert rules.keys() == {"npm.test:4873", "*.team.test:None"}
    assert rules["npm.test:4873"].endswith(f"npm: {MINE}")
    assert rules["*.team.test:None"].endswith("team: team.runner.yaml:4")
    assert setup["body"]["network"]["environment"] == {"npm_config_registry": "http://npm.test:4873/"}

    (repository / ".npmrc").write_text("registry=https://theirs.test/\n")
    git(repository, "add", ".npmrc")
    git(repository, "commit", "-qm", "another registry")
    code, told = planned("{setup: {allow: [team]}}")
    assert (code, "does not allow network theirs.test:443" in told) == (3, True), told


def test_a_ceiling_is_not_compared_with_hosts_that_nobody_asked_for(project: Project) -> None:
    project.script("true", workspace="network: {allow: [npm]}", policy="network: {allow: [npm.test]}")

    assert project.runner("plan", ".", "--offline").code == 0
    assert project.runner("plan", ".").errors == ["policy.network"]


def test_no_name_of_a_tool_is_a_teams(project: Project) -> None:
    project.script("true", workspace="network: {allow: [npm]}")
    (project.folder / "npm.runner.yaml").write_text(
        "apiVersion: runner/v1\nkind: NetworkSet\nmetadata: {name: npm}\nspec: {allow: [a.test]}\n"
    )

    assert "`npm` means the hosts of that tool" in project.runner("validate", ".").err


def test_a_saved_plan_is_stale_once_a_tool_is_configured_to_use_other_hosts(project: Project) -> None:
    program("npm").require()
    project.script("true", workspace="network: {allow: [npm]}")
    assert project.runner("plan", ".", "--save", "saved.json").code == 0
    assert project.runner("apply", "saved.json").code == 0

    (project.home / ".npmrc").write_text("registry=http://npm.test:4873/\n")

    assert "`npm` is configured to use other hosts" in project.runner("apply", "saved.json").err
