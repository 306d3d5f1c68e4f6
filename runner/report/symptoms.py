"""Known signs in what a command printed that its workspace lacks something, and the way to get it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|getaddrinfo|ENOTFOUND"
    r"|EAI_AGAIN|Network is unreachable|ENETUNREACH|No matching distribution found|Could not find a version that"
    r"|no such host|dial tcp|failed to lookup address|unable to access 'https?:|Could not connect to server"
)
_PROGRAM = re.compile(
    r"(?:^|[\s/])(?P<shell>[\w.+-]+): (?:command )?not found"
    r"|No such file or directory: '(?P<python>[\w.+-]+)'|spawn (?P<node>[\w.+-]+) ENOENT"
    r"|env: [\u2018'\"`]?(?P<env>[\w.+-]+)[\u2019'\"`]?: No such file|(?P<make>[\w.+-]+): No such file or directory$",
    re.MULTILINE,
)
_MODULE = re.compile(
    r"No module named '?(?P<python>[\w.]+)|Cannot find (?:module|package) '(?P<node>[^']+)'"
    r"|cannot find package \"(?P<go>[^\"]+)\"|cannot load such file -- (?P<ruby>\S+)"
)
_BRING = "put it into an image (`base_image`) or a directory of this host (`toolchains`); `runner init` looks for them"


def symptom(lines: Sequence[str], message: str, *, offline: bool) -> tuple[str, str] | None:
    """What a failed command has lacked, and the way to it; ``None`` for anything else.

    ``lines`` is the end of what it printed, ``message`` how it ended; ``offline``: its step has no network.
    """
    text = "\n".join(lines)
    if offline and _NETWORK.search(text):
        return "it asked the network, and its workspace has none", f"bring what it fetches: {_BRING}"
    if found := _MODULE.search(text):
        name = next(filter(None, found.groups()))
        return f"`{name}` is not in the workspace: what git ignores is not cloned", _BRING
    found = _PROGRAM.search(text)
    if found or re.search(r"exited 127\b", message):
        name = next(filter(None, found.groups()), "") if found else ""
        return f"{f'`{name}`' if name else 'the program'} is not in the workspace", _BRING
    return None
