"""Runs: apply, resume, recover, watch, deliver, clean up."""
