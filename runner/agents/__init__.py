"""Agent CLIs: the sub-runner contract, and one module per CLI that judges its output."""

from __future__ import annotations

from runner.agents._subrunner import read_command

__all__ = ["read_command"]
