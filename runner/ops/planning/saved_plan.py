"""Saved plans: written with all their inputs, made again before they are applied, and refused when they differ."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from msgspec import Struct

from runner.core.codec import plain, typed
from runner.core.errors import BadPlanFile, OpenPlan, Place, StalePlan
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.planning.files import read_file, texts_of
from runner.ops.planning.make_plan import PlanResult, Request, make_plan
from runner.plan.diff import differences
from runner.plan.model import FORMAT, Json
from runner.ports.provider import Probe
from runner.spec.model import CommitFact, Facts, RunFacts

MAX_BYTES = 256 << 20  # of a saved plan
_NAMED = 3  # changes that the error about a stale plan names
# Where a document or a file lies, as directories do, and which version of a CLI is there.
_OF_A_HOST = frozenset({"origin", "origins", "kubeconfig", "cli"})


class Pinned(Struct, frozen=True):
    """The facts of a saved plan that are not looked up again."""

    probes: Mapping[str, Probe]
    commits: Mapping[str, CommitFact]
    images: Mapping[str, str]

    @property
    def facts(self) -> Facts:
        names = self.commits.keys() | self.images.keys()
        runs = {name: RunFacts(commit=self.commits.get(name), image=self.images.get(name)) for name in names}
        return Facts(self.probes, runs)


def _pinned(facts: Facts) -> Pinned:
    commits = {name: run.commit for name, run in facts.runs.items() if run.commit is not None}
    return Pinned(facts.probes, commits, {name: run.image for name, run in facts.runs.items() if run.image is not None})


def check_place(to: Path) -> None:
    """Raise ``BadPlanFile`` for a path that ``save`` cannot write."""
    if to.suffix != ".json" or (os.path.exists(to) and not os.path.isfile(to)):
        raise BadPlanFile(f"`{to}` cannot hold a plan", hint="name a file that ends in .json")


def save(planned: PlanResult, to: Path) -> None:
    """Write a plan with what it takes to make it again and to show changes. Raises ``BadPlanFile``."""
    check_place(to)
    to = Path(os.path.realpath(to))
    text = json.dumps(_saved(planned, to), indent=1, ensure_ascii=False)
    half = to.with_name(f".{to.name}.{token_hex(4)}")
    try:
        half.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        half.replace(to)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise BadPlanFile(f"`{to}` cannot be written: {error.strerror}") from error


def _saved(planned: PlanResult, to: Path) -> dict[str, Json]:
    return {
        **planned.plan.document(),
        "manifests": os.path.relpath(Path(os.path.realpath(planned.path)), Path(os.path.realpath(to)).parent),
        "request": plain(planned.request),
        "inputs": plain(planned.inputs),
        "pinned": plain(_pinned(planned.facts)),
        "texts": plain(texts_of(planned.facts, *(run.name for run in planned.plan.runs))),
    }


async def make_saved_plan(file: Path, settings: Settings) -> PlanResult:
    """Make a saved plan again from its manifests, with its commits, and check that it is equal.

    Raises ``BadPlanFile``, ``OpenPlan``, and ``StalePlan`` when manifests, context files, settings or capabilities have
    changed, a commit is gone, or the file lists other steps than would run.
    """
    content = read_document(file)
    if content.get("open"):
        hint = "plan again without --offline"
        raise OpenPlan(f"`{file}` is an open plan: made offline, its commits are not pinned", hint=hint)
    try:
        pinned = typed(_without_nul(content["pinned"]), Pinned)
        request = typed(_without_nul(content["request"]), Request)
        manifests = typed(_without_nul(content["manifests"]), str)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_plan(file) from error
    planned = await make_plan(_beside(file, manifests), settings, request, pinned=pinned.facts)
    if planned.plan.digest != content["digest"]:
        raise _stale(file, content, planned)
    places = {str(place) for place in _host_paths(planned.plan.runs)}
    for path, said, true in _mistold(content["runs"], planned.plan.document()["runs"], places):
        raise StalePlan(
            f"`{file}` differs from what would be done: {excerpt(path)} is {_value(true)}, not {_value(said)}",
            hint="plan again and look at that: it was changed, or made by another version",
        )
    return planned


def _host_paths(value: object) -> Iterator[Path]:
    """Yield every path of this host in a plan; paths inside a workspace are plain text."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Mapping):
        yield from _host_paths(value.values())
    elif isinstance(value, Struct):
        yield from _host_paths([getattr(value, name) for name in value.__struct_fields__])
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for inner in value:
            yield from _host_paths(inner)


