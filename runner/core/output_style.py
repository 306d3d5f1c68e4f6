"""The style of output that the environment asks for. Apart from the settings, since every start needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Manners(NamedTuple):
    """Output style. ``ci_commands``: a CI interprets some lines as commands; ``annotates``: it is GitHub Actions."""

    redraw: bool = True
    colour: bool = True
    ci_commands: bool = False
    annotates: bool = False


_CI = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION")
_OBEYING = ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")  # the second is Azure Pipelines'


def in_ci(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether an environment, by default this process's, is that of a CI."""
    env = os.environ if env is None else env  # noqa: TID251  # the other place
    return any(env.get(name, "").lower() not in ("", "0", "false") for name in _CI)


def manners(env: Mapping[str, str] | None = None) -> Manners:
    """Read the output style from an environment, by default this process's."""
    env = os.environ if env is None else env  # noqa: TID251  # the other place
    capable = env.get("TERM", "dumb") != "dumb"
    obeying = {name for name in _OBEYING if env.get(name, "").lower() not in ("", "0", "false")}
    return Manners(
        redraw=capable and not in_ci(env),
        colour=capable and not env.get("NO_COLOR"),
        ci_commands=bool(obeying),
        annotates=env.get("GITHUB_ACTIONS") == "true",
    )
