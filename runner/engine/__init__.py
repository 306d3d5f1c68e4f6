"""Executes plans on trio: order, phases, deadlines, outcomes. Knows ports, not adapters."""
