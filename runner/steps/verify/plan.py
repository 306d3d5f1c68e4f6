"""Check the snapshot on a clean checkout, and the report in the output."""

from __future__ import annotations

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.core.plural import plural
from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, planned_mounts
from runner.spec.model import Facts, RunSpec, VerifySpec
from runner.steps.setup.plan import command_words

NEEDS = (("snapshot", "scan"),)
TAKES_SECRETS = True


class VerifyBody(Struct, frozen=True):
    """``outputs`` are files that later runs will read, so they must be there."""

    verify: VerifySpec
    outputs: tuple[str, ...]
    mount_plan: MountPlan
    network: NetworkSpec = NetworkSpec()


BODY = VerifyBody


def inputs(body: VerifyBody) -> dict[str, object]:
    verify = body.verify
    return {
        "commands": (verify.setup, [(check.argv, check.exit) for check in verify.commands]),
        "files": (verify.required, verify.forbidden),
        "report": verify.report,
        "outputs": body.outputs,
        "hosts": body.network.pinned(),
        "toolchains": (body.mount_plan.toolchains, body.mount_plan.environment, body.mount_plan.dependencies),
    }


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    verify = spec.verify or VerifySpec(setup=(), required=(), forbidden=(), report=None, commands=())
    outputs = tuple(spec.outputs.values())
    parts = [command_words(c.argv) for c in verify.commands]
    if verify.required or verify.forbidden:
        parts.append(f"{len(verify.required) + len(verify.forbidden)} file rules")
    what = ", ".join(parts) + (" on a clean checkout" if verify.needs_tree else "")
    if verify.report:
        count = len(verify.report.sections)
        sections = f", {plural(count, 'section')}" if count else ""
        what += ("; " if what else "") + f"report {verify.report.path}{sections}"
    if not what and not outputs:
        return None
    lent = spec.lent
    mount_plan = MountPlan(
        protected=(),
        toolchains=lent.toolchains,
        incident=False,
        environment=lent.environment,
        dependencies=lent.dependencies,
    )
    return Step(
        id="verify",
        kind="verify",
        what=what or plural(len(outputs), "output"),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["verify"],
        origin=spec.origins["verify"],
        body=VerifyBody(verify, outputs, mount_plan, spec.networks["verify"]),
        network=str(spec.networks["verify"]),
        mounts=planned_mounts(mount_plan, spec),
    )
