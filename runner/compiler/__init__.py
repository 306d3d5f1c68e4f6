"""Specs become a plan by an ordered list of named passes. Pure."""

from __future__ import annotations

from runner.compiler.passes import compile_plan, plan_digest
from runner.compiler.saved import read_runs, run_faults

__all__ = ["compile_plan", "plan_digest", "read_runs", "run_faults"]
