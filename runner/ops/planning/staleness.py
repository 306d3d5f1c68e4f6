"""Staleness of a saved plan: what has changed since, named with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from runner.compiler import plan_digest
from runner.core import codec
from runner.core.errors import Place, StalePlan
from runner.core.sanitize import excerpt
from runner.manifest.load import Document
from runner.ops.planning.make_plan import BUILT_IN, decided_by
from runner.ops.planning.plan_file import SavedPlan
from runner.plan.diff import differences
from runner.spec.model import Facts, RunFacts

_NAMED = 3  # changes that the error names

Change = tuple[str, Place | None]


class Now(Struct, frozen=True):
    """Settings, documents and facts as they are now; ``documents`` are ``None`` where the manifests are not."""

    settings: Mapping[str, object]
    documents: Mapping[str, Document] | None
    facts: Facts


def require_fresh(file: Path, saved: SavedPlan, now: Now) -> None:
    """Raise ``StalePlan``, with the first things that changed, unless the plan would be made from the same."""
    documents = dict(saved.documents)
    if now.documents is not None:
        kept = {key: data for key, data in documents.items() if key.startswith(BUILT_IN)}
        documents = kept | {key: document.data for key, document in now.documents.items()}
    digest = plan_digest(now.facts, documents=decided_by(saved.request, documents), settings=now.settings)
    changes = [*_written_changes(saved, now.documents), *_found_changes(saved, now)]
    if digest == saved.digest and not changes:
        return
    named = "; ".join(text for text, _ in changes[:_NAMED])
    more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    raise StalePlan(
        f"`{file}` is stale: {named or 'its digest differs'}{more}",
        at=next((place for _, place in changes if place), None),
        hint="plan again, look at what changed, and apply that",
    )


def _written_changes(saved: SavedPlan, documents: Mapping[str, Document] | None) -> Iterator[Change]:
    for key, was in saved.documents.items() if documents is not None else ():
        document = documents.get(key) if documents is not None else None
        if document is None and not key.startswith(BUILT_IN):
            yield f"{key} is gone", None
        elif document is not None:
            for path, left, right in differences(was, codec.plain(document.data)):
                keys = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
                yield f"{key} {path} {_value(left)} -> {_value(right)}", document.tree.place(*keys)


def _found_changes(saved: SavedPlan, now: Now) -> Iterator[Change]:
    for path, left, right in differences(saved.settings, codec.plain(now.settings)):
        yield f"setting {path} {_value(left)} -> {_value(right)}", None
    for name, old in saved.facts.items():
        new = now.facts.of(name)
        changes = (*_cluster_changes(name, old, new), *_file_changes(name, old, new), *_lent_changes(name, old, new))
        yield from ((text, None) for text in changes)


def _cluster_changes(run: str, old: RunFacts, new: RunFacts) -> Iterator[str]:
    was, becomes = (fact.cluster.pinned() if fact.cluster is not None else {} for fact in (old, new))
    for field, left, right in differences(was, becomes):
        if field == "plug_in_sha256":
            yield f"cluster of {run} gets its credential with other arguments or variables"
        else:
            yield f"cluster of {run}.{field} {_value(left)} -> {_value(right)}"


def _file_changes(run: str, old: RunFacts, new: RunFacts) -> Iterator[str]:
    before, after = (
        {(kind, file): found.sha256 for kind, files in facts.files.items() for file, found in files.items()}
        for facts in (old, new)
    )
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            how = "is new" if key not in before else "is gone" if key not in after else "has changed"
            yield f"file `{key[1]}` of run `{run}` {how}"


def _lent_changes(run: str, old: RunFacts, new: RunFacts) -> Iterator[str]:
    """Name what commands would see of this host, and did not when the plan was made."""
    if old.lent != new.lent:
        for path, left, right in differences(codec.plain(old.lent), codec.plain(new.lent)):
            yield f"{path or 'what commands see'} of run `{run}` {_value(left)} -> {_value(right)}"


def _value(value: object) -> str:
    return "nothing" if value is None else excerpt(json.dumps(value, ensure_ascii=False))
