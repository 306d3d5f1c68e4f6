"""How Sphinx builds these pages. They are plain Markdown; the map in ``index.md`` is the table of contents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

project = "runner"
extensions = ["myst_parser", "sphinx_copybutton"]
include_patterns = ["*.md", "docs/**.md"]  # from the top, so that links to README and to manifests lead there
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
myst_heading_anchors = 4
html_theme = "furo"
html_title = "runner"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["_templates"]
copybutton_prompt_text = r"\$ |> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_here_doc_delimiter = "EOF"

suppress_warnings = ["misc.highlighting_failure"]  # the errors show YAML that is broken

_ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)\)")


def _prepare(app: Any, name: str, source: list[str]) -> None:
    """Give the map a table of contents, and take the links out of a page that lead to no page and no file."""
    path = _ROOT / f"{name}.md"
    if name == root_doc:
        _, *sections = _SECTION.split(source[0])
        for caption, text in zip(sections[::2], sections[1::2], strict=True):
            pages = "\n".join(f"/{_document(path, link)}" for _, link in _LINK.findall(text))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"

    def without_link(found: re.Match[str]) -> str:
        target = path.parent / found[2]
        page = target.suffix != ".md" or _document(path, found[2]) in app.env.found_docs
        return found[0] if page and not target.is_dir() else f"{found[1]}<!-- -->"  # ends a span of code

    source[0] = _LINK.sub(without_link, source[0])


def _document(page: Path, link: str) -> str:
    """The name of the document that a page links to."""
    return str((page.parent / link).resolve().relative_to(_ROOT)).removesuffix(".md")


def _name_cells(app: Any, document: nodes.document) -> None:
    """Put the name of its column into each cell but the first, for screens that show cells below each other."""
    for group in document.findall(nodes.tgroup):
        names = [entry.astext() for entry in next(group.findall(nodes.thead)).findall(nodes.entry)]
        for row in next(group.findall(nodes.tbody)).findall(nodes.row):
            for name, entry in list(zip(names, row, strict=True))[1:]:
                if not entry.astext():
                    entry["classes"].append("nothing")
                elif name:
                    entry[0].insert(0, nodes.inline("", f"{name} ", classes=["column"]))


def setup(app: Any) -> None:
    app.connect("source-read", _prepare)
    app.connect("doctree-read", _name_cells)
