"""Files of saved plans: written whole, read back typed, and refused when they are damaged or of another make.

The digest over the content shows damage and careless edits. Without a key it proves nothing against somebody who writes
a new one: a saved plan is as trusted as manifests are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from runner.cluster.job import KUBECONFIG
from runner.compiler import plan_digest, read_runs, run_faults
from runner.core import codec
from runner.core.errors import BadPlanFile, Cycle, OpenPlan, Place
from runner.core.sanitize import excerpt
from runner.manifest import STDIN
from runner.manifest.load import DEFAULTS
from runner.ops.planning.files import incident_texts, read_file, texts_of
from runner.ops.planning.make_plan import PlanResult, Request, decided_by
from runner.ops.planning.stored_projects import RECORD
from runner.plan.model import FORMAT, RunPlan
from runner.ports.provider import Probe
from runner.spec.facts_request import FactsRequest
from runner.spec.model import FromFile, RunFacts, SecretSpec
from runner.spec.select import repository_root

MAX_BYTES = 256 << 20  # of a saved plan
MAX_CARRIED = 900 << 10  # of an incident that a plan brings along; a ConfigMap takes no more


class Warned(Struct, frozen=True):
    """A warning of planning."""

    code: str
    message: str
    at: Place | None
    hint: str | None


class SavedPlan(Struct, frozen=True, kw_only=True):
    """All that carrying out a plan takes. ``content`` is the digest of all other fields.

    ``manifests`` and their ``files`` are relative to ``folder``, in which the plan was saved; ``None`` is standard
    input. Everything below ``root`` may move along with the plan. ``texts`` are those of scripts and agents files by
    hash.
    """

    format: str = FORMAT
    content: str = ""
    digest: str
    open: bool
    max_cost_usd: float | None
    manifests: str | None
    files: tuple[str, ...]
    folder: Path
    root: Path
    request: Request
    settings: Mapping[str, object]
    documents: Mapping[str, object]
    recorded: tuple[str, ...]
    probes: Mapping[str, Probe]
    facts: Mapping[str, RunFacts]
    wanted: Mapping[str, FactsRequest]
    secrets: Mapping[str, tuple[SecretSpec, ...]]
    warnings: tuple[Warned, ...]
    texts: Mapping[str, str]
    runs: tuple[RunPlan, ...]


def check_place(to: Path) -> None:
    """Raise ``BadPlanFile`` for a path that ``save`` cannot write."""
    if to.suffix != ".json" or (os.path.exists(to) and not os.path.isfile(to)):
        raise BadPlanFile(f"`{to}` cannot hold a plan", hint="name a file that ends in .json")


def save(planned: PlanResult, to: Path) -> None:
    """Write a plan with what it takes to carry it out and to show changes. Raises ``BadPlanFile``."""
    check_place(to)
    to = Path(os.path.realpath(to))
    text = json.dumps(_document(planned, to.parent), indent=1, ensure_ascii=False)
    half = to.with_name(f".{to.name}.{token_hex(4)}")
    try:
        half.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        half.replace(to)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise BadPlanFile(f"`{to}` cannot be written: {error.strerror}") from error


def text_of(planned: PlanResult, run: RunPlan) -> str:
    """Return the text of a plan with one run of this plan, which needs no other any more, for another host.

    It brings along the files of the run's incident; the kubeconfig of its cluster is where workers have theirs.
    """
    name, wanted = run.name, planned.wanted[run.name]
    if wanted.cluster is not None:
        wanted = replace(wanted, cluster=replace(wanted.cluster, kubeconfig=KUBECONFIG))
    facts = replace(planned.facts, runs={name: planned.facts.of(name)})
    documents = {key: document.data for key, document in planned.documents.items()}
    digest = plan_digest(facts, documents=decided_by(planned.request, documents), settings=planned.settings)
    alone = replace(
        planned,
        plan=replace(planned.plan, digest=digest, runs=(replace(run, needs=()),)),
        facts=facts,
        wanted={name: wanted},
        secrets={name: planned.secrets[name]} if name in planned.secrets else {},
    )
    incident = incident_texts(facts.of(name).incident_files or {}, MAX_CARRIED)
    return json.dumps(_document(alone, Path.cwd(), incident), separators=(",", ":"))


def _document(planned: PlanResult, folder: Path, texts: Mapping[str, str] | None = None) -> dict[str, object]:
    saved = _saved(planned, folder)
    document = codec.plain(replace(saved, texts={**saved.texts, **(texts or {})}))
    return {**document, "content": content_digest(document)}


def _saved(planned: PlanResult, folder: Path) -> SavedPlan:
    plan, facts = planned.plan, planned.facts
    manifests = None if planned.path == STDIN else Path(os.path.realpath(planned.path))
    return SavedPlan(
        digest=plan.digest,
        open=plan.open,
        max_cost_usd=plan.max_cost_usd,
        manifests=os.path.relpath(manifests, folder) if manifests is not None else None,
        files=tuple(dict.fromkeys(os.path.relpath(file, folder) for file in _files(planned))),
        folder=folder,
        root=repository_root(manifests if manifests.is_dir() else manifests.parent) if manifests else folder,
        request=planned.request,
        settings=planned.settings,
        documents={key: document.data for key, document in planned.documents.items()},
        recorded=tuple(key for key, document in planned.documents.items() if document.file == RECORD),
        probes=facts.probes,
        facts={name: replace(run, incident={}) for name, run in facts.runs.items()},
        wanted=planned.wanted,
        secrets={run: tuple(secrets) for run, secrets in planned.secrets.items()},
        warnings=tuple(Warned(one.code, one.message, one.at, one.hint) for one in planned.warnings),
        texts=texts_of(facts, *(run.name for run in plan.runs)),
        runs=plan.runs,
    )


def _files(planned: PlanResult) -> Iterator[str]:
    """Yield the real paths of the manifests."""
    for document in planned.documents.values():
        if document.file not in (DEFAULTS, RECORD, STDIN.name):
            yield os.path.join(os.path.realpath(document.directory), os.path.basename(document.file))


def read_saved(file: Path, moved: tuple[Path, Path] | None = None) -> tuple[SavedPlan, Site]:
    """Return a saved plan, and the site of its manifests. Raises ``BadPlanFile`` and ``OpenPlan``.

    Of a plan without its manifests a directory may have ``moved`` from one place to another.
    """
    document = _read_document(file)
    if document.get("content") != content_digest(document):
        raise BadPlanFile(f"`{file}` was changed after it was saved", hint="plan again, and save that")
    if document.get("open") is True:
        hint = "plan again without --offline"
        raise OpenPlan(f"`{file}` is an open plan: made offline, its commits are not pinned", hint=hint)
    try:
        others = {key: value for key, value in document.items() if key != "runs"}
        places = codec.typed(_without_nul(others), _Places)
        site = Site.of(places, Path(os.path.realpath(file)).parent)
        if moved is not None and not site.found:
            site = replace(site, old=str(moved[0]), new=str(moved[1]))
        saved = codec.typed({**others, "runs": []}, SavedPlan, place=site.place)
        runs = read_runs(document["runs"], place=site.place)
        fault = next(run_faults(runs), None)
    except (ValueError, KeyError, TypeError, RecursionError, Cycle) as error:
        raise _no_plan(file) from error
    if fault is not None:
        raise not_compiled(file, fault)
    wanted = {name: site.wanted(one) for name, one in saved.wanted.items()}
    secrets = {run: tuple(map(site.secret, some)) for run, some in saved.secrets.items()}
    return replace(saved, runs=runs, wanted=wanted, secrets=secrets), site


class _Places(Struct, frozen=True):
    manifests: str | None
    files: tuple[str, ...]
    folder: Path
    root: Path


class Site(Struct, frozen=True):
    """The place of a plan's manifests, and whether they are there; everything below ``old`` is now below ``new``."""

    manifests: Path
    found: bool = False
    old: str = ""
    new: str = ""

    @staticmethod
    def of(places: _Places, folder: Path) -> Site:
        """Return the site of a plan that is in ``folder`` now: it came along with its manifests, or left them."""
        if places.manifests is None:
            return Site(STDIN)
        for parent in (folder, places.folder):
            if any(os.path.lexists(parent / file) for file in places.files):
                root = os.path.normpath(parent / os.path.relpath(places.root, places.folder))
                return Site(_in(parent, places.manifests), True, str(places.root), root)
        return Site(_in(places.folder, places.manifests))

    def place(self, path: str) -> str:
        within = self.old and (path == self.old or path.startswith(f"{self.old}/"))
        return self.new + path.removeprefix(self.old) if within else path

    def wanted(self, one: FactsRequest) -> FactsRequest:
        if one.cluster is None:
            return one
        kubeconfig = ":".join(map(self.place, one.cluster.kubeconfig.split(":")))
        return replace(one, cluster=replace(one.cluster, kubeconfig=kubeconfig))

    def secret(self, one: SecretSpec) -> SecretSpec:
        match one.source:
            case FromFile(path):
                return replace(one, source=FromFile(self.place(path)))
            case _:
                return one


