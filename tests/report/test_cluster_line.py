"""What a report says of a cluster that commands asked."""

from __future__ import annotations

import pytest

from runner.events.record import ClusterUse
from runner.report.text import cluster_line


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        pytest.param({}, "2 requests, 0 refused", id="none"),
        pytest.param({"get pods": 1}, "3 requests, 1 refused (get pods)", id="one"),
        pytest.param({"get pods": 1, "get": 3}, "6 requests, 4 refused (get pods, ...)", id="some together"),
        pytest.param({"get": 3}, "5 requests, 3 refused", id="all together"),
    ],
)
def test_requests_that_were_refused_are_named(refused: dict[str, int], words: str) -> None:
    """What was counted together has no name."""
    assert (
        cluster_line(
            ClusterUse(context="prod", server="https://a", namespace="b", answered={"list pods": 2}, refused=refused)
        )
        == f"prod: {words}"
    )


def test_what_failed_at_the_cluster_is_not_called_refused() -> None:
    used = ClusterUse(
        context="prod",
        server="https://a",
        namespace="b",
        answered={},
        refused={"get secrets": 1},
        failed={"get pods": 7},
    )
    assert cluster_line(used) == "prod: 8 requests, 1 refused (get secrets), 7 failed (get pods)"
