"""A triage that was stopped is gone on with: with more time, with what was found, and to the same place."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from tests.cli.test_agent_clis import KEY, toolchain
from tests.cli.test_incident_places import kill
from tests.cli.test_rehearse import claude
from tests.cli.test_triage import (
    DESCRIBED,
    HANGS,
    HERE,
    MARKED,
    REPORT,
    TALKS,
    TURNS,
    place,
    record_of,
    wait_for_first_words,
)
from tests.support.situations import Done, Project, step, until

__all__ = ["claude", "toolchain"]

OUT = ("--output-dir", "out", "--output-file", "mine.log")


SPOKEN: list[dict[str, Any]] = [
    *({"say": "I look.", "run": f"echo {word}"} for word in ("one", "two")),
    {"say": "I look deeper.", "run": "echo three"},
]


async def run_with_model(project: Project, turns: list[dict[str, Any]], *arguments: str) -> Done:
    """A command whose agents ask a double that stands in the place of their model's provider."""
    project.env |= {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}
    async with serve_fake_model([Turn.model_validate(turn) for turn in turns]) as port:
        url = f"http://127.0.0.1:{port}"
        project.env |= {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1"}
        return await trio.to_thread.run_sync(partial(project.runner, *arguments))


@pytest.mark.nightly
async def test_a_triage_whose_time_was_up_is_continued_with_more_of_it_and_what_it_had_found(
    project: Project, claude: Path
) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    where = ("triage", "-w", "INC-1", *DESCRIBED, *place(project, "local", claude), *OUT)
    late = await run_with_model(project, HANGS, *where, "--timeout", "8")
    first = record_of(project)
    again = project.runner("resume", "last", "--explain")
    longer = project.runner("resume", "last", "--explain", "--timeout", "90", "--output", "json")
    (project.folder / "out" / "mine.log").write_text("precious")

    done = await run_with_model(project, TURNS, "resume", "last", "--timeout", "90")
    record, out = record_of(project), project.folder / "out"

    assert late.code == 124, late.out + late.err
    assert f"  Continue    runner resume {first['id']} --timeout 12\n" in late.out
    assert f" of run {first['id']} were not enough: give it more with --timeout" in again.out
    assert "would be continued as a new run, which has 8.0s:\n" in again.out
    told = f"the agent is told of run {first['id']}: its draft, 2 commands and its last words"
    assert (json.loads(longer.out)["deadline_seconds"], json.loads(longer.out)["notes"]) == (90, [told])

    assert done.code == 0, done.out + done.err
    assert f"note: {told}\nrun {record['id']}   claude/sonnet in local   stops " in done.out
    assert f"(1m30s)   resumes {first['id']}\n" in done.out
    assert "   | I write.\n" in done.out
    assert "INVESTIGATED in " in done.out
    assert (record["resumes"], record["deadline_seconds"]) == (first["id"], 90)
    plan = json.loads((project.directory(record) / "plan.json").read_text())["runs"][0]
    assert [s["deadline_seconds"] for s in plan["steps"] if s["id"] == "agent"] == [90]

    sent = (project.folder / "INC-1" / "prompt-sent.md").read_text()
    assert sent.index("</incident>") < sent.index("<earlier_attempt>") < sent.index("## Summary")
    assert f"This continues run {first['id']}, which ended with `timeout`" in sent
    assert "$ echo begun; sleep 1000 & setsid sleep 1000 & wait   [cut off]" in sent
    assert "What it said last:\nI look deeper.\n" in sent
    assert "<earlier_attempt>" not in (project.directory(first) / "prompt-sent.md").read_text()

    assert (out / "investigation.md").read_text().strip() == REPORT.strip()
    assert {path.read_text() for path in out.glob("investigation.*.md")} == {REPORT.partition("## Root")[0]}
    assert [path.read_text() for path in out.glob("mine.*.log")][-1:] == ["precious"]
    assert "I write." in (out / "mine.log").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["goose", "claude"])
