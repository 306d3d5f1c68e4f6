"""Whatever the environment, the paths and the limits of a process: a code that says what is wrong, never a traceback.

Drawn by seeds; as an ordinary user where the tests are root's, who may read everything.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.cli.main import BUG
from tests.support.forked import FORKS
from tests.support.situations import document, open_to_all

NOBODY = 65534
MANIFESTS = "---\n".join(
    (
        document("AgentType", "worker", "agent: script\nscript: {files: []}\nworkspace: {enabled: true}"),
        document("Policy", "house", "max_file_size: 1M"),
        document("IncidentRun", "work", "agent_type: worker\npolicy: house"),
    )
)

VERBS = (
    *("validate P", "validate P --strict", "plan P", "plan P --offline", "plan m --save P", "plan m --against P"),
    *("plan m --task-file P", "apply P", "apply m --junit P", "apply m --summary P", "apply m --task-file P"),
    *("convert P", "convert P --diff", "init P", "doctor --settings", "doctor", "completion bash", "schema Policy"),
    *("policy check P", "policy explain P", "policy scan P", "policy scan m --manifests P"),
    *("workspace create P", "workspace list", "workspace show P", "workspace create --url P", "workspace find P"),
    *("project create shop --root P", "project list", "project get P", "lease list", "lease show P", "pool status"),
    *("runs list", "runs show P", "runs logs P", "runs export last --to P", "runs apply last", "recover", "recover P"),
    *("gc --dry-run", "gc", "resume P", "resume last P", "rehearse m --turns P", "rehearse P --turns m"),
    *("triage -w P --print", "triage -w m --print -s P", "triage -w m --print --kubeconfig P", "triage -w m --check"),
    *("triage -w m --print --alert P", "triage -w m --print --toolchain P", "triage -w m --print --output-dir P"),
    *("triage -w m --print --turns P", "image build --ca P --save-context P", "image build --npmrc P --save-context P"),
)
VARIABLES = (
    *("HOME", "RUNNER_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR", "PATH", "SHELL"),
    *("KUBECONFIG", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "CI"),
    *("RUNNER_GIT_CREDENTIALS", "RUNNER_GIT", "RUN_RETENTION", "WARM_POOL_SIZE", "COLUMNS", "LINES", "TERM", "TZ"),
    *("WORKSPACE_DEFAULT_CPU", "WORKSPACE_DEFAULT_MEMORY", "WORKSPACE_DEFAULT_DISK", "WORKSPACE_MAX", "WORKSPACE_TTL"),
    *("WORKSPACE_PROVIDERS", "ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "LLM_MODEL", "https_proxy"),
    *("GITHUB_ACTIONS", "GITHUB_EVENT_PATH", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "GITHUB_REPOSITORY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_DIR", "GIT_SSH_COMMAND", "AGENT_HOME", "SYSTEM_PROMPT_FILE", "PROMPT"),
    "NO_PROXY",
)
VALUES = (
    *("", " ", "0", "-1", "1", "9" * 30, "nan", "1e400", "true", "x" * 100_000, "\udcff", "\U0001f600", "a\nb\x1b[31m"),
    *("http://[::1", "https://u:p@h/?q", "tcp://999.9.9.9:x", "unix://", "unix:///nowhere", "ssh://", "npipe://x", ":"),
    *("local,nowhere", "gvisor", "5m", "10G", "~", "$HOME", "%s", "{{ x }}", "\u0661", "1_000"),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Paths of everything that a path can lead to. What may not be read is so for an ordinary user."""
    root = tmp_path_factory.mktemp("places")
    open_to_all(root)
    (root / "file").write_text("a: 1\n")
    (root / "bytes").write_bytes(bytes(range(256)))
    (root / "json").write_text('{"a": "\\ud83d\\ude00"}')
    (root / "folder").mkdir()
    (root / "shut" / "below").mkdir(parents=True)
    (root / "shut" / "below" / "file").write_text("a: 1\n")
    (root / "secret").write_text("a: 1\n")
    links = {"link": "folder", "into": "shut/below", "to": "shut/below/file", "dangling": "nowhere", "loop": "loop"}
    for name, target in {**links, "circle": "circle/x", "self": "/proc/self/root/proc/self", "root": "/"}.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
    (root / os.fsdecode(b"\xff\xfe")).write_text("a: 1\n")
    (root / "new\nline").mkdir()
    (root / ".runner").mkdir()
    (root / ".runner" / "loop.yaml").symlink_to("loop.yaml")
    (root / ".runner" / "shut.yaml").symlink_to("../shut/below/file")
    (root / "secret").chmod(0)
    (root / "shut").chmod(0)
    found = [str(path) for path in root.iterdir()]
    below = [f"{path}/x" for path in found] + [f"{root}/into/file", f"{root}/to/x/y", f"{root}/shut/below/file"]
    odd = ["", "-", ".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/1/environ", "/proc/1/root/x"]
    long = ["x" * 300, "/".join(["d" * 200] * 25), str(root), "m", "m/all.runner.yaml", "last", "--", "\udcff"]
    yield found + below + odd + long
    (root / "shut").chmod(0o700)


