"""Hosts under one name."""

from __future__ import annotations

from runner.manifest.kinds._fields import Body
from runner.manifest.network import HostList

KIND = "NetworkSet"


class Spec(HostList, Body):
    """Hosts that networks name together, by the document's name."""
