"""The first hour: in an ordinary repository with its dependencies, by an ordinary user, from the wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.needs import CARGO, COMPILER, GO, MAKE, NPM
from tests.support.situations import Project, git, write_files
from tests.support.wheel import built_wheel

AS_ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("first-run"))


def python(project: Project) -> None:
    """Code below `src`, and a virtual environment with an older copy of it and with what it needs."""
    test = "import unittest, app\n\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(app.two, 2)\n"
    files = {"pyproject.toml": "", "src/app/__init__.py": "import one\ntwo = one.one + 1\n", "tests/test_app.py": test}
    write_files(project.folder, {**files, "tests/__init__.py": "", ".gitignore": ".venv\n"})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=project.folder, check=True)
    (site,) = (project.folder / ".venv/lib").glob("python*/site-packages")
    write_files(site, {"one.py": "one = 1\n", "app/__init__.py": "two = 3\n"})


def node(project: Project) -> None:
    """A script of a package that is installed, which finds its own modules."""
    package = {"name": "app", "scripts": {"test": "one-test && node test.js"}}
    write_files(project.folder, {"package.json": json.dumps(package), ".gitignore": "node_modules/\n"})
    write_files(project.folder, {"test.js": "require('assert').equal(require('one') + 1, 2)\n"})
    modules = project.folder / "node_modules"
    script = "#!/usr/bin/env node\nrequire('one')\n"
    write_files(modules, {"one/index.js": "module.exports = 1\n", "tester/cli.js": script})
    (modules / ".bin").mkdir()
    (modules / ".bin/one-test").symlink_to("../tester/cli.js")


def go(project: Project) -> None:
    """A module that needs another one, which is in the cache of the user."""
    module = project.home / "proxy/example.org/one/@v"
    module.mkdir(parents=True)
    mod = "module example.org/one\n\ngo 1.17\n"
    write_files(module, {"list": "v1.0.0\n", "v1.0.0.info": '{"Version": "v1.0.0"}', "v1.0.0.mod": mod})
    with zipfile.ZipFile(module / "v1.0.0.zip", "w") as archive:
        archive.writestr("example.org/one@v1.0.0/go.mod", mod)
        archive.writestr("example.org/one@v1.0.0/one.go", "package one\n\nconst One = 1\n")
    code = 'package app\n\nimport "example.org/one"\n\nconst Two = one.One + 1\n'
    test = 'package app\n\nimport "testing"\n\nfunc TestTwo(t *testing.T) {\n\tif Two != 2 {\n\t\tt.Fail()\n\t}\n}\n'
    own = "module example.org/app\n\ngo 1.17\n\nrequire example.org/one v1.0.0\n"
    write_files(project.folder, {"go.mod": own, "app.go": code, "app_test.go": test})
    places = {"GOPROXY": f"file://{project.home}/proxy", "GOSUMDB": "off", "GOFLAGS": "-mod=mod -modcacherw"}
    env = {"PATH": os.environ["PATH"], "HOME": str(project.home), **places}
    subprocess.run(["go", "mod", "download"], cwd=project.folder, env=env, check=True)
    subprocess.run(["go", "mod", "tidy"], cwd=project.folder, env=env, check=True)


def rust(project: Project) -> None:
    lib = "pub const TWO: u8 = 1 + 1;\n\n#[test]\nfn two() {\n    assert_eq!(TWO, 2);\n}\n"
    manifest = '[package]\nname = "app"\nversion = "0.1.0"\nedition = "2021"\n'
    write_files(project.folder, {"Cargo.toml": manifest, "src/lib.rs": lib, ".gitignore": "target\n"})


def c(project: Project) -> None:
    makefile = "test: two\n\t./two\n\ntwo: two.c\n\tcc -o two two.c\n"
    code = "#include <assert.h>\n\nint main(void) { assert(1 + 1 == 2); return 0; }\n"
    write_files(project.folder, {"Makefile": makefile, "two.c": code, ".gitignore": "two\n"})


@pytest.mark.scenario("BEY-22")
@pytest.mark.parametrize(
    ("repository", "command"),
    [
        pytest.param(python, "env PYTHONPATH=src python3 -m unittest", id="python"),
        pytest.param(node, "npm test", id="node", marks=[NPM.mark, pytest.mark.nightly]),
        pytest.param(go, "go test ./...", id="go", marks=[GO.mark, pytest.mark.nightly]),
        pytest.param(rust, "cargo test", id="rust", marks=[CARGO.mark, pytest.mark.nightly]),
        pytest.param(c, "make test", id="c", marks=[MAKE.mark, COMPILER.mark, pytest.mark.nightly]),
    ],
)
def test_what_init_writes_succeeds_at_the_first_apply(
    project: Project, installed: Path, repository: Callable[[Project], None], command: str
) -> None:
    """And the tests that it runs are real ones: a change that breaks them fails the run."""
    home = {name: os.environ[name] for name in ("RUSTUP_HOME", "PYENV_ROOT") if name in os.environ}
    rustup = {"RUSTUP_HOME": str(Path.home() / ".rustup")} if (Path.home() / ".rustup").exists() else {}
    project.env = {"PYTHONPATH": str(installed), **rustup, **home}
    project.within = AS_ORDINARY if os.geteuid() == 0 else ()
    repository(project)
    git(project.folder, "init", "-q", "-b", "main")
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "first")

    begun = project.runner("init", timeout=300)
    planned = project.runner("plan")
    applied = project.runner("apply", timeout=300)
    spoil = "for f in src/app/__init__.py test.js app.go src/lib.rs two.c; do [ ! -f $f ] || echo ') (' >>$f; done\n"
    (project.folder / ".runner/agent.sh").write_text(spoil)
    spoilt = project.runner("apply", timeout=300)

    assert begun.code == 0, begun.out + begun.err
    assert f"run: {command} " in begun.out
    assert planned.code == 0, planned.err
    assert applied.code == 0, applied.out + applied.err
    assert spoilt.code == 1, spoilt.out
