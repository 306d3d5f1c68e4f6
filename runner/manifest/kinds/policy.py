"""Ceilings of a run, whatever its other documents say."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from runner.manifest.kinds._fields import Body, Distinct, Isolation, Size, Text, no_repeats
from runner.manifest.network import CEILING, Network, without_credentials

KIND = "Policy"


class Spec(Body):
    """Ceilings. Several policies compose: what they allow by intersection, what they forbid by union."""

    allowed_paths: list[Text] = Field(
        description="Patterns of the paths that may be changed; one without `/` holds at any depth."
    )
    forbidden_patterns: list[Text] = Field(
        description="Patterns of the paths that must not be in a snapshot, in upper or lower case; one "
        "without `/` holds at any depth. The list replaces the built-in one."
    )
    max_file_size: Size = Field(description="The size that no changed file may exceed.")
    providers: Distinct | None = Field(None, description="The providers that may be used; left out, every one.")
    secrets: Annotated[list[Text], AfterValidator(no_repeats)] | None = Field(
        None,
        description="The secrets that may be given to steps, by name; left out, every one.",
        json_schema_extra={"uniqueItems": True},
    )
    mcp_servers: Annotated[list[Text], AfterValidator(no_repeats)] | None = Field(
        None,
        description="The MCP servers that agents may use, by name; left out, every one.",
        json_schema_extra={"uniqueItems": True},
    )
    network: Annotated[Network | None, AfterValidator(without_credentials)] = Field(
        None,
        json_schema_extra=CEILING,
        description="The most that steps may reach, all of them or each its own; left out, what the agent type says.",
    )
    min_isolation: Isolation = Field(description="The least isolation that a workspace must have.")
