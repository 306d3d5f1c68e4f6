"""Plan as a reviewer reads it: one table a run, with everything that decides anything.

Commands, branch names and paths come from files that others wrote: whatever a terminal could obey is escaped. Long
cells are wrapped; only the last column, the manifest line, may exceed the width.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import unified_diff
from pathlib import Path

from msgspec import Struct

from runner.core.errors import NotEnforced
from runner.core.model import Feature, Limits
from runner.core.plural import plural
from runner.core.sanitize import excerpt
from runner.plan.diff import Change
from runner.plan.model import BUILT_IN, DEFAULTS, Plan, PlannedCluster, RunPlan, SecretGrant, Step, network_of
from runner.report.format import columns, duration, limits, wrapped
from runner.spec.model import CliVersion

_LEAST = 24  # columns of the cells that are wrapped, however narrow the terminal
_WIDEST = 120  # characters of a value, or of a line, that has changed
_MOST_LINES = 20  # of a text that has changed
_COMPARED = 1000  # lines of a text
_HUNK = re.compile(r"@@ -(\d+)")
_DIGEST = re.compile(r"(sha256:)?([0-9a-f]{40}|[0-9a-f]{64})")
_WHOLE = 1 << 24  # characters: nothing is cut


class PlanComparison(Struct, frozen=True):
    """Differences from an earlier plan; ``since`` names it, and is ``None`` when there is none."""

    since: str | None
    changes: tuple[Change, ...]


class Row(Struct, frozen=True, kw_only=True):
    step: str
    what: str
    limit: str = ""
    network: str = ""
    origin: str = ""


def render_plan(plan: Plan, *, width: int = 120, compared: Sequence[PlanComparison] = (), missing: int = 0) -> str:
    """Render all runs of a plan, the differences, and a closing line with counts, without a final line break.

    ``missing`` is how many things this host lacks.
    """
    blocks = ["\n".join(_run(run, plan, width)) for run in plan.runs]
    if changed := [line for one in compared if one.since for line in changes(one)]:
        blocks.append("\n".join(changed))
    return "\n\n".join([*blocks, closing(plan, missing)])


def render_question(plan: Plan, *, compared: Sequence[PlanComparison] = (), most: int) -> str:
    """Render what a person must know before a start: each run with its changes, the places, and the sums.

    At most ``most`` runs, each with as many changed lines.
    """
    width = max(columns(_safe(run.name)) for run in plan.runs[:most])
    pairs = list(zip(plan.runs, compared, strict=True))[:most]
    lines = [line for run, one in pairs for line in _asked(run, one, width, most)]
    lines += [f"and {len(plan.runs) - most} runs more: `runner plan` shows them"] * (len(plan.runs) > most)
    lines += (f"in {place}" for place in dict.fromkeys(_safe(_place(run)) for run in plan.runs))
    if notes := dict.fromkeys(note for run in plan.runs for note in run.notes):
        lines.append(_safe(f"  {'; '.join(notes)}"))
    return "\n".join([*lines, f"{plural(len(plan.runs), 'run')}, {_bounds(plan)}."])


def opened(run: RunPlan) -> Iterator[str]:
    """Yield the steps that reach every public host, which is said first."""
    if steps := [f"{step.id} ({network_of(step).origin})" for step in run.steps if network_of(step).open]:
        yield _safe(f"  NETWORK OPEN: every public host for {', '.join(steps)}")


def _asked(run: RunPlan, compared: PlanComparison, width: int, most: int) -> Iterator[str]:
    what = next(step.what for step in run.steps if step.kind == "agent")
    new = "" if compared.since else "never carried out before"
    yield "   ".join(filter(None, [_left(_safe(run.name), width), (run.commit or "")[:12], _safe(what), new]))
    yield from opened(run)
    changed = list(changes(compared)) if compared.since else []
    yield from (f"  {line}" for line in changed[: most + 1])
    if len(changed) > most + 1:
        yield f"  and {len(changed) - most - 1} lines more: `runner plan` shows them"


def render_summary(plan: Plan, *, compared: Sequence[PlanComparison] = (), missing: int = 0) -> str:
    """Render one line a run, the number of changes, and the closing line."""
    lines = [line for run in plan.runs for line in (_safe(f"{title(run, plan)}   {_place(run)}"), *opened(run))]
    lines += (f"{plural(len(one.changes), 'change')} since {one.since}" for one in compared if one.since)
    return "\n".join([*lines, closing(plan, missing)])


def _place(run: RunPlan) -> str:
    return next((step.what for step in run.steps if step.kind == "provision"), ", then ".join(run.providers))


def title(run: RunPlan, plan: Plan) -> str:
    pinned = f"{run.commit[:12]}, pinned" if run.commit else ""
    bound = f"over after {duration(run.worst_case()[1])} at the latest"
    return f"plan {run.name}  {plan.digest[:19]}..   {len(run.steps)} steps, {bound}   {pinned}".rstrip()


def _run(run: RunPlan, plan: Plan, width: int) -> Iterator[str]:
    yield _safe(title(run, plan))
    yield from opened(run)
    for text in facts(run):
        yield from (f"  {line}" for line in wrapped(_safe(text), max(width - 2, _LEAST)))
    yield from _table([*rows(run)], width)
    yield from (f"warning[{NotEnforced.code}]: {_safe(note)}" for note in run.notes)


def facts(run: RunPlan) -> Iterator[str]:
    """Yield what holds for a whole run, a line each."""
    found = [f"deadline {duration(run.deadline_seconds)}{_written(run, 'deadline')}"]
    policies = ", ".join(f"{name}{_written(run, f'policy {name}')}" for name in run.policies)
    found += [f"isolation >= {run.isolation.value}", f"policy {policies}"]
    found += [f"queue {run.queue}{_written(run, 'queue')}"] if run.queue else []
    found += [f"needs {', '.join(run.needs)}"] if run.needs else []
    found += [f"at most {run.max_parallel} of {run.group} at once"] if run.max_parallel else []
    yield "   ".join(found)
    yield f"longest path {' > '.join(run.worst_case()[0])}"
    if (hook := run.webhook) is not None:
        when = [*hook.events, *(f"{name}={value}" for name, value in hook.labels.items())] or ["every alert"]
        bounds = f"{hook.max_parallel} at once, {hook.per_hour} an hour"
        yield f"started by {hook.service}: {', '.join(when)}; {bounds} ({hook.origin})"
    for one in run.messages:
        where = one.url if one.url is not None else "a secret URL"
        signed = ", signed" if one.signed_with else ""
        yield f"tells {one.form} at {where}{signed}: {', '.join(one.states)} ({one.origin})"
    if run.cluster is not None:
        yield f"{_cluster(run.cluster)}{_written(run, 'cluster')}"
    elif "incident" in run.values:
        yield "cluster none: the files of the incident are all there is"


def rows(run: RunPlan) -> Iterator[Row]:
    """Yield the rows of all steps."""
    return (row for step in run.steps for row in _rows(step, run))


def _rows(step: Step, run: RunPlan) -> Iterator[Row]:
    """Yield a step and what else applies to it, each with the manifest line that decides it."""
    yield Row(
        step=step.id,
        what=step.what,
        limit=duration(step.deadline_seconds),
        network=_network(step, run),
        origin=step.origin,
    )
    if step.kind == "provision":
        yield from (Row(step="", what=part, origin=origin) for origin, part in _limits(run))
    if step.kind == "agent":
        decided = {key: run.origins.get(key, DEFAULTS) for key in ("model", "budget")}
        yield from (
            Row(step="", what=key, origin=line) for key, line in decided.items() if line not in (step.origin, DEFAULTS)
        )
        yield from (Row(step="", what=words) for words in filter(None, [_version(step, run)]))
    yield from (Row(step="", what=part, origin=origin) for origin, part in _mounts(step))
    yield from (Row(step="", what=part, origin=origin) for origin, part in _hosts(step))
    for server in step.mcp_servers:
        yield Row(step="", what=server.what, origin=server.origin)
        yield from (Row(step="", what=f"  {part}", origin=origin) for part, origin in server.lines)
        if server.limits is not None:
            had = _limits_of(server.limits, ends_whole=server.ends_whole)
            yield Row(step="", what=f"  {server.name} has {had}", origin=server.limits_origin)
    yield from (Row(step="", what=_secret(given), origin=given.origin) for given in step.secrets)
    yield from (Row(step="", what=f"adds {one}, outside", origin=one.origin) for one in step.injected)
    limited = run.origins.get(f"timeouts.{step.kind}", step.origin)
    if limited not in (step.origin, DEFAULTS):
        yield Row(step="", what=f"limit {duration(step.deadline_seconds)}", origin=limited)


def _limits_of(value: Limits, *, ends_whole: bool) -> str:
    return limits(value) + "; more memory ends it whole" * (ends_whole and value.memory_bytes is not None)


def _version(step: Step, run: RunPlan) -> str:
    """Return the version of an agent's CLI here, as far as it is known."""
    cli: CliVersion | None = getattr(step.body, "cli", None)
    if cli is None:
        elsewhere = Feature.TOOLCHAINS.value in run.origins or not getattr(step.body, "model", None)
        return "" if elsewhere or not run.image else "whether the image has its CLI is not known"
    return f"CLI {cli.found}" if cli.is_tested else f"CLI {cli.found}, NOT the tested {cli.tested}"


