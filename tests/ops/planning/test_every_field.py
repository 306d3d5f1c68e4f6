"""No field is decoration: changing any one of them changes the plan, or is an error that says why."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from runner.core.codec import plain
from runner.core.errors import Rejected
from runner.core.settings import Settings
from runner.manifest.load import kinds
from runner.manifest.network import STEPS
from runner.ops.mcp.manifests import HostedSpec, read_servers
from runner.ops.planning.make_plan import make_plan
from tests.support.situations import Project, git

Path_ = tuple[str | int, ...]
Specs = dict[str, dict[str, Any]]


def options(annotation: Any) -> Iterator[Any]:
    """A type, and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from options(part)


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field that holds a value, by its path; list items have no position in it."""
    for name, field in ((field.alias or name, field) for name, field in model.model_fields.items()):
        inner = [o for o in options(field.annotation) if isinstance(o, type) and issubclass(o, BaseModel)]
        if inner:
            yield from leaves(inner[0], (*prefix, name))
        else:
            yield (*prefix, name)


def repeats(path: tuple[str, ...]) -> bool:
    """Whether a field is one of a credential's that another place has as well: there its name alone is changed."""
    return "inject" in path and path[:3] != ("workspace", "network", "inject") and path[-1] != "name"


SERVER = "McpServer"  # which plans know nothing of
FIELDS = [
    (kind, ".".join(path))
    for kind, spec in kinds().items()
    if kind != SERVER
    for path in leaves(spec)
    if not repeats(path)
]

INSTALL = {"run": "npm ci", "from": ["README"], "keep": ["node_modules"]}
BASE: Specs = {
    "AgentType": {
        "agent": "script",
        "script": {"path": "agent.sh"},
        "workspace": {
            "enabled": True,
            "providers": ["local"],
            "repo_source": {"type": "local", "path": "repo"},
            "dependencies": [INSTALL],
            "setup_commands": ["true"],
            "setup": {"on_failure": "fail"},
            "network": {"post_hook": {"allow": ["one"]}},
        },
        "post_hooks": ["true"],
    },
    "Policy": {"max_file_size": "5M"},
    "NetworkSet": {"allow": ["a.example"]},
    "Project": {"workspace_isolation": True},
    "IncidentRun": {
        "agent_type": "one",
        "policy": "one",
        "project": "one",
        "outputs": {"x": {"file": "x.md"}},
        "snapshot": {},
        "verify": {"files": {"required": ["README"]}, "commands": [{"run": "true"}], "report": {"path": "r.md"}},
    },
}

READING = {
    **BASE,
    "IncidentRun": {
        **BASE["IncidentRun"],
        "incident": {"directory": "incident", "kubeconfig": "kube.yaml"},
        "context": {"preload": ["incident"]},
    },
}
CLAUDE = {
    **BASE,
    "AgentType": {**BASE["AgentType"], "agent": "claude", "script": None, "mcp_servers": ["one"]},
    "McpServer": {"command": ["docs"]},
}
REMOTE = {"name": "one", "url": "https://a.test/mcp"}

INJECTED: dict[str, dict[str, Any]] = {
    "name": {"bearer": True, "name": "C"},
    "host": {"bearer": True, "host": "a.test:80"},
    "bearer": {"bearer": True},
    "basic": {"basic": "me"},
    "header": {"header": "X-Key"},
    "allow": {"bearer": True, "allow": ["GET /a"]},
    "from.env": {"bearer": True},
    "from.file": {"bearer": True, "from": {"file": "b"}},
    "from.command": {"bearer": True, "from": {"command": ["b"]}},
    "from.keyring.service": {"bearer": True, "from": {"keyring": {"service": "b", "user": "c"}}},
    "from.keyring.user": {"bearer": True, "from": {"keyring": {"service": "b", "user": "c"}}},
}
SOURCES: dict[str, dict[str, Any]] = {
    "env": {"env": "B"},
    "file": {"file": "b"},
    "command": {"command": ["b"]},
    "keyring.service": {"keyring": {"service": "b", "user": "c"}},
    "keyring.user": {"keyring": {"service": "b", "user": "c"}},
}
HOOK = {"from": "github", "secret": {"env": "B"}, "events": ["push"]}
TOLD = {"to": "json", "url": "https://a.example"}
PRIVATE_HOST = {"host": "pypi.org", "private": True}

