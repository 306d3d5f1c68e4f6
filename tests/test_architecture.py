"""The shape of the code is a promise: imports go down, importing does nothing, start-up stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef

LAYERS = [  # top first; rooms in one set do not import each other
    {"__main__"},
    {"cli"},
    {"server"},
    {"ops"},
    {"testing"},
    {"fake_model"},
    {"client"},
    {"providers", "gateway", "mcp", "agents", "git", "store", "artifacts", "telemetry"},
    {"cluster"},
    {"sandbox"},
    {"engine", "guest", "network"},
    {"compiler"},
    {"steps", "report"},
    {"runtime"},
    {"triage", "spec"},
    {"manifest", "policy", "lifecycle"},
    {"ports"},
    {"plan"},
    {"events"},
    {"safefs"},
    {"core"},
    {"__init__"},
]


def imports(path: Path) -> set[str]:
    """Rooms that a module imports, at any depth of the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "runner" else [f"runner.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "runner":
                found.add(parts[1] if len(parts) > 1 and (ROOT / parts[1]).exists() else _module(parts))
    return found - {"__init__"}


def _module(parts: list[str]) -> str:
    return parts[1] if len(parts) > 1 and (ROOT / f"{parts[1]}.py").exists() else "__init__"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_lower_layers(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    level = next(i for i, rooms in enumerate(LAYERS) if room in rooms)
    below = set().union(*LAYERS[level + 1 :])

    assert imports(path) - {room} <= below


def test_every_room_says_what_it_is() -> None:
    rooms = sorted(ROOT.glob("*/__init__.py"))

    assert [path.parent.name for path in rooms if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_the_page_about_the_architecture_names_every_room() -> None:
    page = (ROOT.parent / "docs" / "explanation" / "architecture.md").read_text()
    table = page.partition("\n## Layers\n")[2].partition("\n## ")[0]

    assert [room for room in set().union(*LAYERS) if not room.startswith("__") and f"`{room}`" not in table] == []


def loaded_by(*arguments: str) -> set[str]:
    """Modules in ``sys.modules`` after a command line has run."""
    code = (
        "import sys\nfrom runner.cli.main import main\nfrom runner.cli.output import standard\n"
        f"try:\n    main({list(arguments)!r}, standard())\nexcept SystemExit:\n    pass\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())


HEAVY = {
    "starlette",
    "hypercorn",
    "mcp",
    "trio",
    "pydantic",
    "dulwich",
    "docker",
    "h11",
    "httpcore2",
    "jinja2",
    "ruamel",
    "shtab",
    "sqlite3",
}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("apply", "--help")], ids=" ".join)
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not loaded_by(*arguments) & HEAVY


def test_validate_imports_only_what_its_documents_need() -> None:
    """Text with plain lookups needs no jinja, a pattern without brackets and braces no wcmatch."""
    manifest = ROOT.parent / "manifests" / "quickstart" / "selftest.runner.yaml"
    rooms = {f"runner.{room}" for room in ("compiler", "engine", "git", "ports", "report", "store")}

    assert not loaded_by("validate", str(manifest)) & (HEAVY - {"pydantic", "ruamel"} | rooms | {"difflib", "wcmatch"})


def test_importing_prints_nothing_and_makes_no_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import runner.ops.runs.start"],
        capture_output=True,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=True,
    )

    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == (b"", b"", [])


def test_a_test_skips_for_want_of_a_component_only() -> None:
    """So that the closing table can say what brings it."""
    other = re.compile(r"\b(?:skip|skipif|importorskip|skipTest)\(")
    tests = Path(__file__).parent

    assert [str(file.relative_to(tests)) for file in tests.rglob("*.py") if other.search(file.read_text())] == [
        "support/needs.py"
    ]


@pytest.mark.parametrize("folder", [ROOT, Path(__file__).parent], ids=["runner", "tests"])
def test_no_function_is_longer_than_a_page(folder: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, Function)]
    long = [(f"{path}:{node.name}", (node.end_lineno or 0) - node.lineno + 1) for path, node in functions]

    assert [(name, lines) for name, lines in long if lines > 60] == []


FOREIGN = {"IndexEntry"}  # its fields have no better names than their order


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_values_of_more_than_four_fields_are_built_by_keyword(path: Path) -> None:
    calls = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and len(node.args) > 4
    ]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]

    assert [name for name in names if name.lstrip("_")[:1].isupper() and name not in FOREIGN] == []