def _mistold(said: Any, true: Any, places: Collection[str], at: str = "runs") -> Iterator[tuple[str, object, object]]:
    """Return the first difference between the file and the plan; a checkout that moved has other host paths."""
    if isinstance(said, dict) and isinstance(true, dict):
        for key in true | said:
            if key not in _OF_A_HOST:
                yield from _mistold(said.get(key), true.get(key), places, f"{at}.{key}")
    elif isinstance(said, list) and isinstance(true, list) and len(said) == len(true):
        for position, (one, other) in enumerate(zip(said, true, strict=True)):
            yield from _mistold(one, other, places, f"{at}[{position}]")
    elif said != true and not (isinstance(said, str) and isinstance(true, str) and true in places):
        yield at, said, true


def read_document(file: Path) -> dict[str, Any]:
    """Read the plan document in a file: a saved plan, or the ``plan.json`` of a run. Raises ``BadPlanFile``."""
    try:
        content = json.loads(read_file(file, MAX_BYTES).decode())  # bytes alone might be taken for UTF-16
        if content["format"] != FORMAT:
            found = excerpt(str(content["format"]))
            raise BadPlanFile(f"`{file}` has format `{found}`", hint=f"this version reads {FORMAT}")
        if not isinstance(content["digest"], str) or not all(run["name"] and run["steps"] for run in content["runs"]):
            raise _no_plan(file)
    except OSError as error:
        raise BadPlanFile(f"`{file}` cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_plan(file) from error
    return dict(content)


def _no_plan(file: Path) -> BadPlanFile:
    return BadPlanFile(f"`{file}` is not a saved plan", hint="make one with: runner plan --save FILE")


def _beside(file: Path, relative: str) -> Path:
    return Path(os.path.realpath(file)).parent / relative


def _without_nul(value: object) -> object:
    """Return a part of a saved plan whose texts become names and words. Raises ``ValueError`` for one that cannot."""
    if "\\u0000" in json.dumps(value):
        raise ValueError("not a text that runner wrote")
    return value


def _stale(file: Path, content: Mapping[str, Any], planned: PlanResult) -> StalePlan:
    """Return an error at the first thing that changed since the plan was saved."""
    try:
        changes = list(_changes(content["inputs"], planned))
    except (KeyError, TypeError, AttributeError):
        return StalePlan(f"`{file}` does not hold what it was made from", hint="plan again")
    named = "; ".join(text for text, _ in changes[:_NAMED])
    more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    return StalePlan(
        f"`{file}` is stale: {named or 'its digest differs'}{more}",
        at=next((place for _, place in changes if place), None),
        hint="plan again, look at what changed, and apply that",
    )


def _changes(old: Mapping[str, Any], planned: PlanResult) -> Iterator[tuple[str, Place | None]]:
    new: Any = plain(planned.inputs)
    for key in (*new["documents"], *(key for key in old["documents"] if key not in new["documents"])):
        was, becomes = old["documents"].get(key), new["documents"].get(key)
        if was is None or becomes is None:
            yield f"{key} is {'new' if was is None else 'gone'}", None
            continue
        for path, left, right in differences(was, becomes):
            keys = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
            yield f"{key} {path} {_value(left)} -> {_value(right)}", planned.documents[key].tree.place(*keys)
    for path, left, right in differences(old["settings"], new["settings"]):
        yield f"setting {path} {_value(left)} -> {_value(right)}", None
    for path, left, right in differences(_clusters(old), _clusters(new)):
        run, is_program, _ = path.partition(".plug_in_sha256")
        told = "gets its credential with other arguments or variables" if is_program else ""
        yield f"cluster of {run} {told or f'{_value(left)} -> {_value(right)}'}", None
    before, after = _files(old), _files(new)
    for file in sorted(before.keys() | after.keys()):
        if before.get(file) != after.get(file):
            how = "is new" if file not in before else "is gone" if file not in after else "has changed"
            yield f"file `{file[1]}` of run `{file[0]}` {how}", None


def _files(inputs: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the hash of each context file, by run and name."""
    groups = ((run, files) for run, fact in inputs["facts"]["runs"].items() for files in fact.get("files", {}).values())
    return {(run, name): fact["sha256"] for run, files in groups for name, fact in files.items()}


def _clusters(inputs: Mapping[str, Any]) -> dict[str, object]:
    return {run: fact["cluster"] for run, fact in inputs["facts"]["runs"].items() if "cluster" in fact}


def _value(value: object) -> str:
    return "nothing" if value is None else excerpt(json.dumps(value, ensure_ascii=False))
