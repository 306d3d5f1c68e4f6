"""The model gateway beside a direct connection to what is behind it: the double, in a process of its own.

Run: ``python tests/benchmarks/bench_gateway.py``. Targets, over TCP: a request costs less than 3 ms more and the first
byte of a stream comes less than 2 ms later; a stream at least 0.7 as fast; 200 streams at once in bounded memory. Then
the same through the relay, from inside workspaces.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from runner.core.settings import Settings
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.gateway.gateway import ModelGateway
from runner.ports.gateway import Api, ModelGrant
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.providers.local import LocalProvider
from runner.sandbox.docker_api import Engine
from tests.benchmarks.sizes import amount, rounds
from tests.support import dockerd
from tests.support.providers import OnTestImage

ROUNDS = rounds(300)
STREAMS = amount(200)
MIB = 1 << 20
GRANT = ModelGrant(Api.ANTHROPIC, ("sonnet",))
LONG = Turn(say="x" * (MIB // 2))  # some 4 MiB of events
SLOW = Turn(say="x" * 24 * 20, pace=10)

ASK = {"model": "claude-sonnet-5-5", "messages": [], "tools": [{"name": "Bash", "input_schema": {}}]}
BODY = json.dumps({**ASK, "system": "x" * 48_000})  # as large as Claude's
STREAM = json.dumps({**ASK, "stream": True, "system": "x" * 48_000})


def settings(port: int) -> Settings:
    return Settings.from_env({"ANTHROPIC_API_KEY": "sk-benchmark", "RUNNER_ANTHROPIC_URL": f"http://127.0.0.1:{port}"})


async def double(kind: str) -> None:
    turns = {"short": Turn(say="hello"), "long": LONG, "slow": SLOW}
    async with serve_fake_model([turns[kind]] * 100_000) as port:
        print(port, flush=True)
        await trio.sleep_forever()


async def gateway(port: str) -> None:
    async with ModelGateway(settings(int(port))).open(GRANT, lambda exchange: None) as session:

        async def serve(stream: trio.SocketStream) -> None:
            await session.serve(stream)

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        print(listeners[0].socket.getsockname()[1], flush=True)
        await trio.serve_listeners(serve, listeners)


@contextmanager
def role(*words: str) -> Iterator[tuple[int, int]]:
    """One of the roles above in a process of its own: its port, and its pid."""
    with subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def ask(connection: http.client.HTTPConnection, body: str) -> tuple[float, float, int]:
    """Seconds to the first byte of the answer's body and to its end, and its bytes."""
    start = time.perf_counter()
    connection.request("POST", "/v1/messages", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    first = len(answer.read1(65_536))
    middle = time.perf_counter() - start
    rest = 0
    while piece := answer.read1(65_536):
        rest += len(piece)
    return middle, time.perf_counter() - start, first + rest


def side_by_side(direct: int, through: int, body: str, rounds: int) -> list[list[tuple[float, float]]]:
    """What ``ask`` measures, for each of the two: medians, then what a tenth is below, as all would be when quiet."""
    connections = [http.client.HTTPConnection("127.0.0.1", port) for port in (direct, through)]
    times: list[list[tuple[float, float, int]]] = [[], []]
    for _ in range(rounds):
        for connection, found in zip(connections, times, strict=True):
            found.append(ask(connection, body))
    ranks = (rounds // 2, rounds // 10)
    sorts = [(sorted(t[0] for t in found), sorted(t[1] for t in found)) for found in times]
    return [[(firsts[rank], wholes[rank]) for rank in ranks] for firsts, wholes in sorts]


def rss(pid: int) -> float:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1]) / 1024


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests() -> None:
    with role("double", "short") as (direct, _), role("gateway", str(direct)) as (through, pid):
        for name, body, at in (("a request", BODY, 1), ("first byte of a stream", STREAM, 0)):
            side_by_side(direct, through, body, 20)
            before = cpu(pid)
            plain, gated = side_by_side(direct, through, body, ROUNDS)
            spent = (cpu(pid) - before) / ROUNDS
            for kind, one, other in zip(("median", "a tenth below"), plain, gated, strict=True):
                print(f"{name}, {kind}: {one[at] * 1e3:.2f} ms direct, {(other[at] - one[at]) * 1e3:.2f} ms more")
            print(f"{name}: CPU of the gateway {spent * 1e3:.2f} ms")


