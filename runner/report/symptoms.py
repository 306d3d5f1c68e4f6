"""Symptoms in a command's output that its workspace lacks something, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.core.patterns import pattern

_NETWORK = pattern(
    r"Could not resolve|Temporary failure (?:in name resolution|resolving)|Name or service not known|getaddrinfo"
    r"|ENOTFOUND|EAI_AGAIN|Network is unreachable|ENETUNREACH|No matching distribution found|no such host"
    r"|failed to lookup address|unable to access 'https?:|server misbehaving|connect: cannot assign requested address"
)
_PROGRAM = pattern(
    r"(?P<bash>[\w./+-]+): command not found|: (?:line )?\d+: (?P<dash>[\w./+-]+): not found"
    r"|\bsh: (?P<busybox>[\w./+-]+): not found|spawn (?P<node>[\w./+-]+) ENOENT"
    r"|env: [\u2018'\"`]?(?P<env>[\w.+-]+)[\u2019'\"`]?: No such file"
    r"|make(?:\[\d+\])?: (?P<make>[\w.+-]+): No such file|_execute_child[\s\S]*directory: '(?P<python>[^']+)'"
)
_MODULE = pattern(
    r"No module named '?(?P<python>[\w.]+)|Cannot find (?:module|package) '(?P<node>[^'./][^']*)'"
    r"|cannot load such file -- (?P<ruby>\S+)"
)
_BRING = "put it into an image (`base_image`) or a directory of this host (`toolchains`); `runner init` looks for them"
_FETCH = "let a command of `dependencies` fetch it (`network: {{dependencies: {{allow: [{}]}}}}`)"
_TOOLS = {"pip": "No matching distribution|pip", "npm": "npm", "cargo": "crates.io", "go": "proxy.golang.org"}


def symptom(lines: Sequence[str], message: str, *, offline: bool) -> tuple[str, str] | None:
    """Say what a failed command lacked, and the remedy; ``None`` for anything else.

    ``lines`` is the end of its output, ``message`` how it ended; ``offline`` when its step has no network.
    """
    text = "\n".join(lines)
    if offline and _NETWORK.search(text):
        hosts = next((tool for tool, sign in _TOOLS.items() if re.search(sign, text)), "HOST")
        return "it asked the network, and its workspace has none", f"{_FETCH.format(hosts)}, or {_BRING}"
    if found := _MODULE.search(text):
        return f"`{_name(found)}` is not in the workspace: what git ignores is not cloned", _BRING
    if found := _PROGRAM.search(text):
        return f"`{_name(found)}` is not in the workspace", _BRING
    return ("the program is not in the workspace", _BRING) if "exited 127" in message else None


def _name(found: re.Match[str]) -> str:
    return str(next(filter(None, found.groups())))
