"""Write the pages of ``docs/reference`` that say what the program already says elsewhere.

Arguments come from the parsers of the verbs, fields from the schemas with the shipped defaults, codes from the rules
and the error classes, events from their types. A test compares what is committed with what this makes.
"""

from __future__ import annotations

import json
import re
import typing
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from inspect import cleandoc
from itertools import compress
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

import runner.cli.verbs
from runner.cli import main as entry
from runner.cli.parser import GROUPS, parser_of
from runner.cli.verbs.plan import DIFFERS
from runner.core import errors, plugins
from runner.core.settings import Settings
from runner.events import events
from runner.manifest.load import defaults, kinds
from runner.manifest.schema import file_of, schemas
from runner.report.rules import rules

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by docs/write_reference.py; `make docs` writes it anew. -->"

EXIT_CODES = {
    0: ("success", "Everything that was asked for happened."),
    1: ("a run failed", "The work or its verification failed. The report says which step, and why."),
    2: ("bad input", "A manifest, an argument or a setting is wrong. Nothing was started."),
    3: ("policy", "A policy or the isolation that it demands forbids it."),
    4: ("the platform", "A provider, the disk, git or the model's service did not do what it should."),
    5: ("in use", "Somebody else holds the workspace or the run."),
    6: ("not found", "There is no run, workspace, project or file of that name."),
    7: ("state damaged", "What is below `RUNNER_HOME` cannot be read."),
    DIFFERS: ("the plan differs", "`runner plan --against` found a difference."),
    entry.BUG: ("a bug", "The program is at fault; the message has the traceback."),
    124: ("deadline", "The run, or what was waited for, took longer than it may."),
    130: ("cancelled", "Ctrl-C, a termination signal, or `no` at a question."),
}

