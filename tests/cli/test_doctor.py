"""``runner doctor``: what is wrong here told apart from what is so by design, and how to change it."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest

from runner.core.settings import Settings, duration_text, parse_duration, parse_size, size_text
from runner.sandbox.bwrap import binary, profile
from tests.support import dockerd
from tests.support.dockerd import GVISOR
from tests.support.needs import ROOT
from tests.support.situations import Project


def a_context(folder: Path, name: str, host: object) -> None:
    """Docker's configuration with a current context, as its client writes it."""
    about = folder / "contexts" / "meta" / sha256(name.encode()).hexdigest() / "meta.json"
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host}}}))
    (folder / "config.json").write_text(json.dumps({"auths": {}, "currentContext": name}))


def test_a_host_on_which_nothing_isolates_is_said_and_ends_with_1(host_without_user_namespaces: Project) -> None:
    done = host_without_user_namespaces.runner("doctor")

    assert done.code == 1, done.out + done.err
    assert "✗ local " in done.out
    assert "= hint: sudo sysctl -w user.max_user_namespaces=15000" in done.out
    assert done.out.endswith("\nruns are isolated here by: nothing, see the hints\n")


def test_what_no_host_would_change_is_one_line(project: Project) -> None:
    done = project.runner("doctor")

    assert done.code == 0
    assert "    by design without: base image, warm pool\n" in done.out
    (process,) = [line for line in done.out.split("✓ process")[1].splitlines() if "design" in line]
    assert "network none, protected paths" in process
    assert "NOT ENFORCED: disk" not in done.out.split("✓ process")[1]
    assert "\nruns are isolated here by: " in done.out
    assert re.search(r"^✓ git        (git|dulwich) \d+\.\d+", done.out, re.MULTILINE)


def test_what_this_host_cannot_limit_is_said_with_its_reason(root_without_other_users: Project) -> None:
    done = root_without_other_users.runner("doctor")

    assert done.code == 0
    assert (
        "    disk: watched from outside, and what goes beyond it is ended "
        "(local limits the disk only of workspaces that root makes)\n" in done.out
    )


@GVISOR.mark
def test_what_memory_over_the_limit_does_is_said_where_it_ends_everything(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()
    shown = project.runner("doctor").out
    (gvisor,) = [part for part in re.split(r"\n(?=[^ ])", shown) if part.startswith("✓ gvisor")]
    assert "    memory: what exceeds the limit ends its sandbox whole, not one process of it" in gvisor
    assert shown.count("ends its sandbox whole") == 1


def test_gvisor_alone_says_that_it_needs_root_and_no_group(root_without_other_users: Project) -> None:
    shown = root_without_other_users.runner("doctor").out

    assert "gvisor needs root here, and membership in the group docker is not enough" in shown
    assert "docker needs root" not in shown


@ROOT.mark
def test_the_daemon_of_dockers_context_is_the_one_that_is_asked(project: Project) -> None:
    a_context(project.home / ".docker", "rootless", "unix:///run/user/1000/nowhere.sock")

    shown = project.runner("doctor").out
    settings = project.runner("doctor", "--settings").out

    assert "the docker daemon at `unix:///run/user/1000/nowhere.sock` cannot be reached" in shown
    assert "= hint: start the daemon that listens there, or name another" in shown
    assert "unix:///run/user/1000/nowhere.sock   (docker context rootless)" in settings


@pytest.mark.parametrize(
    ("env", "host", "source"),
    [
        ({}, "unix:///one.sock", "docker context one"),
        ({"DOCKER_CONTEXT": "two"}, "unix:///two.sock", "docker context two"),
        ({"DOCKER_HOST": "unix:///x.sock"}, "unix:///x.sock", "environment"),
        ({"DOCKER_CONTEXT": "default"}, "unix:///var/run/docker.sock", "built-in"),
        ({"DOCKER_CONTEXT": "gone"}, "unix:///var/run/docker.sock", "built-in"),
        ({"DOCKER_CONFIG": "/nowhere"}, "unix:///var/run/docker.sock", "built-in"),
    ],
    ids=["current", "variable", "host", "default", "not there", "no configuration"],
)
def test_dockers_own_precedence_holds(tmp_path: Path, env: dict[str, str], host: str, source: str) -> None:
    a_context(tmp_path / ".docker", "two", "unix:///two.sock")
    a_context(tmp_path / ".docker", "one", "unix:///one.sock")

    settings = Settings.from_env({"HOME": str(tmp_path), **env})

    assert (settings.docker_host, settings.sources["DOCKER_HOST"]) == (host, source)


@pytest.mark.parametrize("text", ["", "[]", '{"currentContext": 7}', '{"currentContext": null}', "{", '"x"'])
def test_a_configuration_of_docker_that_is_none_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    settings = Settings.from_env({"HOME": "/", "DOCKER_CONFIG": str(tmp_path)})

    assert settings.docker_host == "unix:///var/run/docker.sock"


@pytest.mark.parametrize("host", [7, "", None, ["unix:///x"]])
def test_a_context_without_a_host_counts_as_none(tmp_path: Path, host: object) -> None:
    a_context(tmp_path, "odd", host)

    assert Settings.from_env({"HOME": "/", "DOCKER_CONFIG": str(tmp_path)}).sources["DOCKER_HOST"] == "built-in"


def test_settings_are_shown_as_people_write_them(project: Project) -> None:
    project.env |= {"WORKSPACE_TTL": "5400", "WORKSPACE_DEFAULT_MEMORY": "1536M"}

    rows = {line.split()[0]: line.split()[1] for line in project.runner("doctor", "--settings").out.splitlines()}

    wanted = {"WORKSPACE_TTL": "1h30m", "WORKSPACE_DEFAULT_MEMORY": "1536M", "WORKSPACE_DEFAULT_DISK": "10G"}
    assert {name: rows[name] for name in wanted} == wanted


@pytest.mark.parametrize("count", [1, 1023, 1024, 1536 << 20, 4 << 30, (4 << 30) + 1, 1 << 42])
def test_a_shown_size_is_read_as_just_that(count: int) -> None:
    assert parse_size(size_text(count)) == count


@pytest.mark.parametrize("seconds", [1, 59, 60, 90, 3_600, 86_399, 86_400, 2_592_000, 2_592_061])
def test_a_shown_duration_is_read_as_just_that(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == seconds


def test_the_apparmor_profile_is_for_our_bubblewrap_alone() -> None:
    text = profile()

    assert f'profile runner-bwrap "{Path(*binary())}" flags=(unconfined) {{\n  userns,\n' in text
    assert text.startswith("sudo tee /etc/apparmor.d/runner-bwrap <<'PROFILE'\nabi <abi/4.0>,\n")
    assert text.endswith("\nPROFILE\nsudo apparmor_parser --replace /etc/apparmor.d/runner-bwrap")
