"""Workspaces that outlive runs, and their leases."""
