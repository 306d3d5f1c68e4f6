"""Which steps a run has, what each of them waits for and gets, and what providers must be able to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.compiler import compile_plan
from runner.core.errors import RunnerError
from runner.core.injection import Injection
from runner.core.model import Feature, IsolationClass
from runner.plan.model import PlannedCluster, PlannedWebhook, RunPlan, SecretGrant
from runner.ports.provider import Probe
from runner.spec.model import ClusterSpec, DependencySpec, Facts, RunFacts, RunSpec
from tests.support.manifest_text import document, resolved

OPEN = Facts({}, open=True)
CODE = {"repo_source": {"type": "local", "path": "."}}
SETUP = {"setup_commands": ["true"]}
SCARCE = {Feature.DISK: "no quota"}
WATCHING = frozenset({Feature.DISK})


def compiled(spec: RunSpec, facts: Facts = OPEN) -> tuple[RunPlan, list[RunnerError]]:
    plan, findings = compile_plan([spec], facts, documents=[], settings={})
    (only,) = plan.runs
    return only, findings


@pytest.mark.parametrize(
    ("agent", "workspace", "run", "steps"),
    [
        pytest.param(
            {},
            {},
            {},
            "lease provision<lease agent<provision scan<agent save teardown<save release<teardown",
            id="the least",
        ),
        pytest.param(
            {"post_hooks": ["true"]},
            {**CODE, **SETUP},
            {"verify": {"commands": [{"run": "true"}]}},
            "lease provision<lease clone<provision agent<setup setup<clone post_hook<agent"
            " scan<agent,post_hook snapshot<scan"
            " verify<snapshot save teardown<save release<teardown",
            id="all",
        ),
        pytest.param(
            {},
            SETUP,
            {"verify": {"report": {"path": "report.md"}}},
            "lease provision<lease setup<provision agent<setup scan<agent verify<scan save teardown<save"
            " release<teardown",
            id="no repository",
        ),
        pytest.param(
            {},
            CODE,
            {},
            "lease provision<lease clone<provision agent<clone scan<agent snapshot<scan save teardown<save"
            " release<teardown",
            id="no setup",
        ),
        pytest.param(
            {},
            SETUP,
            {"incident": {"directory": "."}, "context": {"preload": ["incident"]}},
            "lease provision<lease setup<provision preload<setup agent<preload scan<agent save teardown<save"
            " release<teardown",
            id="an incident",
        ),
    ],
)
def test_each_step_stands_after_the_best_that_is_there_of_what_it_can_wait_for(
    tmp_path: Path, agent: dict[str, object], workspace: dict[str, object], run: dict[str, object], steps: str
) -> None:
    run_plan, _ = compiled(resolved(tmp_path, workspace, agent=agent, run=run)[0])

    found = [step.id + "<" * bool(step.needs) + ",".join(step.needs) for step in run_plan.steps]
    assert (sorted(found), found[-3:]) == (sorted(steps.split()), steps.split()[-3:])


def test_dependencies_are_there_before_all_that_may_use_them(tmp_path: Path) -> None:
    spec, _ = resolved(tmp_path, {**CODE, **SETUP})
    lock_file = DependencySpec(("npm", "ci"), ("package-lock.json",), ("node_modules",))
    spec = replace(spec, dependencies=(lock_file,), origins={**spec.origins, Feature.DEPENDENCIES: "f.yaml:1"})

    needs = {step.id: step.needs for step in compiled(spec)[0].steps}

    assert (needs["dependencies"], needs["setup"]) == (("clone",), ("clone", "dependencies"))
    assert needs["agent"] == ("setup", "dependencies")


def probe(name: str, missing: dict[Feature, str] | None = None, **more: object) -> Probe:
    return Probe(
        provider=name, **{"available": True, "isolation": IsolationClass.NAMESPACES, "missing": missing or {}, **more}
    )  # type: ignore[arg-type]


WEAK = "`process` gives isolation `namespaces`, and `kernel` is asked for = remove `process` from the providers"
ELSE = "leave the field out, or see `runner doctor` for another provider"
LIMITED = (Feature.CPU, Feature.MEMORY, Feature.DISK, Feature.PIDS)
LIMITS = ("1 CPU", "memory 1G", "disk 1G", "16 pids")
GONE = {"available": False, "reason": "it is gone"}


@pytest.mark.parametrize(
    ("workspace", "probes", "findings", "notes"),
    [
        pytest.param({}, [probe("local"), probe("process")], [], [], id="nothing is missing"),
        pytest.param(
            {"isolation": "kernel"},
            [probe("local", isolation=IsolationClass.KERNEL), probe("process")],
            [WEAK],
            [],
            id="one is too weak",
        ),
        pytest.param(
            {"resource_limits": {"disk": "1G"}},
            [probe("local", SCARCE), probe("process")],
            ["`local` cannot enforce disk 1G: no quota = providers here that can: docker, process"],
            ["disk 1G: not enforced by local"],
            id="a written limit that one cannot keep",
        ),
        pytest.param(
            {"resource_limits": {"disk": "1G"}},
            [probe("local", SCARCE), probe("process", SCARCE), probe("docker", SCARCE), probe("gvisor", **GONE)],
            [f"`{name}` cannot enforce disk 1G: no quota = {ELSE}" for name in ("local", "process")],
            ["disk 1G: not enforced by local", "disk 1G: not enforced by process"],
            id="or none",
        ),
        pytest.param(
            {"resource_limits": {"cpu": 1, "memory": "1G", "disk": "1G", "pids": 16, "enforcement": "best_effort"}},
            [probe("local", dict.fromkeys(LIMITED, "no")), probe("process")],
            [f"warning `local` cannot enforce {limit}: no = None" for limit in LIMITS],
            [f"{limit}: not enforced by local" for limit in LIMITS],
            id="as far as it goes",
        ),
        pytest.param(
            {"network": "none", "resource_limits": {"enforcement": "best_effort"}},
            [probe("local", {Feature.NETWORK_NONE: "no"}), probe("process")],
            ["`local` cannot enforce network none: no = providers here that can: docker, process"],
            ["network none: not enforced by local"],
            id="which is said of limits",
        ),
        pytest.param(
            {},
            [probe("local", SCARCE), probe("process", SCARCE, watched=WATCHING)],
            [],
            [
                "disk 10G: not enforced by local",
                "disk 10G: watched from outside, and what goes beyond it is ended, with process",
            ],
            id="a default is a note",
        ),
        pytest.param(
            {"resource_limits": {"disk": "1G"}},
            [probe("local", SCARCE, **GONE), probe("process", SCARCE, watched=WATCHING)],
            [],
            ["disk 1G: watched from outside, and what goes beyond it is ended, with process"],
            id="one that is gone, and one that watches",
        ),
        pytest.param(
            {},
            [probe("local", needs_image=True), probe("process", needs_image=True, **GONE)],
            ["`local` makes workspaces from an image, and none is named = name one as `workspace.base_image`"],
            [],
            id="no image",
        ),
        pytest.param(
            {"base_image": "a:1"}, [probe("local", needs_image=True), probe("process")], [], [], id="an image"
        ),
        pytest.param(
            {},
            [probe("local", **GONE), probe("process", hint="mend it", **GONE)],
            ["no provider of run `fix` is available: `local`: it is gone; `process`: it is gone = mend it"],
            [],
            id="none is there",
        ),
        pytest.param(
            {},
            [probe("local", **GONE), probe("process", **GONE)],
            ["no provider of run `fix` is available: `local`: it is gone; `process`: it is gone = see `runner doctor`"],
            [],
            id="and no advice",
        ),
    ],
)
def test_every_provider_of_the_chain_must_do_what_is_asked_for(
    tmp_path: Path, workspace: dict[str, object], probes: list[Probe], findings: list[str], notes: list[str]
) -> None:
    facts = Facts({probe.provider: probe for probe in [probe("docker"), *probes]})
    spec, _ = resolved(tmp_path, {"providers": ["local", "process"], **workspace}, facts=facts)

    planned, found = compiled(spec, facts)

    assert [f"{'warning ' * (f.severity == 'warning')}{f.message} = {f.hint}" for f in found] == findings
    assert list(planned.notes) == notes
    assert [f.at is None for f in found] == [f.code == "provider.unavailable" for f in found]


@pytest.mark.parametrize("shared", [False, True])
def test_a_workspace_that_shares_its_disk_has_no_limit_there(tmp_path: Path, shared: bool) -> None:
    facts = Facts({name: probe(name) for name in ("local", "docker")})
    spec, _ = resolved(tmp_path, {"providers": ["local"], "resource_limits": {"disk": "1G"}}, facts=facts)

    _, found = compiled(replace(spec, shared=shared), facts)

    text = "`local` cannot enforce disk 1G: others write to the same disk"
    assert [(f.message, f.hint) for f in found] == [(text, ELSE)] * shared


def test_a_step_gets_the_secrets_that_are_for_it(tmp_path: Path) -> None:
    secrets = [
        {"name": "A", "from": {"env": "B"}, "steps": ["agent", "setup"]},
        {"name": "C", "from": {"env": "D"}, "steps": ["agent"], "as": "file"},
    ]
    spec, _ = resolved(tmp_path, SETUP, agent={"secrets": secrets})
    injection = Injection(host="api.example", secret="E", how="bearer")
    outside = replace(spec.secrets[1], name="E", injection=injection)

    planned = compiled(replace(spec, secrets=(*spec.secrets, outside)))[0].steps
    steps = {step.id: step.secrets for step in planned}

    line = f"{spec.secrets[0].at.file}:{spec.secrets[0].at.line}"
    first, second = SecretGrant("A", False, line), SecretGrant("C", True, line)
    assert {id: found for id, found in steps.items() if found} == {"agent": (first, second), "setup": (first,)}
    assert {step.id: step.injected for step in planned if step.injected} == {"agent": (injection,)}


@pytest.mark.parametrize(
    ("agent", "networks", "cost"),
    [
        pytest.param({}, {"none"}, 0.0, id="no model"),
        pytest.param({"agent": "claude", "budget": {"cost_usd": 3}}, {"none", "model gateway"}, 3.0, id="a gateway"),
        pytest.param({"agent": "claude", "credentials": "env", "budget": {"cost_usd": 3}}, {"host"}, None, id="a key"),
    ],
)
def test_who_has_the_key_of_a_model_has_the_network(
    tmp_path: Path, agent: dict[str, object], networks: set[str], cost: float | None
) -> None:
    run_plan, _ = compiled(resolved(tmp_path, agent=agent)[0])

    assert ({step.network for step in run_plan.steps}, run_plan.cost_usd) == (networks, cost)


@pytest.mark.parametrize("most", [5.0, 100_000.0])
def test_no_step_may_take_longer_than_its_run(tmp_path: Path, most: float) -> None:
    spec, _ = resolved(tmp_path)

    run_plan, _ = compiled(replace(spec, deadline_seconds=most))

    deadlines = {step.id: step.deadline_seconds for step in run_plan.steps}
    assert (deadlines["agent"], max(deadlines.values()) <= most) == (min(most, spec.timeouts["agent"]), True)


def test_a_run_of_the_plan_has_what_was_decided_and_found(tmp_path: Path) -> None:
    policy = document("Policy", "strict")
    run = {"task": {"branch": "b"}, "policy": "strict", "outputs": {"x": {"file": "x.md"}}}
    open_network = {Feature.NETWORK_NONE: "no"}
    probes = {"local": probe("local", open_network), "process": probe("process", open_network, **GONE)}
    probes["docker"] = probe("docker")
    facts = Facts(probes, {"fix": RunFacts(image="sha256:1", incident={"a": 1})})
    spec, _ = resolved(tmp_path, {**CODE, "providers": [*probes], "base_image": "a:1"}, policy, run=run, facts=facts)
    cluster = ClusterSpec(
        kubeconfig="kube", context="context", server="server", namespace="namespace", access="reads", plug_in="plug-in"
    )
    checkout = replace(spec.checkout, commit="c")
    webhook = PlannedWebhook(service="github", events=(), labels={}, max_parallel=1, per_hour=1, origin="f.yaml:1")
    spec = replace(spec, cluster=cluster, incident=Path("i"), max_parallel=3, checkout=checkout)
    spec = replace(spec, webhook=webhook, queue="team-a")

    run_plan, _ = compiled(spec, facts)

    same = "name group needs outputs origin providers isolation limits deadline_seconds stop_budget_seconds"
    names = [*same.split(), "base_image", "webhook", "queue"]
    assert [getattr(run_plan, name) for name in names] == [getattr(spec, name) for name in names]
    assert (run_plan.max_parallel, run_plan.commit, run_plan.image) == (3, "c", "sha256:1")
    assert run_plan.policies == tuple(policy.name for policy in spec.policies)
    assert run_plan.values == {"task": {"branch": "b"}, "incident": {"a": 1}}
    assert compiled(spec, Facts(probes))[0].values == {"task": {"branch": "b"}, "incident": {}}
    assert compiled(replace(spec, incident=None), facts)[0].values == {"task": {"branch": "b"}}
    assert run_plan.origins == {**spec.origins, **{f"policy {p.name}": p.origin for p in spec.policies}}
    assert run_plan.cluster == PlannedCluster(
        context="context", server="server", namespace="namespace", access="reads", plug_in="plug-in"
    )
    assert run_plan.host_network == ("local",)


def test_the_digest_is_of_all_that_a_plan_is_made_of() -> None:
    none, some = Facts({}), Facts({"a": probe("a")})
    inputs = [(none, 1, 1), (none, 2, 1), (none, 1, 2), (some, 1, 1), (OPEN, 1, 1)]

    plans = [compile_plan([], facts, documents=first, settings=second)[0] for facts, first, second in inputs]

    assert len({plan.digest for plan in plans}) == len(inputs)
    assert [plan.open for plan in plans] == [False, False, False, False, True]
    assert plans[0].digest == "sha256:89afee91e05596ef7c55881c4af4dfa106ca474407637cd16724121f2b0a800a"
