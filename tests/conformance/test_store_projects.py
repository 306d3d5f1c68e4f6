"""What every store promises about projects, on each of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runner.core.errors import ProjectOwned, UnknownProject
from runner.ports.store import ProjectRow, Store

SHOP = ProjectRow(name="shop", root="/srv/shop", workspace_isolation=True, protected_paths=("AGENTS.md", ".factory/"))


async def test_a_project_comes_back_with_the_time_of_its_last_change(store: Store) -> None:
    first = await store.put_project(SHOP)
    second = await store.put_project(replace(SHOP, workspace_isolation=False, protected_paths=()))

    assert first == replace(SHOP, updated=first.updated)
    assert first.updated < second.updated
    assert await store.project("shop") == second
    assert await store.projects() == [second]


async def test_projects_are_listed_by_name(store: Store) -> None:
    for name in ("b", "c", "a"):
        await store.put_project(replace(SHOP, name=name))

    assert [row.name for row in await store.projects()] == ["a", "b", "c"]


async def test_only_a_manifest_changes_what_is_a_manifest_s(store: Store) -> None:
    await store.put_project(SHOP)
    owned = await store.put_project(replace(SHOP, manifest="/srv/shop.runner.yaml"))
    with pytest.raises(ProjectOwned) as caught:
        await store.put_project(replace(SHOP, workspace_isolation=False))
    assert caught.value.hint == "change `/srv/shop.runner.yaml`, and apply it"
    assert await store.project("shop") == owned

    moved = await store.put_project(replace(SHOP, manifest="/srv/other.runner.yaml"))
    assert await store.project("shop") == moved


async def test_an_unknown_project_is_not_found_and_the_nearest_is_named(store: Store) -> None:
    await store.put_project(SHOP)
    with pytest.raises(UnknownProject) as caught:
        await store.project("shpo")

    assert caught.value.hint == "did you mean `shop`?"


async def test_a_place_whose_name_is_no_text_can_be_kept(store: Store) -> None:
    await store.put_project(replace(SHOP, root="/srv/\udcff", manifest="/srv/\udcff.runner.yaml"))

    assert (await store.project("shop")).root.startswith("/srv/")
