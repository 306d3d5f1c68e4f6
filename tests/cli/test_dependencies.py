"""Dependencies that commands make, in whole runs: made once, then given to later runs and to verify."""

from __future__ import annotations

import gzip
import io
import json
import socket
import tarfile
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256, sha512
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support import dockerd
from tests.support.needs import GO, NPM
from tests.support.situations import REPO, Project, commit, step, until, write_files

AS_ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
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


MODULE = "/go/example.org/pad/@v/v1.0.0"
PAD = {"go.mod": "module example.org/pad\n", "pad.go": 'package pad\n\nconst Pad = "padded"\n'}
APP = {
    "go.mod": "module example.org/app\n\ngo 1.19\n\nrequire example.org/pad v1.0.0\n",
    "app_test.go": """package app

import (
	"testing"

	"example.org/pad"
)

func TestPad(t *testing.T) {
	if pad.Pad != "padded" {
		t.Fatal()
	}
}
""",
}


CRATE = {"Cargo.toml": '[package]\nname = "pad-left"\nversion = "1.0.0"\n', "src/lib.rs": "pub const PAD: u8 = 1;\n"}


def index_of_cargo(place: str) -> dict[str, bytes]:
    """The files of a sparse index with one crate, and that crate, by their path."""
    crate = packed({f"pad-left-1.0.0/{name}": text for name, text in CRATE.items()})
    about = {"name": "pad-left", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    return {
        "/index/config.json": json.dumps({"dl": f"{place}/crates/{{crate}}-{{version}}.crate"}).encode(),
        "/index/pa/d-/pad-left": json.dumps({**about, "cksum": sha256(crate).hexdigest()}).encode(),
        "/crates/pad-left-1.0.0.crate": crate,
    }


def _sum(files: dict[str, str]) -> str:
    """The hash that a `go.sum` has of files."""
    lines = [f"{sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items())]
    return f"h1:{b64encode(sha256(''.join(lines).encode()).digest()).decode()}"


_WHOLE = {f"example.org/pad@v1.0.0/{name}": text for name, text in PAD.items()}
_SUMS = {"v1.0.0": _sum(_WHOLE), "v1.0.0/go.mod": _sum({"go.mod": PAD["go.mod"]})}
GO_APP = {**APP, "go.sum": "".join(f"example.org/pad {of} {hash}\n" for of, hash in _SUMS.items())}


class Index(ThreadingHTTPServer):
    """A package index with one wheel; ``asked`` are the paths that were asked for."""

    def __init__(self) -> None:
        super().__init__(("0.0.0.0", 0), Handler)
        self.asked: list[str] = []
        self.host = THERE

    @property
    def place(self) -> str:
        return f"{self.host}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = "left_pad-1.0-py3-none-any.whl"
        body = {
            "/simple/left-pad/": f'<a href="/{name}">{name}</a>'.encode(),
            f"/{name}": zipped(WHEEL),
            "/data": b"data",
            "/left-pad.tgz": package_of_npm(),
            f"{MODULE}.info": b'{"Version": "v1.0.0"}',
            f"{MODULE}.mod": PAD["go.mod"].encode(),
            f"{MODULE}.zip": zipped(PAD, "example.org/pad@v1.0.0/"),
            **index_of_cargo(f"http://{self.server.place}"),
        }
        self.send_response(200 if self.path in body else 404)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
        self.send_header("Content-Length", str(len(body.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(body.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        pass


WHEEL = {
    "left_pad.py": "pad = 'padded'\n",
    "left_pad-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: left-pad\nVersion: 1.0\n",
    "left_pad-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "left_pad-1.0.dist-info/RECORD": "",
}


def zipped(files: dict[str, str], prefix: str = "") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{prefix}{name}", text)
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


@pytest.mark.nightly
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
    assert f"to {index.place}\n" in begun.err
    assert "dependencies: [.venv]  " in begun.out
    assert "with the network of pip: python3 -m venv .venv && .venv/bin/pip install -r requirements.txt\n" in begun.out
    assert "/left_pad-1.0-py3-none-any.whl" in asked
    assert "-> .venv (kept)" in planned
    assert f"reaches {index.place}" in planned
    assert index.asked == asked
    assert [record["network"] for record in records] == [[], []]
    told = [step(record, "dependencies")["outcome"]["message"] for record in records]
    assert all(message.startswith(".venv kept from runner init, ") for message in told)
    assert len(layers(project)) == 1


@pytest.mark.nightly
def test_what_init_installs_is_bounded_in_disk(project: Project, index: Index) -> None:
    files = {"requirements.txt": "left-pad==1.0\n", ".gitignore": ".venv\n__pycache__\n", "test_pad.py": TESTED}
    write_files(project.folder, files)
    commit(project.folder)
    project.env |= {"PIP_INDEX_URL": f"http://{index.place}/simple", "PIP_CONFIG_FILE": "/dev/null"}
    project.env |= {"PIP_TRUSTED_HOST": THERE, "WORKSPACE_DEFAULT_DISK": "8M"}

    begun = project.runner("init", timeout=120)

    assert "its workspace grew to" in begun.out + begun.err
    assert layers(project) == []
    assert [*(project.home / "state" / "tmp").glob("*")] == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("provider", "within"),
    [("local", ()), ("local", AS_ORDINARY), ("docker", ()), pytest.param("gvisor", (), marks=dockerd.GVISOR.mark)],
)
def test_tree_and_home_are_given_on_each_provider(
    project: Project, index: Index, repo: Path, provider: str, within: tuple[str, ...]
) -> None:
    """What agents write there is thrown away, also in the home, and is no part of their work."""
    project.within = within
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
        pytest.param("true", "lib", "it has made no directory `lib`", marks=pytest.mark.nightly),
        ("ln -s /etc lib", "lib", "it has made no directory `lib`"),
        pytest.param(
            *("mkdir lib; mkfifo lib/pipe", "lib", "`pipe` is neither a file, a directory nor a link"),
            marks=pytest.mark.nightly,
        ),
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


@pytest.mark.nightly
def test_a_resumed_run_has_its_dependencies_and_another_lock_file_starts_it_anew(
    project: Project, index: Index, repo: Path
) -> None:
    manifest(project, index, FETCH, "lib", "cat lib/data")
    project.edit('commands: [{run: "cat lib/data"}]', "commands: [{run: 'cat lib/data; false'}]")
    assert project.apply()[0].code == 1
    project.edit("cat lib/data; false", "cat lib/data")

    assert project.runner("resume", "last").code == 0
    again = project.record()
    assert step(again, "agent")["reused"]
    assert project.logs("verify") == "data"
    assert index.asked == ["/data"]


def own_address() -> str:
    """One of this host that is no loopback address, to which go takes no proxy."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@pytest.mark.nightly
@GO.mark
def test_go_modules_are_kept_in_the_home(project: Project, index: Index, repo: Path) -> None:
    write_files(repo, GO_APP)
    commit(repo)
    index.host = own_address()
    manifest(project, index, "GOPROXY=http://{place}/go go mod download", "~/go/pkg/mod", "go test ./...")
    project.edit("from: [requirements.txt]", "from: [go.mod, go.sum]")
    project.edit("network:", "toolchains: [go]\n    network:")

    for _ in range(2):
        project.succeed()
    assert [path for path in index.asked if path.endswith(".zip")] == [f"{MODULE}.zip"]


@pytest.mark.nightly
@NPM.mark
def test_npm_installs_for_init_from_its_registry(project: Project, index: Index) -> None:
    """As npm is configured on this host, from a registry of its own."""
    tests = {"name": "app", "version": "1.0.0", "scripts": {"test": "node -e \"require('left-pad')\""}}
    package = {**tests, "dependencies": {"left-pad": "1.0.0"}}
    integrity = f"sha512-{b64encode(sha512(package_of_npm()).digest()).decode()}"
    locked = {"version": "1.0.0", "resolved": f"http://{index.place}/left-pad.tgz", "integrity": integrity}
    lock = {**tests, "lockfileVersion": 3, "packages": {"": package, "node_modules/left-pad": locked}}
    files = {"package.json": json.dumps(package), "package-lock.json": json.dumps(lock), ".gitignore": "node_modules\n"}
    write_files(project.folder, files)
    commit(project.folder)
    project.env["npm_config_registry"] = f"http://{index.place}/"

    begun = project.runner("init", timeout=120)
    records = [project.succeed() for _ in range(2)]

    assert begun.code == 0, begun.out + begun.err
    assert "network: {dependencies: {allow: [npm]}}" in (project.folder / ".runner" / "agent.runner.yaml").read_text()
    assert "/left-pad.tgz" in index.asked
    assert [record["network"] for record in records] == [[], []]


def package_of_npm() -> bytes:
    return packed({"package/package.json": '{"name": "left-pad", "version": "1.0.0"}', "package/index.js": ""})


def packed(files: dict[str, str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(file.getvalue(), mtime=0)
