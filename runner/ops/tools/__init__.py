"""Tools that an agent calls in a workspace, a module each: ``Arguments``, ``Result``, and ``call``.

All of them work inside the open sandbox, by programs that any image with a shell has. So they see what commands see, on
every provider, and no link leads them out. A path is relative to the workspace, and never becomes a part of a script.
"""

from __future__ import annotations

TOOLS = ("bash", "read", "write", "edit", "glob", "grep", "git")
