"""Agents that print millions of lines in whole runs: what it costs, what is kept, and that they can be stopped."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from threading import Thread

import pytest

from runner.runtime.exec import MAX_LOG, TAIL
from tests.support import dockerd
from tests.support.situations import Project, step, until

LINE = "a line of the flood, of which there are so many\n"
LINES = 2_000_000
AT_ONCE = 1000
TOKEN = "npm_A8s7df6A9s8d7f6as8d7fQ"
MIB = 1 << 20
MOST = 64  # MiB more of memory than when the agent begins
SECRET = "secrets: [{name: NPM_TOKEN, from: {env: CI_NPM_TOKEN}, steps: [agent]}]"  # so that all is searched
PROVIDERS = [
    "local",
    pytest.param("docker", marks=pytest.mark.nightly),
    pytest.param("gvisor", marks=[pytest.mark.nightly, dockerd.GVISOR.mark]),
]


def flood(turns: str) -> str:
    """Return a program that prints many lines at each turn."""
    return f'for _ in {turns}: print("{LINE.strip()}\\n" * {AT_ONCE}, end="", flush=True)'


class Flooded:
    """An apply whose agent floods it, with somebody who reads what it prints."""

    def __init__(self, project: Project, provider: str, script: str) -> None:
        project.env["CI_NPM_TOKEN"] = TOKEN
        project.script(f'echo "first $NPM_TOKEN"\n{script}', agent=SECRET, provider=provider)
        self.process = project.start("apply", ".")
        self.out = self.err = ""
        self._reader = Thread(target=self._read)
        self._reader.start()
        until(lambda: self.process.poll() is not None or [log for log in logs(project) if log.stat().st_size])
        self.before = self.most = self.look()  # MiB

    def _read(self) -> None:
        self.out, self.err = self.process.communicate()

    def look(self) -> int:
        try:
            words = Path(f"/proc/{self.process.pid}/status").read_text().split()
            self.most = int(words[words.index("VmHWM:") + 1]) >> 10
        except (OSError, ValueError):
            pass  # it has ended
        return self.most

    def wait(self) -> int:
        while self._reader.is_alive():
            self.look()
            self._reader.join(0.05)
        return self.process.returncode


def logs(project: Project) -> list[Path]:
    return [*(project.home / "state" / "runs").glob("*/logs/agent.stdout")]


def disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks << 9 for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_of_millions_of_lines_beginning_and_end_are_kept_and_the_rest_is_counted(
    project: Project, provider: str
) -> None:
    last = f"python3 -c '{flood(f'range({LINES // AT_ONCE})')}'; echo \"last $NPM_TOKEN\"; exit 3"
    flooded = Flooded(project, provider, last)

    assert flooded.wait() == 1, flooded.out[-2000:] + flooded.err
    kept = logs(project)[0].read_bytes()
    words = "first [redacted:NPM_TOKEN]\n", "last [redacted:NPM_TOKEN]\n"
    whole = LINES * len(LINE) + sum(map(len, words))
    assert kept.startswith(words[0].encode() + LINE.encode())
    assert kept.endswith(LINE.encode() + words[1].encode())
    assert kept[MAX_LOG:-TAIL] == b"\n[runner: %d bytes cut here]\n" % (whole - MAX_LOG - TAIL)
    assert flooded.most - flooded.before < MOST
    assert disk(project.home) < MAX_LOG + 8 * MIB
    assert re.search(r"\[\d+ lines are not shown\]", flooded.out)
    assert "   | last [redacted:NPM_TOKEN]\n" in flooded.out
    assert len(flooded.out) < MIB
    assert step(project.record(), "agent")["outcome"]["message"].endswith("exited 3")


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_flood_without_end_is_stopped_at_once(project: Project, provider: str) -> None:
    flooded = Flooded(project, provider, f"exec python3 -c '{flood('iter(int, 1)')}'")
    until(lambda: logs(project)[0].stat().st_size >= MAX_LOG)

    flooded.process.send_signal(signal.SIGINT)

    assert flooded.wait() == 130, flooded.out[-2000:] + flooded.err
    assert flooded.most - flooded.before < MOST
    assert b" bytes cut here]\n" in logs(project)[0].read_bytes()
