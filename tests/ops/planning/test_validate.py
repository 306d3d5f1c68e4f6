"""One golden case for each code that a manifest can cause, rendered as a person reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.core.errors import Rejected, RunnerError
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider, provider_names, uses_images
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.planning.validate import validate
from runner.ports.provider import Images
from runner.report.diagnostics import render
from tests.support.folder_contents import put
from tests.support.situations import document, git

CASES = Path(__file__).parents[2] / "cases" / "diagnostics"
HINTS = CASES / "hints"
FILES = sorted(path.stem for path in CASES.glob("*.yaml"))


def a_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.runner.yaml")
    return Path("pipe.runner.yaml")


def an_empty_file(folder: Path) -> Path:
    (folder / "later.runner.yaml").write_text("# to be written\n")
    agent = "agent: script\nscript: {files: []}\nworkspace: {enabled: true}"
    documents = [document("AgentType", "fixer", agent), document("IncidentRun", "fix", "agent_type: fixer")]
    (folder / "fix.runner.yaml").write_text("---\n".join(documents))
    return Path()


def a_link_out(folder: Path) -> Path:
    (folder / ".runner").mkdir()
    (folder / ".runner" / "house.yaml").symlink_to("/etc/hostname")
    return Path(".runner")


def a_repository_without_the_branch(folder: Path) -> Path:
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    source = "repo_source: {type: local, path: ., branch: mian}"
    spec = f"agent: script\nscript: {{files: []}}\nworkspace:\n  enabled: true\n  {source}"
    documents = [document("AgentType", "fixer", spec), document("IncidentRun", "fix", "agent_type: fixer")]
    (folder / "fix.runner.yaml").write_text("---\n".join(documents))
    return Path("fix.runner.yaml")


def a_repository_that_allows_network(folder: Path) -> Path:
    put(folder / ".agentgate" / "policy.yaml", "# ours\nallowNetwork: true\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    workspace = "workspace: {enabled: true, network: none, repo_source: {type: local, path: .}}"
    spec = f"agent: script\nscript: {{files: []}}\n{workspace}"
    documents = [document("AgentType", "fixer", spec), document("IncidentRun", "fix", "agent_type: fixer")]
    (folder / "fix.runner.yaml").write_text("---\n".join(documents))
    return Path("fix.runner.yaml")


def a_kubeconfig(mode: int, server: str, incident: str, user: dict[str, object], folder: Path) -> Path:
    """A run that reads a cluster with this kubeconfig."""
    config = {
        "current-context": "prod-eu",
        "contexts": [{"name": "prod-eu", "context": {"cluster": "eu", "user": "me"}}],
        "clusters": [{"name": "eu", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user}],
    }
    put(folder / "kube.yaml", json.dumps(config), mode)
    (folder / "incident").mkdir()
    agent = "agent: script\nscript: {files: []}\nworkspace: {enabled: true, repo_source: {type: none}}"
    run = f"agent_type: oncall\nincident:\n  directory: incident\n{incident}"
    documents = [document("AgentType", "oncall", agent), document("IncidentRun", "triage", run)]
    (folder / "triage.runner.yaml").write_text("---\n".join(documents))
    return Path("triage.runner.yaml")


_SERVER, _FILE = "https://10.2.0.1:6443", "  kubeconfig: kube.yaml\n"


SITUATIONS: dict[str, Callable[[Path], Path]] = {
    "git.unknown-commit": a_repository_without_the_branch,
    "kubeconfig.context": partial(a_kubeconfig, 0o600, _SERVER, f"{_FILE}  context: prod-us\n", {}),
    "kubeconfig.exposed": partial(a_kubeconfig, 0o644, _SERVER, _FILE, {}),
    "kubeconfig.refused": partial(a_kubeconfig, 0o600, _SERVER, _FILE, {"exec": {"command": "aws"}}),
    "kubeconfig.unreadable": partial(a_kubeconfig, 0o600, _SERVER, "  kubeconfig: incident\n", {}),
    "manifest.empty": an_empty_file,
    "manifest.path-escape": a_link_out,
    "manifest.unreadable": a_fifo,
    "policy.network-ignored": a_repository_that_allows_network,
}
BY_HOST = {  # what only a look outside can show
    "git.source",
    "git.unknown-commit",
    "kubeconfig.context",
    "kubeconfig.exposed",
    "kubeconfig.refused",
    "kubeconfig.unreadable",
    "plan.not-enforced",
    "plan.unenforceable",
    "policy.isolation",
    "policy.network-ignored",
    "policy.untrusted",
}
ELSEWHERE = {
    "agent.cli-missing": "what a host or an image has",
    "agent.sub-runner": "what a sub-runner prints",
    "artifacts.": "what an environment names, and what is there",
    "cli.": "what a command line says",
    "cluster.": "what a cluster answers",
    "deliver.": "what a checkout or a remote holds",
    "gateway.": "which keys and prices there are",
    "git.checkout-differs": "what git does",
    "git.denied": "what a server says",
    "git.failed": "what git does",
    "git.hostile-tree": "what a repository holds",
    "git.missing": "what a host lacks",
    "git.no-repository": "what a server says",
    "git.over-limit": "what a server sends",
    "git.redirect": "what a server says",
    "git.unreachable": "what a network does",
    "git.url-unsupported": "what a host lacks",
    "host.": "what a host forbids",
    "image.": "what a daemon, a network or an image holds",
    "init.": "what is in the way of new files",
    "job.": "a cluster, and what of this host it does not see",
    "lease.": "who else uses a workspace",
    "manifest.not-convertible": "an older version: tests/cases/convert/refused.txt",
    "manifest.rejected": "the name of a whole report",
    "manifest.unwritable": "what a host forbids",
    "plan.input-changed": "what changes while a run is on",
    "plan.open": "how a plan was made",
    "plan.over-cost": "what a command line says",
    "plan.stale": "what changed since a plan was made",
    "plan.unreadable": "what a file that is no manifest holds",
    "mcp.": "which servers are hosted, and how they are",
    "plugin.broken": "a distribution is installed that is broken",
    "policy.protected-link": "what a checkout holds",
    "pool.kept": "who else keeps workspaces warm",
    "pool.none": "what is asked to be kept warm",
    "pool.unknown": "what is kept warm",
    "provider.": "what providers do",
    "report.": "what a command line says",
    "run.": "what ran before",
    "secret.": "what an environment, a file or a command holds",
    "session.": "what becomes of a session",
    "server.": "what a request, a token or a listener is",
    "store.": "what the journal holds",
    "telemetry.": "what an environment names, and what is there",
    "tool.": "what a tool is asked for",
    "triage.": "what a command line says, what an incident or a cluster holds",
    "workspace.": "what a workspace holds, and what was done with it",
}


def codes(of: type[RunnerError] = RunnerError) -> Iterator[str]:
    if "code" in vars(of) and of is not RunnerError:
        yield of.code
    for kind in of.__subclasses__():
        yield from codes(kind)


def findings(path: Path, home: Path, code: str) -> list[RunnerError]:
    """What validating finds; when that is not this code, what planning finds."""
    settings = Settings.from_env({"RUNNER_HOME": str(home)})
    found = validate(path, settings)[1]
    if code not in BY_HOST:
        return found
    assert found == []
    request = Request(untrusted=code == "policy.untrusted")
    try:
        return list(trio.run(partial(make_plan, path, settings, request)).warnings)
    except Rejected as rejected:
        return list(rejected.findings)


def compare(code: str, path: Path, home: Path, request: pytest.FixtureRequest) -> None:
    found = findings(path, home, code)
    rendered = render(found).replace(str(Path.cwd()), "PROJECT") + "\n"
    golden = CASES / f"{code}.txt"

    if request.config.getoption("--update-cases"):
        golden.write_text(rendered)
    assert rendered == golden.read_text()
    assert {finding.code for finding in found} == {code}


@pytest.mark.parametrize("code", FILES)
def test_a_code_is_shown_as_in_its_case(
    code: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CASES)
    compare(code, Path(f"{code}.yaml"), tmp_path, request)


@pytest.mark.parametrize("code", SITUATIONS)
def test_a_code_of_a_situation_is_shown_as_in_its_case(
    code: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    compare(code, SITUATIONS[code](tmp_path / "project"), tmp_path / "home", request)


@pytest.mark.parametrize("case", sorted(path.stem for path in HINTS.glob("*.yaml")))
def test_a_hint_leads_to_what_is_wrong(
    case: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes that people make, each of which was answered with advice that made it worse."""
    monkeypatch.chdir(HINTS)
    found = validate(Path(f"{case}.yaml"), Settings.from_env({"RUNNER_HOME": str(tmp_path)}))[1]
    golden = HINTS / f"{case}.txt"

    if request.config.getoption("--update-cases"):
        golden.write_text(render(found) + "\n")
    assert render(found) + "\n" == golden.read_text()


def test_which_providers_make_workspaces_of_images_is_known_without_them(tmp_path: Path) -> None:
    settings = Settings.from_env({"RUNNER_HOME": str(tmp_path)})

    for name in provider_names():
        assert isinstance(open_provider(name, settings), Images) == uses_images(name)


def test_every_code_has_a_case_or_a_reason_why_no_manifest_causes_it() -> None:
    def excused(code: str) -> bool:
        return code in ELSEWHERE or f"{code.partition('.')[0]}." in ELSEWHERE

    assert {code for code in codes() if not excused(code)} == {*FILES, *SITUATIONS}
    assert all(any(code.startswith(excuse) for code in codes()) for excuse in ELSEWHERE)
