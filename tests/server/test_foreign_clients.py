"""Clients that others have made from the server's document alone: schemathesis, and one that npm's generator types."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.server.openapi import document
from runner.server.serve import routes
from tests.server.test_runs import follow
from tests.support.needs import program
from tests.support.server import Served, serving
from tests.support.situations import Project

SCHEMATHESIS = "schemathesis==4.32.5"
GENERATED = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3")
# A body may fit the document and still say what cannot be done, as with a name that is taken or an image that is none.
# Nothing that only reads may refuse what fits. Files that calls of tools name may be missing in their workspace.
CHECKS = """
[checks]
ensure_resource_availability.enabled = false
negative_data_rejection.expected-statuses = ["4XX", "5XX"]
[[operations]]
include-method = ["POST", "PUT", "DELETE"]
checks.positive_data_acceptance.enabled = false
[phases.stateful.generation]
max-examples = 150
"""
CLIENT = """
import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

declare const process: { argv: string[] };
const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { Authorization: `Bearer ${token}` } });

function got<T>({ data, error }: { data?: T; error?: unknown }): T {
  if (data === undefined) throw new Error(JSON.stringify(error));
  return data;
}

const made = got(await client.POST("/api/v1/agent-types", { body: { name: "typed", workspace: { tools: ["read"] } } }));
const read = got(await client.GET("/api/v1/agent-types/{id}", { params: { path: { id: made.name } } }));
const refused = await client.PUT("/api/v1/agent-types/{id}/workspace-config", {
  params: { path: { id: made.name }, header: { "if-match": "odd" } },
  body: { enabled: true },
});
const plan = got(await client.POST("/api/v1/plans", { body: { run: "work" } }));
if (typeof plan === "string") throw new Error(plan);
const started = got(await client.POST("/api/v1/runs", { body: { plan: plan.id } }));
const listed = got(await client.GET("/api/v1/runs", { params: { query: { limit: 10, name: "w*" } } }));
console.log(JSON.stringify([
  read.workspace?.tools, refused.error?.code, started.runs[0]?.id, listed.runs.map((run) => run.id),
]));
"""


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    project.script("echo it is made")
    options = ("--manifests", str(project.folder), "--listen", "127.0.0.1:0", "--rate", "10000")
    with serving(project, *options, says=None) as server:  # keys of runs that come twice are told of
        yield server


def test_what_is_made_links_to_all_that_can_be_asked_of_it() -> None:
    paths = document(routes())["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len({*ids})
    links = paths["/api/v1/sessions"]["post"]["responses"]["202"]["links"]
    assert {link["operationId"] for link in links.values()} == {
        operation["operationId"]
        for path, methods in paths.items()
        for operation in methods.values()
        if path.startswith("/api/v1/sessions/{id}")
    }
    assert links["get_sessions_id"]["parameters"] == {"id": "$response.body#/id"}
    listed = paths["/api/v1/runs"]["get"]["responses"]["200"]["links"]["get_runs_id_logs"]
    assert listed["parameters"] == {"id": "$response.body#/runs/0/id"}


@pytest.fixture
def schemathesis(request: pytest.FixtureRequest) -> Path:
    """Installed once and kept, in an environment of its own."""
    folder = Path(request.config.cache.mkdir(SCHEMATHESIS.replace("==", "-")))
    if not (folder / "bin" / "st").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", SCHEMATHESIS], check=True)
    return folder / "bin" / "st"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_schemathesis_finds_nothing_in_the_whole_document(served: Served, schemathesis: Path, tmp_path: Path) -> None:
    """It sends what fits and what does not to every operation, and what answers lead to by the document's links."""
    run = served.post("/runs", {"run": "work"})["runs"][0]["id"]
    follow(served, run)
    assert served.project.runner("project", "create", "docs").code == 0
    served.post("/agent-types", {"name": "reviewer"})
    for _ in range(5):  # which links lead to, and some of them end
        served.post("/sessions", {"agent_type": "reviewer"})
        served.post("/workspaces", {"provider": "local"})
    (tmp_path / "checks.toml").write_text(CHECKS)
    words = ["--header", f"Authorization: Bearer {served.token}", "--phases", "coverage,fuzzing,stateful"]
    words += ["--max-examples", "40", "--request-timeout", "60", "--continue-on-failure"]
    words += ["--report", "json", "--report-json-path", "found.json"]

    try:
        done = subprocess.run(
            [schemathesis, "--config-file", "checks.toml", "run", f"{served.url}/api/v1/openapi.json", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for one in served.get("/workspaces?limit=1000")["workspaces"]:
            served.ask("DELETE", f"/api/v1/workspaces/{one['id']}?discard=true")

    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["failures"], found["errors"]) == ([], [])
    assert found["operations"]["tested"] == found["operations"]["total"]
    assert found["test_cases"]["generated"] > 2_000
    assert {found["phases"][name]["status"] for name in ("coverage", "fuzzing", "stateful")} == {"success"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_generated_client_works_as_its_types_say(
    served: Served, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program("npm").require()
    folder = Path(request.config.cache.mkdir("openapi-typescript"))
    if not (folder / "node_modules").exists():
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        subprocess.run(["npm", "install", *quiet, "--prefix", str(folder), *GENERATED], check=True)
    programs = folder / "node_modules" / ".bin"
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "document.json").write_bytes(served.ask("GET", "/api/v1/openapi.json").raw)
    (tmp_path / "client.ts").write_text(CLIENT)
    for words in (
        [programs / "openapi-typescript", "document.json", "--default-non-nullable=false", "--output", "schema.ts"],
        [programs / "tsc", "--strict", "--target", "es2022", "--module", "nodenext", "client.ts"],
    ):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    said = subprocess.run(
        ["node", "client.js", served.url, served.token], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert said.returncode == 0, said.stderr
    tools, refused, started, listed = json.loads(said.stdout)
    assert (tools, refused, listed) == (["read"], "server.changed", [started])
    assert follow(served, started)[-1]["exit_code"] == 0
