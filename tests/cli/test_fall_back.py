"""A whole run by the command that falls back to the next provider, for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.situations import Project, step


@pytest.mark.slow
def test_a_run_whose_setup_fails_with_one_provider_is_done_with_the_next_and_says_so(
    project: Project, repository: Path
) -> None:
    project.script(
        "cat README; echo changed > README; ls -A",
        provider="local, process",
        workspace="""
        repo_source: {type: local, path: repo}
        setup_commands: ['echo half > half-done; test "$HOME" != /home/agent']
        """,
        run="snapshot: {message: work}",
    )

    done, record = project.apply()

    assert done.code == 0, done.out + done.err
    failure = "setup: setup command 1 of 1 exited 1"
    assert f"falling back from local: {failure}" in done.out
    assert record["rejected_providers"] == [{"provider": "local", "reason": failure}]
    assert (record["provider"], record["isolation"], record["attempt"]) == ("process", "none", 2)
    assert [step(record, name)["status"] for name in ("clone", "setup", "agent")] == ["succeeded"] * 3
    shown = project.runner("runs", "show", "last").out
    assert "isolation  none (process) - NOT ISOLATED from this host" in shown
    assert f"refused    local: {failure}" in shown
    assert "+changed" in project.runner("runs", "patch", "last").out


@pytest.mark.nightly
@pytest.mark.scenario("LIF-02")
def test_a_single_provider_is_never_fallen_back_from(project: Project) -> None:
    project.script("true", provider="local", workspace='setup_commands: ["exit 4"]')

    done, record = project.apply()

    assert done.code == 1
    assert record["rejected_providers"] == []
    assert (record["provider"], record["attempt"]) == ("local", 1)
