"""The sight that workspaces of one project have of each other, and directories that become workspaces in place."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.core.errors import ProviderFailed
from runner.core.model import DEFAULT_PROJECT, Handle
from runner.ports.provider import Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.safefs import trees
from runner.testing.outside import on_host
from runner.testing.place import listing, read_until, shell

NUMBERS = count()
SLEEPER = ["sh", "-c", "echo ready; exec sleep 1250"]

Make = Callable[..., Awaitable[Handle]]


@pytest.fixture
async def make(provider: Provider, tmp_path: Path) -> AsyncIterator[Make]:
    """Make workspaces; afterwards an outside look finds nothing of them."""
    made: list[Handle] = []

    async def one(project: str = "shop", *, shared: bool = True, tree: Path | None = None) -> Handle:
        id = f"check-{os.getpid()}-p{next(NUMBERS)}-"
        request = WorkspaceRequest(id=id, run="run-1", nonce="nonce", project=project, shared=shared, tree=tree)
        made.append(await provider.create(request))
        return made[-1]

    yield one
    for handle in made:
        await provider.destroy(handle)
    assert on_host(tmp_path) == set()
    assert await provider.list_owned("nonce") == []


def project_of(handle: Handle) -> Path:
    assert handle.project_tree is not None
    return handle.project_tree


async def write(handle: Handle, path: Path, text: str) -> None:
    path.write_text(text)
    trees.chown(path, handle.uid)


@pytest.mark.scenario("ISO-05", only="provider")
async def test_a_shared_workspace_is_in_its_project_which_it_sees_whole(make: Make, provider: Provider) -> None:
    first, second = await make(), await make()
    await write(first, project_of(first) / "notes", "of the project")
    await write(second, second.tree / "work", "of the other")
    async with provider.open(first, SandboxSpec()) as workspace:
        assert workspace.paths.workspace.endswith(f"/workspaces/{first.id}")
        seen = await shell(workspace, f"cat ../../notes ../{second.id}/work; pwd; echo mine > here")
        assert seen == f"of the projectof the other{workspace.paths.workspace}\n"
        said = await shell(workspace, f"echo new > ../../made; echo more > ../{second.id}/work; rm ../../notes")

    assert said == ""
    assert (first.tree / "here").read_text() == "mine\n"
    assert (project_of(first) / "made").read_text() == "new\n"
    assert (second.tree / "work").read_text() == "more\n"
    assert not (project_of(first) / "notes").exists()


async def test_a_shared_workspace_has_the_project_where_a_workspace_is_else(make: Make, provider: Provider) -> None:
    handle = await make()
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert workspace.paths.workspace == f"/workspace/workspaces/{handle.id}"
        assert await shell(workspace, listing("/workspace")) == "workspaces\n"
        assert (await workspace.effective()).read_only == ()


async def test_agents_of_a_project_cannot_change_which_workspaces_it_has(make: Make, provider: Provider) -> None:
    """The host goes by these names, with more rights than any of them."""
    first, second = await make(), await make()
    hostile = (
        f"cd /workspace; mv workspaces w; mv workspaces/{second.id} gone; rmdir workspaces/{second.id};"
        f" ln -s /etc workspaces/link; mkdir workspaces/new; mv workspaces/{first.id} workspaces/other; true"
    )
    async with provider.open(first, SandboxSpec()) as workspace:
        said = await shell(workspace, hostile)

    assert len(said.splitlines()) == 6, said
    assert sorted(path.name for path in first.tree.parent.iterdir()) == sorted([first.id, second.id])
    assert first.tree.parent.is_dir()
    assert not first.tree.parent.is_symlink()


async def test_another_tree_than_its_own_is_seen_alone(make: Make, provider: Provider) -> None:
    handle = await make()
    async with provider.open(handle, SandboxSpec(tree_writable=False)) as workspace:
        assert workspace.paths.workspace == "/workspace"
        assert await shell(workspace, f"{listing('/')} | grep -c workspaces; {listing()}") == "0\n"


@pytest.mark.parametrize("end", ["evict", "destroy"])
async def test_ending_one_shared_workspace_leaves_the_others_alive(make: Make, provider: Provider, end: str) -> None:
    first, second = await make(), await make()
    assert first.uid == second.uid
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(provider.open(second, SandboxSpec()))
        running = await stack.enter_async_context(kept.exec(["sh", "-c", "echo ready; read -r line; echo $line"]))
        await read_until(running, b"ready")
        async with provider.open(first, SandboxSpec()) as workspace, workspace.exec(SLEEPER) as process:
            await read_until(process, b"ready")
        await getattr(provider, end)(first)
        await running.stdin.send_all(b"alive\n")
        await read_until(running, b"alive")
        assert (await running.wait()).ok


@pytest.mark.scenario("ISO-09", only="provider")
async def test_an_isolated_workspace_sees_nothing_of_others_and_of_the_project(
    make: Make, provider: Provider, tmp_path: Path
) -> None:
    first, second = await make(shared=False), await make(shared=False)
    await write(second, second.tree / "secret", "of the other")
    (second.tree.parents[1] / "metadata").write_text("of the project")
    (tmp_path / "state.db").touch()
    looking = (
        f"{listing('..')}; cd ..; pwd; {listing('workspaces')}; {listing('../workspaces')}; "
        "for root in /proc/*/root /proc/*/cwd; do for name in workspaces runs projects; do "
        f"{listing('$root/$name')} 2>/dev/null; done; done; "
        f"cat /workspace/../{second.id}/secret /proc/1/root{second.tree}/secret {second.tree}/secret; "
        f"{listing(str(tmp_path))}; {listing(str(second.private))}; find / -path /usr -prune -o -path /proc -prune -o "
        "-name metadata -print -o -name state.db -print"
    )
    async with provider.open(first, SandboxSpec()) as workspace:
        seen = await shell(workspace, looking)
        assert workspace.paths.workspace == "/workspace"

    lines = seen.splitlines()
    assert "/" in lines
    assert not any(line.startswith("of the") for line in lines), seen
    assert not any(line.endswith(("/secret", "/metadata", "/state.db")) for line in lines if ":" not in line), seen
    assert not {"workspaces", "runs", "projects", second.id, "secret", "metadata", "state.db"} & set(lines), seen


@pytest.mark.scenario("ISO-04", only="provider")
async def test_an_isolated_workspace_of_a_project_is_at_workspace_and_lies_in_the_project(
    make: Make, provider: Provider, tmp_path: Path
) -> None:
    handle = await make(shared=False)
    await write(handle, handle.tree / "file", "mine")
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert await shell(workspace, f"pwd; {listing()}; cat /workspace/file") == "/workspace\nfile\nmine"

    assert handle.tree == tmp_path / "projects" / "shop" / "workspaces" / handle.id


@pytest.mark.parametrize("shared", [True, False])
async def test_a_project_is_isolated_or_not_at_one_time(make: Make, provider: Provider, shared: bool) -> None:
    first = await make(shared=shared)
    with pytest.raises(ProviderFailed, match=first.id):
        await make(shared=not shared)
    await make("other", shared=not shared)
    await provider.destroy(first)

    await make(shared=not shared)


async def test_a_handle_of_another_project_or_shape_is_refused(make: Make, provider: Provider) -> None:
    handle = await make()
    whole = project_of(handle)
    forged = (
        replace(handle, project=DEFAULT_PROJECT),
        replace(handle, project="../.."),
        replace(handle, project_tree=None),
        replace(handle, project_tree=whole.parent),
        replace(handle, adopted=True),
        replace(handle, uid=handle.uid + 1),
    )
    for one in forged:
        with pytest.raises(ProviderFailed):
            await provider.destroy(one)

    assert await provider.list_owned("nonce") == [handle]


async def test_a_project_whose_name_is_a_path_is_refused(make: Make) -> None:
    with pytest.raises(ProviderFailed, match="project"):
        await make("../x")


# --- adopted directories ---


@pytest.fixture
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file, of a user that commands may run as."""
    tree = tmp_path_factory.mktemp("theirs")
    (tree / "kept").write_text("theirs")
    if trees.can_chown():
        trees.chown_tree(tree, trees.FIRST_UID - 1)
    return tree


