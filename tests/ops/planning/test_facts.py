"""What planning found of a provider is taken for what it is, for as long as that can be."""

from __future__ import annotations

import math

from msgspec.structs import replace

from runner.core.settings import Settings
from runner.ops.planning.make_plan import make_plan
from runner.ops.runs.start import FRESH_SECONDS, _seen
from tests.support.situations import Project


async def test_only_what_was_found_just_now_and_for_this_plan_counts(project: Project) -> None:
    project.script("true", provider="local")
    settings = Settings.from_env({"RUNNER_HOME": str(project.home / "state"), "PATH": "/usr/bin:/bin"})
    planned = await make_plan(project.folder, settings)
    found = planned.facts.probes["local"]

    assert found.available
    assert _seen(planned, "local") is found
    assert _seen(planned, "process") is None
    assert _seen(replace(planned, probed=planned.probed - FRESH_SECONDS), "local") is None
    gone = replace(planned.facts, probes={"local": replace(found, available=False)})
    assert _seen(replace(planned, facts=gone), "local") is None
    assert (await make_plan(project.folder, settings, pinned=planned.facts)).probed == -math.inf
