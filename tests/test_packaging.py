"""The wheel is whole: what the product ships beside its code is in it, and is found there.

And nothing that comes with it is compiled where it is installed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runner.guest import binary, build
from runner.guest.framing import Parser, Type
from tests.needs import Component

ROOT = Path(__file__).parent.parent
UV = str(Path(sys.executable).with_name("uv"))
UNREACHABLE = 2  # uv's exit status when the index does not answer; 1 when it has no such wheels


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout, unpacked as an installer does."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, folder / "site"))
            path.chmod((member.external_attr >> 16) & 0o777 or 0o644)
    return folder / "site"


def test_the_shipped_folders_are_found_with_their_executable_bits(installed: Path) -> None:
    program = (
        "from runner.settings import shipped as s; print(*(s(f) for f in ('schemas','manifests','runners','skills')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(installed)},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )

    folders = [Path(word) for word in done.stdout.split()]
    assert all(folder.is_relative_to(installed) and any(folder.iterdir()) for folder in folders)
    assert (folders[2] / "script.sh").stat().st_mode & 0o111
    assert {"Dockerfile", "build.sh", "package-lock.json"} <= {path.name for path in (folders[2] / "image").iterdir()}
    assert (folders[2] / "context" / ".goosehints").is_file()


def test_the_command_works_from_the_wheel(installed: Path) -> None:
    quickstart = installed / "runner" / "_files" / "manifests" / "quickstart"

    done = subprocess.run(
        [sys.executable, "-m", "runner", "validate", str(quickstart)],
        env={"PYTHONPATH": str(installed), "HOME": "/nonexistent"},
        cwd="/",
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout) == (0, "5 documents fine\n"), done.stderr


def test_the_quickstart_of_the_wheel_runs_where_it_is_copied_to(installed: Path, tmp_path: Path) -> None:
    shipped = installed / "runner" / "_files" / "manifests" / "quickstart"
    before = {path: path.stat().st_mtime_ns for path in shipped.rglob("*")}

    def runner(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runner", *map(str, words)]
        env = {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    refused = runner("apply", shipped)
    copied = runner("init", "--quickstart", "first")
    applied = runner("apply", "first")

    assert (refused.returncode, "`runner init --quickstart DIR`" in refused.stderr) == (2, True), refused.stderr
    assert (copied.returncode, copied.stdout.splitlines()[-1]) == (0, "Next: runner apply first"), copied.stderr
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert "SUCCEEDED selftest" in applied.stdout
    assert "SUCCEEDED triage" in applied.stdout
    assert {path: path.stat().st_mtime_ns for path in shipped.rglob("*")} == before


def test_the_wheel_has_each_program_for_each_machine_as_it_was_recorded(installed: Path) -> None:
    folder = installed / "runner" / "guest" / "bin"
    programs = [f"{name}-{machine}" for name in build.PROGRAMS for machine in build.MACHINES]

    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", *sorted(programs)]
    assert [(folder / program).read_bytes()[18] for program in programs] == 2 * [62, 183]  # e_machine: x86-64, AArch64


def test_the_guest_program_of_the_wheel_starts(installed: Path) -> None:
    found = binary.find(installed / "runner" / "guest" / "bin")
    assert found is not None
    ours, theirs = socket.socketpair()
    ours.settimeout(10)

    with subprocess.Popen([found.path], stdin=theirs), ours:
        theirs.close()
        first = next(Parser().feed(ours.recv(1 << 16)))

    assert first.type is Type.HELLO


def test_every_module_of_the_wheel_is_imported_without_what_builds_it(installed: Path) -> None:
    program = (
        "import importlib, pkgutil, runner, sys\n"
        "for module in pkgutil.walk_packages(runner.__path__, 'runner.'):\n"
        "    module.name == 'runner.__main__' or importlib.import_module(module.name)\n"
        "print(*(name for name in ('runner.guest.build', 'hatchling', 'ziglang') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(installed)},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout == "\n"


def has_wheels(requirements: Path, machine: str, python: str, scratch: Path) -> bool:
    """Whether the index has a wheel of each requirement; the test is skipped where it cannot be reached."""
    words = ["pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--target", str(scratch)]
    where = ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", python]
    done = subprocess.run([UV, *words, *where, "-r", str(requirements)], capture_output=True, text=True)
    unreachable = done.stderr.strip().splitlines()[0] if done.returncode == UNREACHABLE else None
    Component("package index", lambda: unreachable, "a network").require()
    return done.returncode == 0


@pytest.mark.parametrize("machine", build.MACHINES)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_each_dependency_has_a_wheel_for_each_python_and_machine(python: str, machine: str, tmp_path: Path) -> None:
    assert has_wheels(ROOT / "requirements.lock", machine, python, tmp_path / "target")


def test_a_dependency_that_would_be_compiled_is_found(tmp_path: Path) -> None:
    """The first composer that we had: it has no wheel, and a machine without Python's headers cannot install it."""
    (tmp_path / "requirements").write_text("ruamel-yaml-clibz==0.3.7\n")

    assert not has_wheels(tmp_path / "requirements", "x86_64", "3.11", tmp_path / "target")
