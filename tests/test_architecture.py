"""The shape of the code is a promise: imports go down, importing does nothing, start-up stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parent

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


Rule = Callable[[Path, Sequence[ast.AST]], Iterable[str]]  # of a module of the product, what breaks it


def imports_only_lower_layers(path: Path, nodes: Sequence[ast.AST]) -> Iterable[str]:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    level = next(i for i, rooms in enumerate(LAYERS) if room in rooms)
    below = set().union(*LAYERS[level + 1 :])
    return imports(nodes) - {room} - below


def imports(nodes: Sequence[ast.AST]) -> set[str]:
    """Rooms that a module imports, at any depth of the file."""
    found: set[str] = set()
    for node in nodes:
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


def imports_no_private_module_of_another_room(path: Path, nodes: Sequence[ast.AST]) -> Iterable[str]:
    room = path.relative_to(ROOT).parts[0]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names = [f"{node.module}.{alias.name}" for node in froms for alias in node.names]
    private = [name for name in names if name.startswith("runner.") and re.search(r"\._[a-z]", name)]
    return [name for name in private if name.split(".")[1] != room]


FOREIGN = {"IndexEntry"}  # its fields have no better names than their order


def builds_values_of_more_than_four_fields_by_keyword(path: Path, nodes: Sequence[ast.AST]) -> Iterable[str]:
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 4]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
    return [name for name in names if name.lstrip("_")[:1].isupper() and name not in FOREIGN]


def lets_values_of_more_than_four_fields_be_built_by_keyword_only(
    path: Path, nodes: Sequence[ast.AST]
) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "frozen" for keyword in node.keywords):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.dump(one)]
            if len(fields) > 4 and not any(keyword.arg == "kw_only" for keyword in node.keywords):
                yield node.name


def has_no_function_longer_than_a_page(path: Path, nodes: Sequence[ast.AST]) -> Iterable[str]:
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 60]


RULES: tuple[Rule, ...] = (
    imports_only_lower_layers,
    imports_no_private_module_of_another_room,
    builds_values_of_more_than_four_fields_by_keyword,
    lets_values_of_more_than_four_fields_be_built_by_keyword_only,
    has_no_function_longer_than_a_page,
)


def test_every_module_keeps_to_the_rules() -> None:
    found: list[tuple[str, str, str]] = []
    for path in sorted(ROOT.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found += [(str(path), rule.__name__, what) for rule in RULES for what in rule(path, nodes)]

    assert found == []


def test_no_function_of_the_tests_is_longer_than_a_page() -> None:
    found: list[tuple[Path, str]] = []
    for path in Path(__file__).parent.rglob("*.py"):
        outermost = list(_outermost(ast.parse(path.read_text())))
        found += [(path, what) for what in has_no_function_longer_than_a_page(path, outermost)]

    assert found == []


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """Functions that are in no other."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt):
            yield from _outermost(child)


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
        "import sys\nfrom runner.cli.main import entry\n"
        f"sys.argv[1:] = {list(arguments)!r}\ntry:\n    entry()\nexcept SystemExit:\n    pass\n"
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
    kinds = {f"runner.manifest.kinds.{kind}" for kind in ("mcp_server", "network_set", "project")}
    libraries = {"difflib", "wcmatch", "importlib.metadata"}

    assert not loaded_by("validate", str(manifest)) & (HEAVY - {"pydantic", "ruamel"} | rooms | kinds | libraries)


def test_listing_the_runs_of_this_host_needs_a_database_and_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_HOME", str(tmp_path))

    assert not loaded_by("runs", "list") & (HEAVY - {"sqlite3"})


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
