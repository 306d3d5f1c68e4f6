"""The escapes of ``runner doctor --probe network``: nothing gets past an allow-list, and each try is counted."""

from __future__ import annotations

import json

import pytest

from runner.ops.host.probe import FLOOD, EscapeResult, examine_networks
from runner.sandbox.network_escapes import NETWORK_ESCAPES
from tests.cli.test_dependencies import AS_ORDINARY
from tests.support import dockerd
from tests.support.situations import Project

HOSTILE = [pytest.param(name, 10_000, marks=marks, id=name) for name, marks in (
    ("local", pytest.mark.nightly),
    ("docker", pytest.mark.nightly),
    ("gvisor", [pytest.mark.nightly, dockerd.GVISOR.mark]),
)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize(("provider", "many"), [pytest.param("local", FLOOD, id="local, few"), *HOSTILE])
async def test_a_hostile_program_gets_past_no_allow_list_and_each_try_is_recorded(
    project: Project, provider: str, many: int
) -> None:
    docker = {"DOCKER_HOST": dockerd.host()} if provider != "local" else {}
    settings = project.settings(**docker)

    (examined,) = await examine_networks(settings, [provider], dockerd.IMAGE if docker else None, many=many)

    assert examined.skipped is None
    assert [(one.name, one.result, one.told) for one in examined.tried] == [
        (escape.name, EscapeResult.REFUSED, ()) for escape in NETWORK_ESCAPES
    ]


@pytest.mark.nightly
def test_nor_does_one_of_an_ordinary_user(project: Project) -> None:
    """By the command, with a daemon of docker that the user may ask."""
    project.within = AS_ORDINARY
    project.env["DOCKER_HOST"] = dockerd.host()

    done = project.runner("doctor", "--probe", "network", "--image", dockerd.IMAGE, "--output", "json")

    assert done.code == 0, done.out + done.err
    tried = {one["provider"]: one["tried"] for one in json.loads(done.out) if not one["skipped"]}
    wanted = [(escape.name, "refused") for escape in NETWORK_ESCAPES]
    assert {name: [(one["name"], one["result"]) for one in all] for name, all in tried.items()} == {
        "docker": wanted,
        "local": wanted,
    }
