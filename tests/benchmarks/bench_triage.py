"""``runner triage`` beside the bare CLI, both asking the same double with the same prompt: what the runner adds.

Run as root: ``python tests/benchmarks/bench_triage.py``. Goose, the fastest CLI, works off a turn with a command and
one that ends it, in turn bare and through ``runner triage --provider local``. Shown are medians of the wall time, and
what a triage takes beyond the bare CLI, the imports and the start of a raw sandbox (bubblewrap, ``/bin/true``). The
target of that is 150 ms. Asserts nothing.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from runner.egress.double import serve_double
from runner.egress.turns import Turn
from runner.providers._bwrap import binary
from tests.cli.test_agent_clis import PLACE

Cost = tuple[float, float]

ROUNDS = 7
TURNS = [Turn(run="cat incident.json"), Turn(say="done")]
WORDS = ["--model", "gpt-4.1", "--no-profile", "--with-builtin", "developer"]
LOADED = """
import sys
from runner.cli.main import main
from runner.cli.output import standard
main(sys.argv[1:], standard())
print("MODULES", *sys.modules, file=sys.stderr)
"""
IMPORTS = """
import sys, importlib
from contextlib import suppress
for name in sys.argv[1:]:
    with suppress(ImportError):  # those that make themselves, such as six.moves
        importlib.import_module(name)
"""


def timed(argv: list[str], env: Mapping[str, str], cwd: Path, stdin: bytes = b"") -> Cost:
    """Wall and CPU seconds of a command and all that it waited for."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, env=env, cwd=cwd, input=stdin, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 or "triage" in argv, done.stdout.decode() + done.stderr.decode()
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def asking(work: Callable[[int], Cost]) -> Cost:
    """The time of some blocking work beside a fresh double."""
    async with serve_double(TURNS) as port:
        return await trio.to_thread.run_sync(work, port)


def steps(home: Path) -> dict[str, float]:
    """Seconds of each step of the newest run."""
    newest = max((home / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    record = json.loads((newest / "run.json").read_text())
    took = {step["id"]: (step["ended"] - step["started"]) / 1e6 for step in record["steps"] if step["ended"]}
    return {**took, "whole": (record["ended"] - record["started"]) / 1e6}


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-triage-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        incident = folder / "INC"
        incident.mkdir()
        (incident / "incident.json").write_text('{"incidentId": "bench", "namespace": "payments"}')
        base = {"PATH": f"{PLACE}/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        prompt = b""
        modules: list[str] = []  # that a triage imports

        def triage(port: int) -> Cost:
            env = {**base, "HOME": name, "RUNNER_HOME": f"{folder}/state", "OPENAI_API_KEY": "sk-bench-0123456789"}
            env["RUNNER_OPENAI_URL"] = f"http://127.0.0.1:{port}/v1"
            words = ["triage", "-w", str(incident), "-a", "goose", "--provider", "local", "--toolchain", str(PLACE)]
            if not modules:
                done = subprocess.run([sys.executable, "-c", LOADED, *words], env=env, cwd=folder, capture_output=True)
                modules.extend(done.stderr.decode().rpartition("MODULES ")[2].split())
                return 0.0, 0.0
            return timed([sys.executable, "-m", "runner", *words, "-o", "json", "why?"], env, folder)

        def bare(port: int) -> Cost:
            env = {**base, "OPENAI_HOST": f"http://127.0.0.1:{port}", "OPENAI_API_KEY": "sk-bench-0123456789"}
            env |= {"GOOSE_PROVIDER": "openai", "GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1"}
            with tempfile.TemporaryDirectory(dir=folder) as home:
                argv = ["goose", "run", "-q", "--output-format", "stream-json", "-n", "bench", *WORDS, "-i", "-"]
                return timed(argv, {**env, "HOME": home}, incident, prompt)

        def imports(port: int) -> Cost:
            return timed([sys.executable, "-c", IMPORTS, *modules], base, folder)

        def sandbox(port: int) -> Cost:
            words = ["--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
            words += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc"]
            return timed([shutil.which("bwrap") or str(Path(*binary())), *words, "/bin/true"], base, folder)

        works = {"runner triage": triage, "bare goose": bare, "imports": imports, "raw sandbox": sandbox}
        times: dict[str, list[Cost]] = {what: [] for what in works}
        inner: dict[str, list[float]] = {}
        for turn in range(ROUNDS + 1):
            for what, work in works.items():
                took = await asking(work)
                if turn:
                    times[what].append(took)
                if turn and work is triage:
                    for step, seconds in steps(folder / "state").items():
                        inner.setdefault(step, []).append(seconds)
                prompt = prompt or (incident / "prompt-sent.md").read_bytes()
    least: dict[str, list[float]] = {}
    for what, costs in times.items():
        walls, cpus = zip(*costs, strict=True)
        least[what] = [statistics.median(walls), statistics.median(cpus), min(walls), min(cpus)]
        wall, cpu, fastest, cheapest = (1e3 * value for value in least[what])
        print(f"{what:<14} wall {wall:6.0f} ms (least {fastest:.0f})   cpu {cpu:6.0f} ms (least {cheapest:.0f})")
    print("steps:", ", ".join(f"{step} {statistics.median(values) * 1e3:.0f}" for step, values in inner.items()))
    for number, name in enumerate(("wall, medians", "cpu, medians", "wall, least", "cpu, least")):
        others = sum(values[number] for what, values in least.items() if what != "runner triage")
        print(f"beyond all three, {name}: {1e3 * (least['runner triage'][number] - others):.0f} ms")


if __name__ == "__main__":
    trio.run(main)