def _limits(run: RunPlan) -> Iterator[tuple[str, str]]:
    """Return limits and network of the whole run, those of one manifest line together."""
    value = run.limits
    single = {
        "cpu": Limits(cpus=value.cpus),
        "memory": Limits(memory_bytes=value.memory_bytes),
        "disk": Limits(disk_bytes=value.disk_bytes),
        "pids": Limits(pids=value.pids),
    }
    parts = [(run.origins.get(key, BUILT_IN), limits(one)) for key, one in single.items() if one != Limits()]
    network = ", ".join(sorted({_network(step, run) for step in run.steps if not network_of(step)} - {"none"}))
    if run.base_image is not None:
        _, at, digest = (run.image or "").partition("@")
        pinned = f"{at}{digest}" if at else f" at {run.image}" if run.image else ""
        name = run.base_image.partition("@")[0] if at else run.base_image
        parts.append((run.origins.get("base image", BUILT_IN), f"image {name}{pinned}"))
    if network or not any(network_of(step) for step in run.steps):  # what steps reach is said of each
        parts.append((run.origins.get("network none", BUILT_IN), f"network {network or 'none'}"))
    return _together(parts)


def _network(step: Step, run: RunPlan) -> str:
    """Return the network of a step's commands, and where nothing enforces it."""
    reached, hosts = step.network, network_of(step)
    if len(hosts.rules) > 1:  # which rows below it name
        reached = reached.replace(str(hosts), plural(len(hosts.rules), "host"))
    if not run.host_network or not step.mounts or step.network == "host":
        return reached
    by = "" if len(run.host_network) == len(run.providers) else f" by {', '.join(run.host_network)}"
    return f"{reached} (not enforced{by})"


