"""Names in ``RUNNER_HOME``, whose path is ``home`` everywhere. What one module alone uses is named there."""

from __future__ import annotations

from pathlib import Path

STATE_FILE = "state.db"
RUNS = "runs"
SNAPSHOTS = "snapshots"
WORKSPACES = "workspaces"  # in the home, leases of those outside of runs; in a project, their trees
PROJECTS = "projects"
SANDBOXES = "sandboxes"  # a record for each workspace that a provider has made
MIRRORS = "mirrors"
LAYERS = "dependencies"  # what the commands of manifests have installed
PLAN_FILE = "plan.json"  # in the directory of a run
SCRATCH = "tmp"
UNSENT = "unsent"  # a file for each run whose copy in the store of artifacts is not known to be whole
FETCHED = "fetched"  # files of runs of other hosts, from that store


def run_directory(home: Path, run: str) -> Path:
    return home / RUNS / run


def private_repository(home: Path, run: str) -> Path:
    """Return the bare repository of a run's snapshots."""
    return home / SNAPSHOTS / f"{run}.git"


def workspace_directory(home: Path, project: str, workspace: str) -> Path:
    return home / PROJECTS / project / WORKSPACES / workspace
