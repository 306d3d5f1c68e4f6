"""Specs become a plan by an ordered list of named passes. Pure."""

from __future__ import annotations

from runner.compiler.passes import compile_plan
from runner.compiler.saved import read_runs

__all__ = ["compile_plan", "read_runs"]
