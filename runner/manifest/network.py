"""The network of a workspace or of a policy, as a manifest has it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from runner.core.hosts import LONGEST, RULE, NetworkSpec, parse_rule
from runner.manifest.kinds._fields import Shape


def _network_host(text: str) -> str:
    parse_rule(text)
    return text


NetworkHost = Annotated[
    str,
    AfterValidator(_network_host),
    WithJsonSchema({"type": "string", "pattern": f"^(?:{RULE.pattern})$", "maxLength": LONGEST}),
]


class PrivateHost(Shape):
    """A host whose addresses need not be public, as in a company's own network."""

    host: NetworkHost = Field(description="The host, or `HOST:PORT`.")
    private: Literal[True] = Field(description="Lets it be reached at addresses that are not public.")


class AllowedHosts(Shape):
    """The only hosts that can be reached."""

    allow: list[NetworkHost | PrivateHost] = Field(
        min_length=1,
        max_length=200,
        description="Hosts: `HOST` for ports 80 and 443, `HOST:PORT`, `*.HOST` for all names below it.",
    )


Network = Literal["none", "open"] | AllowedHosts


def network_spec(written: Network) -> NetworkSpec:
    """Return the rules of a network as it is written in a manifest."""
    if not isinstance(written, AllowedHosts):
        return NetworkSpec(open=written == "open")
    rules = (parse_rule(one) if isinstance(one, str) else parse_rule(one.host, private=True) for one in written.allow)
    return NetworkSpec(tuple(dict.fromkeys(rules)))