def _cluster(cluster: PlannedCluster) -> str:
    words = [cluster.context or "(current context)", cluster.server]
    words += [f"namespace {cluster.namespace}"] if cluster.namespace else []
    words += ["READ ONLY (get list watch logs; secrets refused)"]
    words += [f"credential from exec {cluster.plug_in}"] if cluster.plug_in else []
    return f"cluster {' '.join(filter(None, words))}"


def _secret(given: SecretGrant) -> str:
    return f"secret {given.name}{' as a file' * given.as_file}, gone afterwards"


def _mounts(step: Step) -> Iterator[tuple[str, str]]:
    return _together((m.origin, f"{m.path} {'rw' if m.writable else 'ro'}") for m in step.mounts)


def _hosts(step: Step) -> Iterator[tuple[str, str]]:
    """Return the hosts that a step's commands may reach, those of one manifest line together."""
    network = network_of(step)
    parts = [(rule.origin, f"{rule}{' (private too)' * rule.private}") for rule in network.rules]
    parts += [(network.origin, "every public host")] * network.open
    return ((origin, f"reaches {hosts}") for origin, hosts in _together(parts))


def _together(parts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join texts of one origin, in the order of the first of each."""
    found: dict[str, list[str]] = {}
    for origin, part in parts:
        found.setdefault(origin, []).append(part)
    return ((origin, ", ".join(texts)) for origin, texts in found.items())


def _written(run: RunPlan, key: str) -> str:
    origin = run.origins.get(key, DEFAULTS)
    return "" if origin == DEFAULTS else f" ({origin})"


def _table(rows: Sequence[Row], width: int) -> Iterator[str]:
    cells = [("step", "what", "limit", "network", "from")]
    cells += [(row.step, _safe(row.what), row.limit, row.network, _safe(row.origin)) for row in rows]
    step, what, limit, network, origin = (max(columns(row[i]) for row in cells) for i in range(5))
    what = min(what, max(width - step - limit - network - origin - 10, _LEAST))
    for row in cells:
        first, *more = wrapped(row[1], what)
        padded = (_left(row[0], step), _left(first, what), row[2].rjust(limit), _left(row[3], network), row[4])
        yield f"  {'  '.join(padded)}".rstrip()
        yield from (f"  {' ' * step}  {line}" for line in more)


def _left(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def changes(compared: PlanComparison) -> Iterator[str]:
    """Yield a line for each difference, with the first lines of texts that differ."""
    if not compared.changes:
        yield f"no difference since {compared.since}"
        return
    yield f"since {compared.since}:"
    for change in compared.changes:
        texts = _texts(change)
        if change.is_of_file:
            text = f"{change.where} {_file(change)}"
        elif texts is not None:
            text = change.where
        else:
            text = f"{change.where} {' -> '.join(_value(change, one) for one in _sides(change))}"
        yield _safe(f"{change.sign} {text.rstrip()}   {change.origin}")
        yield from _lines(*texts) if texts is not None else ()


def _sides(change: Change) -> tuple[object, ...]:
    return {"~": (change.old, change.new), "+": (change.new,), "-": (change.old,)}[change.sign]


def _texts(change: Change) -> tuple[str, str] | None:
    """Return both texts of a file, or of a value of several lines."""
    old, new = change.texts if change.is_of_file else (_command(change.old), _command(change.new))
    both = ("" if change.old is None else old, "" if change.new is None else new)
    if not all(isinstance(text, str) for text in both) or not any("\n" in str(text) for text in both):
        return None
    return str(both[0]), str(both[1])


def _file(change: Change) -> str:
    """Return the name of a changed file, with sizes where its old text is unknown."""
    sides = [side for side in _sides(change) if isinstance(side, dict)]
    name = Path(str(sides[-1]["path"])).name
    if all(text is not None for text in change.texts):
        return name
    return f"{name}, {' -> '.join(str(side['size']) for side in sides)} bytes"


def _lines(old: str, new: str) -> Iterator[str]:
    """Yield the first changed lines of a text; only as much is compared as is fast."""
    lefts, rights = old.splitlines(), new.splitlines()
    same = next((n for n, pair in enumerate(zip(lefts, rights, strict=False)) if pair[0] != pair[1]), None)
    start = max(0, (min(len(lefts), len(rights)) if same is None else same) - 1)
    window = slice(start, start + _COMPARED)
    found = list(unified_diff(lefts[window], rights[window], n=1, lineterm=""))[2:]
    for line in found[:_MOST_LINES]:
        hunk = _HUNK.match(line)
        yield f"    {excerpt(line, _WIDEST)}" if hunk is None else f"    @@ line {start + int(hunk[1])} @@"
    if len(found) > _MOST_LINES:
        yield f"    and {len(found) - _MOST_LINES} lines more"


def _command(value: object) -> object:
    """Return a shell command as written, and any other value as it is."""
    return value[2] if isinstance(value, list) and value[:2] == ["sh", "-c"] and len(value) == 3 else value


def _value(change: Change, value: object) -> str:
    """Return the start of a changed value in JSON; nothing for an absent one."""
    value = _command(value)
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        value = f"{value[:19]}.."
    if isinstance(value, (int, float)) and change.where.endswith("_seconds"):
        return duration(value)
    return "" if value is None else excerpt(json.dumps(value, ensure_ascii=False), _WIDEST)


def closing(plan: Plan, missing: int) -> str:
    """Return counts and bounds of a whole plan."""
    steps = sum(len(run.steps) for run in plan.runs)
    notes = sum(len(run.notes) for run in plan.runs)
    path, _ = plan.worst_case()
    longest = f" ({_safe(' > '.join(path))})" if len(path) > 1 else ""
    closing = f"{plural(len(plan.runs), 'run')}, {steps} steps, {plural(notes, 'warning')}, "
    closing += f"{plural(missing, 'error')}, " if missing else ""
    closing += f"{_bounds(plan)}{longest}. Nothing started."
    if plan.open:
        closing += "\nOpen: made offline, providers not probed, commits not pinned; it cannot be applied."
    return closing


def _bounds(plan: Plan) -> str:
    """Format ``up to $36.00, over after 45m at the latest``."""
    costs = [run.cost_usd for run in plan.runs]
    known = math.fsum(cost for cost in costs if cost is not None)
    free = costs.count(None)
    if free == len(costs):
        cost = "no budget in dollars, "
    elif free:
        others = f"the others up to ${known:,.2f}, " if known else ""
        cost = f"{free} of them without a budget in dollars, {others}"
    else:
        cost = f"up to ${known:,.2f}, " if known else ""
    ceiling = f"--max-cost ${plan.max_cost_usd:,.2f}, " if plan.max_cost_usd is not None else ""
    return f"{cost}{ceiling}over after {duration(plan.worst_case()[1])} at the latest"


def _safe(text: str) -> str:
    return excerpt(text, _WHOLE)
