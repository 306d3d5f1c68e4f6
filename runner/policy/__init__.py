"""Policies: which paths, names and directories a run may see, change and publish. Pure; no rule touches a disk."""
