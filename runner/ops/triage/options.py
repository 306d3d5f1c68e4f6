"""Read the options of ``runner triage``, and the variables of the triage document that stand in for them.

Defaults are those of ``TriageRequest``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import runner.agents
from runner.core import plugins
from runner.core.errors import (
    UsageError,
    nearest,
)
from runner.core.sanitize import excerpt
from runner.core.settings import Settings, parse_duration
from runner.ops.planning.facts import uses_images
from runner.ops.planning.files import read_file
from runner.ops.triage.incident_directory import (
    check_directory,
    check_log_file,
    incident_directory,
    new_directory,
    output_directory,
    read_known,
)
from runner.ops.triage.request import IMAGE, MAX_TEXT, NOWHERE, PROMPT, REPORT, SECONDS, SYSTEM, TriageRequest
from runner.ports.agent import ModelAgent
from runner.triage.alert import SERVICES, IncidentMetadata, incident_of, incident_of_words, misnamed
from runner.triage.strict_json import read_object

# Variables of the triage document, by the option that overrides them.
VARIABLES = {
    "workspace": ("WORKSPACE_DIR",),
    "agent": ("AGENT_CLI",),
    "model": ("LLM_MODEL",),
    "tools": ("AGENT_ALLOWED_TOOLS",),
    "system_prompt": ("SYSTEM_PROMPT_FILE",),
    "timeout": ("CONTAINER_TIMEOUT",),
    "memory": ("CONTAINER_MEMORY",),
    "cpus": ("CONTAINER_CPUS",),
    "image": ("AGENT_IMAGE",),
    "kubeconfig": ("KUBECONFIG_PATH", "KUBECONFIG"),
    "context": ("KUBERNETES_CONTEXT",),
    "output_dir": ("OUTPUT_DIR",),
    "output_file": ("OUTPUT_FILE",),
    "format": ("OUTPUT_FORMAT",),
    "max_turns": ("AGENT_MAX_TURNS",),
    "verbose": ("AGENT_VERBOSE",),
    "debug": ("DEBUG",),
}
_OF_CLUSTERS = frozenset({*VARIABLES["kubeconfig"], *VARIABLES["context"]})
_NO_NETWORK = "a workspace has none: its model and its cluster are reached through the runner"
REFUSED = {
    "CONTAINER_NETWORK": _NO_NETWORK,
    "CONTAINER_USER": "commands run as a user of the workspace's own, never as one of this host",
    "SKILLS_DIR": "the skill is the one that is installed with the runner",
}
_FLAGS = {  # that differ from their option's name
    "tools": "--allowed-tools", "system_prompt": "--system-prompt-file", "format": "--output-format",
    "toolchains": "--toolchain",
}  # fmt: skip
OF_INCIDENT = "cluster of the incident"
FORMS = {
    "text": "text",
    "json": "json",
    "jsonl": "jsonl",
    "stream-json": "jsonl",
}  # stream-json is what the CLIs call it
_NO = ("", "0", "false", "no", "off")


def read_request(given: Mapping[str, Any], settings: Settings, read: Callable[[], bytes], *, now: int) -> TriageRequest:
    """Check what options and environment ask for; ``now`` is in microseconds since the epoch. Writes nothing.

    ``read`` returns standard input. Raises ``UsageError``, ``NoIncident`` and ``ForbiddenIncident``.
    """
    env = settings.variables
    _check_refused(env)
    if given.get("files_only"):
        _check_no_cluster(given)
        env = {name: value for name, value in env.items() if name not in _OF_CLUSTERS}
    options, given_as = _merge(given, env)
    nowhere = bool(options.get("check")) and "workspace" not in options  # the rest can be checked without an incident
    _check_input(options)
    prompt = _prompt(options, read)
    incident = _new_incident(options, _metadata(env, options, now), read)
    if incident is not None and "workspace" not in options:
        options["workspace"] = new_directory(incident, now)
    directory = NOWHERE if nowhere else incident_directory(options.get("workspace"), settings)
    check_names("--namespace", {"namespace": options.get("namespace")})
    check_names("--alert" if "alert" in options else "--resource", incident or {})
    name = options.get("agent", TriageRequest(directory=NOWHERE).agent)
    agent = _agent(name)
    model = options.get("model") or (env.get(agent.model_variable) if agent.model_variable else None)
    triage = TriageRequest(
        directory=directory,
        agent=name,
        model=model or None,
        prompt=prompt,
        system=_system(options, env, given_as, read),
        tools=_tools(given, options, agent),
        seconds=_seconds(options.get("timeout", SECONDS), given_as),
        memory=options.get("memory"),
        cpus=options.get("cpus"),
        turns=_turns(options.get("max_turns"), given_as),
        context=options.get("context"),
        namespace=options.get("namespace"),
        baseline=env.get("DISABLE_TRIAGE_PRELOAD", "").lower() in _NO,
        debug=str(options.get("debug", "")).lower() not in _NO,
        incident_id=env.get("INCIDENT_ID") or None,
        output_dir=output_directory(options.get("output_dir"), directory, given_as, settings),
        output_file=_file_name(options.get("output_file"), given_as),
        verbose=str(options.get("verbose", "")).lower() not in _NO,
        form=_form(options.get("format", "text"), given_as),
        kubeconfig=None if given.get("files_only") else find_kubeconfig(options.get("kubeconfig"), settings),
        new_incident=incident,
        given_as=given_as,
        **_provider_and_image(given, options),
    )
    if triage.output_file is not None:
        check_log_file((triage.output_dir or directory / "output") / triage.output_file, given_as)
    if not nowhere:
        check_directory(triage, options["workspace"], required=not options.get("check"))
    return _with_incident_cluster(triage)


def _check_refused(env: Mapping[str, str]) -> None:
    for variable, why in REFUSED.items():
        if env.get(variable) and (variable, env[variable]) != ("CONTAINER_NETWORK", "none"):
            raise UsageError(f"`{variable}` is set, and {why}", hint=f"unset {variable}")


def _merge(given: Mapping[str, Any], env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that are set, by flag or by variable, and the flag or variable that each comes from."""
    options = {option: given[option] for option in given if given[option] not in (None, [], False)}
    given_as = {option: _FLAGS.get(option, f"--{option.replace('_', '-')}") for option in given}
    for option, names in VARIABLES.items():
        named = next((name for name in names if env.get(name)), None)
        if option not in options and named is not None:
            options[option], given_as[option] = env[named], named
    return options, given_as


