"""The language of the house, as far as a test can hold it: docstrings, spelling, and what a room keeps to itself."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
CLAUSE = re.compile(r"(What|Whom?|Whose|Whether|Those|Of|As|Where|How|That|Which|When|Why|None|Nothing)\b")

PAGES = [*(ROOT.parent / "docs").rglob("*.md"), *ROOT.parent.glob("*.md"), *ROOT.rglob("*.md")]
OTHER_SPELLING = re.compile(  # than that of this house: cancelled, behaviour, recognised (the phase is `finalize`)
    r"\b\w*(?:behavior|color(?!ama)|cancel(?:ed|ing)\b|labeled|favor|honor|neighbor|gray\b|center\b|judgment|artefact"
    r"|(?:recogn|normal|organ|serial|minim|maxim|summar|optim|synchron|special|general)iz(?:e|ing|ation))"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_begins_with_a_verb_or_with_what_it_defines(path: Path) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]

    assert [text.splitlines()[0] for text in texts if text and CLAUSE.match(text)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_no_private_module_of_another(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    private = [name for name in names if name.startswith("runner.") and re.search(r"\._[a-z]", name)]

    assert [name for name in private if name.split(".")[1] != room] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_values_of_more_than_four_fields_are_built_by_keyword(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "frozen" for keyword in node.keywords):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.dump(one)]
            by_keyword = any(keyword.arg == "kw_only" for keyword in node.keywords)
            found += [node.name] if len(fields) > 4 and not by_keyword else []

    assert found == []


@pytest.mark.parametrize("path", [*MODULES, *PAGES], ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_prose_has_one_spelling(path: Path) -> None:
    """Names in backticks and fences are as somebody else has spelt them."""
    text = path.read_text()
    if path.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        with tokenize.open(path) as file:
            comments = [one.string for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.COMMENT]
        text = "\n".join([*comments, *(one for one in strings if isinstance(one, str) and " " in one)])
    prose = re.sub(r"```.*?```|`+[^`]*`+|\S+/\S+", "", text, flags=re.DOTALL)

    assert OTHER_SPELLING.findall(prose) == []
