"""Dependencies that commands make, in whole runs: made once, then given to later runs and to verify."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support import dockerd
from tests.support.situations import REPO, Project, commit, step, until, write_files

THERE = "127.0.0.2"  # programs reach 127.0.0.1 without a proxy
MADE = """
  - run: {run}
    from: [requirements.txt]
    keep: [{keep}]
"""
# Without the seconds that a virtual environment takes to get a pip of its own.
PIP = (
    "python3 -m venv --without-pip .venv"
    " && python3 $(ls /usr/share/python-wheels/pip-*.whl /usr/lib*/python3*/ensurepip/_bundled/pip-*.whl | head -1)/pip"
    " --python .venv/bin/python install --index-url http://{place}/simple -r requirements.txt"
)
TESTED = "import unittest, left_pad\n\nclass T(unittest.TestCase):\n    def test(self): assert left_pad.pad\n"
FETCH = (
    "python3 -c \"import os, urllib.request as r; os.makedirs('lib');"
    " open('lib/data', 'wb').write(r.urlopen('http://{place}/data').read())\""
)


class Index(ThreadingHTTPServer):
    """A package index with one wheel; ``asked`` are the paths that were asked for."""

    def __init__(self) -> None:
        super().__init__((THERE, 0), Handler)
        self.asked: list[str] = []

    @property
    def place(self) -> str:
        return f"{THERE}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = "left_pad-1.0-py3-none-any.whl"
        body = {"/simple/left-pad/": f'<a href="/{name}">{name}</a>'.encode(), f"/{name}": _wheel(), "/data": b"data"}
        self.send_response(200 if self.path in body else 404)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
        self.send_header("Content-Length", str(len(body.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(body.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        pass


def _wheel() -> bytes:
    file = io.BytesIO()
    about = "left_pad-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("left_pad.py", "pad = 'padded'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: left-pad\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return file.getvalue()


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.fixture
def repo(repository: Path) -> Path:
    (repository / ".gitignore").write_text(".venv\nlib\n")
    (repository / "requirements.txt").write_text("left-pad==1.0\n")
    commit(repository)
    return repository


def manifest(project: Project, index: Index, run: str, keep: str, script: str, *, provider: str = "local") -> None:
    """An agent that has no network itself, and checks that run its script again."""
    made = MADE.format(run=json.dumps(run.format(place=index.place)), keep=keep)
    allowed = f"network: {{dependencies: {{allow: [{{host: '{index.place}', private: true}}]}}}}"
    project.script(
        script,
        workspace=f"{REPO}\n{allowed}\ndependencies:{made}",
        run=f"verify: {{commands: [{{run: {json.dumps(script)}}}]}}",
        provider=provider,
    )


def layers(project: Project) -> list[Path]:
    return [path for path in (project.home / "state" / "dependencies").glob("*") if path.is_dir()]


@pytest.mark.slow
def test_pip_installs_once_and_the_next_runs_need_no_network(project: Project, index: Index, repo: Path) -> None:
    manifest(project, index, PIP, ".venv", ".venv/bin/python -c 'import left_pad; print(left_pad.pad)'")
    assert ".venv (to be made)" in " ".join(project.runner("plan", ".").out.split())

    first = project.succeed()
    asked = len(index.asked)
    assert "padded" in project.logs("agent")
    assert ".venv (kept)" in " ".join(project.runner("plan", ".").out.split())
    second = project.succeed()

    assert asked > 0
    assert len(index.asked) == asked
    assert [use["place"] for use in first["network"]] == [index.place]
    assert second["network"] == []
    assert step(second, "dependencies")["outcome"]["message"].startswith(f".venv kept from run {first['id']}, ")
    assert [path.name for path in layers(project)] == [layers(project)[0].name]


@pytest.mark.nightly
def test_pip_installs_for_init_and_the_runs_make_no_connection(project: Project, index: Index) -> None:
    """As pip is configured on this host, from an index of its own."""
    files = {"requirements.txt": "left-pad==1.0\n", ".gitignore": ".venv\n__pycache__\n", "test_pad.py": TESTED}
    write_files(project.folder, files)
    commit(project.folder)
    project.env |= {
        "PIP_INDEX_URL": f"http://{index.place}/simple",
        "PIP_TRUSTED_HOST": THERE,
        "PIP_CONFIG_FILE": "/dev/null",
    }

    begun = project.runner("init", timeout=120)
    asked = [*index.asked]
    planned = " ".join(project.runner("plan").out.split())
    records = [project.succeed() for _ in range(2)]

    assert begun.code == 0, begun.out + begun.err
    assert "dependencies: python3 -m venv .venv && .venv/bin/pip inst" in begun.out
    assert "/left_pad-1.0-py3-none-any.whl" in asked
    assert "-> .venv (kept)" in planned
    assert f"reaches {index.place}" in planned
    assert index.asked == asked
    assert [record["network"] for record in records] == [[], []]
    told = [step(record, "dependencies")["outcome"]["message"] for record in records]
    assert all(message.startswith(".venv kept from runner init, ") for message in told)
    assert len(layers(project)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "docker", pytest.param("gvisor", marks=dockerd.GVISOR.mark)])
def test_tree_and_home_are_given_on_each_provider(project: Project, index: Index, repo: Path, provider: str) -> None:
    """What agents write there is thrown away, also in the home, and is no part of their work."""
    script = "cat lib/data ~/.cache/deep/data && echo more > lib/data && touch ~/.cache/deep/more"
    run = f"{FETCH}; mkdir -p ~/.cache/deep && cp lib/data ~/.cache/deep"
    manifest(project, index, run, "lib, ~/.cache/deep", script, provider=provider)

    for _ in range(2):
        record = project.succeed()
        assert project.logs("agent") == "datadata"
        assert step(record, "save")["outcome"]["message"] == "no change"
    assert index.asked == ["/data"]


def test_commands_see_their_files_and_nothing_else(project: Project, index: Index, repo: Path) -> None:
    run = "mkdir lib; ls -A . ~ > lib/seen; env > lib/env"
    manifest(project, index, run, "lib", "cat lib/seen; ! grep -q RUNNER lib/env")

    project.succeed()

    assert project.logs("agent").splitlines() == [".:", "lib", "requirements.txt", "", "/home/agent:"]


@pytest.mark.parametrize(
    ("run", "keep", "words"),
    [
        ("echo broken; exit 3", "lib", "`echo broken; exit 3` exited 3"),
        ("true", "lib", "it has made no directory `lib`"),
        ("ln -s /etc lib", "lib", "it has made no directory `lib`"),
        ("mkdir lib; mkfifo lib/pipe", "lib", "`pipe` is neither a file, a directory nor a link"),
    ],
)
def test_what_cannot_be_kept_fails_the_run_and_nothing_is_kept(
    project: Project, index: Index, repo: Path, run: str, keep: str, words: str
) -> None:
    manifest(project, index, run, keep, "true")

    done, record = project.apply()

    assert done.code == 1
    assert words in step(record, "dependencies")["outcome"]["message"]
    assert layers(project) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"from: [requirements.txt]": "from: [absent.lock]"}, "`absent.lock` is not a file of the repository"),
        ({"keep: [lib]": "keep: [src]"}, "`src` holds files of the repository"),
        ({"keep: [lib]": "keep: [other]"}, "`other` is not ignored by git"),
        ({"keep: [lib]": "keep: [lib, lib/x]"}, "`lib/x` is in this list already, or overlaps with what is"),
        ({"keep: [lib]": "keep: ['~/../x']"}, "is not a path below its folder"),
        ({"keep: [lib]": "keep: ['l*b']"}, "`l*b` is a pattern"),
        ({"{type: local, path: repo}": "{type: none}"}, "dependencies are made from files of a repository"),
        ({"[local]": "[process]"}, "`process` cannot enforce commands that make dependencies lib"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_made_is_refused_at_its_line(
    project: Project, index: Index, repo: Path, changes: dict[str, str], words: str
) -> None:
    manifest(project, index, "npm ci", "lib", "true")
    for old, new in changes.items():
        project.edit(old, new)

    refused = project.runner("plan", ".")

    assert refused.code == 2
    assert words in refused.err
    assert "all.runner.yaml:" in refused.err


def test_a_saved_plan_says_what_is_kept_here_and_is_stale_when_its_lock_file_is_another(
    project: Project, index: Index, repo: Path
) -> None:
    manifest(project, index, FETCH, "lib", "cat lib/data")
    project.edit(REPO, "repo_source: {type: local, path: repo, include_dirty: true}")
    assert project.runner("plan", ".", "--save", "plan.json").code == 0
    assert project.runner("apply", "plan.json").code == 0
    assert project.runner("apply", "plan.json").code == 0
    assert "lib kept from" in step(project.record(), "dependencies")["outcome"]["message"]

    (repo / "requirements.txt").write_text("left-pad==2.0\n")
    refused = project.runner("apply", "plan.json")

    assert refused.errors == ["plan.stale"]
    assert index.asked == ["/data"]


@pytest.mark.nightly
def test_a_runner_killed_while_it_makes_leaves_nothing_half(project: Project, index: Index, repo: Path) -> None:
    manifest(project, index, f"{FETCH}; touch lib/half; sleep 60", "lib", "true")
    runner = project.start("apply", ".", "--yes")
    half = project.home / "state" / "tmp"
    until(lambda: [*half.glob("*-dependencies/tree/lib/half")])
    runner.kill()
    runner.communicate()
    assert project.runner("recover").code == 0

    assert layers(project) == []
    assert [*half.iterdir()] == []
    project.edit("sleep", "true")
    project.succeed()
    assert len(layers(project)) == 1


@pytest.mark.nightly
def test_what_grows_beyond_the_disk_limit_is_ended_and_not_kept(project: Project, index: Index, repo: Path) -> None:
    manifest(project, index, "mkdir lib; yes > lib/full", "lib", "true")
    project.edit("network:", "resource_limits: {disk: 64M, enforcement: best_effort}\n    network:")

    done, record = project.apply()

    assert (done.code, step(record, "dependencies")["outcome"]["reason"]) == (1, "disk")
    assert layers(project) == []
