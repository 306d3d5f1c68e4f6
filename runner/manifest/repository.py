"""``.agentgate/policy.yaml``: what a repository says of its own workspaces, in the form that the documents give it.

It is no manifest: it has no kind, and its names are camelCase. What its patterns may be is for others to judge.
"""

from __future__ import annotations

from pydantic import Field

from runner.core.errors import RunnerError
from runner.manifest.kinds._fields import Shape, Size, Text
from runner.manifest.load import load_tree
from runner.manifest.text import Tree

FILE = ".agentgate/policy.yaml"
FILE_BYTES = 256 << 10


class RepositoryPolicy(Shape):
    """Path rules of one repository's workspaces. ``None`` means not written."""

    allowedPaths: list[Text] | None = Field(
        None, description="Patterns of the paths that may be changed; one without `/` holds at any depth."
    )
    forbiddenPatterns: list[Text] | None = Field(
        None,
        description="Patterns of the paths that must not be in a workspace, in upper or lower case; one "
        "without `/` holds at any depth. The list replaces the built-in one.",
    )
    allowNetwork: bool | None = Field(
        None,
        description="`true` gives commands every public host where the agent type says nothing of its network and no"
        " `Policy` forbids it; `false` allows none, whatever the agent type says.",
    )
    maxFileSize: Size | None = Field(None, description="The size in bytes that no file may exceed.")


def read(content: bytes) -> tuple[RepositoryPolicy | None, Tree | None, list[RunnerError]]:
    """The file's text as a policy with its places, or all that is wrong with it."""
    try:
        return load_tree(RepositoryPolicy, FILE, content)
    except RunnerError as error:
        return None, None, [error]
