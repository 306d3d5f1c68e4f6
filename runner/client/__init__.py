"""Client of a server: ``Client`` blocks, ``AsyncClient`` is for trio; ``requests`` has what either of them can send."""

from __future__ import annotations

from runner.client.connection import AsyncClient, Client
from runner.client.requests import Ask

__all__ = ["Ask", "AsyncClient", "Client"]