def _metadata(env: Mapping[str, str], options: Mapping[str, Any], now: int) -> IncidentMetadata:
    return IncidentMetadata(
        env.get("INCIDENT_ID") or str(uuid.uuid4()),
        datetime.fromtimestamp(now / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options.get("context", ""),
    )


def _check_no_cluster(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` when a cluster is named as well."""
    for option in ("kubeconfig", "context"):
        if given.get(option) is not None:
            raise UsageError(f"`--files-only` contradicts `--{option}`, which names a cluster", hint="leave out one")


def _with_incident_cluster(triage: TriageRequest) -> TriageRequest:
    """Fill in cluster and namespace of the incident where no others are named. Raises ``UsageError``."""
    if triage.kubeconfig is None:
        if triage.context is not None:
            message = f"`{triage.given_as['context']}` is `{excerpt(triage.context)}`, and there is no kubeconfig"
            raise UsageError(message, hint="name one: --kubeconfig FILE, KUBECONFIG, or ~/.kube/config")
        return triage
    incident = read_known(triage.directory) if triage.new_incident is None else triage.new_incident
    cluster, namespace = (_text_of(incident.get(name)) for name in ("cluster", "namespace"))
    given_as = dict(triage.given_as)
    if triage.context is None and cluster is not None:
        given_as["context"] = OF_INCIDENT
    if triage.namespace is None and namespace is not None:
        given_as["namespace"] = "namespace of the incident"
    return replace(
        triage, context=triage.context or cluster, namespace=triage.namespace or namespace, given_as=given_as
    )


def _text_of(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _new_incident(
    options: Mapping[str, Any], metadata: IncidentMetadata, read: Callable[[], bytes]
) -> Mapping[str, Any] | None:
    alert, resource = options.get("alert"), options.get("resource")
    if alert is not None and resource is not None:
        raise UsageError("`--alert` and `--resource` both describe the incident", hint="leave out one of them")
    if alert is not None:
        return _incident_of_alert(alert, metadata, read)
    if resource is None:
        return None
    if "namespace" not in options:
        raise UsageError("`--resource` needs `--namespace`", hint="write --namespace NAMESPACE --resource KIND/NAME")
    try:
        return incident_of_words(resource, options["namespace"], metadata)
    except ValueError as error:
        raise UsageError(f"`--resource` is `{excerpt(resource)}`", hint=f"write {error}") from None


def check_names(option: str, incident: Mapping[str, Any]) -> None:
    if (wrong := misnamed(incident)) is not None:
        raise UsageError(
            f"{option}: {wrong}", hint="use small letters, digits and, between them, `-`; dots in names too"
        )


def _incident_of_alert(name: str, metadata: IncidentMetadata, read: Callable[[], bytes]) -> Mapping[str, Any]:
    raw = _read_text(name, read, "--alert")
    try:
        document = read_object(raw.encode(), "it")
        own = not {"alerts", "labels"} & {*document} and {"incidentId", "resource", "faultType"} & {*document}
        return document if own else incident_of(document, metadata)
    except ValueError as error:
        hint = f"give a firing message of {SERVICES}, an alert with labels, an incident.json, or --resource KIND/NAME"
        raise UsageError(f"{_source(name, '--alert')} is not an alert: {error}", hint=hint) from None


def _read_text(name: str, read: Callable[[], bytes], option: str) -> str:
    """Read the text of a file, or of standard input for ``-``."""
    what = _source(name, option)
    try:
        raw = read() if name == "-" else read_file(Path(name), MAX_TEXT)
        text = raw.decode()
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}", hint="write `-` to read standard input") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} is not UTF-8") from None
    if len(raw) > MAX_TEXT or "\0" in text:
        raise UsageError(f"{what} is not text, or longer than {MAX_TEXT >> 20} MiB")
    return text


def _source(name: str, option: str) -> str:
    return f"{option} from standard input" if name == "-" else f"`{option} {excerpt(name)}`"


def _agent(name: str) -> ModelAgent:
    found = plugins.load(runner.agents, name).agent if plugins.exists(runner.agents, name) else None
    if isinstance(found, ModelAgent):
        return found
    known = filter(_has_model, plugins.importable(runner.agents))
    raise UsageError(f"`{excerpt(name)}` is not an agent", hint=nearest(name, known))


def _has_model(name: str) -> bool:
    return isinstance(plugins.load(runner.agents, name).agent, ModelAgent)


def _prompt(options: Mapping[str, Any], read: Callable[[], bytes]) -> str:
    words: Sequence[str] = options.get("prompt") or ()
    if list(words) != ["-"]:
        text = " ".join(words)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError("the prompt is not UTF-8")
        return text or PROMPT
    return _read_text("-", read, "the prompt") or PROMPT


def _check_input(options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` when two options ask for standard input."""
    told = {"the prompt": options.get("prompt") == ["-"], "the alert": options.get("alert") == "-"}
    told["the system prompt"] = options.get("system_prompt") == "-"
    if len(both := [what for what, is_input in told.items() if is_input]) > 1:
        raise UsageError(f"{both[0]} and {both[1]} both ask for standard input")


def _system(
    options: Mapping[str, Any], env: Mapping[str, str], given_as: Mapping[str, str], read: Callable[[], bytes]
) -> str:
    file = options.get("system_prompt")
    if file is None:
        return env.get("SYSTEM_PROMPT") or SYSTEM
    return _read_text(str(file), read, given_as["system_prompt"])


def _tools(given: Mapping[str, Any], options: Mapping[str, Any], agent: ModelAgent) -> tuple[str, ...] | None:
    text = given.get("tools") if given.get("tools") is not None else options.get("tools")
    if text is None:
        return None
    names = [name.strip() for name in str(text).split(",") if name.strip()]
    return tuple(dict.fromkeys(agent.native_names.get(name, name) for name in names))


def _seconds(text: str, given_as: Mapping[str, str]) -> str:
    try:
        parse_duration(text)
    except ValueError as error:
        raise UsageError(
            f"`{given_as['timeout']}` is `{excerpt(text)}`", hint=f"write {error}, at most 999999999s"
        ) from None
    return text


def _turns(text: object, given_as: Mapping[str, str]) -> int | None:
    if text is None:
        return None
    if not str(text).isascii() or not str(text).isdigit() or int(str(text)) < 1:
        raise UsageError(f"`{given_as['max_turns']}` is `{excerpt(str(text))}`", hint="write a whole number above 0")
    return int(str(text))


def _file_name(text: str | None, given_as: Mapping[str, str]) -> str | None:
    if text is not None and (text in (".", "..") or "/" in text or not text.isprintable()):
        raise UsageError(
            f"`{given_as['output_file']}` is `{excerpt(text)}`",
            hint="give a file name, and its directory as --output-dir",
        )
    if text == REPORT:
        raise UsageError(f"`{given_as['output_file']}` is `{REPORT}`, the report's own name", hint="name another")
    return text


def _form(text: str, given_as: Mapping[str, str]) -> str:
    if text not in FORMS:
        raise UsageError(f"`{given_as['format']}` is `{excerpt(text)}`", hint=nearest(text, FORMS))
    return FORMS[text]


def find_kubeconfig(text: str | None, settings: Settings) -> str | None:
    """Return the paths that were named, else the file where kubectl looks, if it exists."""
    if text is not None:
        return ":".join(os.path.abspath(part) for part in text.split(":") if part)
    usual = os.path.join(settings.variables.get("HOME") or "/nonexistent", ".kube", "config")
    return usual if os.path.exists(usual) else None


def _provider_and_image(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that say where the agent works: in a container, or on this host."""
    provider, image = options.get("provider", "docker"), options.get("image")
    toolchains = tuple(os.path.realpath(folder) for folder in options.get("toolchains", ()))
    place = {
        "providers": (provider,),
        "toolchains": toolchains,
        "place_named": bool({"provider", "image"} & {*options}),
    }
    if uses_images(provider):
        return {**place, "image": image or IMAGE}
    if given.get("image"):
        raise UsageError(f"`{excerpt(provider)}` has no images", hint="leave out --image, or --provider docker")
    return {**place, "image": None}
