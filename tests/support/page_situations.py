"""Directories that pages begin with, by the names of ``<!-- given: -->``, and what ``<!-- needs: -->`` asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import files
from pathlib import Path
from textwrap import dedent

from tests.support import components, dockerd, needs
from tests.support.kubernetes import certificates, serving
from tests.support.situations import commit, write_files

ROOT = Path(__file__).parents[2]
_COMPONENTS = {"docker": dockerd.DOCKER, "gvisor": dockerd.GVISOR}
_PROGRAMS = {"agents": components.AGENTS / "bin", "kubectl": components.KUBECTL / "bin"}  # that are on no PATH
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")

_PYTHON = {
    ".gitignore": ".venv/\n__pycache__/\n",
    "pyproject.toml": """\
        [project]
        name = "shop"
        version = "1.0"
        dependencies = []

        [dependency-groups]
        test = ["pytest"]

        [tool.pytest.ini_options]
        pythonpath = "."
        """,
    "shop/__init__.py": "",
    "shop/price.py": '''\
        def total(prices, discount=0):
            """Sum of prices less a discount in percent."""
            return round(sum(prices) * (100 - discount) / 100, 2)
        ''',
    "tests/test_price.py": """\
        from shop.price import total


        def test_total():
            assert total([1.50, 2.25]) == 3.75


        def test_discount():
            assert total([10], discount=25) == 7.50
        """,
}
_NODE = {
    ".gitignore": "node_modules/\n",
    "package.json": """\
        {
          "name": "shop",
          "version": "1.0.0",
          "scripts": {"test": "node --test"},
          "dependencies": {"cents": "1.0.0"}
        }
        """,
    "package-lock.json": """\
        {
          "name": "shop",
          "version": "1.0.0",
          "lockfileVersion": 3,
          "packages": {
            "": {"name": "shop", "version": "1.0.0", "dependencies": {"cents": "1.0.0"}},
            "node_modules/cents": {"version": "1.0.0"}
          }
        }
        """,
    "price.js": """\
        const cents = require("cents");

        exports.total = (prices) => prices.reduce((sum, price) => sum + cents(price), 0) / 100;
        """,
    "test/price.test.js": """\
        const assert = require("node:assert");
        const test = require("node:test");
        const { total } = require("../price.js");

        test("total", () => assert.equal(total([1.5, 2.25]), 3.75));
        """,
}
_CENTS = {
    "package.json": '{"name": "cents", "version": "1.0.0", "main": "index.js"}\n',
    "index.js": "module.exports = (price) => Math.round(price * 100);\n",
}
_GO = {
    "go.mod": "module example.org/shop\n\ngo 1.19\n",
    "price.go": """\
        package shop

        // Total is the sum of prices in cents.
        func Total(prices ...int) int {
        \tsum := 0
        \tfor _, price := range prices {
        \t\tsum += price
        \t}
        \treturn sum
        }
        """,
    "price_test.go": """\
        package shop

        import "testing"

        func TestTotal(t *testing.T) {
        \tif Total(150, 225) != 375 {
        \t\tt.Fatal("not 375")
        \t}
        }
        """,
}


@contextmanager
def committed(work: Path, *, content: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A git repository of one commit."""
    _write(work, content)
    commit(work, "first")
    yield {}


@contextmanager
def python_project(work: Path) -> Iterator[dict[str, str]]:
    """A repository with two tests, and pytest in its virtual environment."""
    with committed(work, content=_PYTHON):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / ".venv"], check=True)
        [packages] = (work / ".venv" / "lib").glob("python3*/site-packages")
        for file in (file for name in _PYTEST for file in files(name) or () if ".." not in file.parts):
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), packages / file)
        yield {}


@contextmanager
def node_project(work: Path) -> Iterator[dict[str, str]]:
    """A repository with a test, and one package in ``node_modules``."""
    with committed(work, content=_NODE):
        _write(work / "node_modules" / "cents", _CENTS)
        yield {}


@contextmanager
def incident(work: Path) -> Iterator[dict[str, str]]:
    """The incident of the quickstart in ``incident``."""
    shutil.copytree(ROOT / "manifests" / "quickstart" / "incident", work / "incident", ignore=_outputs)
    yield {}


@contextmanager
def cluster(work: Path) -> Iterator[dict[str, str]]:
    """A cluster's API in which a pod was killed for its memory, and ``~/.kube/config`` for it."""
    needs.OPENSSL.require()
    with serving(certificates(work.parent / ".pki")) as api:
        (work.parent / ".kube").mkdir()
        api.write(work.parent / ".kube" / "config")
        yield {}


@contextmanager
def checkout(work: Path) -> Iterator[dict[str, str]]:
    """This repository with its environment; ``runner`` is that of the page's copy."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, work / name, follow_symlinks=False)
    shutil.copytree(ROOT / "runner" / "guest" / "bin", work / "runner" / "guest" / "bin")
    with committed(work, content={}):
        (work / ".venv").symlink_to(sys.prefix)
        yield {"PYTHONPATH": str(work)}


@contextmanager
def postgres(work: Path) -> Iterator[dict[str, str]]:
    """Two empty databases of PostgreSQL, found by the variables of libpq."""
    needs.POSTGRES.require()
    from tests.support.postgres import running

    with running() as server:
        server.execute("CREATE DATABASE runner")
        server.execute("CREATE DATABASE second")
        server.execute("CREATE DATABASE third")
        yield {"PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": "postgres"}


SITUATIONS: dict[str, Callable[[Path], AbstractContextManager[dict[str, str]]]] = {
    "python-project": python_project,
    "node-project": node_project,
    "go-project": partial(committed, content=_GO),
    "incident": incident,
    "cluster": cluster,
    "checkout": checkout,
    "postgres": postgres,
}


def require(name: str) -> dict[str, str]:
    """The environment in which a part of the machine is found; the test is skipped without the part."""
    component = _COMPONENTS.get(name) or getattr(needs, name.upper().replace("-", "_"))
    component.require()
    if name not in _COMPONENTS:
        return {}
    with dockerd.session().client() as client:
        client.tag(dockerd.IMAGE, "team/agent", "3")  # as pages call the image of a team
    return {"DOCKER_HOST": dockerd.host()}


def programs(names: list[str]) -> list[str]:
    """Directories of programs for a page that needs these parts."""
    return [str(_PROGRAMS[name]) for name in names if name in _PROGRAMS]


def _write(folder: Path, content: Mapping[str, str]) -> None:
    write_files(folder, {name: dedent(text) for name, text in content.items()})


def _outputs(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("logs", "output", "prompt-sent.md")]