async def adopt(provider: Provider, make: Make, tree: Path) -> Handle:
    """Adopt a directory for an ordinary user, whose directories are his own, as well."""
    if trees.can_chown() and getattr(provider, "_own_users", True) is False:
        trees.chown_tree(tree, os.getuid())
    return await make("default", shared=False, tree=tree)


async def test_an_adopted_directory_is_the_tree_in_place_and_stays(
    make: Make, provider: Provider, theirs: Path
) -> None:
    handle = await adopt(provider, make, theirs)
    owner = theirs.stat().st_uid
    await provider.chown_to_workspace_user(handle)
    async with provider.open(handle, SandboxSpec()) as workspace:
        seen = await shell(workspace, "cat kept; echo more > made; rm kept")
    assert seen == "theirs"
    assert await provider.list_owned("nonce") == [handle]
    await provider.destroy(handle)
    await provider.destroy(handle)

    assert (theirs / "made").read_text() == "more\n"
    assert {path.stat().st_uid for path in (theirs, *theirs.iterdir())} == {owner}
    assert sorted(os.listdir(theirs)) == ["made"]


async def test_giving_changes_no_owner_in_an_adopted_directory(make: Make, provider: Provider, theirs: Path) -> None:
    handle = await adopt(provider, make, theirs)
    before = (theirs / "kept").stat().st_uid
    if trees.can_chown():
        os.chown(theirs / "kept", before + 1, -1)
    await provider.chown_to_workspace_user(handle)

    assert (theirs / "kept").stat().st_uid == before + trees.can_chown()


async def test_a_directory_is_adopted_once_at_a_time(make: Make, provider: Provider, theirs: Path) -> None:
    first = await adopt(provider, make, theirs)
    (theirs / "inner").mkdir()
    os.chown(theirs / "inner", theirs.stat().st_uid, -1)
    for tree in (theirs, theirs / "inner"):
        with pytest.raises(ProviderFailed, match=first.id):
            await make("default", shared=False, tree=tree)


async def test_what_cannot_be_adopted_is_refused(make: Make, provider: Provider, tmp_path: Path, theirs: Path) -> None:
    (theirs / "link").symlink_to("/usr")
    for tree in (theirs / "link", theirs / "kept", theirs / "gone", tmp_path, tmp_path.parent, Path("usr"), Path("/")):
        with pytest.raises(ProviderFailed):
            await make("default", shared=False, tree=tree)
    with pytest.raises(ProviderFailed, match="share"):
        await make("default", shared=True, tree=theirs)
    assert await provider.list_owned("nonce") == []


async def test_evicting_an_adopted_workspace_leaves_its_user_s_other_processes(
    make: Make, provider: Provider, theirs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    trees.chown_tree(other, (theirs.stat().st_uid))
    first, second = await adopt(provider, make, theirs), await adopt(provider, make, other)
    async with provider.open(second, SandboxSpec()) as workspace:
        await provider.evict(first)
        assert await answers(workspace)


async def answers(workspace: Workspace) -> bool:
    return await shell(workspace, "echo alive") == "alive\n"
