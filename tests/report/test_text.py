"""The report of a run for people: where its files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.model import Status
from runner.events.events import ArtifactsCopied
from runner.events.record import RunRecord
from runner.report.text import render_run

COPY = ArtifactsCopied(url="s3://runs/7k3q9m2x4c6p", files=11, bytes=4096, sha256="0" * 64)
HERE = "not on this host"


@pytest.mark.parametrize(
    ("record", "directory", "said"),
    [
        pytest.param({"status": Status.FAILED}, Path("/home/you/run"), "evidence   /home/you/run", id="here"),
        pytest.param({"status": Status.FAILED}, None, f"evidence   {HERE}: the run was on another", id="elsewhere"),
        pytest.param({"status": Status.FAILED, "artifacts": COPY}, None, f"{HERE}: name the store of its", id="copied"),
        pytest.param({"status": Status.SKIPPED}, None, "", id="skipped"),
        pytest.param({"status": Status.PENDING}, None, "", id="not begun"),
    ],
)
def test_evidence_is_told_where_it_is(record: dict[str, object], directory: Path | None, said: str) -> None:
    shown = render_run(RunRecord(id="7k3q9m2x4c6p", name="fix", **record), directory)  # type: ignore[arg-type]

    assert said in shown
    assert ("evidence" in shown) is bool(said)
