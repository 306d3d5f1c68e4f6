"""Size limit of a preloaded context. No tokenizer is used: four characters count as a token, for all models."""

from __future__ import annotations

from collections.abc import Mapping

CHARACTERS = 4  # of a token
LARGE = 8_000  # tokens from which on a context is said to be large
MOST = 10_000  # tokens from which on the triage report is cut; nothing else ever is

LABELS: Mapping[str, str] = {"incident": "incident", "permissions": "rights", "baseline": "baseline"}


def tokens(text: str) -> int:
    """Estimate tokens, rounded up."""
    return -(-len(text) // CHARACTERS)


def sizes(parts: Mapping[str, int]) -> str:
    """Format ``incident 1.1k + rights 0.2k = 1.3k tokens (estimated)`` from the tokens of each part."""
    if not parts:
        return "nothing"
    listed = " + ".join(f"{LABELS[name]} {_thousands(count)}" for name, count in parts.items())
    return f"{listed} = {_thousands(sum(parts.values()))} tokens (estimated)"


def _thousands(count: int) -> str:
    return str(count) if count < 100 else f"{count / 1000:.1f}k"
