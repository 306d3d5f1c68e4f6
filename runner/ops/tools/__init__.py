"""Tools that an agent calls in a workspace, a module each: ``Arguments``, ``Result``, and ``call``.

All of them work inside the open sandbox, by programs that any image with a shell has. So they see what commands see, on
every provider, and no link leads them out. A path is relative to the workspace, and never becomes a part of a script.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from runner.core.errors import UnknownTool
from runner.core.sanitize import excerpt

TOOLS = ("bash", "read", "write", "edit", "glob", "grep", "git")
ToolName = Annotated[str, Meta(extra_json_schema={"enum": list(TOOLS)})]


def unknown_tools(names: Iterable[str]) -> UnknownTool | None:
    """Return the error of names that no tools have; ``None`` when there are none."""
    bad = [f"`{excerpt(name)}`" for name in sorted({*names} - {*TOOLS})]
    if not bad:
        return None
    words = "cannot be a tool" if len(bad) == 1 else "cannot be tools"
    return UnknownTool(f"{', '.join(bad)} {words}", hint=f"valid tools: {', '.join(TOOLS)}")
