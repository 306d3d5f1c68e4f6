"""Compare two plan documents field by field, with the manifest line of each change.

Both are compared in JSON form, where a field has its path. Runs are compared by name, steps by id, files by name and
content. Not compared: origins, since a comment moves them, and derived values such as the digest of all
policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from runner.core.codec import plain
from runner.plan.model import RunPlan

Sign = Literal["+", "-", "~"]
Plain = Mapping[str, Any]  # a JSON object of a plan document

_DERIVED = frozenset(
    {"origin", "origins", "name", "id", "steps", "what", "critical_path", "worst_seconds", "host_network", "cost_usd"}
)


class Change(Struct, frozen=True, kw_only=True):
    """``where`` is ``run``, ``run.field``, ``run.step`` or ``run.step.field``; a side that is not there is ``None``.

    ``texts`` are both contents of a file, as far as they are known.
    """

    sign: Sign
    where: str
    old: object
    new: object
    origin: str
    texts: tuple[str | None, str | None] = (None, None)

    @property
    def is_of_file(self) -> bool:
        return _is_file(self.old) or _is_file(self.new)


def diff(old: Iterable[RunPlan], new: Iterable[RunPlan]) -> list[Change]:
    """The changes that lead from some runs to others; in the order of the new ones, removals last."""
    return changes_of(map(plain, old), map(plain, new))


def changes_of(old: Iterable[Plain], new: Iterable[Plain]) -> list[Change]:
    """The changes between runs in JSON form."""
    changes: list[Change] = []
    before = {run["name"]: run for run in old}
    after = {run["name"]: run for run in new}
    for name, run in after.items():
        if name in before:
            changes += _run(name, before[name], run)
        else:
            changes.append(Change(sign="+", where=name, old=None, new=None, origin=run["origin"]))
    changes += (
        Change(sign="-", where=name, old=None, new=None, origin=run["origin"])
        for name, run in before.items()
        if name not in after
    )
    return changes


def differences(old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """Path, old and new value of each leaf that differs. Absent is ``None``; a path starts with its first key."""
    waiting: list[tuple[str, object, object]] = [("", old, new)]
    while waiting:
        path, left, right = waiting.pop()
        if left == right or _same_file(left, right):
            continue
        left, right = _by_name(left, right), _by_name(right, left)
        if _is_file(left) or _is_file(right):
            yield path, left, right
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            keys = [*right, *(key for key in left if key not in right)]
            inner = [(f"{path}.{key}" if path else str(key), left.get(key), right.get(key)) for key in keys]
        elif isinstance(left, list) and isinstance(right, list) and not path.endswith("]"):
            inner = list(_items(path, left, right))
        else:  # a list in a list, such as a command, is shown whole
            yield path, left, right
            continue
        waiting += reversed(inner)


def _is_file(value: object) -> bool:
    """Tell whether a value is a ``ContextFile``."""
    return isinstance(value, dict) and {"path", "sha256", "size"} <= value.keys()


def _same_file(old: object, new: object) -> bool:
    """Tell whether both are a file with the same content, wherever it lies."""
    if not (isinstance(old, dict) and isinstance(new, dict) and _is_file(old) and _is_file(new)):
        return False
    return bool(old["sha256"] == new["sha256"])


def _by_name(value: object, other: object) -> object:
    """A list of named files as what is compared by name: of those of this host, and of those that a manifest holds."""
    items = value if isinstance(value, list) else ()
    if value == [] and _by_name(other, None) is not other:
        return {}
    if items and all(isinstance(item, list) and len(item) == 2 and _is_file(item[1]) for item in items):
        return {str(name): file for name, file in items}
    if items and all(isinstance(item, list) and [*map(type, item)] == [str, str, bool] for item in items):
        return {name: {"content": content, "executable": executable} for name, content, executable in items}
    return value


def _items(path: str, old: list[object], new: list[object]) -> Iterator[tuple[str, object, object]]:
    """Items by position, equal ones at both ends left out, so that one more in front is not a change of all."""
    short = min(len(old), len(new))
    head = next((i for i in range(short) if old[i] != new[i]), short)
    tail = next((i for i in range(short - head) if old[-1 - i] != new[-1 - i]), short - head)
    lefts, rights = old[head : len(old) - tail], new[head : len(new) - tail]
    for i in range(max(len(lefts), len(rights))):
        left = lefts[i] if i < len(lefts) else None
        right = rights[i] if i < len(rights) else None
        yield f"{path}[{head + i}]", left, right


def _run(name: str, old: Plain, new: Plain) -> Iterator[Change]:
    seen: set[tuple[str, str]] = set()  # the same value in several steps is one change

    def fields(where: str, left: Plain, right: Plain, origin: str) -> Iterator[Change]:
        for path, was, becomes in differences(_compared(left), _compared(right)):
            key = path.removeprefix("body."), repr((was, becomes))
            if key not in seen and not path.endswith((".origin", ".warm.policy")):
                seen.add(key)
                yield Change(sign=_sign(was, becomes), where=f"{where}.{key[0]}", old=was, new=becomes, origin=origin)

    yield from fields(name, old, new, new["origin"])
    before = {step["id"]: step for step in old["steps"]}
    after = {step["id"]: step for step in new["steps"]}
    for id, step in after.items():
        if id in before:
            yield from fields(f"{name}.{id}", before[id], step, step["origin"])
        else:
            yield Change(sign="+", where=f"{name}.{id}", old=None, new=step["what"], origin=step["origin"])
    for id, step in before.items():
        if id not in after:
            yield Change(sign="-", where=f"{name}.{id}", old=step["what"], new=None, origin=step["origin"])


def _compared(value: Plain) -> dict[str, object]:
    return {key: item for key, item in value.items() if key not in _DERIVED}


def _sign(old: object, new: object) -> Sign:
    if old is None:
        return "+"
    return "-" if new is None else "~"
