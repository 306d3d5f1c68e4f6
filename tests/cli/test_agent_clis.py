"""One turn of each real CLI through the gateway, a key set on this host and nowhere else.

The CLIs are where ``RUNNER_TESTS_AGENTS`` says, or in ``runner-tests/agents`` of the user's cache, as ``.ci/run``
installs them: a toolchain with their programs in ``bin``.
"""

from __future__ import annotations

import json
import os
import shlex
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import trio

from runner.app.apply import apply
from runner.app.planning import make_plan
from runner.egress.double import serve_double
from runner.egress.turns import Turn
from runner.settings import Settings
from tests.conformance import dockerd
from tests.situations import Project, document

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-tests" / "agents"
PLACE = Path(os.environ.get("RUNNER_TESTS_AGENTS") or _CACHE).resolve()

KEY = "sk-test-0+/=%'\"\\9f8e7d6c5b4a"
# CLI: the variable that has its key, and the header that its provider gets it in
CLIS = {
    "claude": ("ANTHROPIC_API_KEY", f"x-api-key: {KEY}"),
    "codex": ("OPENAI_API_KEY", f"authorization: Bearer {KEY}"),
    "gemini": ("GOOGLE_API_KEY", f"x-goog-api-key: {KEY}"),
    "goose": ("OPENAI_API_KEY", f"authorization: Bearer {KEY}"),
}

WORK = """
echo made > made.txt
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' > $RUNNER_OUTPUT/processes
find /tmp -xdev -type f -exec cat {} + > $RUNNER_OUTPUT/temporary
"""
KEEP_HOME = "cp -r ~/. $RUNNER_OUTPUT/home && cp -r /run/runner $RUNNER_OUTPUT/run"


def forms(key: str) -> Iterator[bytes]:
    """How a key may be written down."""
    raw = key.encode()
    for before in range(3):
        coded = b64encode(bytes(before) + raw)
        whole = coded[4 if before else 0 : -4]  # what lies in whole groups does not depend on its neighbours
        yield from (whole, whole.replace(b"+", b"-").replace(b"/", b"_"))
    texts = (key, raw.hex(), raw.hex().upper(), quote(key), quote(key, safe=""), quote_plus(key), json.dumps(key)[1:-1])
    texts += ("".join(f"%{byte:02x}" for byte in raw), shlex.quote(key)[1:-1], repr(key)[1:-1])
    yield from (text.encode() for text in texts)


def places_with(key: str, below: Path) -> list[str]:
    """Files that hold a key in any form, or a sign that it was taken out of them; and links that say it."""
    wanted = [*forms(key), b"[redacted:"]
    found = []
    for path in below.rglob("*"):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found += [str(path.relative_to(below))] if any(form in content for form in wanted) else []
    return found


@asynccontextmanager
async def overheard(port: int, heard: bytearray) -> AsyncIterator[int]:
    """A port that leads to another one, and keeps what is sent there."""

    async def pipe(source: trio.SocketStream, target: trio.SocketStream, kept: bytearray) -> None:
        async for chunk in source:
            kept += chunk
            await target.send_all(chunk)
        await target.send_eof()

    async def serve(stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as onward, trio.open_nursery() as both:
            both.start_soon(pipe, stream, onward, heard)
            both.start_soon(pipe, onward, stream, bytearray())

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="session")
def toolchain() -> Path:
    if not (PLACE / "versions").exists():
        pytest.skip(f"no agent CLIs in {PLACE}: .ci/run installs them")
    return PLACE


# There a command has no more address space than memory, and V8 reserves tens of gigabytes that it never touches.
ROOMY = "resource_limits: {memory: 128G}"
SCENARIOS = {"claude": "TRI-12", "codex": "TRI-13", "gemini": "TRI-14", "goose": "BEY-18"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "workspace"),
    [
        pytest.param("local", "", id="local"),
        pytest.param("docker", f"base_image: {dockerd.IMAGE}", id="docker", marks=pytest.mark.nightly),
        pytest.param("gvisor", f"base_image: {dockerd.IMAGE}\n  {ROOMY}", id="gvisor", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.scenario(s)) for n, s in SCENARIOS.items()])
async def test_a_turn_with_a_tool_is_worked_off_and_the_key_is_nowhere(
    project: Project, toolchain: Path, name: str, provider: str, workspace: str
) -> None:
    system = "" if provider == "local" else ", /usr, /etc/ssl"  # Node, what the others are linked with, certificates
    project.write(
        document(
            "AgentType",
            "worker",
            f"agent: {name}\nbudget: {{turns: 8, tokens: 1000000, cost_usd: 10}}\npost_hooks: ['{KEEP_HOME}']\n"
            f"workspace:\n  enabled: true\n  providers: [{provider}]\n"
            f"  toolchains: [{toolchain}{system}]\n  {workspace}",
        ),
        document("IncidentRun", "work", "agent_type: worker\nprompt: make it\nsnapshot: {message: made}"),
    )
    variable, header = CLIS[name]
    heard = bytearray()

    async with serve_double([Turn(run=WORK), Turn(say="All done.")]) as port, overheard(port, heard) as front:
        url = f"http://127.0.0.1:{front}"
        env = {"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin", variable: KEY}
        env |= {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        env |= {"DOCKER_HOST": dockerd.host()} if provider != "local" else {}
        settings = Settings.from_env(env)
        (record,) = await apply(await make_plan(project.folder, settings), settings, [])

    directory = project.home / "state" / "runs" / record.id
    said = [(directory / "logs" / f"agent.{stream}").read_text()[-3000:] for stream in ("stdout", "stderr")]
    agent = record.steps["agent"].outcome
    assert record.exit_code == 0, (record.outcome, *said)
    assert agent is not None
    assert agent.message == "All done."
    assert [used.requests >= 2 for used in record.models.values()] == [True]
    assert (directory / "output" / "processes").exists(), said
    assert {path.name for path in (directory / "output" / "home").iterdir()} & {
        ".claude",
        ".codex",
        ".gemini",
        ".config",
    }
    assert "made.txt" in (directory / "work.patch").read_text()
    assert header.lower() in heard.decode(errors="replace").lower()
    assert places_with(KEY, project.home) == []
