"""A workspace that was a slot of a warm pool is known by two records, and nothing of it is lost with the newer one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.core.errors import ProviderFailed
from runner.core.model import Limits
from runner.ports.provider import WorkspaceRequest
from runner.sandbox.directories import WorkspaceDirectories


def wish(id: str) -> WorkspaceRequest:
    return WorkspaceRequest(id=id, run="run-1", nonce="nonce", limits=Limits())


@pytest.mark.parametrize("damage", [Path.unlink, lambda record: record.write_text("")], ids=["gone", "empty"])
def test_a_record_that_a_loss_of_power_took_leaves_nothing_that_is_nobodys(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    places = WorkspaceDirectories(tmp_path, "docker")
    handle = places.assign(places.create(wish("slot")), wish("warm"))
    assert [found.id for found in places.list_owned("nonce")] == ["warm"]

    damage(tmp_path / "sandboxes" / "warm.json")

    assert [found.id for found in places.list_owned("nonce")] == ["slot"]
    places.check(handle)
    places.destroy(handle)
    assert places.list_owned("nonce") == []
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert not handle.tree.exists()


def test_a_slot_that_became_a_workspace_of_another_project_is_no_neighbour(tmp_path: Path) -> None:
    places = WorkspaceDirectories(tmp_path, "docker", own_users=False)
    slot = places.create(wish("slot"))
    shared = WorkspaceRequest(id="whole", run="run-2", nonce="nonce", limits=Limits(), shared=True)
    with pytest.raises(ProviderFailed, match="sees itself alone"):
        places.create(shared)
    places.assign(slot, WorkspaceRequest(id="warm", run="run-1", nonce="nonce", limits=Limits(), project="other"))
    assert places.create(shared).project_tree is not None