MCP: dict[str, list[Any]] = {
    "name": [],
    "url": [REMOTE],
    "command": [{"name": "one", "command": ["docs"]}],
    "private": [{**REMOTE, "private": True}],
    "tools": [{"name": "one", "tools": ["search"]}],
    "max_calls": [{"name": "one", "max_calls": 7}],
    **{
        f"inject.{field}": [{**REMOTE, "inject": {"name": "A", "from": {"env": "B"}, **more}}]
        for field, more in INJECTED.items()
        if field not in ("host", "allow")
    },
}

# These say something of agents that work with a model only.
OF_MODELS = {
    ("AgentType", "model"),
    ("AgentType", "budget.tokens"),
    ("AgentType", "budget.cost_usd"),
    ("AgentType", "budget.turns"),
    ("AgentType", "credentials"),
    ("AgentType", "cli_tools"),
    *(("AgentType", f"mcp_servers.{field}") for field in MCP),
    ("IncidentRun", "matrix.model"),
    ("IncidentRun", "debug"),
}

# field: (where to put it in the base, a value that differs from what holds there)
CHANGES: dict[tuple[str, str], tuple[Path_, Any]] = {
    ("AgentType", "agent"): (("agent",), "claude"),
    ("AgentType", "script.path"): (("script", "path"), "other.sh"),
    ("AgentType", "script.files.path"): (("script",), {"files": [{"path": "a", "content": ""}]}),
    ("AgentType", "script.files.content"): (("script",), {"files": [{"path": "a", "content": "b"}]}),
    ("AgentType", "script.files.executable"): (
        ("script",),
        {"files": [{"path": "a", "content": "b", "executable": True}]},
    ),
    ("AgentType", "model"): (("model",), "opus"),
    ("AgentType", "budget.tokens"): (("budget",), {"tokens": 7}),
    ("AgentType", "budget.cost_usd"): (("budget",), {"cost_usd": 7}),
    ("AgentType", "budget.turns"): (("budget",), {"turns": 7}),
    ("AgentType", "credentials"): (("credentials",), "env"),
    ("AgentType", "cli_tools"): (("cli_tools",), ["Read"]),
    **{("AgentType", f"mcp_servers.{field}"): (("mcp_servers",), value) for field, value in MCP.items()},
    ("Policy", "mcp_servers"): (("mcp_servers",), []),
    ("IncidentRun", "matrix.model"): (("matrix",), {"model": ["opus"]}),
    ("AgentType", "prompt.system"): (("prompt",), {"system": "changed"}),
    ("AgentType", "prompt.user"): (("prompt",), {"user": "changed"}),
    ("AgentType", "skills"): (("skills",), ["k8s-troubleshooter"]),
    ("AgentType", "policy"): (("policy",), "two"),
    ("AgentType", "env"): (("env",), {"A": "b"}),
    **{
        ("AgentType", f"secrets.{field}"): (("secrets",), [{"name": "A", "from": {"env": "B"}, **more}])
        for field, more in (
            ("name", {"steps": ["agent"]}),
            ("steps", {"steps": ["setup"]}),
            ("as", {"steps": ["agent"], "as": "file"}),
        )
    },
    **{
        ("AgentType", f"secrets.from.{field}"): (("secrets",), [{"name": "A", "from": source, "steps": ["agent"]}])
        for field, source in (
            ("env", {"env": "B"}),
            ("file", {"file": "b"}),
            ("command", {"command": ["b"]}),
            ("keyring.service", {"keyring": {"service": "b", "user": "c"}}),
            ("keyring.user", {"keyring": {"service": "b", "user": "c"}}),
        )
    },
    **{
        ("AgentType", f"timeouts.{step}"): (("timeouts",), {step: "7s"})
        for step in (
            "provision",
            "clone",
            "dependencies",
            "setup",
            "preload",
            "agent",
            "post_hook",
            "scan",
            "snapshot",
            "verify",
        )
    },
    ("AgentType", "stop_budget"): (("stop_budget",), "7s"),
    ("AgentType", "post_hooks"): (("post_hooks",), ["false"]),
    ("AgentType", "workspace.enabled"): (("workspace",), {"enabled": False}),
    ("AgentType", "workspace.providers"): (("workspace", "providers"), ["process"]),
    ("AgentType", "workspace.isolation"): (("workspace", "isolation"), "namespaces"),
    ("AgentType", "workspace.repo_source.type"): (("workspace", "repo_source"), {"type": "none"}),
    ("AgentType", "workspace.repo_source.url"): (
        ("workspace", "repo_source"),
        {"type": "fixed", "url": "https://git.example.org/a"},
    ),
    ("AgentType", "workspace.repo_source.path"): (("workspace", "repo_source", "path"), "repo2"),
    ("AgentType", "workspace.repo_source.branch"): (("workspace", "repo_source", "branch"), "other"),
    ("AgentType", "workspace.repo_source.depth"): (("workspace", "repo_source", "depth"), 1),
    ("AgentType", "workspace.repo_source.include_dirty"): (("workspace", "repo_source", "include_dirty"), True),
    ("AgentType", "workspace.repo_source.submodules"): (("workspace", "repo_source", "submodules"), True),
    ("AgentType", "workspace.repo_source.lfs"): (("workspace", "repo_source", "lfs"), True),
    ("AgentType", "workspace.checkout_on_start"): (("workspace", "checkout_on_start"), False),
    ("AgentType", "workspace.resource_limits.cpu"): (("workspace", "resource_limits"), {"cpu": "500m"}),
    ("AgentType", "workspace.resource_limits.memory"): (("workspace", "resource_limits"), {"memory": "1G"}),
    ("AgentType", "workspace.resource_limits.disk"): (("workspace", "resource_limits"), {"disk": "1G"}),
    ("AgentType", "workspace.resource_limits.pids"): (("workspace", "resource_limits"), {"pids": 7}),
    ("AgentType", "workspace.setup_commands"): (("workspace", "setup_commands"), ["false"]),
    ("AgentType", "workspace.setup.timeout"): (("workspace", "setup", "timeout"), "7s"),
    ("AgentType", "workspace.setup.on_failure"): (("workspace", "setup", "on_failure"), "warn"),
    ("AgentType", "workspace.protected_paths"): (("workspace", "protected_paths"), ["README"]),
    ("AgentType", "workspace.toolchains"): (("workspace", "toolchains"), ["/usr"]),
    **{
        ("AgentType", f"workspace.dependencies.{field}"): (("workspace", "dependencies"), [{**INSTALL, **changed}])
        for field, changed in (
            ("run", {"run": "npm i"}),
            ("from", {"from": ["README", ".gitignore"]}),
            ("keep", {"keep": ["node_modules", "~/.npm"]}),
        )
    },
    ("AgentType", "workspace.base_image.ref"): (("workspace", "base_image"), "team/agent:3"),
    ("AgentType", "workspace.base_image.pull"): (
        ("workspace", "base_image"),
        {"ref": "team/agent:3", "pull": "always"},
    ),
    ("AgentType", "workspace.warm_pool.size"): (("workspace", "warm_pool"), {"size": 3}),
    ("Policy", "allowed_paths"): (("allowed_paths",), ["src/**"]),
    ("Policy", "forbidden_patterns"): (("forbidden_patterns",), ["**/*.tfstate"]),
    ("Policy", "max_file_size"): (("max_file_size",), "1M"),
    ("Policy", "providers"): (("providers",), ["process"]),
    ("Policy", "secrets"): (("secrets",), []),
    ("Policy", "min_isolation"): (("min_isolation",), "namespaces"),
    ("Project", "root"): (("root",), "incident"),
    ("Project", "workspace_isolation"): (("workspace_isolation",), False),
    ("Project", "protected_paths"): (("protected_paths",), ["README"]),
    ("Project", "policy"): (("policy",), "two"),
    ("Project", "requires_runner"): (("requires_runner",), ">=99"),
    ("Project", "queue"): (("queue",), "team-a"),
    ("IncidentRun", "project"): (("project",), "two"),
    ("IncidentRun", "matrix.max_parallel"): (("matrix",), {"incident": ["incident"], "max_parallel": 1}),
    ("IncidentRun", "matrix.incident"): (("matrix",), {"incident": ["incident"]}),
    ("IncidentRun", "matrix.agent_type"): (("matrix",), {"agent_type": ["two"]}),
    ("IncidentRun", "needs"): (("needs",), ["two"]),
    ("IncidentRun", "outputs.file"): (("outputs", "x"), {"file": "y.md"}),
    ("IncidentRun", "agent_type"): (("agent_type",), "two"),
    ("IncidentRun", "policy"): (("policy",), "two"),
    ("IncidentRun", "prompt"): (("prompt",), "changed"),
    ("IncidentRun", "task.repository_url"): (("task",), {"repository_url": "https://git.example.org/a"}),
    ("IncidentRun", "task.branch"): (("task",), {"branch": "b"}),
    ("IncidentRun", "task.base_branch"): (("task",), {"base_branch": "b"}),
    ("IncidentRun", "task.pull_request_number"): (("task",), {"pull_request_number": 7}),
    ("IncidentRun", "task.commit"): (("task",), {"commit": "a" * 40}),
    ("IncidentRun", "incident.directory"): (("incident",), {"directory": "incident"}),
    **{
        ("IncidentRun", f"incident.{field}"): (("incident", field), value)
        for field, value in (
            ("kubeconfig", "other.yaml"),
            ("context", "other"),
            ("namespace", "shop"),
            ("access", "write"),
        )
    },
    ("IncidentRun", "context.preload"): (("context",), {"preload": []}),
    ("IncidentRun", "verify.files.required"): (("verify", "files", "required"), ["other"]),
    ("IncidentRun", "verify.files.forbidden"): (("verify", "files", "forbidden"), ["other"]),
    ("IncidentRun", "verify.report.path"): (("verify", "report", "path"), "other.md"),
    ("IncidentRun", "verify.report.min_bytes"): (("verify", "report", "min_bytes"), 7),
    ("IncidentRun", "verify.report.sections"): (("verify", "report", "sections"), ["Summary"]),
    ("IncidentRun", "verify.commands.run"): (("verify", "commands"), [{"run": "false"}]),
    ("IncidentRun", "verify.commands.timeout"): (("verify", "commands"), [{"run": "true", "timeout": "7s"}]),
    ("IncidentRun", "verify.commands.exit"): (("verify", "commands"), [{"run": "true", "exit": 7}]),
    ("IncidentRun", "verify.setup"): (("verify", "setup"), ["true"]),
    ("IncidentRun", "post_hooks"): (("post_hooks",), ["false"]),
    ("IncidentRun", "snapshot.message"): (("snapshot",), {"message": "changed"}),
    ("IncidentRun", "snapshot.branch"): (("snapshot",), {"message": "x", "branch": "changed"}),
    ("IncidentRun", "snapshot.allow_empty"): (("snapshot",), {"allow_empty": True}),
    ("IncidentRun", "debug"): (("debug",), True),
    **{
        ("IncidentRun", f"webhook.{field}"): (("webhook",), HOOK | more)
        for field, more in {
            "from": {"from": "gitlab"},
            "events": {"events": ["push", "pull_request.opened"]},
            "labels": {"labels": {"a": "b"}},
            "max_parallel": {"max_parallel": 2},
            "per_hour": {"per_hour": 2},
            **{f"secret.{name}": {"secret": source} for name, source in SOURCES.items()},
        }.items()
    },
    **{
        ("IncidentRun", f"notify.{field}"): (("notify",), [TOLD | more])
        for field, more in {
            "to": {"to": "slack"},
            "url": {"url": "https://b.example"},
            "states": {"states": ["running"]},
            "private": {"private": True},
            **{f"secret.{name}": {"secret": source} for name, source in SOURCES.items()},
            **{f"url_from.{name}": {"url": None, "url_from": source} for name, source in SOURCES.items()},
        }.items()
    },
    **{
        (kind, ".".join((*path, *step, "allow", field))): ((*path, *step), {"allow": [PRIVATE_HOST]})
        for kind, path in (("AgentType", ("workspace", "network")), ("Policy", ("network",)))
        for step in ((), *((name,) for name in STEPS))
        for field in PRIVATE_HOST
    },
    **{
        (kind, ".".join((*path, *step, "inject", field))): (
            (*path, *step),
            {"allow": ["a.test"], "inject": [{"name": "A", "host": "a.test", "from": {"env": "B"}, **more}]},
        )
        for kind, path in (("AgentType", ("workspace", "network")), ("Policy", ("network",)))
        for step in ((), *((name,) for name in STEPS))
        for field, more in INJECTED.items()
    },
    **{("NetworkSet", f"allow.{field}"): (("allow",), [PRIVATE_HOST]) for field in PRIVATE_HOST},
    ("IncidentRun", "timeout"): (("timeout",), "7s"),
}

