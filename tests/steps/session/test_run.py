"""Which of the files that an agent's post-hook names are kept."""

from __future__ import annotations

from pathlib import Path

from runner.steps.session.run import likeliest_first

SESSION = "0b7c6a52-7f0e-5d0b-9a64-0d7c2b9e4f11"


def test_the_sessions_own_transcript_comes_before_those_that_fill_the_archive(tmp_path: Path) -> None:
    """An agent can write as many as it likes, with any name and time, but the CLI writes after it."""
    forged = [f"a{number}/{SESSION}.jsonl" for number in range(3)]
    sub_agents, real, linked = f"w/{SESSION}/subagents/a.jsonl", f"w/{SESSION}.jsonl", f"out/{SESSION}.jsonl"
    for name in (*forged, sub_agents, real):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "out").symlink_to("w")
    while (tmp_path / real).stat().st_ctime_ns <= (tmp_path / forged[-1]).stat().st_ctime_ns:
        (tmp_path / real).write_text("the last turn")  # clocks of file systems tick slowly

    found = likeliest_first(tmp_path, [sub_agents, linked, "gone", *forged, real], SESSION)

    assert found[0] == real
    assert sorted(found[1:4]) == forged
    assert found[4:] == [linked, sub_agents, "gone"]
