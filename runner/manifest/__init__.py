"""Manifest text to documents: YAML with positions, defaults merged in, every error of every file in one report."""

from pathlib import Path

STDIN = Path("<stdin>")  # in place of a manifest's path: its text is standard input, and this is how people see it