def stream() -> None:
    with role("double", "long") as (direct, _), role("gateway", str(direct)) as (through, pid):
        side_by_side(direct, through, STREAM, 1)
        before = cpu(pid)
        plain, gated = side_by_side(direct, through, STREAM, 5)
        spent = (cpu(pid) - before) / 5
        ours, theirs = gated[0][1], plain[0][1]
        print(f"a stream of 4 MiB: {theirs:.2f} s direct, speed {theirs / ours:.2f} of that; CPU {spent:.2f} s")


def many() -> None:
    """Each lasts two seconds, and waits for all to have begun."""
    with role("double", "slow") as (direct, _), role("gateway", str(direct)) as (through, pid):
        ask(http.client.HTTPConnection("127.0.0.1", through), STREAM)
        before, start, ended = rss(pid), time.perf_counter(), []

        def one() -> None:
            ended.append(ask(http.client.HTTPConnection("127.0.0.1", through), STREAM))

        threads = [threading.Thread(target=one) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        most = rss(pid)
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - start
        grown = most - before
        print(
            f"{STREAMS} streams at once: all {len(ended)} in {spent:.1f} s; {grown:.0f} MiB more than {before:.0f} MiB"
        )


INSIDE = """
import http.client, statistics, sys, time
port, rounds, body = int(sys.argv[1]), int(sys.argv[2]), sys.stdin.read()
connection = http.client.HTTPConnection("127.0.0.1", port)
firsts, wholes = [], []
for _ in range(rounds):
    start = time.perf_counter()
    connection.request("POST", "/v1/messages", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read1(65536)
    firsts.append(time.perf_counter() - start)
    answer.read()
    wholes.append(time.perf_counter() - start)
print(statistics.median(firsts) * 1e3, statistics.median(wholes) * 1e3)
"""


async def relayed(kind: str, provider: LocalProvider | DockerProvider, direct: int) -> None:
    handle = await provider.create(WorkspaceRequest(id=f"bench-{os.getpid()}", run="run", nonce="nonce"))
    try:
        async with (
            provider.open(handle, SandboxSpec()) as workspace,
            ModelGateway(settings(direct)).open(GRANT, lambda exchange: None) as session,
            workspace.listen(session.serve) as port,
        ):
            argv = ["python3", "-SIc", INSIDE, str(port), str(ROUNDS)]
            done = await workspace.run(argv, stdin=STREAM.encode())
            first, whole = map(float, done.stdout.split())
            print(f"through the relay of {kind}: first byte of a stream after {first:.2f} ms, whole {whole:.2f} ms")
    finally:
        await provider.destroy(handle)


async def relays() -> None:
    with role("double", "short") as (direct, _), tempfile.TemporaryDirectory() as folder:
        await relayed("local", LocalProvider(Path(folder)), direct)
        if dockerd.missing() is None:
            await relayed("docker", OnTestImage(Path(folder), Engine(dockerd.host())), direct)


def main() -> None:
    print("POST with 48 kB: through the gateway, beside a direct connection to the double over TCP")
    requests()
    stream()
    many()
    try:
        trio.run(relays)
    finally:
        dockerd.leave()


if __name__ == "__main__":
    gc.set_threshold(100_000)  # as the program itself does
    match sys.argv[1:]:
        case ["double", kind]:
            trio.run(double, kind)
        case ["gateway", port]:
            trio.run(gateway, port)
        case _:
            main()
