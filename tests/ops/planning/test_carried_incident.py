"""Incidents that a saved plan brings to a host which does not have them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from runner.core.errors import BadPlanFile
from runner.ops.planning.carried_incident import carried_incident, unpack_incident
from runner.ops.planning.files import incident_files, incident_texts
from runner.ops.planning.plan_file import SavedPlan
from runner.spec.model import ContextFile, RunFacts
from tests.support.situations import write_files


def saved(place: Path, files: dict[str, ContextFile], texts: dict[str, str]) -> SavedPlan:
    """What is read of a saved plan for this."""
    facts, wanted = {"work": RunFacts(incident_files=files)}, {"work": SimpleNamespace(incident=place)}
    return cast(SavedPlan, SimpleNamespace(content="sha256:" + 64 * "a", facts=facts, wanted=wanted, texts=texts))


def test_the_files_come_as_they_were_and_twice_into_the_same_place(tmp_path: Path) -> None:
    given = {"incident.json": "{}", "pods/web.log": "it is slow: ä\n", "output/report.md": "of an earlier run"}
    write_files(tmp_path / "here", given)
    files, _ = incident_files(tmp_path / "here")
    plan = saved(tmp_path / "there", files, incident_texts(files, 1 << 20))

    [one, other] = [unpack_incident(plan, tmp_path / "home") for _ in range(2)]

    found = {str(path.relative_to(one)): path.read_text() for path in one.rglob("*") if path.is_file()}
    assert carried_incident(plan) == tmp_path / "there"
    assert one == other
    assert found == {name: text for name, text in given.items() if not name.startswith("output/")}
    assert [path.name for path in one.parent.iterdir()] == [one.name]


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/escaped"])
def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    digest = sha256(b"text").hexdigest()
    plan = saved(tmp_path / "there", {name: ContextFile(path=tmp_path, sha256=digest, size=4)}, {digest: "text"})

    with pytest.raises(BadPlanFile, match="no plan has"):
        unpack_incident(plan, tmp_path / "home")

    assert [*tmp_path.rglob("escaped")] == []


def test_what_is_no_text_or_too_large_together_does_not_come_along(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": 60 * "a", "b": 60 * "b", "c": "\0"})
    files, _ = incident_files(tmp_path)

    texts = incident_texts(files, 100)

    assert [*texts.values()] == [60 * "a"]
    assert carried_incident(saved(tmp_path / "there", files, texts)) is None
