"""Build of a real Kubernetes for tests: its servers from Debian's sources, etcd from Debian's package.

No registry ships a server of Kubernetes as a program, so ``components.py --cluster`` compiles Debian's source package
with Debian's Go: 12 minutes the first time, kept in the user's cache. Nothing is installed, and none of it needs root.

This file runs before there is an environment, so it imports the standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = "kubernetes"
PARTS = ("etcd-server", "golang-github-modern-go-reflect2-dev", "golang-github-modern-go-concurrent-dev")
SERVERS = ("kube-apiserver", "kubelet", "kube-scheduler", "kube-controller-manager")
_OPENAPI = "vendor/k8s.io/kube-openapi/cmd/openapi-gen"
_VERSION = "k8s.io/kubernetes/vendor/k8s.io/component-base/version"
_FLAGS = f"-s -w -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=20 -X {_VERSION}.gitVersion=v1.20.2"
_OOM = "defaultSandboxOOMAdj int = -998"  # which only a root with CAP_SYS_RESOURCE may give a process


def build(folder: Path, recipe: str) -> None:
    """Leave etcd and the servers in ``folder/bin``, and the recipe that they are of beside it."""
    work = folder / "work"
    home = work / "go"
    if not (home / "ready").exists():
        shutil.rmtree(work, ignore_errors=True)
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        work.mkdir()
        _fetch(work)
        shutil.copy(work / "etcd-server" / "usr" / "bin" / "etcd", folder / "bin")
        [unpacked] = (path for path in work.glob("kubernetes-*") if path.is_dir())
        tree = _tree(home)
        tree.parent.mkdir(parents=True)
        unpacked.rename(tree)
        _adapt(tree, work)
        _write_openapi(home)
        (home / "ready").touch()  # a build that was stopped goes on here, with what was compiled
    for server in SERVERS:
        _go(home, "build", "-ldflags", _FLAGS, "-o", str(folder / "bin" / server), f"k8s.io/kubernetes/cmd/{server}")
    (folder / "versions").write_text(recipe)
    shutil.rmtree(work, ignore_errors=True)


def _fetch(work: Path) -> None:
    """Bring the sources and the packages with a list and a state of apt's own: the machine's are left as they are."""
    options = _apt_options(work)
    _run(["apt-get", *options, "update", "-qq"], work)
    _run(["apt-get", *options, "source", "-qq", SOURCE], work)
    for package in PARTS:
        _run(["apt-get", *options, "download", "-qq", package], work)
        [archive] = work.glob(f"{package}_*.deb")
        _run(["dpkg-deb", "-x", str(archive), str(work / package)], work)


def _apt_options(work: Path) -> list[str]:
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"]
    known = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split("\n")
    places = [line.split() for line in known if re.fullmatch(r"\S+ bookworm main", line)]
    if not places:
        raise SystemExit("the cluster is built on Debian 12 (bookworm), and no list of apt names its main archive")
    place = places[0][0]
    (work / "lists").mkdir()
    (work / "archives").mkdir()
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (work / "sources.list").write_text(f"deb {signed} {place} bookworm main\ndeb-src {signed} {place} bookworm main\n")
    chosen = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "archives",
        "APT::Sandbox::User": "",
        "APT::Update::Post-Invoke-Success::": "true",
    }
    return [word for name, value in chosen.items() for word in ("-o", f"{name}={value}")]


def _adapt(tree: Path, work: Path) -> None:
    """Make the sources of 2021 run when they are built with the Go of 2022, by a root without all capabilities."""
    packages = Path("usr", "share", "gocode", "src", "github.com", "modern-go")
    for name in ("reflect2", "concurrent"):  # the vendored reflect2 crashes a program of Go 1.18 or newer
        vendored = tree / "vendor" / "github.com" / "modern-go" / name
        shutil.rmtree(vendored)
        shutil.copytree(work / f"golang-github-modern-go-{name}-dev" / packages / name, vendored)
    helper = tree / "pkg" / "kubelet" / "dockershim" / "helpers.go"
    found = [path for path in helper.parent.glob("*.go") if _OOM in path.read_text()]
    if len(found) != 1:
        raise SystemExit(f"`{_OOM}` stands in {len(found)} files of {helper.parent}, not in one")
    found[0].write_text(found[0].read_text().replace(_OOM, "defaultSandboxOOMAdj int = 0"))


def _write_openapi(home: Path) -> None:
    """Generate what upstream's makefile generates before it compiles: the description of the API's types."""
    root = _tree(home)
    generator = home / "openapi-gen"
    _go(home, "build", "-o", str(generator), f"k8s.io/kubernetes/{_OPENAPI}")
    # Libraries lie below ``staging``, to which ``vendor`` has links that this grep passes by.
    words = ["grep", "-rl", "--include=*.go", r"^// +k8s:openapi-gen=", "pkg", "vendor/k8s.io", "staging/src/k8s.io"]
    tagged = subprocess.run(words, check=True, capture_output=True, text=True, cwd=root).stdout.splitlines()
    folders = {str(Path(path).parent) for path in tagged if "code-generator" not in path and "/examples/" not in path}
    packages = sorted({_import_path(folder) for folder in folders})
    arguments = [
        *("--go-header-file", str(root / "hack" / "boilerplate" / "boilerplate.generatego.txt")),
        *("--output-base", str(home / "src"), "--output-package", "k8s.io/kubernetes/pkg/generated/openapi"),
        *("--output-file-base", "zz_generated.openapi", "--report-filename", str(home / "violations")),
        *("--input-dirs", ",".join(packages)),
    ]
    _run([str(generator), *arguments], root, _environment(home))


def _import_path(folder: str) -> str:
    for prefix in ("vendor/", "staging/src/"):
        if folder.startswith(prefix):
            return "k8s.io/kubernetes/vendor/" + folder.removeprefix(prefix)
    return f"k8s.io/kubernetes/{folder}"


def _tree(home: Path) -> Path:
    return home / "src" / "k8s.io" / "kubernetes"


def _go(home: Path, *arguments: str) -> None:
    _run(["go", *arguments], _tree(home), _environment(home))


def _environment(home: Path) -> dict[str, str]:
    cache = home.parent / "go-cache"
    return {
        **os.environ,
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOPATH": str(home),
        "GOCACHE": str(cache),
        "GOFLAGS": "-p=2",
    }


def _run(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(words, check=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
