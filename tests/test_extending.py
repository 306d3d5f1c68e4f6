"""One place to extend: a provider, a step kind, an agent and a verb are new files, and no other file changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import runner
from tests.cli.test_plugins import BOXED, GREET, GREETER, LINE
from tests.support.situations import Project

ROOT = Path(runner.__file__).parents[1]
PLAN = """
from msgspec import Struct

from runner.plan.model import BUILT_IN, Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts

NEEDS = (("agent",),)
BEFORE = ("scan",)


class InventoryBody(Struct, frozen=True):
    mount_plan: MountPlan


BODY = InventoryBody


def plan(spec, facts, needs):
    if not spec.debug:
        return None
    mounts = mount_plan_of(spec, facts)
    return Step(
        id="inventory", kind="inventory", what="the files", phase="work", needs=needs, deadline_seconds=30.0,
        origin=BUILT_IN, body=InventoryBody(mounts), mounts=planned_mounts(mounts, spec), fills_disk=True,
    )
"""
RUN = """
from runner.core.model import succeeded
from runner.runtime.exec import open_logs, run_command


async def perform(body, run):
    workspace = await run.open(body.mount_plan)
    with open_logs(run.paths.logs, "inventory") as logs:
        await run_command(run, workspace, ["ls"], logs, env=run.variables(workspace.paths))
    await run.sandboxes.close()
    return succeeded("looked")
"""
VERB = """
SUMMARY = "say hello"
GROUP = "this host"
EXAMPLES = ("runner hello",)


def add_arguments(parser):
    pass


def main(args, out):
    out.line("hello")
    return 0
"""
ADDED = {
    "runner/providers/boxed.py": BOXED,
    "runner/agents/greeter.py": GREETER,
    "runners/greeter.sh": f'source "${{BASH_SOURCE[0]%/*}}/common.sh"\n{LINE}',
    "runner/steps/inventory/__init__.py": "",
    "runner/steps/inventory/plan.py": PLAN,
    "runner/steps/inventory/run.py": RUN,
    "runner/cli/verbs/hello.py": VERB,
}


@pytest.mark.nightly
@pytest.mark.slow
def test_one_of_each_is_added_by_new_files_alone_and_works(project: Project, repository: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in ("runner", "runners", "manifests", "skills"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("testing"))
    for name, text in ADDED.items():
        (tree / name).parent.mkdir(exist_ok=True)
        assert not (tree / name).exists()
        (tree / name).write_text(text)
    project.env["PYTHONPATH"] = str(tree)
    project.write(GREET + "  debug: true\n")

    record = project.succeed()

    assert record["provider"] == "boxed"
    ids = [step["id"] for step in record["steps"]]
    assert ids.index("inventory") < ids.index("scan"), ids
    assert "answer.txt" in project.logs("inventory")
    assert project.runner("hello").out == "hello\n"
    assert "hello" in project.runner("--help").out
    assert project.runner("plan", str(project.folder), "--save", "saved.json").code == 0
    assert project.runner("apply", "saved.json").code == 0
