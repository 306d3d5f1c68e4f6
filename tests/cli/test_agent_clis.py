"""One turn of each real CLI through the gateway, a key set on this host and nowhere else.

The CLIs are where ``RUNNER_TESTS_AGENTS`` says, or in ``runner-tests/agents`` of the user's cache, as ``.ci/run``
installs them: a toolchain with their programs in ``bin``.
"""

from __future__ import annotations

import json
import os
import shlex
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import trio

from runner.app.apply import apply
from runner.app.planning import make_plan
from runner.egress.double import serve_double
from runner.egress.turns import Fail, Turn
from runner.model import Reason
from runner.record import RunRecord
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


async def work_off(project: Project, name: str, turns: Sequence[Turn], heard: bytearray) -> RunRecord:
    """Apply the project with the key of one CLI and these turns in its provider's place, which keeps what it hears."""
    async with serve_double(turns) as port, overheard(port, heard) as front:
        url = f"http://127.0.0.1:{front}"
        env = {"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin", CLIS[name][0]: KEY, **project.env}
        env |= {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        settings = Settings.from_env(env)
        (record,) = await apply(await make_plan(project.folder, settings), settings, [])
        return record


def write(project: Project, spec: str, workspace: str, run: str = "") -> None:
    project.write(
        document("AgentType", "worker", f"{spec}\nworkspace: {{enabled: true, {workspace}}}"),
        document("IncidentRun", "work", f"agent_type: worker\nprompt: make it\n{run}"),
    )


# Containers see of this host Node, what the other CLIs are linked with, and certificates.
_CONTAINED = f"base_image: {dockerd.IMAGE}, toolchains: [{{}}, /usr, /etc/ssl]"
PLACES = {
    "local": "providers: [local], toolchains: [{}]",
    "docker": f"providers: [docker], {_CONTAINED}",
    "gvisor": f"providers: [gvisor], {_CONTAINED}",
}
SCENARIOS = {"claude": "TRI-12", "codex": "TRI-13", "gemini": "TRI-14", "goose": "BEY-18"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("local"),
        pytest.param("docker", marks=pytest.mark.nightly),
        pytest.param("gvisor", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.scenario(s)) for n, s in SCENARIOS.items()])
async def test_a_turn_with_a_tool_is_worked_off_and_the_key_is_nowhere(
    project: Project, toolchain: Path, name: str, provider: str
) -> None:
    spec = f"agent: {name}\nbudget: {{turns: 8, tokens: 1000000, cost_usd: 10}}\npost_hooks: ['{KEEP_HOME}']"
    if provider != "local":
        project.env["DOCKER_HOST"] = dockerd.host()
    write(project, spec, PLACES[provider].format(toolchain), "snapshot: {message: made}")
    heard = bytearray()

    record = await work_off(project, name, [Turn(run=WORK), Turn(say="All done.")], heard)

    directory = project.home / "state" / "runs" / record.id
    said = [(directory / "logs" / f"agent.{stream}").read_text()[-3000:] for stream in ("stdout", "stderr")]
    assert record.exit_code == 0, (record.outcome, *said)
    agent = record.steps["agent"].outcome
    assert agent is not None
    assert agent.message == "All done."
    assert [used.requests >= 2 for used in record.models.values()] == [True]
    assert (directory / "output" / "processes").exists(), said
    assert {".claude", ".codex", ".gemini", ".config"} & set(os.listdir(directory / "output" / "home"))
    assert "made.txt" in (directory / "work.patch").read_text()
    assert CLIS[name][1].lower() in heard.decode(errors="replace").lower()
    assert places_with(KEY, project.home) == []


# what goes wrong: turns of the model, a budget, and how the step ends
WRONG: dict[str, tuple[Turn, str, set[Reason]]] = {
    "wrong key": (Turn(fail=Fail(status=401)), "{}", {Reason.AUTH}),
    "no quota": (Turn(fail=Fail(status=429)), "{}", {Reason.QUOTA, Reason.TIMEOUT}),  # Gemini CLI tries for minutes
    "no end": (Turn(run="true"), "{turns: 2}", {Reason.TURNS, Reason.BUDGET}),
    "over budget": (Turn(run="true"), "{tokens: 1}", {Reason.BUDGET}),
    "stalled": (Turn.model_validate({"stall": "1h", "say": "late"}), "{}", {Reason.TIMEOUT}),
    "cut off": (Turn(say="never all of it", cut_off=True), "{}", {Reason.GATEWAY, Reason.TIMEOUT}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", CLIS)
async def test_what_goes_wrong_with_the_model_ends_the_step_with_its_reason(
    project: Project, toolchain: Path, name: str, what: str
) -> None:
    turn, budget, reasons = WRONG[what]
    spec = f"agent: {name}\nbudget: {budget}\ntimeouts: {{agent: 25s}}"
    write(project, spec, f"providers: [local], toolchains: [{toolchain}]")

    record = await work_off(project, name, [turn] * 20, bytearray())

    outcome = record.steps["agent"].outcome
    assert outcome is not None
    assert outcome.reason in reasons, outcome
    assert record.exit_code == (124 if outcome.reason is Reason.TIMEOUT else 1)
    assert record.left == ()
