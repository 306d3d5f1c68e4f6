"""Warm pools: the keeper's side and the run's side."""
