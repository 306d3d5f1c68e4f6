"""Rules about hosts that commands may reach: what a rule means, which one allows a connection, which addresses are
public. Nothing here resolves a name or dials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from msgspec import Struct

from runner.core.patterns import pattern

WEB = (80, 443)  # ports of a rule that names none
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_TOP = r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
RULE = pattern(rf"(?:(?:{_LABEL}\.)*{_TOP}|\*\.(?:{_LABEL}\.)+{_TOP}|(?:{_OCTET}\.){{3}}{_OCTET})(?::{_PORT})?")
LONGEST = 253
_NAME = pattern(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_NUMERIC = pattern(r"(?:0x[0-9a-f]*|[0-9]+)")
# RFC 6052, RFC 4380 and RFC 3056: an IPv4 address is reached through these.
_NAT64 = ip_network("64:ff9b::/96")
_TRANSLATED = (_NAT64, ip_network("64:ff9b:1::/48"), ip_network("2001::/32"), ip_network("2002::/16"))

Address = IPv4Address | IPv6Address


class NetworkRule(Struct, frozen=True):
    """A host that commands may reach: a name, ``*.name`` for all below it, or an address.

    Without a port, ports 80 and 443. ``private`` allows addresses that are not public. ``origin`` is the manifest line.
    """

    host: str
    port: int | None = None
    private: bool = False
    origin: str = ""

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    def allows(self, host: str, port: int) -> bool:
        """Tell whether a canonical host and a port are meant."""
        if port not in (WEB if self.port is None else (self.port,)):
            return False
        return host == self.host or (self.host.startswith("*.") and host.endswith(self.host[1:]))

    def covers(self, other: NetworkRule) -> bool:
        """Tell whether this rule allows all that the other does."""
        ports = WEB if other.port is None else (other.port,)
        below = self.host.startswith("*.") and other.host.endswith(self.host[1:])
        return (
            (other.host == self.host or below)
            and (self.private or not other.private)
            and all(port in (WEB if self.port is None else (self.port,)) for port in ports)
        )


class NetworkSpec(Struct, frozen=True):
    """The hosts that commands may reach: ``rules``, or with ``open`` every public one. Neither is no network.

    ``origin`` is the manifest line. ``environment`` leads tools to the hosts that they are configured to use.
    """

    rules: tuple[NetworkRule, ...] = ()
    open: bool = False
    origin: str = ""
    environment: Mapping[str, str] = {}

    def __bool__(self) -> bool:
        return self.open or bool(self.rules)

    def __str__(self) -> str:
        return "open" if self.open else ", ".join(map(str, self.rules)) or "none"

    def pinned(self) -> object:
        """Return all that decides what commands reach, without where it is written; ``None`` without a network."""
        rules = sorted((str(rule), rule.private) for rule in self.rules)
        return [self.open, rules, self.environment] if self else None

    def rule_for(self, host: str, port: int) -> NetworkRule | None:
        """Return the rule that allows most of a canonical host and a port."""
        found = max((rule for rule in self.rules if rule.allows(host, port)), key=lambda r: r.private, default=None)
        return NetworkRule("*", port, origin=self.origin) if found is None and self.open else found

    def excess(self, ceiling: NetworkSpec) -> list[str]:
        """Name what this allows and a ceiling does not."""
        if ceiling.open:
            return [str(rule) for rule in self.rules if rule.private]
        beyond = ["open"] if self.open else []
        return beyond + [str(rule) for rule in self.rules if not any(limit.covers(rule) for limit in ceiling.rules)]


def parse_rule(text: str, *, private: bool = False, origin: str = "") -> NetworkRule:
    """Read ``host``, ``*.host`` or an IPv4 address, each with ``:port`` or without. Raises ``ValueError``."""
    if len(text) > LONGEST or RULE.fullmatch(text) is None:
        raise ValueError("a host such as `pypi.org`, `*.example.org`, `git.example.org:22` or `10.0.0.7:5432`")
    host, _, port = text.partition(":")
    return NetworkRule(host, int(port) if port else None, private, origin)


def canonical_host(text: str) -> str | None:
    """Return a host in the one spelling that rules are compared in; ``None`` for what may be read in two ways.

    Names are ASCII, in lower case, without the dot at their end. Addresses are as Python writes them; numbers that C
    libraries take for addresses are no hosts.
    """
    text = text.lower()
    bracketed = text.startswith("[") and text.endswith("]")
    try:
        address = ip_address(text[1:-1] if bracketed else text)
    except ValueError:
        address = None
    if address is not None:
        scoped = isinstance(address, IPv6Address) and address.scope_id is not None
        return None if scoped or bracketed is not isinstance(address, IPv6Address) else str(address)
    name = text.removesuffix(".")
    if not text.isascii() or not _NAME.fullmatch(name) or _NUMERIC.fullmatch(name.rpartition(".")[2]):
        return None
    return name


def host_port(host: str, port: int | None) -> str:
    """Return a canonical host and a port as an authority, as URLs and proxies have it."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def is_address(host: str) -> bool:
    """Tell whether a canonical host is an address."""
    return ":" in host or _NUMERIC.fullmatch(host.rpartition(".")[2]) is not None


def is_public(address: Address) -> bool:
    """Tell whether an address belongs to a host of the internet, also by way of the IPv4 address inside it."""
    if isinstance(address, IPv6Address):
        if (mapped := address.ipv4_mapped) is not None:
            return is_public(mapped)
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if any(address in network for network in _TRANSLATED) or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def reachable(found: Sequence[Address], rule: NetworkRule, host: str) -> list[Address]:
    """Return the addresses of a host that a rule lets be dialled: public ones, and others if it says so."""
    return [one for one in found if is_public(one) or rule.private or rule.host == host == str(one)]
