"""Hosted MCP servers in containers of a daemon that sees nothing of this host: an ordinary user's, and one behind a
wire.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mcp.shared.exceptions import MCPError

from tests.providers import test_docker_volumes
from tests.server.test_hosted_mcp import ask, events, hosting, state, write
from tests.support import dockerd
from tests.support.dockerd import Daemon
from tests.support.needs import ROOT
from tests.support.situations import Project, until

# The SDK's client leaves generators of its streams to the collector.
pytestmark = [ROOT.mark, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
elsewhere, homes = test_docker_volumes.elsewhere, test_docker_volumes.homes
near, remote = test_docker_volumes.near, test_docker_volumes.remote


@pytest.mark.scenario("LIF-22", only="elsewhere")
def test_a_crashed_server_there_is_started_again(project: Project, elsewhere: Callable[[], Daemon]) -> None:
    project.env["WORKSPACE_PROVIDERS"] = "docker"
    write(project, image=dockerd.IMAGE)
    elsewhere()
    assert project.runner("token", "create", "own", "--scope", "admin").code == 0  # which makes the home
    with hosting(project) as served:
        until(lambda: state(served)["state"] == "ready")
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="has ended"), flatten_subgroups=True):
            ask(served, "die", code=3)
        assert ask(served, "echo", text="again") == "again"
        written = events(project, state(served)["workspace"])
    (ended,) = (one for one in written if one["type"] == "McpServerEnded")
    assert (ended["how"], ended["pause_seconds"]) == ("exited 3", 0)