SETTINGS = {
    "RUNNER_HOME": "The directory of all state. [Files](files.md) shows what is in it.",
    "RUNNER_DATABASE_URL": (
        "The store: `sqlite:///PATH`, `postgresql://USER@HOST/DATABASE` ([shared store](../howto/shared-store.md)), or"
        " `memory:`, which is lost when the command ends."
    ),
    "RUNNER_DATABASE_PASSWORD_COMMAND": "Command that prints the password for PostgreSQL, asked for new connections.",
    "RUNNER_TELEMETRY": "`otlp` tells [OpenTelemetry](../howto/opentelemetry.md) of runs; `none` is the default.",
    "RUNNER_ARTIFACTS": "Where the files of runs are kept for [all hosts](../howto/artifacts.md): `file:///PATH`, `s3://BUCKET/PREFIX`.",
    "WORKSPACE_DEFAULT_CPU": "Processors of a workspace whose manifest names no `cpu`.",
    "WORKSPACE_DEFAULT_MEMORY": "Memory of a workspace whose manifest names no `memory`.",
    "WORKSPACE_DEFAULT_DISK": "Disk of a workspace whose manifest names no `disk`.",
    "WORKSPACE_MAX": "Workspaces at a time, those of runs and stopped ones counted.",
    "WARM_POOL_SIZE": "Slots of each warm pool, for agent types that leave `providers` to the server.",
    "RUNNER_MIRROR_LIMIT": "Disk for the mirrors of remote repositories together.",
    "RUNNER_DEPENDENCIES_LIMIT": "Disk for all dependencies together that commands have made.",
    "RUNNER_GIT_CREDENTIALS": "What https git servers get: `none`, `netrc`, `HOST=env:NAME` or `HOST=file:/PATH`.",
    "RUNNER_UNTRUSTED_POLICY": "File of a `Policy` that [`--untrusted`](../howto/forks.md) holds manifests to.",
    "WORKSPACE_PROVIDERS": "Providers to try in turn, for agent types that name none.",
    "WORKSPACE_TTL": "How long a workspace lives after its last use.",
    "WORKSPACE_MAX_AGE": "How long a workspace lives at most.",
    "RUN_RETENTION": "How long `runner gc` keeps a run after its end.",
    "RUNNER_SERVER": "URL of a [server](../howto/server.md) for `plan`, `apply` and `runs`, instead of this host.",
    "DOCKER_HOST": "Address of the docker daemon; without it, that of docker's current context.",
    "RUNNER_KUBERNETES_NAMESPACE": "Namespace for workspaces of provider [`kubernetes`](../howto/kubernetes.md).",
    "RUNNER_KUBERNETES_CONTEXT": "Context of the kubeconfig for the same; its current one by default.",
    "RUNNER_KUBERNETES_RUNTIME_CLASS": "RuntimeClass of the pods for the same, such as one of gVisor or Kata.",
    "RUNNER_KUBERNETES_STORAGE_CLASS": "StorageClass of a volume for each of them, of the size of its disk limit.",
    "RUNNER_KUBERNETES_CACHE_CLAIM": "PersistentVolumeClaim from which Pods take toolchains that were sent before.",
    "RUNNER_KUBERNETES_SANDBOXES": "What workspaces there are: plain `pods`, or Sandboxes of `agent-sandbox`.",
    "RUNNER_WORKER_IMAGE": "Image of the workers of [runs as Jobs](../howto/runs-as-jobs.md).",
    "RUNNER_WORKER_SECRET": "Secret that has the workers' environment: store, artifacts and keys.",
    "RUNNER_WORKER_PRIORITY_CLASS": "PriorityClass of the same Jobs.",
    "RUNNER_WORKER_KUBECONFIG": "Secret whose key `config` is the kubeconfig of incidents, for their Jobs.",
    "RUNNER_ANTHROPIC_URL": "Where the gateway reaches models of Anthropic.",
    "RUNNER_OPENAI_URL": "Where the gateway reaches models of OpenAI.",
    "RUNNER_GEMINI_URL": "Where the gateway reaches models of Google.",
}
OTHER_VARIABLES = (
    ("`RUNNER_TOKEN`", "Token for `RUNNER_SERVER`, from `runner token create` there."),
    ("`ANTHROPIC_API_KEY`", "Key for models of Anthropic; stays with the gateway."),
    ("`OPENAI_API_KEY`, `CODEX_API_KEY`", "Key for models of OpenAI; the first that is set counts."),
    ("`GEMINI_API_KEY`, `GOOGLE_API_KEY`", "Key for models of Google; the first that is set counts."),
    ("`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`", "The way to models and git servers, in either case."),
    ("`SSL_CERT_FILE`, `GIT_SSL_CAINFO`, `GIT_SSL_CAPATH`", "Certificates of authorities, for the same."),
    ("`SSH_AUTH_SOCK`, `GIT_SSH_COMMAND`", "The ssh agent and client for `git@` URLs."),
    ("`KUBECONFIG`", "The cluster of `runner triage`, unless `--kubeconfig` names one, and of provider `kubernetes`."),
    ("`AWS_...`", "Keys, profile and region for `RUNNER_ARTIFACTS` in S3, read by its library."),
    ("`OTEL_...`, `TRACEPARENT`", "The collector of `RUNNER_TELEMETRY=otlp`, and the trace that runs are part of."),
    ("`XDG_STATE_HOME`, `HOME`", "Where `RUNNER_HOME` is when it is not set."),
    ("`NO_COLOR`, `TERM`, `CI`", "Whether output has colours and progress is redrawn."),
    ("`GITHUB_*`, `CI_*`", "The job, for `--task-from`, summaries and annotations."),
)


