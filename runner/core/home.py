"""The layout of ``RUNNER_HOME``, whose path is ``home`` everywhere. What one module alone uses is named there."""

from __future__ import annotations

from pathlib import Path

WORKSPACES = "workspaces"  # of a project


def state_file(home: Path) -> Path:
    return home / "state.db"


def runs_directory(home: Path) -> Path:
    return home / "runs"


def run_directory(home: Path, run: str) -> Path:
    return home / "runs" / run


def private_repository(home: Path, run: str) -> Path:
    """Return the bare repository of a run's snapshots."""
    return home / "snapshots" / f"{run}.git"


def workspaces_directory(home: Path) -> Path:
    """Return the directory with the leases of workspaces outside of runs; their trees are in their projects."""
    return home / "workspaces"


def project_directory(home: Path, project: str) -> Path:
    return home / "projects" / project


def workspace_directory(home: Path, project: str, workspace: str) -> Path:
    return home / "projects" / project / WORKSPACES / workspace


def sandboxes_directory(home: Path) -> Path:
    """Return the directory with a record for each workspace that a provider has made."""
    return home / "sandboxes"


def mirrors_directory(home: Path) -> Path:
    return home / "mirrors"


def scratch_directory(home: Path) -> Path:
    return home / "tmp"
