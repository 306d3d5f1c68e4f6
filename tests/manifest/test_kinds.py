"""Each rule of each kind, by the loader and by the published schema: both take and refuse the same documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource

from runner.core.settings import shipped
from runner.manifest import schema
from runner.manifest.load import defaults, kinds
from tests.support.manifest_text import ENABLED, agent_type, document, load_data, policy, run

SCHEMAS = shipped("schemas") / "v1"


@pytest.fixture(scope="module")
def published() -> dict[str, Validator]:
    """A validator of each form: the umbrella with its kinds beside it, and as one schema."""
    return {
        "2020-12": validator(Draft202012Validator, SCHEMAS),
        "draft-07": validator(Draft7Validator, SCHEMAS / schema.DRAFT_07),
        "one 2020-12": Draft202012Validator(schema.bundled()),
        "one draft-07": Draft7Validator(schema.as_draft_07(schema.bundled())),
    }


def validator(dialect: type[Validator], folder: Path) -> Validator:
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    registry: Registry[Any] = Registry().with_resources((n, Resource.from_contents(s)) for n, s in files.items())
    return dialect(files[schema.UMBRELLA], registry=registry)


def workspace(**fields: object) -> dict[str, object]:
    return agent_type({**ENABLED, **fields})


def source(**fields: object) -> dict[str, object]:
    return workspace(repo_source=fields)


def limits(**fields: object) -> dict[str, object]:
    return workspace(resource_limits=fields)


def secrets(*sources: object) -> dict[str, object]:
    names = "ABC"
    return agent_type(
        secrets=[{"name": n, "from": one, "steps": ["agent"]} for n, one in zip(names, sources, strict=False)]
    )


def servers(*used: object) -> dict[str, object]:
    return document("AgentType", agent="claude", model="opus", mcp_servers=[*used])


GOOD = {
    "least agent type": agent_type(),
    "image": workspace(base_image="node"),
    "image of a registry": workspace(base_image="Registry.example.org:5000/team/my_agent--x:3.1"),
    "image by its digest": workspace(base_image=f"team/agent@sha256:{'0' * 64}"),
    "image that is always pulled": workspace(base_image={"ref": "node:22", "pull": "always"}),
    "image by its id": workspace(base_image=f"sha256:{'a' * 64}"),
    "script path may lead up": agent_type(script={"path": "../play.sh"}),
    "script file": agent_type(script={"files": [{"path": "a/b.sh", "content": "", "executable": True}]}),
    "other script is null": agent_type(script={"path": None, "files": []}),
    "agent without a script": document("AgentType", agent="goose"),
    "model": document("AgentType", agent="claude", model="opus", credentials="env", script=None),
    "servers": servers(
        "docs",
        {"name": "far", "url": "https://a.org/mcp", "private": True, "command": None},
        {"name": "near", "command": ["x"], "tools": None, "url": None},
    ),
    "no tools": document("AgentType", agent="claude", cli_tools=[]),
    "tools that another agent does not have": document("AgentType", agent="gemini", cli_tools=None),
    "models": run(matrix={"model": ["gpt-5", "openai/gpt-5:beta@2[1m]"]}),
    "budget": document("AgentType", agent="codex", budget={"tokens": 1, "cost_usd": 0.01, "turns": 50}),
    "secrets of each kind of place": secrets({"env": "A"}, {"file": "a"}, {"command": ["a", "b"]}),
    "secret of the keyring as a file": agent_type(
        secrets=[{"name": "A", "from": {"keyring": {"service": "a", "user": "b"}}, "steps": ["setup"], "as": "file"}]
    ),
    "policy without secrets": policy(secrets=[]),
    "budget of whole dollars": document("AgentType", agent="gemini", budget={"cost_usd": 3, "tokens": None}),
    "no model of the script agent": agent_type(model=None, budget=None),
    "skills": agent_type(skills=["k8s-troubleshooter", "of-another-installation"]),
    "policy may be null": agent_type(policy=None),
    "variable": agent_type(env={"_A1": ""}),
    "durations": agent_type(timeouts={"agent": "90s", "clone": "1h30m", "setup": 5, "scan": "30d"}),
    "commands": agent_type(post_hooks=["make", ["make", "all", ""]]),
    "disabled": agent_type({"enabled": False}),
    "one provider": workspace(provider="local"),
    "several providers": workspace(providers=["gvisor", "docker"]),
    "isolation": workspace(isolation="vm"),
    "a network for each step": workspace(network={"setup": {"allow": ["pypi.org"]}, "agent": "open", "verify": "none"}),
    "task context": source(type="task_context", branch="main", depth=1),
    "fixed": source(type="fixed", url="https://e.org/a"),
    "local": source(type="local", path="..", include_dirty=True),
    "parts": source(type="local", path="..", submodules=True, lfs=True, include_dirty=False),
    "nothing": source(type="none"),
    "null in place of a field": source(type="none", url=None),
    "limits": limits(cpu="500m", memory="512M", disk="10GiB", pids=16, enforcement="best_effort"),
    "bare limits": limits(cpu=0.5, memory=67108864, disk="2g"),
    "setup": workspace(setup_commands=[], setup={"timeout": "1m", "on_failure": "warn"}),
    "toolchain": workspace(toolchains=["/opt/node", "python3", "g++-12"]),
    "dependencies": workspace(dependencies=["node_modules", "packages/a/.venv"]),
    "least policy": policy(),
    "policy": policy(allowed_paths=["src/**"], max_file_size="1K", providers=["local"], min_isolation="kernel"),
    "least run": run(),
    "task": run(task={"repository_url": "https://e.org/a", "pull_request_number": 42, "commit": None}),
    "incident": run(incident={"directory": "../INC-1"}),
    "one cluster for the incidents of a matrix": run(incident={"kubeconfig": "k"}, matrix={"incident": ["a", "b"]}),
    "verify": run(verify={"report": {"path": "report.md"}, "commands": [{"run": ["npm", "test"], "exit": 255}]}),
    "empty blocks": run(verify={}, snapshot={}, task={}),
    "snapshot": run(snapshot={"message": "fix", "branch": "x/{{ run.id }}"}, timeout="1h"),
}

BAD = {
    "image without a name": workspace(base_image=""),
    "image without its name": workspace(base_image={"pull": "always"}),
    "image that is pulled at times": workspace(base_image={"ref": "node:22", "pull": "sometimes"}),
    "images": workspace(base_image=["node:22"]),
    "image with a blank": workspace(base_image="node 22"),
    "image in capitals": workspace(base_image="Node:22"),
    "image whose tag is none": workspace(base_image="node:"),
    "image that is a url": workspace(base_image="docker://registry.example.org/node"),
    "image with half a digest": workspace(base_image="node@sha256:00"),
    "model with a blank": document("AgentType", agent="claude", model="son net"),
    "model without end": document("AgentType", agent="claude", model="x" * 201),
    "agent that there is none of": document("AgentType", agent="cursor"),
    "script of another agent": agent_type(agent="claude"),
    "model of the script agent": agent_type(model="sonnet"),
    "secret from nowhere": secrets({}),
    "secret from two places": secrets({"env": "A", "file": "a"}),
    "secret from an empty command": secrets({"command": []}),
    "secret whose name is no variable": agent_type(secrets=[{"name": "A-B", "from": {"env": "A"}, "steps": ["setup"]}]),
    "secret for no step": agent_type(secrets=[{"name": "A", "from": {"env": "A"}, "steps": []}]),
    "secret for a step without commands": agent_type(secrets=[{"name": "A", "from": {"env": "A"}, "steps": ["scan"]}]),
    "secret for a step twice": agent_type(secrets=[{"name": "A", "from": {"env": "A"}, "steps": ["agent", "agent"]}]),
    "policy that names a secret twice": policy(secrets=["A", "A"]),
    "budget of the script agent": agent_type(budget={}),
    "credentials of the script agent": agent_type(credentials="gateway"),
    **{f"model {name!r}": document("AgentType", agent="codex", model=name) for name in ("", " ", "a\nb", "a\0", "é")},
    "the same model twice": run(matrix={"model": ["opus", "opus"]}),
    "no models": run(matrix={"model": []}),
    "tool with a pattern": document("AgentType", agent="claude", cli_tools=["Bash(git *)"]),
    "tools of another agent": document("AgentType", agent="gemini", cli_tools=["Read"]),
    "unknown credentials": document("AgentType", agent="codex", credentials="file"),
    "null credentials": document("AgentType", agent="codex", credentials=None),
    **{
        f"budget {name} {value!r}": document("AgentType", agent="goose", budget={name: value})
        for name, value in (("tokens", 0), ("tokens", 1.5), ("turns", "50"), ("cost_usd", 0), ("cost_usd", "3"))
    },
    "unknown budget": document("AgentType", agent="goose", budget={"seconds": 5}),
    **{f"skill {name!r}": agent_type(skills=[name]) for name in ("", "..", "a/b", "A", "-a", "a" * 65, 5)},
    "the same skill twice": agent_type(skills=["a", "a"]),
    "null skills": agent_type(skills=None),
    "no script": document("AgentType", agent="script"),
    "empty script": agent_type(script={}),
    "both scripts": agent_type(script={"path": "a", "files": []}),
    "no content": agent_type(script={"files": [{"path": "a"}]}),
    "script file leads up": agent_type(script={"files": [{"path": "a/../b", "content": ""}]}),
    "absolute script file": agent_type(script={"files": [{"path": "/a", "content": ""}]}),
    "script file is a folder": agent_type(script={"files": [{"path": ".", "content": ""}]}),
    "backslash": agent_type(script={"files": [{"path": "a\\b", "content": ""}]}),
    "empty path": agent_type(script={"files": [{"path": "", "content": ""}]}),
    "variable with a dash": agent_type(env={"A-B": ""}),
    "variable of the runner": agent_type(env={"RUNNER_X": ""}),
    "number as variable": agent_type(env={"PORT": 80}),
    "duration of no length": agent_type(timeouts={"agent": "0s"}),
    "negative duration": agent_type(timeouts={"agent": -5}),
    "duration with a colon": agent_type(timeouts={"agent": "1:30"}),
    "fraction of a second": agent_type(timeouts={"agent": 1.5}),
    "digits of another script": agent_type(timeouts={"agent": "٣m"}),
    "boolean duration": agent_type(timeouts={"agent": True}),
    "empty command": agent_type(post_hooks=[""]),
    "no words": agent_type(post_hooks=[[]]),
    "empty first word": agent_type(post_hooks=[["", "a"]]),
    "number as first word": agent_type(post_hooks=[[5, "a"]]),
    "number as word": agent_type(post_hooks=[["sleep", 5]]),
    "command with NUL": agent_type(post_hooks=["a\0b"]),
    "text for a list": agent_type(post_hooks="make"),
    "list for a mapping": agent_type([]),
    "null for a mapping": agent_type(workspace=None),
    "server of nothing": servers({"name": "near", "command": []}),
    "server in two places": servers({"name": "near", "command": ["x"], "url": "https://a.org/mcp"}),
    "server inside with tools": servers({"name": "near", "command": ["x"], "tools": []}),
    "server inside with a budget": servers({"name": "near", "command": ["x"], "max_calls": 1}),
    "server inside that is private": servers({"name": "near", "command": ["x"], "private": True}),
    "hosted server that is private": servers({"name": "near", "private": True}),
    "text for a boolean": agent_type({"enabled": "yes"}),
    "field of a disabled workspace": agent_type({"enabled": False, "isolation": "vm"}),
    "field of a workspace that is not enabled": agent_type({"provider": "local"}),
    "provider and providers": workspace(provider="a", providers=["b"]),
    "no providers": workspace(providers=[]),
    "provider twice": workspace(providers=["a", "b", "a"]),
    "empty provider": workspace(provider=""),
    "unknown isolation": workspace(isolation="container"),
    "network": workspace(network="all"),
    "a host": workspace(network={"allow": ["pypi.org/simple"]}),
    "a whole domain": workspace(network={"allow": ["*.org"]}),
    "a host that is not private": workspace(network={"allow": [{"host": "a.org", "private": False}]}),
    "a step": workspace(network={"build": "none"}),
    "hosts and steps": workspace(network={"allow": ["a.org"], "agent": "none"}),
    "neither": workspace(network={}),
    "no list": workspace(network={"allow": None}),
    "a network of a step": workspace(network={"agent": {"verify": "open"}}),
    "misspelt": workspace(protected_path=["a"]),
    "fixed without url": source(type="fixed"),
    "fixed with path": source(type="fixed", url="u", path="p"),
    "local without path": source(type="local"),
    "url by default type": source(url="u"),
    "dirty task": source(include_dirty=False),
    "uncommitted files and parts": source(type="local", path="..", include_dirty=True, lfs=True),
    "parts of nothing": source(type="none", submodules=False),
    "branch of nothing": source(type="none", branch="main"),
    "no depth": source(depth=0),
    "more depth than git can count": source(type="local", path="p", depth=1 << 31),
    "relative toolchain": workspace(toolchains=["opt/node"]),
    "absolute dependency": workspace(dependencies=["/opt/node"]),
    "dependency outside": workspace(dependencies=["../node_modules"]),
    "dependency twice": workspace(dependencies=["node_modules", "node_modules"]),
    **{f"memory {value!r}": limits(memory=value) for value in (0, -1, "0", "2 ", "4X", "1.5G", "", "-1G", True, [])},
    **{f"cpu {value!r}": limits(cpu=value) for value in (0, -1, "0m", "2 ", "NaN", "1e400", "inf", "0.0001")},
    "no processes": limits(pids=0),
    "too few processes to start a shell": limits(pids=15),
    "more processes than Linux has": limits(pids=(1 << 22) + 1),
    "null processes": limits(pids=None),
    "fraction of a process": limits(pids=1.5),
    "unknown policy field": policy(networks="none"),
    "empty pattern": policy(allowed_paths=[""]),
    "null patterns": policy(forbidden_patterns=None),
    "empty agent type": run(agent_type=""),
    "pull request 0": run(task={"pull_request_number": 0}),
    "number as commit": run(task={"commit": 1234567}),
    "incident without directory": run(incident={}),
    "incident whose directory is null": run(incident={"directory": None}),
    "cluster without an incident": run(incident={"kubeconfig": "k"}, matrix={"agent_type": ["a"]}),
    "cluster beside a matrix of no incident": run(incident={"kubeconfig": "k"}, matrix={"incident": None}),
    "report without path": run(verify={"report": {}}),
    "report leads up": run(verify={"report": {"path": "../report.md"}}),
    "check without command": run(verify={"commands": [{}]}),
    "exit 256": run(verify={"commands": [{"run": "a", "exit": 256}]}),
    "labels": {**run(), "metadata": {"name": "a", "labels": {}}},
    "future version": {**run(), "apiVersion": "runner/v2"},
    "unknown kind": {**run(), "kind": "Job"},
    "no spec": {key: value for key, value in run().items() if key != "spec"},
    **{
        f"name {name!r}": document("Policy", name=name)
        for name in ("../x", "a/b", "", "a" * 64, "A", "-rf", "x-", "a b", "é")
    },
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD.keys())
def test_a_good_document_is_taken(data: dict[str, object], tmp_path: Path, published: dict[str, Validator]) -> None:
    documents, found = load_data(tmp_path, data)

    assert not found
    assert len(documents) == 1
    assert [(form, error.message) for form, v in published.items() for error in v.iter_errors(data)] == []


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_document_is_refused(data: dict[str, object], tmp_path: Path, published: dict[str, Validator]) -> None:
    documents, found = load_data(tmp_path, data)

    assert not documents
    assert found
    assert all(finding.exit_code == 2 and finding.at is not None for finding in found)
    assert not any("pydantic" in f.message or "Input should" in f.message or "http" in f.message for f in found)
    assert [form for form, validator in published.items() if validator.is_valid(data)] == []


def test_published_schemas_are_fresh(tmp_path: Path) -> None:
    """``python -m runner.manifest.schema`` writes them."""
    schema.write(tmp_path)

    published, wanted = (
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.json")}
        for folder in (SCHEMAS, tmp_path)
    )
    assert published == wanted


@pytest.mark.parametrize("path", sorted(SCHEMAS.rglob("*.json")), ids=lambda p: str(p.relative_to(SCHEMAS)))
def test_published_schemas_are_schemas(path: Path) -> None:
    content = json.loads(path.read_text())
    validator_for(content, default=None).check_schema(content)


def test_every_kind_has_defaults_and_every_field_a_description() -> None:
    def undescribed(block: object, path: str) -> list[str]:
        if not isinstance(block, dict):
            return []
        own = [
            f"{path}.{name}"
            for name, field in block.get("properties", {}).items()
            if isinstance(field, dict)
            and "description" not in field
            and "$ref" not in field
            and field != {"type": "null"}
            and field.keys() != {"properties"}  # further rules for fields of a block
        ]
        return own + [
            name
            for key in ("properties", "$defs")
            for n, b in block.get(key, {}).items()
            for name in undescribed(b, f"{path}.{n}")
        ]

    assert {key.partition(" ")[0] for key in defaults()} == kinds().keys()
    assert [n for name, content in schema.schemas().items() for n in undescribed(content, name)] == []
