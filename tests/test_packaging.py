"""The wheels are whole: what the product ships beside its code is in them, and is found there.

And nothing that comes with them is compiled where they are installed.
"""

from __future__ import annotations

import platform
import re
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from runner import DISTRIBUTION
from runner.guest import binary, build
from runner.guest.framing import Parser, Type
from tests.support.needs import Component
from tests.support.wheel import make_wheel, unpack

ROOT = Path(__file__).parent.parent
UV = str(Path(sys.executable).with_name("uv"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
E_MACHINE = {"x86_64": 62, "aarch64": 183}  # of ELF
STRANGER = re.compile(r"(pip|pipx|tool) (install|upgrade)( -\S+)* runner\b")
COMMAND = "from runner.__main__ import entry; sys.exit(entry())"
UNREACHABLE = 2  # uv's exit status when the index does not answer; 1 when it has no such wheels


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel for each machine, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    return {machine: make_wheel(folder, machine) for machine in build.MACHINES}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's wheel, unpacked as an installer does."""
    return unpack(wheels[platform.machine()], tmp_path_factory.mktemp("site"))


def python(installed: Path, *words: str | Path, cwd: Path = Path("/"), **env: str) -> subprocess.CompletedProcess[str]:
    """The interpreter with the wheel on its path and nothing of this checkout."""
    command = [sys.executable, *map(str, words)]
    env = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", **env}
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def test_the_shipped_folders_are_found_with_their_executable_bits(installed: Path) -> None:
    folders = ("schemas", "manifests", "runners", "skills")
    program = f"from runner.core.settings import shipped; print(*(shipped(folder) for folder in {folders}))"
    done = python(installed, "-c", program)

    found = [Path(word) for word in done.stdout.split()]
    assert all(folder.is_relative_to(installed) and any(folder.iterdir()) for folder in found)
    assert (found[2] / "script.sh").stat().st_mode & 0o111
    assert {"Dockerfile", "build.sh", "package-lock.json"} <= {path.name for path in (found[2] / "image").iterdir()}
    assert (found[2] / "context" / ".goosehints").is_file()
    templates = Path("runner", "report", "html", "templates")
    assert {path.name for path in (installed / templates).rglob("*")} == {p.name for p in (ROOT / templates).rglob("*")}


def test_the_command_works_from_the_wheel(installed: Path) -> None:
    quickstart = installed / "runner" / "_files" / "manifests" / "quickstart"

    done = python(installed, "-m", "runner", "validate", quickstart, HOME="/nonexistent")

    assert (done.returncode, done.stdout) == (0, "5 documents fine\n"), done.stderr


def test_the_quickstart_of_the_wheel_runs_where_it_is_copied_to(installed: Path, tmp_path: Path) -> None:
    shipped = installed / "runner" / "_files" / "manifests" / "quickstart"
    before = {path: path.stat().st_mtime_ns for path in shipped.rglob("*")}

    def runner(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return python(installed, "-m", "runner", *words, cwd=tmp_path, HOME=str(tmp_path))

    refused = runner("apply", shipped)
    copied = runner("init", "--quickstart", "first")
    applied = runner("apply", "first")

    assert (refused.returncode, "copy it to a place of your own: runner init --quickstart DIR" in refused.stderr) == (
        2,
        True,
    ), refused.stderr
    assert (copied.returncode, copied.stdout.splitlines()[-1]) == (0, "Next: runner apply first"), copied.stderr
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert "SUCCEEDED selftest" in applied.stdout
    assert "SUCCEEDED triage" in applied.stdout
    assert {path: path.stat().st_mtime_ns for path in shipped.rglob("*")} == before


@pytest.mark.parametrize("machine", build.MACHINES)
def test_a_wheel_has_the_programs_of_its_machine_as_they_were_recorded(
    machine: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels[machine]) as archive:
        inside = [name for name in archive.namelist() if name.startswith("runner/guest/bin/")]
        archive.extractall(tmp_path, inside)
    folder = tmp_path / "runner" / "guest" / "bin"
    programs = [f"{name}-{machine}" for name in build.PROGRAMS]

    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", *sorted(programs)]
    assert {(folder / program).read_bytes()[18] for program in programs} == {E_MACHINE[machine]}


@pytest.mark.parametrize("machine", build.MACHINES)
def test_pip_takes_the_wheel_for_its_machine_only(machine: str, wheels: dict[str, Path]) -> None:
    _, _, _, tags = parse_wheel_filename(wheels[machine].name)

    assert {str(tag) for tag in tags} == {f"py3-none-manylinux_2_28_{machine}"}
    with zipfile.ZipFile(wheels[machine]) as archive:
        [told] = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Root-Is-Purelib: false\nTag: py3-none-manylinux_2_28_{machine}\n" in archive.read(told).decode()


def test_a_machine_that_runner_does_not_work_on_gets_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHEEL_MACHINE", "riscv64")

    with pytest.raises(RuntimeError, match="x86_64 and aarch64 only, not on riscv64"):
        build.wheel_machine()


def test_another_system_gets_no_wheel_unless_its_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("WHEEL_MACHINE", raising=False)

    with pytest.raises(RuntimeError, match="runner works on Linux only"):
        build.wheel_machine()

    monkeypatch.setenv("WHEEL_MACHINE", "aarch64")
    assert build.wheel_machine() == "aarch64"


def test_the_distribution_has_one_name(wheels: dict[str, Path]) -> None:
    names = {parse_wheel_filename(wheel.name)[0] for wheel in wheels.values()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert names == {project["name"]} == {DISTRIBUTION}
    assert list(project["scripts"]) == ["runner"]


def test_nothing_here_installs_the_distribution_of_another() -> None:
    texts = [path for end in ("md", "yml", "py", "sh") for path in ROOT.rglob(f"*.{end}") if ".venv" not in path.parts]
    found = [path for path in texts if STRANGER.search(path.read_text())]

    assert found == []


def test_the_pythons_that_are_named_are_the_ones_that_have_wheels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [words.rpartition(" ")[2] for words in project["classifiers"] if ":: Python :: 3." in words]

    assert (named, project["requires-python"]) == (PYTHONS, f">={PYTHONS[0]}")


@pytest.mark.parametrize(
    ("system", "way", "start"),
    [
        ("darwin", "limactl start", COMMAND),
        ("win32", "WSL 2", COMMAND),
        ("freebsd14", "machine", "runpy.run_module('runner', run_name='__main__')"),
    ],
    ids=["darwin", "win32", "freebsd14, as a module"],
)
def test_another_system_gets_a_sentence(start: str, system: str, way: str, installed: Path) -> None:
    """As far as it can be shown here: with another name of the system, and without what only Unix has."""
    absent = "sys.modules.update(dict.fromkeys(('fcntl', 'grp', 'pwd', 'resource', 'termios')))"
    launcher = f"import runpy, sys; {absent}; sys.platform = {system!r}; {start}"
    done = python(installed, "-c", launcher)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error[host.not-linux]: runner works on Linux only, and this is `{system}`\n")
    assert way in done.stderr.splitlines()[1]
    assert len(done.stderr.splitlines()) == 2


def test_the_guest_program_of_the_wheel_starts(installed: Path) -> None:
    found = binary.find(installed / "runner" / "guest" / "bin")
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
    done = python(installed, "-c", program)

    assert done.stdout == "\n", done.stderr


def test_the_doctor_names_another_distribution_that_has_a_package_runner(installed: Path, tmp_path: Path) -> None:
    """As pip leaves it when ours comes second; when it comes first nothing of us starts any more."""
    rival = tmp_path / "rival-1.0.dist-info"
    rival.mkdir()
    (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (rival / "RECORD").write_text("runner/__init__.py,,\nrival-1.0.dist-info/METADATA,,\n")

    done = python(installed, "-m", "runner", "doctor", PYTHONPATH=f"{installed}:{tmp_path}", HOME=str(tmp_path))

    assert "✗ package    `rival` has a package `runner` too" in done.stdout, done.stderr
    assert f"= hint: install runner by itself: `pipx install {DISTRIBUTION}`" in done.stdout
    assert done.stdout.count("✗ package") == 1


def has_wheels(requirements: list[Path], machine: str, python: str, scratch: Path) -> bool:
    """Whether the index has a wheel of each requirement; the test is skipped where it cannot be reached."""
    words = ["pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--target", str(scratch)]
    where = ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", python]
    files = [word for path in requirements for word in ("-r", str(path))]
    done = subprocess.run([UV, *words, *where, *files], capture_output=True, text=True)
    unreachable = done.stderr.strip().splitlines()[0] if done.returncode == UNREACHABLE else None
    Component("package index", lambda: unreachable, "a network").require()
    return done.returncode == 0


@pytest.mark.parametrize("machine", build.MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_a_wheel_for_each_python_and_machine(python: str, machine: str, tmp_path: Path) -> None:
    locks = [ROOT / "requirements.lock", ROOT / "runners" / "server" / "requirements.lock"]
    assert has_wheels(locks, machine, python, tmp_path / "target")


def test_a_dependency_that_would_be_compiled_is_found(tmp_path: Path) -> None:
    """The first composer that we had: it has no wheel, and a machine without Python's headers cannot install it."""
    (tmp_path / "requirements").write_text("ruamel-yaml-clibz==0.3.7\n")

    assert not has_wheels([tmp_path / "requirements"], "x86_64", "3.11", tmp_path / "target")
