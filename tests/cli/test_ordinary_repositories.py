"""Ordinary repositories, with registries as this machine has them configured: `init`, and later runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_dependencies import GO_APP, Index, index, own_address
from tests.support.needs import CARGO, GO, NPM
from tests.support.situations import Project, commit, step, write_files

__all__ = ["index"]  # a fixture

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

STARTED = 1.0  # seconds from the start of a run whose dependencies are kept to its agent
TRIES = 4  # of them the fastest counts: other work on the machine is not the run's
UNITTEST = "import unittest, {module}\n\nclass T(unittest.TestCase):\n    def test(self): assert {module}\n"
PYTEST = "import {module}\n\ndef test() -> None:\n    assert {module}\n"


def python(files: dict[str, str], test: str) -> dict[str, str]:
    return {
        **files,
        "tests/__init__.py": "",
        "tests/test_it.py": test,
        ".gitignore": ".venv\n__pycache__\n.pytest_cache\n",
    }


def node(packages: dict[str, str], test: str, **files: str) -> dict[str, str]:
    package = {"name": "app", "version": "1.0.0", "scripts": {"test": test}, "devDependencies": packages}
    return {"package.json": json.dumps(package), ".gitignore": "node_modules/\n", **files}


REPOSITORIES = {
    "unittest": python({"requirements.txt": "humanize==4.9.0\n"}, UNITTEST.format(module="humanize")),
    "pytest": python({"requirements.txt": "toolz\npytest\n"}, PYTEST.format(module="toolz")),
    "pytest-beside": python(
        {"requirements.txt": "webcolors\n", "requirements-dev.txt": "pytest\n"}, PYTEST.format(module="webcolors")
    ),
    "native": python({"requirements.txt": "ujson\nbrotli\n"}, UNITTEST.format(module="ujson")),
    "bottle": python({"requirements.txt": "bottle\npytest\n"}, PYTEST.format(module="bottle")),
    "left-pad": node({"left-pad": "1.3.0"}, "node -e \"require('left-pad')\""),
    "mocha": node({"mocha": "^10"}, "mocha", **{"test/it.js": "it('works', () => {})\n"}),
    "typescript": node({"typescript": "^5"}, "tsc --noEmit a.ts", **{"a.ts": "export const a: number = 1\n"}),
    "jest": node({"jest": "^29"}, "jest", **{"a.test.js": "test('works', () => {})\n"}),
    "large": node(
        {"webpack": "^5", "eslint": "^8", "typescript": "^5", "jest": "^29", "@babel/preset-env": "^7", "core-js": "^3",
         "date-fns": "^2", "rxjs": "^7", "lodash": "^4", "@types/node": "^20"},
        "node -e \"require('lodash'); require('rxjs')\"",
    ),
}  # fmt: skip


def seconds_to_agent(project: Project, record: dict[str, Any]) -> float:
    at = {event["type"]: event["at"] for event in project.events(record)}
    return float(at["AgentStarted"] - at["RunStarted"]) / 1_000_000


@NPM.mark
@pytest.mark.parametrize("name", REPOSITORIES)
def test_its_second_run_makes_no_connection_and_starts_its_agent_at_once(project: Project, name: str) -> None:
    files = REPOSITORIES[name]
    ours = {key: value for key, value in os.environ.items() if key.lower().startswith(("pip_", "npm_", "ssl_cert"))}
    project.env |= {**ours, "HOME": str(Path.home()), "npm_config_cache": str(project.home / "npm")}
    write_files(project.folder, files)
    if "package.json" in files:
        lock = ("npm", "install", "--package-lock-only", "--ignore-scripts")
        env = os.environ | {"npm_config_cache": str(project.home / "npm")}
        subprocess.run(lock, cwd=project.folder, env=env, check=True, capture_output=True)

    check(project)


@GO.mark
def test_so_does_one_of_go(project: Project, index: Index) -> None:
    index.host = own_address()
    project.env |= {"GOPROXY": f"http://{index.place}/go", "GOSUMDB": "off"}
    write_files(project.folder, GO_APP)

    check(project)
    assert any(path.endswith(".zip") for path in index.asked)


@CARGO.mark
def test_so_does_one_of_rust(project: Project, index: Index) -> None:
    """Its registry is named by this host's cargo, and by the repository in the place of crates.io."""
    registry = (
        f'[source.crates-io]\nreplace-with = "far"\n\n[source.far]\nregistry = "sparse+http://{index.place}/index/"\n'
    )
    cargo = project.home / "cargo"
    rustup = Path(os.environ.get("RUSTUP_HOME") or Path.home() / ".rustup")
    project.env |= {"CARGO_HOME": str(cargo), **({"RUSTUP_HOME": str(rustup)} if rustup.exists() else {})}
    write_files(cargo, {"config.toml": registry})
    package = '[package]\nname = "app"\nversion = "0.1.0"\nedition = "2021"\n\n[dependencies]\npad-left = "1"\n'
    test = "#[test]\nfn pads() {\n    assert_eq!(pad_left::PAD, 1);\n}\n"
    files = {"Cargo.toml": package, "src/lib.rs": test, ".cargo/config.toml": registry, ".gitignore": "target\n"}
    write_files(project.folder, files)
    lock = ("cargo", "generate-lockfile")
    subprocess.run(lock, cwd=project.folder, env=os.environ | project.env, check=True, capture_output=True)

    check(project)
    assert any(path.endswith(".crate") for path in index.asked)


def check(project: Project) -> None:
    commit(project.folder)

    begun = project.runner("init", timeout=600)
    records = [project.succeed() for _ in range(TRIES)]

    assert begun.code == 0, begun.out + begun.err
    assert "installed: " in begun.err
    assert [record["network"] for record in records] == [[]] * TRIES
    for record in records:
        assert " kept from runner init, " in step(record, "dependencies")["outcome"]["message"]
    assert min(seconds_to_agent(project, record) for record in records) < STARTED
