"""The files that a run leaves on disk for people and programs."""
