"""Metrics of the real server, in the text that Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from runner.core.model import PoolMissReason
from runner.events.events import PoolMissed
from runner.ops.host.state import make_home, open_state
from tests.support.server import Served, create_token, serving
from tests.support.situations import Project, until

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "server.md"
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)')


def scrape(served: Served) -> dict[str, float]:
    """Return every sample; each family has its help and its type before it."""
    answer = served.ask("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[str, float] = {}
    family = ""
    for line in answer.raw.decode().splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif not line.startswith(f"# TYPE {family} "):
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample[1].startswith(family)
            assert line.rpartition(" ")[0] not in found
            found[line.rpartition(" ")[0]] = float(sample[3])
    return found


async def claim(project: Project) -> None:
    """Ask a warm pool that is empty for two workspaces."""
    make_home(project.settings())
    async with open_state(project.settings()) as store:
        await store.append_to_workspace("w", [PoolMissed("w", PoolMissReason.EMPTY)] * 2)


@pytest.mark.scenario("LIF-04")
def test_what_a_server_has_done_is_counted(project: Project) -> None:
    project.script("echo ran >file")
    trio.run(claim, project)
    with serving(project, "--manifests", str(project.folder)) as served:
        made = served.post("/workspaces", {"tools": ["bash"]})["id"]
        served.tool(made, "bash", command="true")
        assert served.refused("POST", f"/workspaces/{made}/tools/read", {"file_path": "x"})[0] == 403
        served.post("/runs")
        for name in ("../x", "y", "z" * 200):
            served.ask("BREW", f"/{name}")
        steps = 'runner_step_duration_seconds_%s{kind="agent",status="succeeded"%s}'
        until(lambda: steps % ("count", "") in scrape(served))

        found = scrape(served)

        listed = re.findall(r"^\| `(runner_\w+)`", PAGE.read_text(), re.MULTILINE)
        assert {re.sub("_(bucket|sum|count)$", "", name.partition("{")[0]) for name in found} <= {*listed}
        assert found['runner_runs{status="succeeded"}'] == 1
        assert found['runner_pool_claims_total{result="miss",reason="empty"}'] == 2
        assert found['runner_tool_calls_total{tool="bash",outcome="ok"}'] == 1
        assert found['runner_tool_calls_total{tool="read",outcome="tool.not-enabled"}'] == 1
        assert found['runner_workspaces{status="ready"}'] == 1
        assert found['runner_leases{state="live"}'] == 1
        assert found['runner_provider_available{provider="local"}'] == 1
        assert found['runner_provider_available{provider="kubernetes"}'] == 0
        assert found[steps % ("count", "")] == found[steps % ("bucket", ',le="+Inf"')] == 1
        assert found[steps % ("bucket", ',le="0.1"')] <= found[steps % ("bucket", ',le="900"')]
        assert found['runner_http_requests_total{method="other",route="none",status="404"}'] == 3
        assert found['runner_http_requests_total{method="POST",route="/api/v1/workspaces",status="201"}'] == 1
        other = create_token(project.settings(), "shop", ("project:shop",))
        assert served.ask("GET", "/metrics", token=other).code == "server.scope"
        assert served.ask("GET", "/metrics", headers={"Authorization": ""}).status == 401
        assert served.ask("DELETE", f"/api/v1/workspaces/{made}?discard=true").status == 200
