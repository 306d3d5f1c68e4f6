"""Plans: what a run will do, complete and frozen. Equal inputs give equal bytes and so an equal digest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct

from runner.core.codec import plain
from runner.core.hosts import NetworkSpec
from runner.core.injection import Injection
from runner.core.model import IsolationClass, Limits
from runner.plan.graph import Graph

B = TypeVar("B")

FORMAT = "runner/plan/v2"  # minor additions keep it; a reader refuses any other

Seconds = Annotated[float, Meta(ge=0)]
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


BUILT_IN = "built-in"  # the origin of what nobody can choose
DEFAULTS = "defaults"  # the origin of what manifests/defaults decides


class PlannedMount(Struct, frozen=True):
    """A path that the commands of a step see; ``/workspace`` holds those that are relative."""

    path: str
    writable: bool
    origin: str


class SecretGrant(Struct, frozen=True):
    """A secret, by its name, that the commands of a step get: as a variable or, ``as_file``, as a file in memory."""

    name: str
    as_file: bool
    origin: str


class PlannedServer(Struct, frozen=True, kw_only=True):
    """An MCP server that commands of a step may use: ``what`` it is and where, in words for a person.

    ``lines`` are its parts, each with the manifest line that decides it. A ``hosted`` one has a workspace of the run;
    ``command`` is a digest of what is started there. With ``ends_whole`` memory over its limit ends it, and not only
    what it has started.
    """

    name: str
    what: str
    origin: str
    tools: tuple[str, ...] | None = None
    max_calls: int | None = None
    hosted: bool = False
    command: str = ""
    image: str | None = None
    limits: Limits | None = None
    limits_origin: str = ""
    ends_whole: bool = False
    lines: tuple[tuple[str, str], ...] = ()
    secret_names: tuple[str, ...] = ()


class NoBody(Struct, frozen=True):
    """The body of a step kind that has no parameters."""


class Step(Struct, frozen=True, kw_only=True):
    """One node. ``body`` is the frozen value of the step's kind; ``origin`` the manifest line that asked for it.

    ``injected`` secrets are added to requests of its commands, outside the workspace; ``mcp_servers`` have their own.
    ``when``: ``success`` runs after needs that all succeeded, ``ended`` after needs that ran at all.
    ``repeated_on_fallback`` steps run again with each provider of the chain. ``post_agent`` steps follow an agent that
    has started, whatever becomes of it: when work ends before them, finalize begins with them. Commands of a step that
    ``fills_disk`` are watched where no file system limits it. A ``routine`` step that went well is not worth a line.
    """

    id: str
    kind: str
    what: str
    phase: Literal["work", "finalize"]
    needs: tuple[str, ...]
    deadline_seconds: Seconds
    origin: str
    body: object = NoBody()
    when: Literal["success", "ended"] = "success"
    network: str = "none"
    mounts: tuple[PlannedMount, ...] = ()
    secrets: tuple[SecretGrant, ...] = ()
    injected: tuple[Injection, ...] = ()
    mcp_servers: tuple[PlannedServer, ...] = ()
    repeated_on_fallback: bool = False
    post_agent: bool = False
    fills_disk: bool = False
    routine: bool = False

    @property
    def secret_names(self) -> list[str]:
        own = [one.name for one in self.secrets] + [one.secret for one in self.injected]
        return own + [name for server in self.mcp_servers for name in server.secret_names]


class PlannedCluster(Struct, frozen=True, kw_only=True):
    """The cluster that commands of a run can ask, and what for. ``plug_in`` is what is run for the credential."""

    context: str
    server: str
    namespace: str
    access: str
    plug_in: str = ""


class PlannedWebhook(Struct, frozen=True, kw_only=True):
    """Messages of a service that start a run, when a server has its manifest."""

    service: str
    events: tuple[str, ...]
    labels: Mapping[str, str]
    max_parallel: int
    per_hour: int
    origin: str


class PlannedMessage(Struct, frozen=True, kw_only=True):
    """Message about a run, in some of its states. ``url_secret`` and ``signed_with`` are names of secrets."""

    form: str
    url: str | None
    url_secret: str | None
    signed_with: str | None
    states: tuple[str, ...]
    private: bool
    origin: str

    @property
    def secret_names(self) -> list[str]:
        return [name for name in (self.url_secret, self.signed_with) if name is not None]


class RunPlan(Struct, frozen=True, kw_only=True):
    """One run. ``notes`` are defaults that the chosen providers cannot enforce, in words for a person;
    ``values`` is what templates may name besides ``run``. ``needs`` are names of runs that come first,
    ``group`` is shared by the members of a matrix, of which ``max_parallel`` run at once; ``outputs`` maps
    names to files in the run's output directory. ``origins`` maps features, ``policy NAME`` and ``timeouts.STEP``
    to the manifest lines that decided them. ``image`` is the digest or the id of what ``base_image`` means.
    ``host_network`` are those of the providers that leave commands the network of this host. ``cost_usd`` is what its
    model may cost, ``None`` if nobody has said. ``queue`` is the queue of Kueue that its Job waits in."""

    name: str
    group: str
    needs: tuple[str, ...]
    max_parallel: Annotated[int, Meta(ge=1)] | None
    outputs: Mapping[str, str]
    origin: str
    providers: tuple[str, ...]
    isolation: IsolationClass
    limits: Limits
    commit: str | None
    deadline_seconds: Seconds
    stop_budget_seconds: Seconds
    policies: tuple[str, ...]
    notes: tuple[str, ...]
    values: Mapping[str, object]
    steps: tuple[Step, ...]
    origins: Mapping[str, str] = {}
    base_image: str | None = None
    image: str | None = None
    cluster: PlannedCluster | None = None
    host_network: tuple[str, ...] = ()
    cost_usd: float | None = 0.0
    webhook: PlannedWebhook | None = None
    messages: tuple[PlannedMessage, ...] = ()
    queue: str | None = None

    def body(self, kind: type[B]) -> B | None:
        """Return the parameters of the step whose kind has a body of this type; ``None`` without such a step."""
        return next((step.body for step in self.steps if isinstance(step.body, kind)), None)

    def phase(self, phase: str) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def worst_case(self) -> tuple[tuple[str, ...], float]:
        """The steps that may take longest after each other, and the seconds after which the run is over for sure."""
        work, seconds = _longest(self.phase("work"), len(self.providers))
        finalize, more = _longest(self.phase("finalize"))
        return (*work, *finalize), min(seconds, self.deadline_seconds) + min(more, self.stop_budget_seconds)


class Plan(Struct, frozen=True):
    """``open``: made without a look outside, so that commits are not pinned and providers not probed.

    ``max_cost_usd`` is the ceiling of all runs together, if one was asked for; the runs' own never add up to more.
    """

    digest: str
    runs: tuple[RunPlan, ...]
    open: bool = False
    max_cost_usd: float | None = None

    def document(self) -> dict[str, Json]:
        """The JSON face, with its format first for readers to check."""
        runs: list[Json] = [run_document(run) for run in self.runs]
        return {
            "format": FORMAT,
            "digest": self.digest,
            "open": self.open,
            "worst_seconds": self.worst_case()[1],
            "max_cost_usd": self.max_cost_usd,
            "runs": runs,
        }

    def worst_case(self) -> tuple[tuple[str, ...], float]:
        """The runs that may take longest after each other, and the seconds after which all are over for sure.

        Waiting for a place among all runs of this host is not counted.
        """
        needs = {run.name: list(run.needs) for run in self.runs}
        weights = {run.name: run.worst_case()[1] for run in self.runs}
        groups: dict[str, list[RunPlan]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        for members in groups.values():
            if (room := members[0].max_parallel) is not None:
                slowest = max(weights[run.name] for run in members)
                weights |= {run.name: slowest for run in members}
                for earlier, later in zip(members, members[room:], strict=False):
                    needs[later.name].append(earlier.name)
        return Graph(needs).longest(weights)


def run_document(run: RunPlan) -> dict[str, Json]:
    """One run as JSON: its fields, and what follows from them."""
    path, seconds = run.worst_case()
    return {**plain(run), "critical_path": list(path), "worst_seconds": seconds}


def network_of(step: Step) -> NetworkSpec:
    """Return the hosts that the commands of a step may reach."""
    found: NetworkSpec = getattr(step.body, "network", NetworkSpec())
    return found


def graph_of(steps: tuple[Step, ...]) -> Graph:
    """The graph of some steps; needs on steps outside are dropped, since those ended in an earlier phase."""
    inside = {step.id for step in steps}
    return Graph({step.id: [need for need in step.needs if need in inside] for step in steps})


def _longest(steps: tuple[Step, ...], providers: int = 1) -> tuple[tuple[str, ...], float]:
    times = {step.id: providers if step.repeated_on_fallback else 1 for step in steps}
    return graph_of(steps).longest({step.id: times[step.id] * step.deadline_seconds for step in steps})