# of a server: what differs from the base
SERVER_CHANGES: dict[str, dict[str, Any]] = {
    "command": {"command": ["other"]},
    "image": {"image": "node:22"},
    "provider": {"provider": "docker"},
    "toolchains": {"toolchains": ["/opt/node"]},
    "stdio_bridge.timeout": {"stdio_bridge": {"timeout": "7s"}},
    "stdio_bridge.sampling": {"stdio_bridge": {"sampling": "pass"}},
    "stdio_bridge.elicitation": {"stdio_bridge": {"elicitation": "pass"}},
    "env": {"env": {"A": "b"}},
    "secrets.name": {"secrets": [{"name": "B", "from": {"env": "B"}}]},
    "secrets.as": {"secrets": [{"name": "A", "from": {"env": "B"}, "as": "file"}]},
    **{f"secrets.from.{name}": {"secrets": [{"name": "A", "from": source}]} for name, source in SOURCES.items()},
    **{f"network.allow.{field}": {"network": {"allow": [PRIVATE_HOST]}} for field in PRIVATE_HOST},
    **{
        f"network.inject.{field}": {
            "network": {"allow": ["a.test"], "inject": [{"name": "A", "host": "a.test", "from": {"env": "B"}, **more}]}
        }
        for field, more in INJECTED.items()
    },
    "tools": {"tools": ["search"]},
    "restart": {"restart": "always"},
    "resource_limits.cpu": {"resource_limits": {"cpu": 1}},
    "resource_limits.memory": {"resource_limits": {"memory": "1G"}},
    "resource_limits.disk": {"resource_limits": {"disk": "1G"}},
    "resource_limits.pids": {"resource_limits": {"pids": 77}},
    "health.interval": {"health": {"interval": "7s"}},
    "health.timeout": {"health": {"timeout": "7s"}},
}