def pages() -> dict[Path, str]:
    """The text of every page by its file."""
    found = {
        "cli.md": cli(),
        "settings.md": settings(),
        "exit-codes.md": exit_codes(),
        "errors.md": error_codes(),
        "events.md": event_types(),
        **{f"manifests/{kebab(kind)}.md": manifest(kind) for kind in kinds()},
    }
    return {FOLDER / name: text.rstrip() + "\n" for name, text in found.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns in which nothing stands."""
    lines = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    filled = [any(column) for column in zip(*lines, strict=True)]
    return "".join("| " + " | ".join(compress(line, filled)) + " |\n" for line in (head, ["---"] * len(head), *lines))


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *(part.strip("\n") for part in parts if part)]) + "\n"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


# --- verbs -----------------------------------------------------------------------------------------


def cli() -> str:
    whole = parser_of(plugins.names(runner.cli.verbs))
    [verbs] = (action for action in whole._actions if isinstance(action, _SubParsersAction))
    modules = {name: plugins.load(runner.cli.verbs, name) for name in verbs.choices}
    order = [
        [*first, *(name for name, module in modules.items() if group == module.GROUP and name not in first)]
        for group, first in GROUPS.items()
    ]
    summary = "".join(
        f"**{group}**\n\n"
        + table(["verb", "what it does"], ((f"[`{v}`](#runner-{v})", modules[v].SUMMARY) for v in names))
        + "\n"
        for group, names in zip(GROUPS, order, strict=True)
    )
    intro = "For everybody who types `runner`: every verb, its arguments, and an example of each.\n\n" + OPTIONS
    return page(
        "Commands",
        intro,
        summary,
        *(_verb(verbs.choices[name], modules[name].SUMMARY, modules[name].EXAMPLES, 2) for g in order for name in g),
    )


OPTIONS = """\
`runner -C DIR VERB ...` works as if it had been started in `DIR`. `runner --version` shows the version, and
`runner VERB --help` shows what is on this page. [Exit codes](exit-codes.md) are the same for all verbs."""


def _verb(parser: ArgumentParser, summary: str, examples: Sequence[str], depth: int) -> str:
    inner = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    own = [action for action in parser._actions if action not in inner and action.help != SUPPRESS]
    own = [action for action in own if action.dest != "help"]
    positional = [action for action in own if not action.option_strings]
    options = [action for action in own if action.option_strings]
    usage = [
        parser.prog,
        *(["[options]"] if options else []),
        *map(_usage, positional),
        *(["WHAT ..."] if inner else []),
    ]
    parts = [f"{'#' * depth} {parser.prog}", f"{summary[0].upper()}{summary[1:]}.", f"```text\n{' '.join(usage)}\n```"]
    if own:
        parts.append(table(["argument", "meaning"], [(_names(action), _meaning(action)) for action in own]).strip())
    shown = [example for example in examples if not inner and f"{example} ".startswith(f"{parser.prog} ")]
    if shown:
        parts.append("```sh\n" + "\n".join(shown) + "\n```")
    for group in inner:
        summaries = {choice.dest: choice.help or "" for choice in group._choices_actions}
        parts += [_verb(each, summaries[name], examples, depth + 1) for name, each in group.choices.items()]
    return "\n\n".join(parts)


def _usage(action: Action) -> str:
    name = _metavar(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]", "...": f"[-- {name} ...]"}.get(
        str(action.nargs), name
    )


def _metavar(action: Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _names(action: Action) -> str:
    if not action.option_strings:
        return code(_metavar(action))
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(code(f"{name}{value}") for name in action.option_strings)


def _meaning(action: Action) -> str:
    meaning = (action.help or "") % vars(action) if "%" in (action.help or "") else action.help or ""
    default = action.default if isinstance(action.default, str | int | float) else ""
    if default in ("", False, SUPPRESS) or "default" in meaning:
        return meaning
    return f"{meaning}{' ' if meaning else ''}(default: {code(default)})"


# --- manifests -------------------------------------------------------------------------------------

KINDS = {
    "AgentType": "For authors of manifests: an agent, and the workspace that it works in.",
    "IncidentRun": "For authors of manifests: one piece of work, and how its result is judged.",
    "McpServer": "For whoever gives agents tools: a server of the Model Context Protocol that runs for the agents of "
    "runs, and for clients of `runner serve`.",
    "NetworkSet": "For whoever runs the registries of a team: hosts under one name, for networks to allow together.",
    "Policy": "For whoever decides what agents may do: the ceilings of a run.",
    "Project": "For authors of manifests: what the runs of one repository have in common.",
}


def manifest(kind: str) -> str:
    schema = schemas()[file_of(kind)]
    blocks, body = schema["$defs"], schema["properties"]["spec"]
    example = (ROOT / "manifests" / "examples" / f"{kebab(kind)}.runner.yaml").read_text()
    lines = [
        f"{KINDS[kind]} Every field, its type and its default. An unknown field is an error.",
        f"A [JSON schema](../../../schemas/v1/{file_of(kind)}) for editors says the same; `runner schema` prints it.",
    ]
    parts = ["\n".join(lines), "## spec", _fields(body, blocks, "spec")]
    parts += [part for path, block in _inner(body, blocks, "spec") for part in _section(path, block, blocks)]
    named = {d.name: d.written for d in defaults().values() if d.kind == kind and d.name != "defaults"}
    if named:
        rows = [
            (code(f"agent: {name}"), ", ".join(code(f"{k}: {v}") for k, v in told.items()))
            for name, told in named.items()
        ]
        parts += ["## Defaults of an agent", table(["with", "default"], rows)]
    return page(kind, *parts, "## Example", f"```yaml\n{example.strip()}\n```")


def _section(path: str, block: Mapping[str, Any], blocks: Mapping[str, Any]) -> list[str]:
    return [f"## {path}", block.get("description", ""), _fields(block, blocks, path)]


def _fields(block: Mapping[str, Any], blocks: Mapping[str, Any], path: str) -> str:
    required = block.get("required", [])
    rows = []
    for name, field in block["properties"].items():
        inner = _reference(field)
        plain = inner is None or isinstance(field.get("default"), str)
        default = "**required**" if name in required else _default(field) if plain else ""
        meaning = field.get("description") or blocks[str(inner)]["description"]
        rows.append((code(name), _type(field, f"{path}.{name}"), default, " ".join(meaning.split())))
    return table(["field", "type", "default", "meaning"], rows)


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    return "" if value in (None, "") else code(value if isinstance(value, str) else json.dumps(value))


def _inner(block: Mapping[str, Any], blocks: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every block that a field of this one holds, alone, in a list or by name, at any depth."""
    for name, field in block["properties"].items():
        if (inner := _reference(field)) is not None:
            here = _place(field, f"{path}.{name}")
            yield here, blocks[inner]
            yield from _inner(blocks[inner], blocks, here)


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    several = field.get("anyOf") or field.get("oneOf")
    found = [one for choice in several for one in _choices(choice)] if several else [field]
    return [choice for choice in found if choice.get("type") != "null"]


def _reference(field: Mapping[str, Any]) -> str | None:
    """The block in a field's values."""
    for choice in _choices(field):
        for held in (choice, *_choices(choice.get("items", {})), choice.get("additionalProperties", {})):
            if isinstance(held, dict) and "$ref" in held:
                return str(held["$ref"]).rpartition("/")[2]
    return None


def _place(field: Mapping[str, Any], path: str) -> str:
    [choice, *_] = _choices(field)
    return f"{path}[]" if "items" in choice else f"{path}.NAME" if "additionalProperties" in choice else path


def _type(field: Mapping[str, Any], path: str) -> str:
    choices = _choices(field)
    if len(choices) > 1 and {choice.get("type") for choice in choices} == {"string", "array"}:
        return "command"  # text for a shell, or a list of words
    if len(choices) > 1:
        return " or ".join(_type(choice, path) for choice in choices)
    match choices[0]:
        case {"$ref": _}:
            return f"[block](#{anchor(path)})"
        case {"items": items}:
            inner = _type(items, f"{path}[]")
            return f"list of {inner.replace('[block]', '[blocks]') if '[' in inner else plural(inner)}"
        case {"additionalProperties": values, "type": "object"}:
            return f"name: {_type(values, f'{path}.NAME')}"
        case {"enum": values}:
            return ", ".join(map(code, values))
        case {"const": value}:
            return code("true" if value is True else value)
    return _scalar(choices[0])


def _scalar(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"type": ["string", "number"]}:
            return "processors"
        case {"type": ["string", "integer"]}:
            return "duration" if "exclusiveMinimum" in schema else "size"
        case {"type": "integer" | "number"}:
            return f"number{_bounds(schema)}"
        case {"type": "boolean"}:
            return "`true`, `false`"
    return "relative path" if schema.get("pattern", "").startswith("^(?!/)") else "text"


def plural(word: str) -> str:
    return word if word in ("text", "processors") or "`" in word else f"{word}s"


def _bounds(bounds: Mapping[str, Any]) -> str:
    least, most = bounds.get("minimum"), bounds.get("maximum")
    told = f" from {least:,.12g}" if least else ""
    return f"{told} to {most:,.12g}" if most is not None and most < (1 << 31) - 1 else told


# --- settings, exit codes, errors ------------------------------------------------------------------


def settings() -> str:
    found = Settings.from_env({"HOME": "/home/you"}).rows()
    assert {name for name, _, _ in found} == SETTINGS.keys(), "a setting is told nowhere, or is gone"
    rows = [(code(name), code(value) if value[0] != "(" else value[1:-1], SETTINGS[name]) for name, value, _ in found]
    return page(
        "Settings",
        "For whoever runs `runner` on a host: every environment variable that it reads, with its default.\n"
        "`runner doctor --settings` shows the value of each on this host, and where it comes from.",
        "A flag counts more than a manifest, a manifest more than a variable, a variable more than the default.\n"
        "Nothing of the environment reaches an agent unless a manifest says so.",
        table(["variable", "default", "meaning"], rows),
        "## Variables of others",
        table(["variable", "meaning"], OTHER_VARIABLES),
    )


def _error_classes(of: type[errors.RunnerError] = errors.RunnerError) -> Iterator[type[errors.RunnerError]]:
    for kind in of.__subclasses__():
        if "code" in vars(kind):
            yield kind
        yield from _error_classes(kind)


def exit_codes() -> str:
    ends = defaultdict(set)
    for cls in _error_classes():
        if cls.exit_code and cls is not errors.Rejected:  # which ends as the gravest of what it holds
            ends[cls.exit_code].add(cls.code.partition(".")[0])
    others = {0, 1, DIFFERS, entry.BUG, 124, 130}  # of runs, of `plan`, and of the command line
    assert ends.keys() | others == EXIT_CODES.keys(), "an exit code is told nowhere, or is gone"
    rows = [
        (f"{number}", word, meaning, ", ".join(f"[{room}](errors.md#{room})" for room in sorted(ends[number])))
        for number, (word, meaning) in sorted(EXIT_CODES.items())
    ]
    return page(
        "Exit codes",
        "For scripts and CI: what the status of a command says. Several findings end with the gravest of them.",
        table(["status", "word", "meaning", "errors"], rows),
    )


def error_codes() -> str:
    classes = {cls.code: cls for cls in _error_classes()}
    rooms = defaultdict(list)
    for rule in rules().values():
        rooms[rule.code.partition(".")[0]].append(rule)
    parts = [
        "For whoever reads an error: what each code means, an example that breaks the rule, and one that is right.\n"
        "`runner validate --explain CODE` prints the same. A code is never reused and never renamed.",
        " · ".join(f"[{room}](#{room})" for room in rooms),
    ]
    for room, found in rooms.items():
        rows = [(f"[`{rule.code}`](#{anchor(rule.code)})", rule.summary) for rule in found]
        parts += [f"## {room}", table(["code", "rule"], rows)]
        for rule in found:
            text = re.sub(r"^```console$", "```text", rule.text, flags=re.MULTILINE)
            parts += [f"### {rule.code}", text, _ending(classes[rule.code])]
    return page("Errors", *parts)


def _ending(cls: type[errors.RunnerError]) -> str:
    if cls is errors.Rejected:
        return "Exit code: the gravest of what was found."
    return f"Exit code: {cls.exit_code}." if cls.exit_code else "A warning."


# --- events ----------------------------------------------------------------------------------------


def event_types() -> str:
    types = events.Event.__subclasses__()
    used: dict[str, type] = {}
    parts = [
        "For programs that follow a run: every event, in the order in which they are declared.\n"
        "`events.jsonl` in a run's directory and `runner apply --output jsonl` have one JSON object a line.",
        "A line has `run`, `seq` (from 1), `at` (microseconds since 1970, UTC), `type`, and the fields of its type.\n"
        "A type or field is never reused for another meaning.",
    ]
    for cls in types:
        hints = typing.get_type_hints(cls)
        parts.append(f"## {cls.__name__}")
        parts.append(_docstring(cls))
        if fields(cls):
            parts.append(
                table(["field", "type", "default"], [_event_field(f, hints[f.name], used) for f in fields(cls)])
            )
    parts.append("## Values")
    for name, value in sorted(used.items()):
        parts += [f"### {name}", _docstring(value), _words(value) if issubclass(value, Enum) else _record(value, {})]
    return page("Events", *parts)


def _docstring(cls: type) -> str:
    own = cls.__dict__.get("__doc__") or ""
    text = "" if own.startswith(f"{cls.__name__}(") else cleandoc(own)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _event_field(field: Any, hint: Any, used: dict[str, type]) -> tuple[str, str, str]:
    default = "" if field.default is NODEFAULT else json.dumps(field.default, default=str)
    return code(field.name), _hint(hint, used), code(default)


def _hint(hint: Any, used: dict[str, type]) -> str:
    """A type as JSON has it; values of ours are collected in ``used``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        kinds_of = [arg for arg in inner if arg is not Ellipsis]
        return f"list of {_hint(kinds_of[0], used)}"
    if origin is dict:
        return f"name: {_hint(inner[1], used)}"
    if inner:
        return " or ".join(_hint(arg, used) for arg in inner if arg is not type(None))
    if isinstance(hint, type) and issubclass(hint, Struct | Enum):
        if hint.__name__ not in used:
            used[hint.__name__] = hint
            for each in fields(hint) if issubclass(hint, Struct) else ():
                _hint(typing.get_type_hints(hint)[each.name], used)
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {"str": "text", "int": "number", "float": "number", "bool": "`true`, `false`"}.get(hint.__name__, "text")


def _words(cls: type[Enum]) -> str:
    return f"One of {', '.join(code(each.value) for each in cls)}."


def _record(cls: type, used: dict[str, type]) -> str:
    hints = typing.get_type_hints(cls)
    return table(["field", "type", "default"], [_event_field(each, hints[each.name], used) for each in fields(cls)])


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
