"""``runner triage`` beside the bare CLI, both asking the same double with the same prompt: what the runner adds.

Run as root: ``python tests/benchmarks/bench_triage.py``. Goose, the fastest CLI, works off a turn with a command and
one that ends it, in turn bare and through ``runner triage --provider local``: the same words and environment, and the
same files and skills in its home. Shown are medians of the wall time, and what a triage takes beyond the bare CLI, the
imports and the start of a raw sandbox (bubblewrap, ``/bin/true``). Then the same on docker, in a sandbox that was kept
warm, beyond the bare CLI and the imports. The target of both is 150 ms. Asserts nothing.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import trio

from runner.agents import goose
from runner.egress.double import serve_double
from runner.egress.turns import Turn
from runner.ports.agent import Access
from runner.ports.provider import Paths
from runner.providers._bwrap import binary
from runner.settings import shipped
from runner.steps.agent.home import furnish
from tests.cli.test_agent_clis import PLACE
from tests.conformance import dockerd

Cost = tuple[float, float]

ROUNDS = 7
TURNS = [Turn(run="cat incident.json"), Turn(say="done")]
KEY = "sk-bench-0123456789"
SKILL = "k8s-troubleshooter"
LOADED = """
import sys
from runner.cli.main import main
from runner.cli.output import standard
main(sys.argv[1:], standard())
print("MODULES", *sys.modules, file=sys.stderr)
"""
IMPORTS = """
import gc, sys, importlib
gc.set_threshold(200_000)  # as the runner does
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