ORIGINS = ("origin", "origins")

# These decide about providers that cannot enforce something or have images, or about what a run does not say itself.
ELSEWHERE = {
    ("AgentType", "timeouts.pull"),
    ("Project", "agent_type"),
    ("AgentType", "workspace.resource_limits.enforcement"),
}


@pytest.fixture
def stage(project: Project, repository: Path) -> Project:
    git(repository, "branch", "other")
    git(repository, "commit", "--allow-empty", "-qm", "second")
    git(project.folder, "clone", "-q", "repo", "repo2")
    git(project.folder / "repo2", "commit", "--allow-empty", "-qm", "third")
    (repository / ".git/info/exclude").write_text("node_modules\n")
    (repository / "node_modules").mkdir()
    (project.folder / "agent.sh").write_text("true\n")
    (project.folder / "other.sh").write_text("false\n")
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "incident.json").write_text("{}")
    for file, server in (("kube.yaml", "https://one.example"), ("other.yaml", "https://two.example")):
        contexts = [{"name": name, "context": {"cluster": "c"}} for name in ("current", "other")]
        clusters = [{"name": "c", "cluster": {"server": server}}]
        config = {"current-context": "current", "contexts": contexts, "clusters": clusters}
        (project.folder / file).write_text(json.dumps(config))
    return project


