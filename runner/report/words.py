"""How numbers and outcomes are worded, once for all faces."""

from __future__ import annotations

from runner.model import Isolation, Limits, Status

MARKS = {
    Status.PENDING: "·",
    Status.RUNNING: "▸",
    Status.SUCCEEDED: "✓",
    Status.FAILED: "✗",
    Status.SKIPPED: "-",
    Status.CANCELLED: "!",
    Status.UNKNOWN: "?",
}


def duration(seconds: float | None) -> str:
    """``0.4s``, ``2m05s``, ``1h30m``; empty for ``None``."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds % 1 or seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if minutes else f"{hours}h"


def size(count: int) -> str:
    """``512M``, ``1.5G``: three significant figures at most."""
    number, unit = float(count), ""
    for larger in "KMGT":
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g}{unit}"


def limits(value: Limits) -> str:
    parts = []
    if value.cpus is not None:
        parts.append(f"{value.cpus:g} CPU")
    if value.memory_bytes is not None:
        parts.append(size(value.memory_bytes))
    if value.disk_bytes is not None:
        parts.append(f"disk {size(value.disk_bytes)}")
    if value.pids is not None:
        parts.append(f"{value.pids} pids")
    return ", ".join(parts) or "no limits"


def isolation(seen: Isolation) -> str:
    """What was read back from inside, in one line."""
    if seen.interfaces is None:
        network = "network of the host"
    else:
        network = "no interface" if seen.interfaces in ((), ("lo",)) else f"interfaces {', '.join(seen.interfaces)}"
    shared = f", shares {', '.join(seen.shared_namespaces)} with the host" if seen.shared_namespaces else ""
    return f"uid {seen.uid}, {network}, {limits(seen.limits)}{shared}"