def newest(home: Path) -> Path:
    return max((home / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def words(home: Path) -> list[str]:
    """What the newest run has started its agent with."""
    events = map(json.loads, (newest(home) / "events.jsonl").read_text().splitlines())
    return [*next(event["argv"] for event in events if event["type"] == "AgentStarted")]


def steps(home: Path) -> dict[str, float]:
    """Seconds of each step of the newest run."""
    record = json.loads((newest(home) / "run.json").read_text())
    took = {step["id"]: (step["ended"] - step["started"]) / 1e6 for step in record["steps"] if step["ended"]}
    return {**took, "whole": (record["ended"] - record["started"]) / 1e6}


@contextmanager
def kept_warm(words: list[str], env: Mapping[str, str], folder: Path) -> Iterator[Callable[[], None]]:
    """A keeper of slots for the triages that these words start; what it gives waits until there is one."""
    runner = [sys.executable, "-m", "runner"]

    def told(*words: str) -> str:
        return subprocess.run([*runner, *words], env=env, cwd=folder, check=True, capture_output=True, text=True).stdout

    (folder / "pool.runner.yaml").write_text(told(*words, "--print"))
    keeper = subprocess.Popen(
        [*runner, "pool", "warm", "pool.runner.yaml", "--size", "1"], env=env, cwd=folder, stdout=subprocess.DEVNULL
    )

    def wait() -> None:
        while not any(
            pool["slots"]["ready"] for pool in json.loads(told("pool", "status", "--output", "json"))["pools"]
        ):
            time.sleep(0.2)

    try:
        yield wait
    finally:
        keeper.terminate()
        keeper.wait()


async def compare(folder: Path, place: list[str], env: Mapping[str, str], stack: ExitStack, *, warm: bool) -> None:
    """Show what a triage in a place costs beyond the bare CLI, the imports and a raw sandbox, or with ``warm`` none."""
    incident, state = folder / "INC", folder / "state"
    incident.mkdir()
    (incident / "incident.json").write_text('{"incidentId": "bench", "namespace": "payments"}')
    base = {"PATH": f"{PLACE}/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    own = {**base, **env, "HOME": str(folder), "RUNNER_HOME": str(state), "OPENAI_API_KEY": KEY}
    asked = ["triage", "-w", str(incident), "-a", "goose", *place]
    modules: list[str] = []  # that a triage imports
    ready = stack.enter_context(kept_warm(asked, own, folder)) if warm else lambda: None

    def triage(port: int) -> Cost:
        told = {**own, "RUNNER_OPENAI_URL": f"http://127.0.0.1:{port}/v1"}
        ready()
        if not modules:
            done = subprocess.run([sys.executable, "-c", LOADED, *asked], env=told, cwd=folder, capture_output=True)
            modules.extend(done.stderr.decode().rpartition("MODULES ")[2].split())
            return 0.0, 0.0
        return timed([sys.executable, "-m", "runner", *asked, "-o", "json", "why?"], told, folder)

    def bare(port: int) -> Cost:
        with tempfile.TemporaryDirectory(dir=folder) as home:
            paths = replace(Paths(*[str(incident)] * len(fields(Paths))), home=home, skills=str(shipped("skills")))
            access = Access("gpt-4.1", KEY, f"http://127.0.0.1:{port}/v1", home=home)
            prepared = goose.agent.prepare(access)
            subprocess.run(furnish(prepared, paths, [SKILL]), check=True)
            prompt = (incident / "prompt-sent.md").read_bytes()
            return timed(words(state), {**base, **prepared.env, "HOME": home}, incident, prompt)

    def imports(port: int) -> Cost:
        return timed([sys.executable, "-c", IMPORTS, *modules], base, folder)

    def sandbox(port: int) -> Cost:
        shown = ["--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
        shown += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc"]
        return timed([shutil.which("bwrap") or str(Path(*binary())), *shown, "/bin/true"], base, folder)

    works = {"runner triage": triage, "bare goose": bare, "imports": imports}
    works |= {} if warm else {"raw sandbox": sandbox}
    times: dict[str, list[Cost]] = {what: [] for what in works}
    inner: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for what, work in works.items():
            took = await asking(work)
            if turn:
                times[what].append(took)
            if turn and work is triage:
                for step, seconds in steps(state).items():
                    inner.setdefault(step, []).append(seconds)
    show(times, inner)


def show(times: Mapping[str, list[Cost]], inner: Mapping[str, list[float]]) -> None:
    least: dict[str, list[float]] = {}
    for what, costs in times.items():
        walls, cpus = zip(*costs, strict=True)
        least[what] = [statistics.median(walls), statistics.median(cpus), min(walls), min(cpus)]
        wall, cpu, fastest, cheapest = (1e3 * value for value in least[what])
        print(f"{what:<14} wall {wall:6.0f} ms (least {fastest:.0f})   cpu {cpu:6.0f} ms (least {cheapest:.0f})")
    print("steps:", ", ".join(f"{step} {statistics.median(values) * 1e3:.0f}" for step, values in inner.items()))
    for number, name in enumerate(("wall, medians", "cpu, medians", "wall, least", "cpu, least")):
        others = sum(values[number] for what, values in least.items() if what != "runner triage")
        print(f"beyond the others, {name}: {1e3 * (least['runner triage'][number] - others):.0f} ms")


async def main() -> None:
    tools = ["--toolchain", str(PLACE)]
    with tempfile.TemporaryDirectory(prefix="bench-triage-") as name, ExitStack() as stack:
        Path(name).chmod(0o755)
        await compare(Path(name), ["--provider", "local", *tools], {}, stack, warm=False)
    if (why := dockerd.missing()) is not None:
        print(f"no docker: {why}")
        return
    print("docker, in a slot that was kept warm; the CPU of its commands is the daemon's and not counted")
    seen = [*tools, "--toolchain", "/usr", "--toolchain", "/etc/ssl"]
    with tempfile.TemporaryDirectory(prefix="bench-triage-") as name, ExitStack() as stack:
        stack.callback(dockerd.leave)
        env = {"DOCKER_HOST": dockerd.host()}
        await compare(Path(name), ["--provider", "docker", "-i", dockerd.IMAGE, *seen], env, stack, warm=True)


if __name__ == "__main__":
    trio.run(main)