async def outcomes(stage: Project, sets: Mapping[str, Specs]) -> dict[str, str]:
    """Of each set of documents the plan of its runs as text, without the lines that asked for it, or what is wrong.

    They are planned together, each set in a file of its own and with names of its own; each kind has a second document
    to refer to. What is rejected is left out, and the others are planned again.
    """
    others = {
        "AgentType": {**BASE["AgentType"], "prompt": {"system": "two"}},
        "NetworkSet": {"allow": ["b.example"]},
        "Policy": {"max_file_size": "2M"},
        "Project": {"workspace_isolation": True, "protected_paths": ["src/"]},
        "IncidentRun": {"agent_type": "two"},
    }
    (stage.folder / "two.runner.yaml").write_text(documents("two", others))
    files = {f"set-{number:03}": key for number, key in enumerate(sets)}
    for name, key in files.items():
        (stage.folder / f"{name}.runner.yaml").write_text(documents(name, sets[key]))
    settings = Settings.from_env({"RUNNER_HOME": str(stage.home), "PATH": "/usr/bin:/bin"})
    found: dict[str, str] = {}
    while len(found) < len(files):
        try:
            planned = await make_plan(stage.folder, settings)
        except Rejected as rejected:
            errors = [(Path(error.at.file), error.message) for error in rejected.findings if error.severity == "error"]
            for file, message in errors:
                key = files[file.name.partition(".")[0]]
                found[key] = "; ".join([found.get(key, "rejected: "), message])
                file.unlink(missing_ok=True)
        else:
            for name, key in files.items():
                runs = [plain(run) for run in planned.plan.runs if run.name.startswith(name)]
                found.setdefault(key, without_origins(runs).replace(name, "one"))
    return found


