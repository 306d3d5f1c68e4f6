"""``runner triage`` beside the bare CLI, both asking the same double with the same prompt: what the runner adds.

Run as root: ``python tests/benchmarks/bench_triage.py``. Goose, the fastest CLI, works off a turn with a command and
one that ends it, in turn bare and through ``runner triage --provider local``: the same words and environment, and the
same files and skills in its home. A triage is timed from where all is imported that it imports, the models of manifests
made. Shown are medians of wall and CPU time, and of what a triage takes beyond the bare CLI and the start of a raw
sandbox (bubblewrap, ``/bin/true``) that came after it in the same round. Then the same on docker, in a sandbox that was
kept warm, beyond the bare CLI. The target of both is 150 ms, where Goose takes some 350. Asserts nothing.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.agents import goose
from runner.core.settings import shipped
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.ports.agent import ModelAccess
from runner.ports.provider import Paths
from runner.sandbox.bwrap import binary
from runner.steps.agent.home import furnish
from tests.benchmarks.measure import Cost, cost
from tests.benchmarks.sizes import rounds
from tests.cli.test_agent_clis import PLACE
from tests.support import dockerd

ROUNDS = rounds(11)
TURNS = [Turn(run="cat incident.json"), Turn(say="done")]
KEY = "sk-bench-0123456789"
SKILL = "k8s-troubleshooter"
LOADED = """
import sys
from runner.cli.main import entry
entry()
print("MODULES", *sys.modules, file=sys.stderr)
"""
IMPORTED = """
import gc, os, sys, importlib
from contextlib import suppress
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import perf_counter
def clock():
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)
marks = [clock()]
gc.set_threshold(200_000)  # this and the next as the runner does
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
for name in os.environ.pop("MODULES").split():
    with suppress(ImportError):  # those that make themselves, such as six.moves
        importlib.import_module(name)
from runner.manifest.load import Header, kinds
for model in (Header, *kinds().values()):
    model.model_rebuild(force=True)  # as pydantic does at import, unless it is told to wait
marks.append(clock())
from runner.cli.main import entry
entry()
marks.append(clock())
print("TIMES", *(b - a for one, two in zip(marks, marks[1:]) for a, b in zip(one, two)), file=sys.stderr)
"""


def timed(argv: list[str], env: Mapping[str, str], cwd: Path, stdin: bytes = b"") -> Cost:
    """Of a command and all that it waited for."""
    return cost(lambda: subprocess.run(argv, env=env, cwd=cwd, input=stdin, capture_output=True, check=True))


async def asking(work: Callable[[int], Cost]) -> Cost:
    """The time of some blocking work beside a fresh double."""
    async with serve_fake_model(TURNS) as port:
        return await trio.to_thread.run_sync(work, port)


def newest(home: Path) -> Path:
    return max((home / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def words(home: Path) -> list[str]:
    """What the newest run has started its agent with."""
    events = map(json.loads, (newest(home) / "events.jsonl").read_text().splitlines())
    return [*next(event["argv"] for event in events if event["type"] == "AgentStarted")]


def steps(home: Path) -> dict[str, float]:
    """Seconds of each step of the newest run, and of all of it."""
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
    """Show what a triage in a place costs beyond the bare CLI and a raw sandbox, or with ``warm`` none."""
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
        words = [*asked, "-o", "json", "why?"]
        if not modules:
            done = subprocess.run([sys.executable, "-c", LOADED, *words], env=told, cwd=folder, capture_output=True)
            modules.append(done.stderr.decode().rpartition("MODULES ")[2])
            return 0.0, 0.0
        told["MODULES"] = modules[0]
        done = subprocess.run([sys.executable, "-c", IMPORTED, *words], env=told, cwd=folder, capture_output=True)
        wall, cpu, *own_cost = map(float, done.stderr.decode().rpartition("TIMES ")[2].split())
        times["imports"].append((wall, cpu))
        return own_cost[0], own_cost[1]

    def bare(port: int) -> Cost:
        with tempfile.TemporaryDirectory(dir=folder) as home:
            paths = replace(
                Paths(**dict.fromkeys(Paths.__struct_fields__, str(incident))), home=home, skills=str(shipped("skills"))
            )
            access = ModelAccess(model="gpt-4.1", key=KEY, base_url=f"http://127.0.0.1:{port}/v1", home=home)
            prepared = goose.agent.set_up(access)
            subprocess.run(furnish(prepared, paths, [SKILL]), check=True)
            prompt = (incident / "prompt-sent.md").read_bytes()
            return timed(words(state), {**base, **prepared.env, "HOME": home}, incident, prompt)

    def sandbox(port: int) -> Cost:
        shown = ["--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
        shown += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc"]
        return timed([shutil.which("bwrap") or str(Path(*binary())), *shown, "/bin/true"], base, folder)

    works = {"runner triage": triage, "bare goose": bare} | ({} if warm else {"raw sandbox": sandbox})
    times: dict[str, list[Cost]] = {what: [] for what in (*works, "imports")}
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
    """In docker, of whose commands no CPU time is counted, there is no raw sandbox either."""
    for what, costs in times.items():
        walls, cpus = ([1e3 * cost for cost in one] for one in zip(*costs, strict=True))
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        print(f"{what:<14} wall {wall:6.0f} ms (least {min(walls):.0f})   cpu {cpu:6.0f} ms (least {min(cpus):.0f})")
    print("steps:", ", ".join(f"{step} {statistics.median(values) * 1e3:.0f}" for step, values in inner.items()))
    triage, *others = (costs for what, costs in times.items() if what != "imports")
    for number, name in enumerate(("wall", "cpu")[: len(others)]):
        beyond = [
            1e3 * (whole[number] - sum(part[number] for part in parts))
            for whole, *parts in zip(triage, *others, strict=True)
        ]
        share = statistics.median(beyond) / 1e3 / statistics.median(bare[number] for bare in others[0])
        print(
            f"beyond the others, {name}: {statistics.median(beyond):.0f} ms ({min(beyond):.0f} to {max(beyond):.0f}),",
            end=" ",
        )
        print(f"{share:.2f} of the bare CLI")


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