class Tried:
    """One command after another in a home of its own, by a seeded draw."""

    def __init__(self, home: Path, places: list[str]) -> None:
        self.home, self.places = home, places
        self.user = NOBODY if os.geteuid() == 0 else None

    def fresh(self) -> Path:
        shutil.rmtree(self.home, ignore_errors=True)
        (self.home / "m").mkdir(parents=True)
        (self.home / "m" / "all.runner.yaml").write_text(MANIFESTS)
        for path in (self.home, self.home / "m"):
            path.chmod(0o777)
        return self.home

    def run(self, words: list[str], env: dict[str, str], descriptors: int | None = None) -> None:
        home = self.fresh()
        usual = {"PATH": os.environ["PATH"], "HOME": str(home), "RUNNER_HOME": str(home / "state")}
        wanted = {"env": {**usual, **env}, "user": self.user, "descriptors": descriptors}
        code, out, err = FORKS.run(words, cwd=home, timeout=60, **wanted)  # type: ignore[arg-type]
        told = f"{words} { ({k: v[:200] for k, v in env.items()}) } {descriptors}\n{err[-3000:]}"
        assert code != BUG, told
        assert "Traceback" not in err, told
        assert code >= 0, told
        assert code == 0 or err or out, told


def by_paths(tried: Tried, rng: random.Random) -> None:
    words = [rng.choice(tried.places) if word == "P" else word for word in rng.choice(VERBS).split()]
    tried.run(words, {})


def by_environment(tried: Tried, rng: random.Random) -> None:
    names = rng.sample(VARIABLES, rng.randint(1, 3))
    env = {name: rng.choice([rng.choice(VALUES), rng.choice(tried.places)]) for name in names}
    words = ["m" if word == "P" else word for word in rng.choice(VERBS).split()]
    tried.run(words, {name: value.replace("\0", "") for name, value in env.items()})


def by_descriptors(tried: Tried, rng: random.Random) -> None:
    words = ["m" if word == "P" else word for word in rng.choice(VERBS).split()]
    tried.run(words, {}, rng.randint(3, 24))


DRAWS: dict[str, Callable[[Tried, random.Random], None]] = {
    "paths": by_paths,
    "environment": by_environment,
    "descriptors": by_descriptors,
}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 9))])
@pytest.mark.parametrize("draw", DRAWS)
def test_no_command_ends_with_a_bug(tmp_path: Path, places: list[str], draw: str, seed: int) -> None:
    open_to_all(tmp_path)
    tried, rng = Tried(tmp_path / "home", places), random.Random(seed)
    for _ in range(20 if seed == 1 else 100):
        DRAWS[draw](tried, rng)


@pytest.mark.parametrize("descriptors", [6, 8])
def test_a_new_interpreter_with_few_descriptors_says_so(tmp_path: Path, descriptors: int) -> None:
    """What would say it well cannot be imported any more."""
    (tmp_path / "all.runner.yaml").write_text(MANIFESTS)
    done = subprocess.run(
        ["prlimit", f"--nofile={descriptors}", sys.executable, "-m", "runner", "plan", "--offline", str(tmp_path)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert done.returncode in (2, 4), done.stderr
    assert "Traceback" not in done.stderr
    assert "oo many open files" in done.stderr


def test_a_link_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    """`/proc/1/root` is one, for everybody but root."""
    tried = Tried(tmp_path / "home", [])
    open_to_all(tmp_path)
    home = tried.fresh()
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    words = ["plan", "m", "--save", "/proc/1/root/plan.json"]

    code, _, err = FORKS.run(words, cwd=home, env=env, timeout=60, user=tried.user)

    assert code == 4
    assert err.startswith("error[host.refused]: Permission denied: `/proc/1/root`")