def documents(name: str, specs: Specs) -> str:
    bodies = [
        {"apiVersion": "runner/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, spec in specs.items()
    ]
    return "\n---\n".join(map(json.dumps, bodies)).replace('"one"', f'"{name}"')


def without_origins(runs: list[object]) -> str:
    told = json.dumps(runs)
    return str(json.loads(told, object_hook=lambda each: {k: v for k, v in each.items() if k not in ORIGINS}))


def changed(path: Path_, value: Any, spec: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(spec)
    at: Any = result
    for key in path[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
    at[path[-1]] = value
    return result


@pytest.mark.scenario("BEY-01", only="each field changes the plan")
async def test_changing_any_field_changes_the_plan_or_is_an_error(stage: Project) -> None:
    unlisted = [f"{kind}.{field}" for kind, field in FIELDS if (kind, field) not in {*CHANGES, *ELSEWHERE}]
    assert unlisted == [], "a new field needs a line here that shows its effect"
    bases = {"script": BASE, "claude": CLAUDE, "reading": READING}
    sets, based_on = {**bases, "again": BASE}, {}
    for kind, field in FIELDS:
        if (kind, field) in ELSEWHERE:
            continue
        path, value = CHANGES[kind, field]
        reads = path[:-1] == ("incident",) or "preload" in field
        base = "claude" if (kind, field) in OF_MODELS or "mcp" in field else "reading" if reads else "script"
        based_on[f"{kind}.{field}"] = base
        sets[f"{kind}.{field}"] = {**bases[base], kind: changed(path, value, bases[base][kind])}
    found = await outcomes(stage, sets)

    assert not [base for base in bases if found[base].startswith("rejected")]
    assert found["again"] == found["script"], "names alone make a difference"
    assert [field for field, base in based_on.items() if found[field] == found[base]] == []


@pytest.mark.scenario("BEY-01", only="each field changes the plan")
async def test_what_a_script_cannot_do_is_refused(stage: Project) -> None:
    sets = {f"{kind}.{field}": {**BASE, kind: changed(*CHANGES[kind, field], BASE[kind])} for kind, field in OF_MODELS}
    found = await outcomes(stage, sets)

    assert [field for field, outcome in found.items() if not outcome.startswith("rejected")] == []


@pytest.mark.scenario("BEY-01", only="each field changes the plan")
async def test_the_agent_type_of_a_project_is_that_of_runs_that_name_none(stage: Project) -> None:
    run = {key: value for key, value in BASE["IncidentRun"].items() if key != "agent_type"}
    sets = {
        name: {**BASE, "IncidentRun": run, "Project": {**BASE["Project"], "agent_type": name}}
        for name in ("one", "two")
    }
    plans = await outcomes(stage, sets)

    assert plans["one"] != plans["two"]
    assert not any(plan.startswith("rejected") for plan in plans.values())


@pytest.mark.scenario("BEY-01", only="refused where it cannot be enforced")
async def test_what_a_provider_can_not_enforce_is_an_error_that_names_it(stage: Project) -> None:
    workspace = {**BASE["AgentType"]["workspace"], "providers": ["process"], "dependencies": []}
    del workspace["network"]
    told = {
        "network none": {"network": "none"},
        "protected_paths README": {"protected_paths": ["README"]},
        "disk 1G": {"resource_limits": {"disk": "1G"}},
        "dependencies node_modules": {"dependencies": ["node_modules"]},
        "commands that make dependencies node_modules": {"dependencies": [INSTALL]},
        "base image team/agent:3": {"base_image": "team/agent:3"},
        "lenient": {"resource_limits": {"disk": "1G", "enforcement": "best_effort"}},
    }
    sets = {
        what: {**BASE, "AgentType": {**BASE["AgentType"], "workspace": {**workspace, **extra}}}
        for what, extra in told.items()
    }
    found = await outcomes(stage, sets)

    assert "disk 1G: not enforced by process" in found.pop("lenient")
    assert [what for what, said in found.items() if f"`process` cannot enforce {what}" not in said] == []


async def test_every_field_of_a_server_changes_what_is_hosted(project: Project) -> None:
    async def hosted(**spec: Any) -> HostedSpec:
        document = {"apiVersion": "runner/v1", "kind": SERVER, "metadata": {"name": "docs"}}
        file = project.folder / "docs.runner.yaml"
        file.write_text(json.dumps({**document, "spec": {"command": ["docs"], **spec}}))
        return replace((await read_servers(file, project.settings()))["docs"], digest="")

    assert {*SERVER_CHANGES} == {".".join(path) for path in leaves(kinds()[SERVER])}
    base = await hosted()
    found = {field: await hosted(**change) for field, change in SERVER_CHANGES.items()}

    assert [field for field, spec in found.items() if spec == base] == []