async def test_a_real_cli_that_ran_out_of_turns_is_continued_with_what_it_had_found(
    project: Project, toolchain: Path, name: str
) -> None:
    """Of goose the reason and the last words were the same, its own, and what its model had said was lost."""
    where = ("triage", "-w", "INC-1", "-a", name, *DESCRIBED, *place(project, "local", toolchain))
    ended = await run_with_model(project, SPOKEN, *where, "--max-turns", "3")
    first = record_of(project)
    done = await run_with_model(project, TURNS, "resume", "last", "--timeout", "2m")
    sent = (project.folder / "INC-1" / "prompt-sent.md").read_text()

    assert (ended.code, first["outcome"]["reason"]) == (1, "turns"), ended.out + ended.err
    assert '  Last words  "I look deeper."\n' in ended.out
    assert f"  Continue    runner resume {first['id']}\n" in ended.out
    assert "$ echo one   [exit 0]\n" in sent or "$ echo one   [ran]\n" in sent
    assert "What it said last:\nI look deeper.\n" in sent
    assert record_of(project)["resumes"] == first["id"]
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
async def test_a_triage_whose_runner_was_killed_is_delivered_by_recover_and_continued(
    project: Project, claude: Path
) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    project.env["ANTHROPIC_API_KEY"] = KEY
    async with serve_fake_model([Turn.model_validate(turn) for turn in HANGS]) as port:
        project.env["RUNNER_ANTHROPIC_URL"] = f"http://127.0.0.1:{port}"
        process = project.start("triage", "-w", "INC-1", *DESCRIBED, *place(project, "local", claude), *OUT)
        await trio.to_thread.run_sync(partial(wait_for_first_words, project))
        log = next((project.folder / "INC-1" / "output").glob("*.log"))
        await trio.to_thread.run_sync(partial(until, lambda: "I look deeper" in log.read_text()))
        kill(process)
    recovered = project.runner("recover", "last")
    lost = record_of(project)
    done = await run_with_model(project, TURNS, "resume", "last", "--timeout", "1m")

    report = project.folder / "INC-1" / "output" / "investigation.md"
    assert recovered.code == 0, recovered.out + recovered.err
    assert f"  saved    {report}\n" in recovered.out
    assert "no change" not in recovered.out
    assert done.code == 0, done.out + done.err
    assert (
        f"which ended with `{step(lost, 'agent')['outcome']['reason']}`"
        in (project.folder / "INC-1" / "prompt-sent.md").read_text()
    )
    earlier = list((project.folder / "out").glob("investigation.*.md"))
    assert [path.read_text() for path in earlier] == [REPORT.partition("## Root")[0]]
    assert report.read_text() == (project.folder / "out" / "investigation.md").read_text()
    assert "I look deeper" in next((project.folder / "out").glob("mine.*.log")).read_text()


@pytest.mark.nightly
def test_a_rehearsal_whose_runner_was_killed_leaves_a_marked_report_too(project: Project, claude: Path) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    (project.folder / "a.turns.yaml").write_text(json.dumps({"turns": HANGS}))
    words = ("triage", "-w", "INC-1", "--turns", "a.turns.yaml", *DESCRIBED, *place(project, "local", claude))
    process = project.start(*words)
    wait_for_first_words(project)
    log = next((project.folder / "INC-1" / "output").glob("*.log"))
    until(lambda: "I look deeper" in log.read_text())
    kill(process)

    recovered = project.runner("recover", "last")

    assert recovered.code == 0, recovered.out + recovered.err
    assert (project.folder / "INC-1" / "output" / "investigation.md").read_text().startswith(MARKED)


def test_a_time_that_is_none_is_refused_with_its_bounds(project: Project) -> None:
    for text in ("0", "-5", "soon", "31d", "9" * 30):
        done = project.runner("resume", "last", f"--timeout={text}")

        assert (done.code, done.out) == (2, "")
        assert "error[cli.usage]: `--timeout` is `" in done.err
        assert "from 1s to 30d" in done.err


def test_any_run_can_be_given_more_time(project: Project) -> None:
    project.script("exit 3", agent="timeouts: {agent: 3s}", run="timeout: 7s")
    project.apply()

    done = project.runner("resume", "last", "--timeout", "2m")
    record = record_of(project)
    project.runner("resume", "last")
    plan = json.loads((project.directory(record) / "plan.json").read_text())["runs"][0]

    assert done.code == 1
    assert "FAILED work at agent in" in done.out
    assert (record["deadline_seconds"], record_of(project)["deadline_seconds"]) == (120, 120)
    assert [s["deadline_seconds"] for s in plan["steps"] if s["id"] == "agent"] == [120]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--output-dir", "file/below"), "which is not a directory"),
        (("--output-dir", "file"), "not a directory"),
        (("--output-dir", "/proc/below"), "this host's own system"),
        (("--output-file", "folder"), "which exists and is not a file"),
        (("--output-dir", ".", "--output-file", "link"), "which exists and is not a file"),
    ],
)
def test_a_place_for_the_output_that_cannot_be_had_is_told_before_anything_starts(
    project: Project, arguments: tuple[str, ...], words: str
) -> None:
    (project.folder / "file").touch()
    (project.folder / "INC-1" / "output" / "folder").mkdir(parents=True)
    (project.folder / "link").symlink_to("file")

    done = project.runner("triage", "-w", "INC-1", *DESCRIBED, *HERE, *arguments)

    assert (done.code, done.out) == (2, ""), done.err
    assert words in done.err
    assert os.listdir(project.folder / "INC-1") == ["output"]
