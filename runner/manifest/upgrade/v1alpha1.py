"""``runner/v1alpha1``: an agent type in flat form.

The one kind is ``AgentType``. Its ``spec`` holds ``agent`` and ``script`` as in ``v1``, and what the agent
type asks of its workspace, each field either in ``spec`` itself or in its block ``workspace``::

    apiVersion: runner/v1alpha1
    kind: AgentType
    metadata: {name: NAME}
    spec:
      agent: script
      script: {path: FILE}
      workspace: {enabled: BOOLEAN}        # left out: false
      provider: NAME
      repo_source: {type: task_context | fixed | none, url: URL, branch: NAME}
      tools: [bash, read, write, edit, glob, grep, git]
      resource_limits: {cpu: CPUS, memory: SIZE, disk: SIZE}
      checkout_on_start: BOOLEAN
      base_image: IMAGE
      setup_commands: [TEXT, ...]          # a failed one is a warning
      allow_network: BOOLEAN               # left out: false

In ``v1`` all of it is in ``workspace``, ``allow_network: false`` is ``network: none``, and setup commands
that may fail say so: ``setup: {on_failure: warn}``. What ``v1`` cannot say yet is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from runner.core.errors import BadValue, NotConvertible, RunnerError, UnknownField, UnknownKind, nearest
from runner.core.sanitize import excerpt
from runner.manifest.text import Tree
from runner.manifest.upgrade._rewrite import Line, Rewrite, aliased

NEXT = "runner/v1"

_WORKSPACE = (
    "enabled",
    "provider",
    "repo_source",
    "tools",
    "resource_limits",
    "checkout_on_start",
    "base_image",
    "setup_commands",
    "allow_network",
)
_SPEC = ("agent", "script", "workspace", *_WORKSPACE)
_HOPELESS = 100  # fields that are not of this version; then the rest is not looked at
_MAY_FAIL = "setup: {on_failure: warn}"
_ABSENT = {"tools": "remove it: the agent then has every tool, inside its sandbox"}


def upgrade(tree: Tree, rewrite: Rewrite) -> tuple[object, list[RunnerError]]:
    """Rewrite one document as ``runner/v1``; ``None`` for data means that it has been left half-way."""
    assert isinstance(tree.data, dict)
    data: dict[str, Any] = tree.data
    spec = data.get("spec")
    if data.get("kind") != "AgentType":
        hint = "`runner/v1alpha1` has the kind AgentType only"
        message = f"{tree.written('kind')} is not a kind of `runner/v1alpha1`" if "kind" in data else "there is no kind"
        return None, [UnknownKind(message, at=tree.place("kind"), hint=hint)]
    if not isinstance(spec, dict) or not isinstance(spec.get("workspace", {}), dict):
        return data, []
    block: dict[str, Any] = spec.get("workspace", {})
    found = [*islice(_misplaced(tree, spec, block), _HOPELESS)]
    flat = {name: value for name, value in spec.items() if name in _WORKSPACE}
    workspace = {**block, **flat}
    prefix = {name: ("spec",) if name in flat else ("spec", "workspace") for name in workspace}
    found += _inexpressible(tree, workspace, prefix)
    if len(found) >= _HOPELESS or spec.keys() & block.keys() & set(_WORKSPACE):
        return None, found
    if workspace.pop("allow_network", None) is not None:
        parent = tree.mapping(*prefix["allow_network"])
        key, value = next(entry for entry in parent.value if entry[0].value == "allow_network")
        rewrite.edit(key, "network")
        rewrite.edit(value, "none")
        workspace["network"] = "none"
    beside = tree.mapping(*prefix.get("setup_commands", ()))
    spread = bool(flat) and beside.flow_style  # then its entries become lines, and this one is added to them
    if workspace.get("setup_commands"):
        workspace["setup"] = {"on_failure": "warn"}
        if not spread:
            rewrite.append(beside, "setup_commands", _MAY_FAIL)
    if flat and (unmovable := _gather(tree, rewrite, _MAY_FAIL if spread and "setup" in workspace else None)):
        return None, [*found, unmovable]
    rest = {name: value for name, value in spec.items() if name not in _WORKSPACE}
    return {**data, "spec": {**rest, "workspace": workspace} if workspace else rest}, found


def _misplaced(tree: Tree, spec: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[RunnerError]:
    for keys, written, known in ((("spec",), spec, _SPEC), (("spec", "workspace"), block, _WORKSPACE)):
        for name in written:
            if name not in known:
                message = f"`{excerpt(name)}` is not a field of `{'.'.join(keys)}` in `runner/v1alpha1`"
                yield UnknownField(message, at=tree.key_place(*keys, name), hint=nearest(name[:60], known))
    for name in spec.keys() & block.keys() & set(_WORKSPACE):
        yield BadValue(
            f"`{name}` is written in `spec` and in `spec.workspace`",
            at=tree.key_place("spec", name),
            hint="remove one of the two",
            also=(tree.key_place("spec", "workspace", name),),
        )


def _inexpressible(
    tree: Tree, workspace: Mapping[str, Any], prefix: Mapping[str, tuple[str, ...]]
) -> Iterator[RunnerError]:
    for name, hint in _ABSENT.items():
        if name in workspace:
            yield NotConvertible(
                f"`{name}` cannot be said in `{NEXT}` yet", at=tree.key_place(*prefix[name], name), hint=hint
            )
    if "allow_network" not in workspace or workspace["allow_network"] is False:
        return
    keys = (*prefix["allow_network"], "allow_network")
    if workspace["allow_network"] is True:
        hint = "write `allow_network: false`, and bring what is needed with the repository or `toolchains`"
        yield NotConvertible(
            f"a workspace with a network cannot be said in `{NEXT}` yet", at=tree.place(*keys), hint=hint
        )
    else:
        message = f"{tree.written(*keys)} is not true or false"
        yield BadValue(message, at=tree.place(*keys), hint="valid choices: false, true")


def _gather(tree: Tree, rewrite: Rewrite, more: str | None) -> RunnerError | None:
    """Move the fields of the workspace that stand in ``spec`` into its block, which is given one ``more`` if spread."""
    spec = tree.mapping("spec")
    outer = next(key for key, value in tree.mapping().value if value is spec)
    block = next((value for key, value in spec.value if key.value == "workspace"), None)
    in_lines = block is None or not block.flow_style or block.start_mark.line == block.end_mark.line
    if spec.flow_style or not in_lines:
        where = "spec" if spec.flow_style else "workspace"
        at = tree.key_place("spec") if spec.flow_style else tree.key_place("spec", "workspace")
        hint = "write each of its fields on a line of its own"
        return NotConvertible(f"fields cannot be moved while `{where}` is in braces", at=at, hint=hint)
    if aliased(spec):
        return NotConvertible("fields with aliases cannot be moved", at=tree.key_place("spec"), hint="write them out")
    column = spec.value[0][0].start_mark.column
    entries = rewrite.entries(spec, outer.end_mark.line)
    inner = 2 * column - outer.start_mark.column
    head: list[Line]
    if block is None:
        name = next(name for name in entries if name in _WORKSPACE)
        head = [Line(entries[name][0].number, "workspace:", added=True, indent=column)]
    elif block.flow_style:
        name = "workspace"
        key = next(key for key, _ in spec.value if key.value == name)
        own = next(line for line in entries[name] if line.number == block.start_mark.line and not line.added)
        spread = list(rewrite.spread(block, inner))
        spread += [Line(own.number, more, added=True, indent=inner)] if more else []
        own.edits = [(key.end_mark.column + 1, block.end_mark.column, "")]
        head = [*entries[name], *spread]
    else:
        name = "workspace"
        head = entries[name]
        inner = block.value[0][0].start_mark.column
    moved = [line for field in entries if field in _WORKSPACE for line in entries[field]]
    for line in moved:
        line.indent += inner - column
    ordered = []
    for field, lines in entries.items():
        if field == name:
            ordered += [*head, *moved]
        elif field not in _WORKSPACE:
            ordered += lines
    first = rewrite.lines.index(next(iter(entries.values()))[0])
    rewrite.lines[first : first + sum(map(len, entries.values()))] = ordered
    return None
