"""The language of the house, as far as a test can hold it: docstrings and spelling."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

import runner

ROOT = Path(runner.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
CLAUSE = re.compile(r"(What|Whom?|Whose|Whether|Those|Of|As|Where|How|That|Which|When|Why|None|Nothing)\b")

PAGES = [*(ROOT.parent / "docs").rglob("*.md"), *ROOT.parent.glob("*.md"), *ROOT.rglob("*.md")]
OTHER_SPELLING = re.compile(  # than that of this house: cancelled, behaviour, recognised (the phase is `finalize`)
    r"\b\w*(?:behavior|color(?!ama)|cancel(?:ed|ing)\b|labeled|favor|honor|neighbor|gray\b|center\b|judgment|artefact"
    r"|(?:recogn|normal|organ|serial|minim|maxim|summar|optim|synchron|special|general)iz(?:e|ing|ation))"
)


def test_a_docstring_begins_with_a_verb_or_with_what_it_defines() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    suspects = [path for path in MODULES if re.search(rf'"""\s*{CLAUSE.pattern}', path.read_text())]
    nodes = [(path, node) for path in suspects for node in ast.walk(ast.parse(path.read_text()))]
    texts = [(path, ast.get_docstring(node)) for path, node in nodes if isinstance(node, documented)]

    assert [(str(path), text.splitlines()[0]) for path, text in texts if text and CLAUSE.match(text)] == []


def test_prose_has_one_spelling() -> None:
    """Names in backticks and fences are as somebody else has spelt them."""
    suspects = [path for path in [*MODULES, *PAGES] if OTHER_SPELLING.search(path.read_text())]
    found = {str(path): OTHER_SPELLING.findall(prose_of(path)) for path in suspects}

    assert {path: words for path, words in found.items() if words} == {}


def prose_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        with tokenize.open(path) as file:
            comments = [one.string for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.COMMENT]
        text = "\n".join([*comments, *(one for one in strings if isinstance(one, str) and " " in one)])
    return re.sub(r"```.*?```|`+[^`]*`+|\S+/\S+", "", text, flags=re.DOTALL)