def _in(folder: Path, relative: str) -> Path:
    return Path(os.path.normpath(folder / relative))


def read_compared(file: Path) -> tuple[tuple[RunPlan, ...], dict[str, str]]:
    """Read the runs and texts of a saved plan, or of the ``plan.json`` of a run; an open one will do.

    Raises ``BadPlanFile``.
    """
    document = _read_document(file)
    try:
        inputs = document.get("inputs") or document
        return read_runs(document["runs"]), codec.typed(inputs["texts"], dict[str, str])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_plan(file) from error


def _read_document(file: Path) -> dict[str, Any]:
    """Read the JSON of a plan file. Raises ``BadPlanFile``."""
    try:
        content = codec.decode(read_file(file, MAX_BYTES).decode(), dict[str, Any])  # bytes alone may be UTF-16
        if content["format"] != FORMAT:
            found = excerpt(str(content["format"]))
            raise BadPlanFile(f"`{file}` has format `{found}`", hint=f"this version reads {FORMAT}")
    except OSError as error:
        raise BadPlanFile(f"`{file}` cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_plan(file) from error
    return content


def _without_nul(value: object) -> object:
    """Return a part of a saved plan whose texts become names and words. Raises ``ValueError`` for one that cannot."""
    if "\\u0000" in json.dumps(value):
        raise ValueError("not a text that runner wrote")
    return value


def content_digest(document: Mapping[str, Any]) -> str:
    others = {key: value for key, value in document.items() if key != "content"}
    return "sha256:" + sha256(codec.encode(others, order="sorted")).hexdigest()


def _no_plan(file: Path) -> BadPlanFile:
    return BadPlanFile(f"`{file}` is not a saved plan", hint="make one with: runner plan --save FILE")


def not_compiled(file: Path, fault: str) -> BadPlanFile:
    return BadPlanFile(f"`{file}` is no plan that was compiled: {fault}", hint="plan again, and save that")
