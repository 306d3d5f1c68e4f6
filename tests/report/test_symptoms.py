"""What a failed command has lacked, by what the tools of its trade print then."""

from __future__ import annotations

import pytest

from runner.report.symptoms import symptom

OFFLINE = "it asked the network, and its workspace has none"
NETWORK = {
    "pip": "ERROR: No matching distribution found for requests",
    "npm": "npm error code ENOTFOUND\nnpm error network request to https://packages.example.org/ms failed",
    "npm, again": "npm error code EAI_AGAIN\nnpm error syscall getaddrinfo",
    "curl": "curl: (6) Could not resolve host: example.org",
    "git": "fatal: unable to access 'https://example.org/x.git/': Could not resolve host: example.org",
    "cargo": "spurious network error: [6] Could not resolve hostname (Could not resolve host: index.crates.io)",
    "go": 'Get "https://proxy.golang.org/x": dial tcp: lookup proxy.golang.org: no such host',
    "apt": "Temporary failure resolving 'packages.example.org'",
    "python": "socket.gaierror: [Errno -3] Temporary failure in name resolution",
}
LACKING = {
    "dash": ("agent.sh: 3: pytest: not found", "pytest"),
    "bash": ("bash: line 1: cargo: command not found", "cargo"),
    "busybox": ("sh: npm: not found", "npm"),
    "env": ("env: \u2018node\u2019: No such file or directory", "node"),
    "make": ("make: ruff: No such file or directory\nmake: *** [Makefile:2: check] Error 127", "ruff"),
    "node": ("Error: spawn tsc ENOENT", "tsc"),
    "subprocess": ("in _execute_child\nFileNotFoundError: [Errno 2] No such file or directory: 'git'", "git"),
    "a module of Python": ("/usr/bin/python3: No module named pytest", "pytest"),
    "an import": ("ModuleNotFoundError: No module named 'requests'", "requests"),
    "a package of Node": ("Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'ms' imported from /w/a.js", "ms"),
}
OTHERS = [
    "E   assert 1 == 2",
    "Error: not found",
    "FileNotFoundError: [Errno 2] No such file or directory: 'config.toml'",
    "Error: Cannot find module './gone.js'",
    "404: page not found",
]


@pytest.mark.parametrize("printed", NETWORK.values(), ids=NETWORK)
def test_a_want_of_network_is_known_where_there_is_none(printed: str) -> None:
    found = symptom(["before", *printed.split("\n")], "exited 1", offline=True)

    assert found[0] == OFFLINE
    assert symptom([printed], "exited 1", offline=False) is None


@pytest.mark.parametrize(("printed", "name"), LACKING.values(), ids=LACKING)
def test_what_is_not_there_is_named(printed: str, name: str) -> None:
    found = symptom(printed.split("\n"), "exited 1", offline=True)

    assert found[0].startswith(f"`{name}` is not in the workspace")


def test_a_program_that_is_not_there_is_known_by_its_exit_status() -> None:
    assert symptom([], "`x` exited 127", offline=True) is not None


@pytest.mark.parametrize("printed", OTHERS)
def test_an_ordinary_failure_has_no_symptom(printed: str) -> None:
    assert symptom([printed], "exited 1", offline=True) is None


@pytest.mark.parametrize("tool", ["pip", "npm", "cargo", "go"])
def test_the_remedy_names_the_hosts_of_the_tool(tool: str) -> None:
    found = symptom(NETWORK[tool].splitlines(), "exited 1", offline=True)
    assert found is not None
    assert f"network: {{dependencies: {{allow: [{tool}]}}}}" in found[1]
