"""Mounts, protected paths, and how workspaces are made, found and removed, on every provider."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.core.errors import CleanUpIncomplete, ProtectedLink, ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Mount
from runner.ports.provider import Provider, SandboxSpec, WorkspaceRequest
from runner.safefs.sealed_trees import open_to_all
from runner.safefs.trees import can_chown, chown
from runner.testing.place import Place, listing, shell

ATTEMPTS = [
    ("echo x > d/P", "Read-only file system"),
    ("echo x >> d/P", "Read-only file system"),
    ("truncate -s 0 d/P", "Read-only file system"),
    ("chmod 777 d/P", "Read-only file system"),
    ("touch d/P", "Read-only file system"),
    ("rm -f d/P", "busy"),
    ("mv d/P other", "busy"),
    ("echo x > n; mv -f n d/P", "busy"),
    ("ln d/P hard", "cross-device"),
    ("ln -s d/P soft; echo x > soft", "Read-only file system"),
    ("umount d/P", "mount"),
]


async def test_home_persists_and_a_fresh_one_does_not(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, 'echo mine > "$HOME/note"')
    async with place.open(SandboxSpec(fresh_home=True)) as workspace:
        fresh = await shell(workspace, f'{listing("$HOME")}; echo lost > "$HOME/other"')
    async with place.open() as workspace:
        again = await shell(workspace, listing("$HOME"))

    assert (fresh, again) == ("", "note\n")


async def test_temporary_files_are_gone_at_the_next_opening(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, "touch ${TMPDIR:-/tmp}/left")
    async with place.open() as workspace:
        assert await shell(workspace, listing("${TMPDIR:-/tmp}")) == ""


async def test_a_tree_that_is_not_writable_stays_untouched(place: Place) -> None:
    place.write("sub/kept", "as it was")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(tree_writable=False)) as workspace:
        assert await shell(workspace, "echo new > sub/kept; rm -r sub; echo more > made") == ""
        seen = await shell(workspace, listing())
    async with place.open() as workspace:
        after = await shell(workspace, f"cat sub/kept; {listing()}")

    assert (seen, after) == ("made\n", "as it wassub\n")


@pytest.mark.parametrize("writable", [True, False])
async def test_the_tree_is_read_from_here_as_its_commands_see_it(place: Place, writable: bool) -> None:
    place.write("kept", "as it was")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(tree_writable=writable)) as workspace:
        assert await shell(workspace, "echo new > kept; echo more > made") == ""
        await workspace.refresh()
        kept = os.open("kept", os.O_RDONLY, dir_fd=workspace.tree)
        with os.fdopen(kept) as file:
            assert file.read() == "new\n"
        assert os.stat("made", dir_fd=workspace.tree).st_size == len("more\n")


async def test_another_tree_can_be_shown_instead_even_one_of_the_host_s_own(place: Place, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "file").write_text("of the commit")
    spec = SandboxSpec(tree=Mount(clean, "/workspace"), tree_writable=False, fresh_home=True)
    async with place.open(spec) as workspace:
        seen = await shell(workspace, f"cat file; echo x > file && cat file; {listing()}")

    assert seen == "of the commitx\nfile\n"
    assert (clean / "file").read_text() == "of the commit"


async def test_output_and_inputs_are_where_the_paths_say(place: Place) -> None:
    (place.handle.private / "runner" / "task.json").write_text("{}")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open() as workspace:
        paths = workspace.paths
        seen = await shell(workspace, f"cat {paths.runner}/task.json; echo report > {paths.output}/report.md")

    assert seen == "{}"
    assert (place.handle.private / "output" / "report.md").read_text() == "report\n"


async def test_a_mounted_incident_can_be_read(place: Place, tmp_path: Path) -> None:
    incident = tmp_path / "incident"
    incident.mkdir()
    (incident / "incident.json").write_text("{}")
    async with place.open(SandboxSpec(mounts=(Mount(incident, "/incident"),))) as workspace:
        assert await shell(workspace, f"cat {workspace.paths.incident}/incident.json") == "{}"


async def test_skills_and_a_kubeconfig_that_is_written_late_can_be_read(place: Place) -> None:
    private = place.handle.private
    for name in ("skills/triage", "kube"):
        (private / name).mkdir(parents=True)
    (private / "skills/triage/SKILL.md").write_text("how")
    mounts = (Mount(private / "skills", "/skills"), Mount(private / "kube", "/root/.kube"))
    async with place.open(SandboxSpec(mounts=mounts)) as workspace:
        paths = workspace.paths
        before = await shell(workspace, f"cat {paths.skills}/triage/SKILL.md; {listing(paths.kube)}")
        (private / "kube/config").write_text("late")
        after = await shell(workspace, f"cat {paths.kube}/config")

    assert (before, after) == ("how", "late")


async def test_skills_and_the_kubeconfig_cannot_be_written(place: Place) -> None:
    private = place.handle.private
    mounts = (Mount(private / "skills", "/skills"), Mount(private / "kube", "/root/.kube"))
    for mount in mounts:
        mount.source.mkdir(mode=0o777)
    async with place.open(SandboxSpec(mounts=mounts)) as workspace:
        said = await shell(workspace, "for d in /skills /root/.kube /root; do echo x > $d/x; mkdir $d/y; done")
        seen = await shell(workspace, "cd /root/.kube && pwd")

    assert len(re.findall("Read-only file system|Permission denied", said)) == 6
    assert seen == "/root/.kube\n"
    assert not any(list(mount.source.iterdir()) for mount in mounts)


async def test_a_read_only_mount_cannot_be_written(place: Place, tmp_path: Path) -> None:
    skills = tmp_path / "skills"
    skills.mkdir(0o777)
    async with place.open(SandboxSpec(mounts=(Mount(skills, "/skills"),))) as workspace:
        said = await shell(workspace, "echo x > /skills/x")

    assert re.search("Read-only file system|Permission denied", said)  # a kernel may ask for permissions first
    assert list(skills.iterdir()) == []


async def test_a_toolchain_is_at_its_own_path(place: Place) -> None:
    tools = Path("/usr/share/base-files")
    async with place.open(SandboxSpec(toolchains=(str(tools),))) as workspace:
        assert (await workspace.run(["test", "-d", str(tools)])).exit.ok


async def test_a_dependency_is_in_the_tree_and_what_is_written_there_is_thrown_away(
    place: Place, tmp_path: Path
) -> None:
    """Also in a tree that is shown instead. The directory that it lies in cannot be moved away."""
    installed, clean = tmp_path / "installed", tmp_path / "clean"
    (installed / "left-pad").mkdir(parents=True)
    (installed / "left-pad" / "index.js").write_text("pad")
    (clean / "app").mkdir(parents=True)
    place.write("app/kept", "mine")
    await place.provider.chown_to_workspace_user(place.handle)
    dependencies = (Mount(installed, "app/node_modules"), Mount(installed, "vendor"))
    script = (
        "cat app/node_modules/left-pad/index.js vendor/left-pad/index.js; mkdir vendor/.cache && echo made; mv app b"
    )
    said = []
    for spec in (
        SandboxSpec(dependencies=dependencies),
        SandboxSpec(dependencies=dependencies, tree=Mount(clean, "/workspace"), tree_writable=False, fresh_home=True),
    ):
        async with place.open(spec) as workspace:
            said.append(await shell(workspace, f"{script} 2>/dev/null || echo busy"))

    assert said == ["padpadmade\nbusy\n" if place.candidate.pins_parents else "padpadmade\n"] * 2
    assert [path.name for path in installed.iterdir()] == ["left-pad"]
    assert not (place.handle.tree / "vendor").exists()
    assert not (clean / "vendor").exists()


async def test_dependencies_are_made_and_then_given_in_tree_and_home(place: Place) -> None:
    """In directories that are shown instead of both, for commands of another workspace."""
    assert place.probe.enforces(Feature.DEPENDENCY_COMMANDS)
    made = place.home / "made"
    for name in ("tree", "home"):
        (made / name).mkdir(parents=True)
        if place.candidate.own_users and can_chown():
            chown(made / name, place.handle.uid)
    async with place.open(SandboxSpec(tree=Mount(made / "tree", "/workspace", True), home=made / "home")) as workspace:
        await shell(workspace, "mkdir lib; echo tree > lib/x; mkdir -p ~/go/pkg; echo home > ~/go/pkg/x")
    open_to_all(made)
    given = (Mount(made / "tree" / "lib", "lib"), Mount(made / "home" / "go" / "pkg", "~/go/pkg"))
    script = "cat lib/x ~/go/pkg/x; echo more > lib/x; touch lib/y ~/go/pkg/y; mv ~/go ~/other 2>/dev/null; echo ~/go/*"
    for spec in (SandboxSpec(dependencies=given), SandboxSpec(dependencies=given, fresh_home=True)):
        async with place.open(spec) as workspace:
            assert await shell(workspace, script) == f"tree\nhome\n{workspace.paths.home}/go/pkg\n"
    async with place.open() as workspace:
        assert await shell(workspace, "ls; cd ~/go; ls") == ""
    assert [path.name for path in sorted(made.rglob("*"))] == ["home", "go", "pkg", "x", "tree", "lib", "x"]


async def test_a_home_that_is_a_link_takes_no_dependency(place: Place, tmp_path: Path) -> None:
    async with place.open() as workspace:
        await shell(workspace, "ln -s /etc ~/go")
    with pytest.raises(ProviderFailed, match="`~/go/pkg/` cannot be shown: Not a directory"):
        async with place.open(SandboxSpec(dependencies=(Mount(tmp_path, "~/go/pkg"),))):
            pass


async def test_a_dependency_never_hides_what_the_tree_has(place: Place, tmp_path: Path) -> None:
    place.write("vendor/kept", "mine")
    await place.provider.chown_to_workspace_user(place.handle)

    with pytest.raises(ProviderFailed, match=r"`vendor` is in the tree already|cannot protect paths"):
        async with place.open(SandboxSpec(dependencies=(Mount(tmp_path, "vendor"),))):
            pass


async def test_paths_are_the_same_on_every_provider_with_mounts(place: Place) -> None:
    async with place.open() as workspace:
        assert workspace.paths.workspace == "/workspace"
        assert workspace.paths.home == "/home/agent"


async def test_a_lost_workspace_is_said_so(place: Place) -> None:
    os.rename(place.handle.tree, place.handle.tree.with_name("elsewhere"))
    try:
        with pytest.raises(WorkspaceLost):
            async with place.open():
                pytest.fail("opened")
    finally:
        os.rename(place.handle.tree.with_name("elsewhere"), place.handle.tree)


@pytest.mark.scenario("ISO-10", only="provider")
async def test_protected_paths_are_read_only_in_place_and_the_rest_is_writable(place: Place) -> None:
    place.write("AGENTS.md", "rules")
    place.write(".factory/hooks/one", "hook")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(protected=("AGENTS.md", ".factory/"))) as workspace:
        seen = await shell(workspace, "cat AGENTS.md .factory/hooks/one; echo ok > free; touch .factory/new")

    assert seen.startswith("ruleshook")
    assert "Read-only file system" in seen
    assert (place.handle.tree / "free").exists()


@pytest.mark.scenario("ISO-11", only="provider")
async def test_writing_a_protected_file_fails_and_changes_nothing(place: Place) -> None:
    kept = place.write("d/P", "rules")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(protected=("d/P",))) as workspace:
        for attempt, words in ATTEMPTS:
            seen = await shell(workspace, attempt)

            assert words.lower() in seen.lower(), attempt
            assert kept.read_text() == "rules", attempt


@pytest.mark.scenario("ISO-12", only="provider")
async def test_protected_paths_that_do_not_exist_are_no_error_and_cannot_be_created(place: Place) -> None:
    place.write("sub/file", "")
    await place.provider.chown_to_workspace_user(place.handle)
    before = sorted(str(p) for p in place.handle.tree.rglob("*"))
    paths = ("AGENTS.md", ".factory/", "no/such/parent.md", "sub/new")
    async with place.open(SandboxSpec(protected=paths)) as workspace:
        for path in paths:
            forging = f"mkdir -p $(dirname {path}); echo forged > {path}; rm -rf {path.split('/')[0]}"
            assert await shell(workspace, forging) != "", path

    left = sorted(str(p) for p in place.handle.tree.rglob("*"))
    assert [p for p in left if p not in before] == []
    assert not any((place.handle.tree / path).exists() for path in paths)


async def test_moving_the_parent_of_a_protected_path_away_fails(place: Place) -> None:
    place.write("a/b/P.md", "rules")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(protected=("a/b/P.md",))) as workspace:
        seen = await shell(workspace, "mv a q; mv a/b a/c; mkdir -p a/b; echo forged > a/b/P.md")

    assert seen.count("busy") == 2
    assert (place.handle.tree / "a/b/P.md").read_text() == "rules"


@pytest.mark.parametrize("path", ["link", "link/below", "dangling"])
async def test_a_protected_path_that_is_a_link_is_refused(place: Place, path: str) -> None:
    (place.handle.tree / "link").symlink_to("/etc")
    (place.handle.tree / "dangling").symlink_to("nowhere")
    with pytest.raises(ProtectedLink, match=path.split("/", maxsplit=1)[0]):
        async with place.open(SandboxSpec(protected=(path,))):
            pytest.fail("opened")


async def test_a_stand_in_that_a_crash_left_is_removed(place: Place) -> None:
    _leave(place.write("AGENTS.md", ""))
    async with place.open(SandboxSpec(protected=("AGENTS.md",))) as workspace:
        await workspace.run(["true"])

    assert not (place.handle.tree / "AGENTS.md").exists()


async def test_evicting_removes_the_stand_ins_of_a_killed_opening_and_nothing_else(place: Place) -> None:
    """Regression: the patch of a recovered run had the empty files that stood for missing protected paths."""
    _leave(place.write("deep/AGENTS.md", ""))
    rules = place.handle.tree / "rules"
    rules.mkdir()
    _leave(rules)
    place.write("closed", "").chmod(0)
    place.write("kept/file", "work")
    (place.handle.tree / "kept").chmod(0)
    place.write("empty", "")

    await place.provider.evict(place.handle)

    (place.handle.tree / "kept").chmod(0o755)
    found = sorted(str(path.relative_to(place.handle.tree)) for path in place.handle.tree.rglob("*"))
    assert found == ["closed", "deep", "empty", "kept", "kept/file"]


def _leave(path: Path) -> None:
    """Make of an empty file or directory what stands for a missing one."""
    path.chmod(0)
    os.utime(path, (1, 1))


async def test_a_workspace_is_found_by_its_nonce_only(place: Place) -> None:
    records = place.handle.private.parent
    (records / "decoy.json").write_text('{"provider": "elsewhere", "nonce": "nonce-of-this-store"}')
    (records / "torn.json").write_text("{")
    (records / "list.json").write_text("[]")

    assert await place.provider.list_owned(place.nonce) == [place.handle]
    assert await place.provider.list_owned("another") == []


async def test_destroying_twice_is_no_error(place: Place) -> None:
    await place.provider.destroy(place.handle)
    await place.provider.destroy(place.handle)

    assert await place.provider.list_owned(place.nonce) == []


async def test_destroying_a_half_made_workspace_removes_the_rest(place: Place) -> None:
    (place.handle.private / "home").rmdir()
    place.handle.tree.rmdir()

    await place.provider.destroy(place.handle)

    assert not place.handle.private.exists()


async def test_destroying_leaves_nothing_of_a_hostile_tree(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    tree = place.handle.tree
    (tree / "link").symlink_to(outside)
    for name in (b"new\nline", b"\xff\xfe", b"-rf", b"x" * 255):
        (Path(os.fsdecode(os.fsencode(tree) + b"/" + name))).touch()
    os.mkfifo(tree / "fifo")
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(2000):  # 10,000 bytes of path: longer than any system call takes
        os.mkdir("deep!", dir_fd=fd)
        inner = os.open("deep!", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner").chmod(0)
    (tree / "closed").chmod(0)

    await place.provider.destroy(place.handle)

    assert not tree.exists()
    assert (outside / "kept").read_text() == "kept"


async def test_a_handle_that_points_elsewhere_is_refused(place: Place, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for forged in (replace(place.handle, tree=victim), replace(place.handle, id="../victim")):
        with pytest.raises(ProviderFailed):
            await place.provider.destroy(forged)

    assert victim.exists()


async def test_directories_without_a_record_are_left_and_named(place: Place) -> None:
    record = place.handle.private.with_name(f"{place.handle.id}.json")
    text = record.read_text()
    record.unlink()
    with pytest.raises(CleanUpIncomplete, match=place.handle.id):
        await place.provider.destroy(place.handle)

    assert place.handle.tree.exists()
    record.write_text(text)


async def test_an_id_that_is_a_path_is_refused(provider: Provider) -> None:
    with pytest.raises(ProviderFailed):
        await provider.create(WorkspaceRequest(id="../x", run="run-1", nonce="nonce"))


async def test_making_a_workspace_again_is_refused_and_leaves_the_first(place: Place) -> None:
    place.write("work", "precious")
    with pytest.raises(ProviderFailed):
        await place.provider.create(WorkspaceRequest(id=place.handle.id, run="run-2", nonce=place.nonce))

    assert (place.handle.tree / "work").read_text() == "precious"


async def test_files_that_the_host_wrote_belong_to_the_workspace_user_after_chown(place: Place, tmp_path: Path) -> None:
    place.write("a/b/c", "")
    (place.handle.tree / "out").symlink_to(tmp_path)
    owner = tmp_path.stat().st_uid

    await place.provider.chown_to_workspace_user(place.handle)

    assert {p.lstat().st_uid for p in place.handle.tree.rglob("*")} == {place.handle.uid}
    assert tmp_path.stat().st_uid == owner
