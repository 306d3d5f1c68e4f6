"""What the image k8s-triage-agent is built from, before anything is built."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import ContextNotWritten, UsageError
from runner.core.settings import Settings, shipped
from runner.ops.host import image
from runner.ops.host.recipe import MAX_HOST_FILE, ImageRecipe, save_context

FOLDER = shipped("runners") / "image"
ROOT = FOLDER.parents[1]
PACKAGE = json.loads((FOLDER / "package.json").read_text())
LOCKED = json.loads((FOLDER / "package-lock.json").read_text())["packages"]


def recipe_of(tag: str = image.NAME, **more: Any) -> ImageRecipe:
    return ImageRecipe(tag, **more)


def members(recipe: ImageRecipe) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(image.context(recipe))) as tar:
        return {entry.name: entry for entry in tar}


def test_what_is_locked_is_what_is_asked_for() -> None:
    assert LOCKED[""]["dependencies"] == PACKAGE["dependencies"]
    assert {name: LOCKED[f"node_modules/{name}"]["version"] for name in PACKAGE["dependencies"]} == PACKAGE[
        "dependencies"
    ]


def test_the_bytes_of_every_package_are_locked_and_its_place_is_not() -> None:
    packages = {name: entry for name, entry in LOCKED.items() if name}

    assert all(len(base64.b64decode(entry["integrity"].removeprefix("sha512-"))) == 64 for entry in packages.values())
    assert [name for name, entry in packages.items() if "resolved" in entry] == []


def test_no_file_names_a_host() -> None:
    found = [word for path in FOLDER.iterdir() for word in re.findall(r"https?://\S+", path.read_text())]

    assert found == []


@pytest.mark.parametrize("where", ["tests/support/components.py", "docs/oncall/setup.md"])
def test_tests_and_documentation_have_the_versions_of_the_image(where: str) -> None:
    told = dict(re.findall(r"(@?[a-z][\w/-]+)@(\d+\.\d+\.\d+)", (ROOT / where).read_text()))
    ours = {package: version for package, version in told.items() if package in PACKAGE["dependencies"]}

    assert ours
    assert ours.items() <= PACKAGE["dependencies"].items()


def test_kubectl_is_of_1_31_and_helm_of_3() -> None:
    assert image.pins()["kubectl"].startswith("1.31.")
    assert image.pins()["helm"].startswith("3.")


def test_every_tool_that_is_pinned_is_asked_for_its_version_by_name() -> None:
    assert sorted(image.pins()) == ["claude", "codex", "gemini", "goose", "helm", "kubectl", "node"]


def test_the_last_stage_runs_nothing_and_has_no_build_argument_or_layer_of_the_others() -> None:
    stages = (FOLDER / "Dockerfile").read_text().split("\nFROM ")
    words = [line.split()[0] for line in stages[-1].splitlines()[1:] if line.strip()]

    assert stages[-1].startswith("scratch\n")
    assert set(words) <= {"COPY", "ENV", "USER", "WORKDIR", "CMD"}
    assert "USER agent" in stages[-1]
    assert [line for stage in stages[1:] for line in stage.splitlines() if line.startswith(("ARG", "ADD"))] == []


def test_the_context_has_what_this_runner_ships_with_its_modes() -> None:
    found = members(recipe_of())

    assert {name for name in found if not name.startswith("host")} == set(image.inputs())
    assert {"image/Dockerfile", "runners/common.sh", "runners/context/GEMINI.md"} <= set(found)
    assert {"skills/k8s-troubleshooter/SKILL.md", "host"} <= set(found)
    assert {name: found[name].mode for name in ("runners/claude.sh", "runners/common.sh")} == {
        "runners/claude.sh": 0o755,
        "runners/common.sh": 0o644,
    }


def test_equal_files_give_an_equal_context_so_that_a_builder_finds_what_it_has_built() -> None:
    assert image.context(recipe_of()) == image.context(recipe_of(base="other", tag="other"))
    assert {(entry.mtime, entry.uid) for entry in members(recipe_of()).values()} == {(0, 0)}


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ("deb https://mirror.example.org bookworm main\n", "apt.list"),
        ("Types: deb\nURIs: https://mirror.example.org\n", "apt.sources"),
    ],
)
def test_what_the_host_reaches_its_mirrors_with_is_in_the_context_and_not_among_the_inputs(
    sources: str, name: str, tmp_path: Path
) -> None:
    before = image.digest()
    for file, text in (("ca", "PEM"), ("npmrc", "registry=x"), ("apt", sources)):
        (tmp_path / file).write_text(text)

    found = members(recipe_of(ca=tmp_path / "ca", npmrc=tmp_path / "npmrc", apt_sources=tmp_path / "apt"))

    assert sorted(entry for entry in found if entry.startswith("host/")) == [
        f"host/{name}",
        "host/ca.crt",
        "host/npmrc",
    ]
    assert image.digest() == before


def test_a_file_of_the_host_that_can_not_be_read_is_bad_input(tmp_path: Path) -> None:
    """Neither a FIFO that nobody writes to nor a file without end is waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * (MAX_HOST_FILE + 1))

    for path, why in (
        (tmp_path / "nothing", "No such file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "large", "larger than 4 MiB"),
    ):
        with pytest.raises(UsageError, match=f"cannot be read: {why}"):
            image.context(recipe_of(ca=path))


def test_a_saved_context_is_a_new_file_of_its_owner_alone(tmp_path: Path) -> None:
    """It may hold a token, which neither a file that others can read nor a link may get."""
    before = os.umask(0)
    try:
        save_context(image.context(recipe_of()), tmp_path / "new")
    finally:
        os.umask(before)
    (tmp_path / "there").write_text("as it was")
    (tmp_path / "link").symlink_to("elsewhere")

    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").read_bytes() == image.context(recipe_of())
    for name in ("there", "link"):
        with pytest.raises(ContextNotWritten, match="exists already"):
            save_context(image.context(recipe_of()), tmp_path / name)
    with pytest.raises(ContextNotWritten, match="No such file or directory"):
        save_context(image.context(recipe_of()), tmp_path / "nowhere" / "new")
    assert (tmp_path / "there").read_text() == "as it was"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (recipe_of(ca=Path("/nonexistent")), "`/nonexistent` cannot be read"),
        (recipe_of(base=""), "`` is not the name of an image"),
        (recipe_of(tag=""), "`` is not the name of an image"),
    ],
    ids=["a file that is not there", "no base", "no tag"],
)
async def test_what_is_asked_for_is_looked_at_before_the_daemon_is(
    recipe: ImageRecipe, words: str, tmp_path: Path
) -> None:
    settings = Settings.from_env({"HOME": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/no-daemon"})

    with pytest.raises(UsageError, match=words):
        await image.build(settings, recipe, print)


def test_a_tool_of_another_version_than_the_pinned_one_is_wrong() -> None:
    assert image.judge("helm", "3.17.3", "3.17.3").is_right
    assert image.judge("rg", "13.0.0", None).is_right
    assert (image.judge("helm", "3.16.1", "3.17.3").is_right, image.judge("helm", "3.16.1", "3.17.3").told) == (
        False,
        "3.16.1, not 3.17.3",
    )


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"/skills/a": "1", "/runners/b": "2"}, "2 files, as this runner has them"),
        ({"/skills/a": "1", "/runners/b": "0"}, "these differ from this runner's: /runners/b"),
        ({"/runners/b": "2", "/runners/c": "3"}, "these differ from this runner's: /runners/c and 1 more"),
    ],
    ids=["equal", "altered", "one lacks, one is too many"],
)
def test_files_that_differ_from_those_of_this_runner_are_named(there: dict[str, str], told: str) -> None:
    found = image.compare({"/skills/a": "1", "/runners/b": "2"}, there)

    assert (found.told, found.is_right) == (told, told.startswith("2 files"))


def test_context_files_must_be_there_be_this_runners_and_belong_to_the_images_user() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for source, uid in (("GEMINI.md", 1000), (".goosehints", 0)):
            text = (FOLDER.parent / "context" / source).read_bytes()
            entry = tarfile.TarInfo(f"agent/{source}")
            entry.size, entry.uid = len(text), uid
            tar.addfile(entry, io.BytesIO(text))

    found = {one.what.removeprefix("/home/agent/"): one.told for one in image.of_home(buffer.getvalue())}

    assert found == {
        "GEMINI.md": "as this runner has it",
        ".goosehints": "of user 0, not 1000",
        ".config/goose/config.yaml": "not there",
    }
    assert not any(one.is_right for one in image.of_home(b""))
