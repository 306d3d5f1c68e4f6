"""Manifests to plans, and everything that ``apply`` would refuse."""
