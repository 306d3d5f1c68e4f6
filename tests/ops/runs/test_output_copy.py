"""What a triage leaves is copied to where it was asked for, and nothing of the user's that is there is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.core.codec import plain
from runner.events.record import RunRecord
from runner.ops.planning.make_plan import Request
from runner.ops.planning.plan_inputs import PlanInputs
from runner.ops.runs.output_copy import copy_output
from runner.plan.model import FORMAT, run_document
from runner.runtime.mount_plan import MountPlan
from runner.spec.model import ReportCheck, VerifySpec
from runner.steps.agent.plan import AgentBody
from runner.steps.verify.plan import VerifyBody
from tests.support.small_plans import small_run, small_step

Leave = Callable[..., list[str]]
MOUNTS = MountPlan(protected=(), toolchains=(), incident=False)
AGENT = AgentBody(agent="claude", system="", user="", prompt="", env={}, must=(), mount_plan=MOUNTS)
REPORT = ReportCheck("investigation.md", 0, ())
VERIFY = VerifySpec(setup=(), required=(), forbidden=(), report=REPORT, commands=())


TRIAGE = small_run("triage", small_step("agent", body=AGENT), small_step("verify", body=VerifyBody(VERIFY, (), MOUNTS)))
INPUTS = PlanInputs(
    manifests=Path("x"),
    request=Request(),
    group="triage",
    needs=(),
    checkout=None,
    commit=None,
    probes={},
    outputs={},
    keys={},
    texts={},
)


@pytest.fixture
def leave(tmp_path: Path) -> Leave:
    """A run leaves some files in its output and a log, and they are handed out as its plan says."""

    def leave(request: dict[str, str], **files: str) -> list[str]:
        kept, log = tmp_path / "run" / "output", tmp_path / "INC-1" / "output" / "triage_claude_20261122_030000.log"
        for path, content in ((log, "log"), *((kept / name.replace("__", "/"), text) for name, text in files.items())):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        inputs = replace(INPUTS, request=replace(Request(), **request))
        plan = {"format": FORMAT, "digest": "x", "runs": [run_document(TRIAGE)], "inputs": plain(inputs)}
        (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
        return copy_output(tmp_path / "run", RunRecord(id="7k3q", log=str(log)))

    return leave


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_output_and_log_go_to_where_they_were_asked_for(leave: Leave, tmp_path: Path) -> None:
    out, log = tmp_path / "out", "triage_claude_20261122_030000.log"

    assert leave({}, **{"investigation.md": "report", "triage__baseline.txt": "baseline"}) == []
    assert names(tmp_path / "INC-1") == [f"output/{log}"]
    assert leave({"output_file": "mine.log"}) == []
    assert (tmp_path / "INC-1" / "output" / "mine.log").read_text() == "log"
    assert leave({"output_dir": str(out)}) == []
    assert names(out) == ["investigation.md", "triage/baseline.txt", log]


def test_nothing_that_is_there_is_lost(leave: Leave, tmp_path: Path) -> None:
    """`--output-dir . --output-file precious.txt` wrote over what was the user's; a draft, over a good report."""
    out = tmp_path / "out"
    for name in ("precious.txt", "investigation.md", "triage/baseline.txt", "Makefile", "sub/x", "same"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    asked = {"output_dir": str(out), "output_file": "precious.txt"}
    files = {"investigation.md": "new", "triage__baseline.txt": "new", "Makefile": "new", "sub__x": "new"}

    behind = [leave(asked, same="mine", **files) for _ in range(2)]  # a second time nothing is new

    assert behind == [["'Makefile': another file is there", "'sub/x': another file is there"]] * 2
    moved = [name for name in names(out) if re.search(r"\.\d{8}_\d{6}", name)]
    assert [re.sub(r"\.\d{8}_\d{6}", "", name) for name in moved] == [
        "investigation.md", "precious.txt", "triage/baseline.txt"
    ]  # fmt: skip
    assert {(out / name).read_text() for name in (*moved, "Makefile", "sub/x", "same")} == {"mine"}
    assert {(out / name).read_text() for name in ("investigation.md", "triage/baseline.txt")} == {"new"}
    assert (out / "precious.txt").read_text() == "log"


def test_no_name_of_an_agents_leads_elsewhere_or_hides(leave: Leave, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    (other / "x").write_text("mine")
    (out / "sub").symlink_to(other)
    (out / "log").symlink_to(other / "x")

    behind = leave(
        {"output_dir": str(out), "output_file": "log"}, sub__x="new", **{".git__config": "new", ".envrc": "new"}
    )

    assert behind == [
        "'.envrc': its name begins with a dot",
        "'.git/config': its name begins with a dot",
        "'sub/x': another file is there",
        "'sub': Not a directory",
        f"{out / 'log'}: it is a link",
    ]
    assert (names(other), (other / "x").read_text()) == (["x"], "mine")


def test_a_place_that_has_gone_is_told_and_nothing_more(leave: Leave, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    behind = leave({"output_dir": str(tmp_path / "file" / "out")}, **{"investigation.md": "x"})

    assert behind == [
        f"{tmp_path}/file/out: Not a directory",
        f"{tmp_path}/file/out/triage_claude_20261122_030000.log: Not a directory",
    ]


def test_a_log_that_has_no_place_leaves_no_half_of_it(leave: Leave, tmp_path: Path) -> None:
    (tmp_path / "out" / "mine.log").mkdir(parents=True)

    left = leave({"output_dir": str(tmp_path / "out"), "output_file": "mine.log"}, **{"investigation.md": "report"})

    assert left == [f"{tmp_path}/out/mine.log: Is a directory"]
    assert names(tmp_path / "out") == ["investigation.md"]


def test_a_plan_that_is_gone_asks_for_nothing(tmp_path: Path) -> None:
    assert copy_output(tmp_path, RunRecord(id="7k3q")) == []
