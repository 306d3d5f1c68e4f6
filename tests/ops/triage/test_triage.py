"""Flag over environment over default: each either works or is refused, and what comes out is a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner.cli.parser import parser_of
from runner.core.errors import ForbiddenIncident, NoIncident, Rejected, RunnerError, StoreFailed, UsageError
from runner.core.settings import Settings
from runner.manifest.load import load
from runner.ops.triage.incident_directory import new_incident_file
from runner.ops.triage.manifest import manifest_of, store_manifest
from runner.ops.triage.options import read_request
from runner.ops.triage.place import flags_of
from runner.ops.triage.plan import plan_triage
from runner.ops.triage.request import PROMPT, SYSTEM, TriageRequest
from runner.spec import template
from tests.support.folder_contents import put
from tests.support.needs import MEMORY

NOW = 1_795_230_000_000_000
DESCRIBED = ("--namespace", "payments", "--resource", "deploy/checkout")


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    folder = tmp_path / "INC-1"
    put(folder / "incident.json", '{"incidentId": "i-1", "namespace": "payments"}')
    return folder


def asked(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", where: str | None = ""
) -> TriageRequest:
    home = folder.parent / "home"
    settings = Settings.from_env({"RUNNER_HOME": str(home / "state"), "HOME": str(home), **(env or {})})
    words = ["triage", *(["-w", where or str(folder)] if where is not None else []), *arguments]
    return read_request(vars(parser_of(["triage"]).parse_args(words)), settings, lambda: stdin, now=NOW)


def documents(triage: TriageRequest, tmp_path: Path) -> dict[str, Any]:
    """What the manifest says, as it is read."""
    path = tmp_path / "made.runner.yaml"
    path.write_text(manifest_of(triage))
    found, errors = load(path)
    assert errors == []
    return {document.kind: document.written for document in found}


@pytest.mark.scenario("TRI-03")
@pytest.mark.scenario("TRI-16")
def test_without_flags_it_is_claude_for_ten_minutes_in_the_image(incident: Path, tmp_path: Path) -> None:
    made = documents(asked(incident), tmp_path)

    agent, run = made["AgentType"], made["IncidentRun"]
    assert (agent["agent"], agent.get("model"), agent["skills"]) == ("claude", None, ["k8s-troubleshooter"])
    assert agent["workspace"]["providers"] == ["docker"]
    assert agent["workspace"]["base_image"] == {"ref": "k8s-triage-agent", "pull": "never"}
    assert agent["workspace"]["resource_limits"] == {"memory": "2g"}
    assert (run["timeout"], run["incident"], run["prompt"]) == ("600", {"directory": str(incident)}, PROMPT)
    assert run["context"] == {"preload": ["incident"]}
    assert len(run["verify"]["report"]["sections"]) == 7


LIMITS = ("AgentType", "workspace", "resource_limits")
FLAGS: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...], object]] = {
    # option: flag, variables, where in the manifest, value
    "agent": (("-a", "goose"), {"AGENT_CLI": "goose"}, ("AgentType", "agent"), "goose"),
    "model": (("-m", "opus"), {"LLM_MODEL": "opus"}, ("AgentType", "model"), "opus"),
    "claude's model": ((), {"CLAUDE_MODEL": "opus"}, ("AgentType", "model"), "opus"),
    "tools": (("-t", "Read,Grep"), {"AGENT_ALLOWED_TOOLS": "Read,Grep"}, ("AgentType", "cli_tools"), ["Read", "Grep"]),
    "timeout": (("--timeout", "90"), {"CONTAINER_TIMEOUT": "90"}, ("IncidentRun", "timeout"), "90"),
    "agent's timeout": (("--timeout", "1h"), {}, ("AgentType", "timeouts", "agent"), "1h"),
    "memory": (("--memory", "1g"), {"CONTAINER_MEMORY": "1g"}, (*LIMITS, "memory"), "1g"),
    "cpus": (("--cpus", "1.5"), {"CONTAINER_CPUS": "1.5"}, (*LIMITS, "cpu"), "1.5"),
    "image": (("-i", "a/b:1"), {"AGENT_IMAGE": "a/b:1"}, ("AgentType", "workspace", "base_image"), "a/b:1"),
    "turns": (("--max-turns", "9"), {"AGENT_MAX_TURNS": "9"}, ("AgentType", "budget", "turns"), 9),
    "debug": (("-d",), {"DEBUG": "true"}, ("IncidentRun", "debug"), True),
    "system prompt": ((), {"SYSTEM_PROMPT": "Be brief."}, ("AgentType", "prompt", "system"), "Be brief."),
    "incident's id": ((), {"INCIDENT_ID": "i-1"}, ("AgentType", "env", "INCIDENT_ID"), "i-1"),
    "prompt": (("why", "does it restart"), {}, ("IncidentRun", "prompt"), "why does it restart"),
    "context": (
        ("--kubeconfig", "/k", "--context", "eu"),
        {"KUBECONFIG_PATH": "/k", "KUBERNETES_CONTEXT": "eu"},
        ("IncidentRun", "incident"),
        {"kubeconfig": "/k", "access": "read", "context": "eu"},
    ),
    "kubectl's variable": ((), {"KUBECONFIG": "/k:/l"}, ("IncidentRun", "incident", "kubeconfig"), "/k:/l"),
    "no baseline": (
        (),
        {"KUBECONFIG": "/k", "DISABLE_TRIAGE_PRELOAD": "true"},
        ("IncidentRun", "context", "preload"),
        ["incident", "permissions"],
    ),
}


@pytest.mark.parametrize("what", FLAGS)
def test_a_flag_and_its_variable_say_the_same_in_the_manifest(incident: Path, tmp_path: Path, what: str) -> None:
    flags, env, keys, value = FLAGS[what]
    for triage in [*([asked(incident, *flags)] if flags else []), *([asked(incident, env=env)] if env else [])]:
        found: Any = documents(triage, tmp_path)
        for key in keys:
            found = found[key]
        if isinstance(value, dict):
            found = {name: found[name] for name in value}
        assert found == value


@pytest.mark.scenario("TRI-19")
@pytest.mark.parametrize(
    ("flags", "env", "model"),
    [
        (("-m", "opus"), {"LLM_MODEL": "haiku", "CLAUDE_MODEL": "haiku"}, "opus"),
        ((), {"LLM_MODEL": "haiku", "CLAUDE_MODEL": "opus"}, "haiku"),
        (("-a", "codex"), {"CLAUDE_MODEL": "opus"}, None),
    ],
    ids=["flag first", "then the variable", "Claude's is for Claude"],
)
def test_a_flag_goes_before_the_environment(
    incident: Path, flags: tuple[str, ...], env: dict[str, str], model: str | None
) -> None:
    assert asked(incident, *flags, env=env).model == model


@pytest.mark.parametrize(
    "text", ["{{ run.id }}", "{% for x in y %}", 'a {{ "b\\n" }}\r\n{# c #}', "50% {{", "😀 {{ \\u0041"]
)
def test_a_prompt_is_no_template(incident: Path, tmp_path: Path, text: str) -> None:
    made = documents(asked(incident, text, env={"SYSTEM_PROMPT": text}), tmp_path)

    for written in (made["IncidentRun"]["prompt"], made["AgentType"]["prompt"]["system"]):
        assert template.check(written) is None
        assert template.render(written, {}) == text


def test_the_prompt_and_the_system_prompt_can_be_files(incident: Path, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    triage = asked(incident, "-s", str(tmp_path / "system.txt"), "-", stdin=b"why?\n", env={"SYSTEM_PROMPT": "other"})

    assert (triage.system, triage.prompt) == ("Be brief.\n", "why?\n")


@pytest.mark.scenario("TRI-34")
def test_the_system_prompt_knows_no_domain() -> None:
    assert not [word for word in ("kube", "pod", "cluster", "container", "node") if word in SYSTEM.lower()]
    assert len(SYSTEM) < 1_500


def test_a_host_with_the_tools_needs_no_image(incident: Path, tmp_path: Path) -> None:
    triage = asked(incident, "--provider", "local", "--toolchain", str(tmp_path), env={"AGENT_IMAGE": "x"})
    workspace = documents(triage, tmp_path)["AgentType"]["workspace"]

    assert workspace["providers"] == ["local"]
    assert workspace["toolchains"] == [str(tmp_path.resolve())]
    assert "base_image" not in workspace
    assert workspace["resource_limits"] == {"memory": "2g", "enforcement": "best_effort"}


def test_gemini_has_the_tools_of_the_document_under_its_own_names(incident: Path) -> None:
    triage = asked(incident, "-a", "gemini", "-t", "Read, Bash,Skill,web_fetch,Read")

    assert triage.tools == ("read_file", "run_shell_command", "activate_skill", "web_fetch")


def test_the_usual_kubeconfig_is_taken_when_it_is_there(incident: Path) -> None:
    usual = incident.parent / "home" / ".kube" / "config"
    assert asked(incident).kubeconfig is None
    usual.parent.mkdir(parents=True)
    usual.write_text("")

    assert asked(incident).kubeconfig == str(usual)


REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "network": (("--network", "host"), {}, "has no network"),
    "network by variable": ((), {"CONTAINER_NETWORK": "host"}, "has none"),
    "user": (("--user", "0"), {}, "a user of the workspace's own"),
    "user by variable": ((), {"CONTAINER_USER": "0"}, "a user of the workspace's own"),
    "skills": ((), {"SKILLS_DIR": "/x"}, "installed with the runner"),
    "agent": (("-a", "cluade"), {}, "did you mean `claude`?"),
    "script": (("-a", "script"), {}, "is not an agent"),
    "timeout": (("--timeout", "soon"), {}, "90s, 5m"),
    "turns": (("--max-turns", "0"), {}, "above 0"),
    "form": (("-o", "xml"), {}, "valid choices"),
    "file's name": (("--output-file", "../x"), {}, "give a file name"),
    "resource alone": (("--resource", "deploy/x"), {}, "needs `--namespace`"),
    "resource of another form": (("--namespace", "x", "--resource", "x"), {}, "KIND/NAME"),
    "two descriptions": ((*DESCRIBED, "--alert", "-"), {}, "both describe"),
    "file's name that is the report's": (("--output-file", "investigation.md"), {}, "the report's own name"),
    "alert and prompt": (("--alert", "-", "-"), {}, "the prompt and the alert both ask"),
    "alert and system prompt": (("--alert", "-", "-s", "-"), {}, "the alert and the system prompt both ask"),
    "no alert": (("--alert", "/nonexistent"), {}, "cannot be read"),
    "an alert of nothing": (("--alert", "-"), {}, "--alert from standard input is not an alert: no label"),
    "namespace": (("--namespace", "P_ X"), {}, "--namespace: `P_ X` is not a Kubernetes namespace"),
    "resource that is an option": (
        ("--namespace", "x", "--resource", "pod/--help"),
        {},
        "`--help` is not a Kubernetes name",
    ),
    "image without images": (("--provider", "local", "-i", "x"), {}, "has no images"),
    "system prompt": (("-s", "/nonexistent"), {}, "cannot be read"),
    "context alone": (("--context", "eu"), {}, "`--context` is `eu`, and there is no kubeconfig"),
    "context by variable": ((), {"KUBERNETES_CONTEXT": "eu"}, "`KUBERNETES_CONTEXT` is `eu`, and there is no"),
    "timeout by variable": ((), {"CONTAINER_TIMEOUT": "abc"}, "`CONTAINER_TIMEOUT"),
    "turns by variable": ((), {"AGENT_MAX_TURNS": "0"}, "`AGENT_MAX_TURNS"),
    "form by variable": ((), {"OUTPUT_FORMAT": "xml"}, "`OUTPUT_FORMAT"),
    "file's name by variable": ((), {"OUTPUT_FILE": "a/b"}, "`OUTPUT_FILE"),
    "system prompt by variable": ((), {"SYSTEM_PROMPT_FILE": "/nonexistent"}, "`SYSTEM_PROMPT_FILE"),
    "to print and to check": (("--print", "--check"), {}, "exclude each other"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_work_is_refused_with_the_reason(incident: Path, what: str) -> None:
    flags, env, words = REFUSALS[what]
    with pytest.raises(UsageError) as caught:
        asked(incident, *flags, env=env, stdin=b'{"alerts": [{}]}')

    assert words in f"{caught.value.message} {caught.value.hint}"
    assert flags or "--" not in caught.value.message, "what a variable says is called by its name"


def test_a_key_on_the_command_line_is_refused_and_not_repeated(incident: Path) -> None:
    with pytest.raises(UsageError) as caught:
        asked(incident, "--anthropic-key", "sk-ant-verysecret")

    said = f"{caught.value.message} {caught.value.hint}"
    assert "ANTHROPIC_API_KEY" in said
    assert "verysecret" not in said


@pytest.mark.scenario("TRI-04")
def test_a_missing_directory_is_asked_for_with_the_line_that_makes_one(incident: Path) -> None:
    with pytest.raises(NoIncident) as caught:
        asked(incident, where=None)

    assert "an incident workspace directory is required" in caught.value.message
    assert "runner triage --namespace" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("/", ForbiddenIncident, "the root of this host"),
        ("{0}/root", ForbiddenIncident, "the root of this host"),
        ("{0}/home/state", ForbiddenIncident, "the runner's own state"),
        ("{0}/home/state/runs", ForbiddenIncident, "the runner's own state"),
        ("{0}/home", ForbiddenIncident, "holds the runner's own state"),
        ("/etc", ForbiddenIncident, "of this host's own system"),
        ("/usr/share/INC-1", ForbiddenIncident, "of this host's own system"),
        ("/var", ForbiddenIncident, "of this host's own system"),
        ("/proc", ForbiddenIncident, "of this host's own system"),
        ("/home/somebody", ForbiddenIncident, "a home directory"),
        ("{0}/file", NoIncident, "not a directory"),
        ("{0}/missing", NoIncident, "does not exist"),
        ("{0}/fifo", NoIncident, "not a directory"),
        ("{0}/circle", NoIncident, "does not exist"),
    ],
)
def test_a_directory_that_is_no_incidents_is_refused(
    incident: Path, where: str, error: type[RunnerError], words: str
) -> None:
    (incident.parent / "root").symlink_to("/")
    (incident.parent / "circle").symlink_to("circle")
    (incident.parent / "home" / "state" / "runs").mkdir(parents=True)
    (incident.parent / "file").touch()
    os.mkfifo(incident.parent / "fifo")

    with pytest.raises(error, match=words) as caught:
        asked(incident, where=where.format(incident.parent))

    assert caught.value.exit_code == (3 if error is ForbiddenIncident else 2)
    assert caught.value.hint


def test_a_new_directory_is_written_from_words_once(incident: Path) -> None:
    new = incident.parent / "INC-2"
    triage = asked(new, *DESCRIBED, "--context", "eu", "--kubeconfig", "/k")

    assert not new.exists()
    with new_incident_file(triage) as wrote:
        assert wrote
    made = json.loads((new / "incident.json").read_text())
    assert (made["cluster"], made["createdAt"]) == ("eu", "2026-11-21T03:00:00Z")
    assert made["resource"]["kind"] == "Deployment"
    with new_incident_file(asked(new, *DESCRIBED)) as wrote:  # the same line again
        assert not wrote
    assert sorted(os.listdir(new)) == ["incident.json", "output"]
    assert json.loads((new / "incident.json").read_text()) == made


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "there already"])
def test_what_does_not_begin_leaves_no_incident_in_the_way_of_the_corrected_line(incident: Path, is_new: bool) -> None:
    folder = incident.parent / "INC-2"
    if not is_new:
        folder.mkdir()
    with pytest.raises(UsageError), new_incident_file(asked(folder, *DESCRIBED)):
        raise UsageError("the cluster does not answer")

    assert folder.exists() is not is_new
    assert is_new or os.listdir(folder) == []


def test_what_a_run_has_left_keeps_its_incident(incident: Path) -> None:
    folder = incident.parent / "INC-2"
    with suppress(UsageError), new_incident_file(asked(folder, *DESCRIBED)):
        (folder / "output" / "triage.log").touch()
        raise UsageError("lost")

    assert (folder / "incident.json").exists()


@pytest.mark.parametrize("way", ["dangling link", "file in the way of output"])
def test_an_incident_that_can_not_be_written_is_an_error_and_leaves_nothing(incident: Path, way: str) -> None:
    folder = incident.parent / "INC-2"
    folder.mkdir()
    in_the_way = folder / ("incident.json" if way == "dangling link" else "output")
    in_the_way.symlink_to("nowhere/at/all")

    with (
        pytest.raises(NoIncident, match=r"cannot be written: |can write"),
        new_incident_file(asked(folder, *DESCRIBED)),
    ):
        pass

    assert list(folder.iterdir()) == [in_the_way]


CLUSTERS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "of the incident": ('{"cluster": "eu", "namespace": "payments"}', (), {"context": "eu", "namespace": "payments"}),
    "flags first": (
        '{"cluster": "eu", "namespace": "payments"}',
        ("--context", "us", "--namespace", "web"),
        {"context": "us", "namespace": "web"},
    ),
    "no text": ('{"cluster": {"name": "eu"}, "namespace": null}', (), {}),
    "no object": ("[]", (), {}),
}


@pytest.mark.parametrize("what", CLUSTERS)
def test_the_cluster_of_an_incident_is_the_one_that_is_read(incident: Path, tmp_path: Path, what: str) -> None:
    text, flags, cluster = CLUSTERS[what]
    (incident / "incident.json").write_text(text)
    made = documents(asked(incident, "--kubeconfig", "/k", *flags), tmp_path)["IncidentRun"]["incident"]

    assert made == {"directory": str(incident), "kubeconfig": "/k", "access": "read", **cluster}


def test_the_cluster_and_namespace_of_an_alert_are_those_that_are_read(tmp_path: Path) -> None:
    alert = {"labels": {"alertname": "X", "pod": "p", "namespace": "n", "cluster": "eu"}}
    triage = asked(tmp_path / "new", "--alert", "-", "--kubeconfig", "/k", stdin=json.dumps(alert).encode())

    assert (triage.context, triage.namespace) == ("eu", "n")


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    (tmp_path / "cli" / "bin").mkdir(parents=True)
    (tmp_path / "cli" / "bin" / "claude").touch(mode=0o755)
    return tmp_path / "cli"


KUBECONFIG = """\
contexts: [{name: staging, context: {cluster: s}}]
clusters: [{name: s, cluster: {server: "https://10.0.0.1"}}]
current-context: staging
"""
UNFIT: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "memory": (("--memory", "5"), {}, "--memory: `5` is not a size"),
    "tool": (("-t", "Read,Foo"), {}, "--allowed-tools: `Foo` is not a tool"),
    "processors": (("--cpus", "x"), {}, "--cpus: `x` is not"),
    "variable": ((), {"CONTAINER_MEMORY": "5"}, "CONTAINER_MEMORY: `5` is not a size"),
    "model": (("-m", "''"), {}, "--model: `''` is not the name"),
    "kubeconfig": ((), {"KUBECONFIG": "/nonexistent"}, "unset KUBECONFIG, or name another"),
    "other cluster": (
        ("--kubeconfig", "{kubeconfig}"),
        {},
        "cluster of the incident: `{kubeconfig}` has no context `eu`; choose one with --context NAME",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_what_a_plan_refuses_is_said_of_the_option(incident: Path, tool: Path, what: str) -> None:
    flags, env, words = UNFIT[what]
    (incident / "incident.json").write_text('{"cluster": "eu"}')
    path = incident.parent / "kubeconfig"
    put(path, KUBECONFIG, 0o600)
    flags = tuple(flag.format(kubeconfig=path) for flag in flags)
    triage = asked(incident, "--provider", "local", "--toolchain", str(tool), *flags, env=env)
    settings = Settings.from_env({"RUNNER_HOME": str(incident.parent / "state")})

    with pytest.raises(Rejected) as caught:
        await plan_triage(triage, store_manifest(manifest_of(triage), settings), settings)

    said = [f"{finding.message}; {finding.hint}" for finding in caught.value.findings if finding.severity == "error"]
    assert [words.format(kubeconfig=path) in one for one in said] == [True], said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-t", "Read"), "--allowed-tools: with Read alone the agent cannot write `investigation.md`"),
        (("-t", "Read", "-a", "gemini"), "--allowed-tools: with read_file alone the agent cannot write"),
        (("-t", "Read,Bash"), None),
        (("-t", "Read,Bash", "-a", "gemini"), None),
        ((), None),
    ],
)
async def test_tools_that_write_no_report_are_told_of(
    incident: Path, tool: Path, flags: tuple[str, ...], said: str | None
) -> None:
    (tool / "bin" / "gemini").touch(mode=0o755)
    triage = asked(incident, "--provider", "local", "--toolchain", str(tool), *flags)
    settings = Settings.from_env({"RUNNER_HOME": str(incident.parent / "state")})

    planned = await plan_triage(triage, store_manifest(manifest_of(triage), settings), settings)

    found = [warning.message for warning in planned.warnings if warning.code == "agent.no-writer"]
    assert found == [] if said is None else found[0].startswith(said)


@MEMORY.mark
async def test_another_run_of_the_same_has_the_flags_of_place_limits_and_cluster(incident: Path, tool: Path) -> None:
    kubeconfig = incident.parent / "my kubeconfig"
    put(kubeconfig, KUBECONFIG, 0o600)
    place = ("--provider", "local", "--toolchain", str(tool), "--memory", "1g", "--cpus", "0.5")
    env = {"CONTAINER_TIMEOUT": "1m", "KUBECONFIG": str(kubeconfig), "KUBERNETES_CONTEXT": "staging"}
    settings = Settings.from_env({"RUNNER_HOME": str(incident.parent / "state"), "HOME": "/nonexistent"})

    found = []
    for triage in (asked(incident, *place, env=env), asked(incident, "--provider", "local", "--toolchain", str(tool))):
        planned = await plan_triage(triage, store_manifest(manifest_of(triage), settings), settings)
        found.append(flags_of(planned.plan.runs[0], settings))

    first, plain = found
    assert first == (
        *("--provider", "local", "--toolchain", str(tool), "--memory", "1024M", "--cpus", "0.5", "--timeout", "60"),
        *("--kubeconfig", str(kubeconfig), "--context", "staging", "--namespace", "payments"),
    )
    assert plain == ("--provider", "local", "--toolchain", str(tool))
    assert flags_of(None, settings) == ()


def test_a_state_that_can_not_be_written_is_no_bug(incident: Path) -> None:
    (incident.parent / "file").touch()
    settings = Settings.from_env({"RUNNER_HOME": str(incident.parent / "file")})

    with pytest.raises(StoreFailed, match="cannot be written: Not a directory"):
        store_manifest("text", settings)


def test_the_system_prompt_can_be_standard_input(incident: Path) -> None:
    """It was empty then, and the agent knew nothing of its report."""
    assert asked(incident, "-s", "-", stdin=b"Be brief.").system == "Be brief."


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_output_that_cannot_take_a_report_is_refused_before_anything_is_made(incident: Path, kind: str) -> None:
    """It was found when the agent was to start, and `--check` knew nothing of it."""
    output = incident / "output"
    output.touch() if kind == "file" else output.symlink_to(incident.parent)

    with pytest.raises(NoIncident, match="output` is not a directory that you can write to"):
        asked(incident, "--check")


def test_a_directory_of_another_incident_is_not_overwritten(incident: Path) -> None:
    with pytest.raises(NoIncident, match="of another incident"):
        asked(incident, *DESCRIBED)
    with pytest.raises(NoIncident, match="INCIDENT_ID"):
        asked(incident, env={"INCIDENT_ID": "other"})


def test_an_alert_and_an_incident_json_can_both_be_given(incident: Path, tmp_path: Path) -> None:
    alert = {"alerts": [{"status": "firing", "labels": {"alertname": "X", "pod": "p", "namespace": "n"}}]}
    of_alert = asked(tmp_path / "new", "--alert", "-", stdin=json.dumps(alert).encode())
    (tmp_path / "i.json").write_text('{"incidentId": "7", "resource": "pod/x"}')
    plain = asked(tmp_path / "new", "--alert", str(tmp_path / "i.json"))

    assert of_alert.new_incident["resource"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "n"}
    assert plain.new_incident == {"incidentId": "7", "resource": "pod/x"}


def test_equal_manifests_are_one_file_of_its_owner_only(incident: Path) -> None:
    settings = Settings.from_env({"RUNNER_HOME": str(incident.parent / "state")})
    first, second = (store_manifest(manifest_of(asked(incident)), settings) for _ in range(2))

    assert first == second
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_home_is_no_incidents_directory(incident: Path, tmp_path: Path) -> None:
    with pytest.raises(ForbiddenIncident, match="a home directory"):
        asked(incident, env={"HOME": str(incident)})


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (DESCRIBED, "checkout"),
        (("--namespace", "n", "--resource", "node/ip-10.0.0.1"), "ip-10-0-0-1"),
        (("--alert", "-"), "something-is-wrong"),
    ],
    ids=["a resource", "odd characters", "an alert without a resource"],
)
def test_a_new_incident_without_a_directory_gets_one_that_is_called_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    alert = b'{"labels": {"alertname": "Something is wrong!"}}'

    first = asked(tmp_path / "none", *flags, stdin=alert, where=None)
    with new_incident_file(first) as wrote:
        second = asked(tmp_path / "none", *flags, stdin=alert, where=None)

    assert wrote
    assert first.directory == tmp_path / "triage" / f"{name}-20261121-030000"
    assert (first.directory / "incident.json").exists()
    assert second.directory == Path(f"{first.directory}-2")


def test_a_directory_that_nobody_named_is_taken_away_with_a_line_that_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    triage = asked(tmp_path / "none", *DESCRIBED, where=None)

    with pytest.raises(UsageError), new_incident_file(triage):
        raise UsageError("no")

    assert os.listdir(tmp_path) == []
