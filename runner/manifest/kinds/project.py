"""Settings that the runs of one repository share."""

from __future__ import annotations

from pydantic import Field

from runner.manifest.kinds._fields import Body, QueueName, Text

KIND = "Project"


class Spec(Body):
    """Settings that the runs of one repository share."""

    root: Text = Field(description="The project's directory, relative to the manifest; what runs refer to lies in it.")
    workspace_isolation: bool = Field(description="Shows a workspace only itself, not its whole project.")
    protected_paths: list[Text] = Field(description="Paths that no isolated agent may change, besides its type's.")
    agent_type: str | None = Field(None, description="The agent type of runs that name none.")
    policy: str | None = Field(None, description="A policy for every run, besides those of run and agent type.")
    requires_runner: str | None = Field(None, description="The versions of runner that it works with: `>=0.1,<2`.")
    queue: QueueName | None = Field(None, description="The queue of Kueue that its runs wait in, where they are Jobs.")
