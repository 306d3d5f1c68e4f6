"""What the image of a server is built from, and what is refused before anything is built."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from runner import __version__
from runner.core.errors import UsageError
from runner.core.settings import shipped
from runner.ops.host import image
from runner.ops.host.recipe import ImageRecipe
from runner.ops.host.server_image import DOCKERFILE, TAG, context
from tests.support.situations import Project
from tests.support.wheel import ROOT

FOLDER = shipped("runners") / "server"
WHEEL = f"plan_runner-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
INSTRUCTIONS = (FOLDER / "Dockerfile").read_text()


def members(recipe: ImageRecipe, wheel: Path | None) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(context(recipe, wheel))) as tar:
        return {entry.name: file.read() for entry in tar if (file := tar.extractfile(entry))}


def made(folder: Path, name: str = WHEEL) -> Path:
    (folder / name).write_bytes(b"a wheel")
    return folder / name


def test_the_context_has_recipe_wheel_and_what_reaches_the_mirrors(tmp_path: Path) -> None:
    wheel, settings = made(tmp_path), tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = x\n")

    found = members(ImageRecipe(TAG, pip_conf=settings), wheel)

    shared = {"image/build.sh", "host/pip.conf", "wheel/wheel.txt", f"wheel/{WHEEL}"}
    assert set(found) == {f"server/{path.name}" for path in FOLDER.iterdir()} | shared
    assert DOCKERFILE in found
    assert found["wheel/wheel.txt"] == f"./{WHEEL}\n".encode()
    assert found[f"wheel/{WHEEL}"] == b"a wheel"
    assert context(ImageRecipe(TAG), wheel) == context(ImageRecipe("other", base="other"), wheel)


def test_the_name_is_that_which_the_build_gives_a_wheel() -> None:
    name, version, _, tags = parse_wheel_filename(WHEEL)

    assert (name, str(version), {tag.platform for tag in tags}) == (
        "plan-runner",
        __version__,
        {"manylinux_2_28_x86_64"},
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("requests-2.0.0-py3-none-any.whl", "is no wheel of plan-runner"),
        ("plan_runner-0.1.0.tar.gz", "is no wheel of plan-runner"),
        (WHEEL.replace(__version__, "99.0"), f"is version 99.0, and this runner is {__version__}"),
        (WHEEL.replace("x86_64", "riscv64"), "is no wheel of plan-runner"),
    ],
)
def test_a_wheel_of_something_else_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"`{name}` {words}")):
        context(ImageRecipe(TAG), made(tmp_path, name))


def test_a_wheel_that_can_not_be_read_is_bad_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WHEEL)

    with pytest.raises(UsageError, match="cannot be read: not a regular file"):
        context(ImageRecipe(TAG), tmp_path / WHEEL)


def test_a_runner_of_a_checkout_wants_a_wheel_and_one_of_an_index_names_its_version(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not installed from a package index") as refused:
        context(ImageRecipe(TAG), None)
    record = tmp_path / f"plan_runner-{__version__}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plan-runner\nVersion: {__version__}\n")
    words = ["image", "build", "--server", "--save-context", str(tmp_path / "context.tar")]
    subprocess.run(
        [sys.executable, "-m", "runner", *words], check=True, cwd="/", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )

    assert refused.value.hint is not None
    assert f"--wheel dist/{WHEEL}" in refused.value.hint
    with tarfile.open(tmp_path / "context.tar") as tar:
        file = tar.extractfile("wheel/wheel.txt")
        assert file is not None
        assert file.read() == f"plan-runner=={__version__}\n".encode()


@pytest.mark.parametrize(
    "words", [["--wheel", "x"], ["--pip-conf", "x"], ["--server", "--npmrc", "x"]], ids=lambda words: words[-2]
)
def test_an_option_of_the_other_image_is_bad_input(project: Project, words: list[str]) -> None:
    done = project.runner("image", "build", *words)

    assert (done.code, f"error[cli.usage]: `{words[-2]}` is for an image that is built with it" in done.err) == (
        2,
        True,
    )


def test_the_image_runs_nothing_as_root_and_has_no_layer_of_the_stages_that_install() -> None:
    last = INSTRUCTIONS.split("\nFROM ")[-1]
    words = {line.split()[0] for line in last.splitlines()[1:] if line.strip()}

    assert last.startswith("scratch\n")
    assert words <= {"COPY", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert "\nUSER 1000:1000\n" in last


def test_each_package_is_locked_with_its_bytes_and_has_the_version_that_was_tested() -> None:
    def pins(lock: Path) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)(?:\[\S+\])?==([^\s;]+)", lock.read_text(), re.MULTILINE))

    ours, tested = pins(FOLDER / "requirements.lock"), pins(ROOT / "tests" / "requirements.lock")
    product = pins(ROOT / "requirements.lock")

    assert {"starlette", "hypercorn", "psycopg", "botocore", "wsproto", "mcp", "opentelemetry-sdk"} <= ours.keys()
    assert {name: version for name, version in ours.items() if name in product | tested} == {
        name: (product | tested)[name] for name in ours if name in product | tested
    }
    assert not {"hatchling", "ziglang", "pytest"} & ours.keys()
    entries = (FOLDER / "requirements.lock").read_text().split("\n    # via")[:-1]
    assert all("--hash=sha256:" in entry for entry in entries)


def test_the_image_of_an_incident_has_nothing_of_it() -> None:
    assert [name for name in image.inputs() if "server" in name] == []
