"""How Sphinx builds these pages. They are plain Markdown; the map in ``index.md`` is the table of contents."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

project = "runner"
extensions = ["myst_parser", "sphinx_copybutton"]
include_patterns = ["*.md", "docs/**/*.md"]  # from the top, so that links to README and to manifests lead there
exclude_patterns = ["docs/_build"]
root_doc = "docs/index"
myst_heading_anchors = 4
html_theme = "furo"
html_title = "runner"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["_templates"]
copybutton_prompt_text = r"\$ |> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_here_doc_delimiter = "EOF"

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_PAGE = re.compile(r"\]\(([^)#]+\.md)\)")


def _add_contents(app: object, name: str, source: list[str]) -> None:
    """Give each section of the map a table of contents with the pages that it names."""
    if name != root_doc:
        return
    _, *sections = _SECTION.split(source[0])
    for caption, text in zip(sections[::2], sections[1::2], strict=True):
        pages = "\n".join("/" + _document(link) for link in _PAGE.findall(text))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def _document(link: str) -> str:
    """The name of a document that the map links to."""
    path = PurePosixPath(link)
    return str(path.relative_to("..") if path.parts[0] == ".." else "docs" / path).removesuffix(".md")


def setup(app: Any) -> None:
    app.connect("source-read", _add_contents)
