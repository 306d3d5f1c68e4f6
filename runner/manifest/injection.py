"""Credentials that are added to requests outside the workspace, as a manifest has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from runner.core.hosts import RULE
from runner.core.injection import REQUEST_RULE, TLS_PORT, Injection, canonical_path
from runner.core.patterns import pattern
from runner.manifest.kinds._fields import Fault, Faults, Shape, VariableName, matching
from runner.manifest.secret_source import SecretSource

_KINDS = ("bearer", "basic", "header")
_NULL: JsonDict = {"type": "null"}
_EXACT = pattern(r"(?!\*)" + RULE.pattern)
_HEADER = pattern(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_USER = pattern(r"[^\x00-\x20\x7f:]{1,128}")
# What a credential cannot be: how long a request is, for whom, and how it is sent on.
_RESERVED = {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect"}


ExactHost = Annotated[str, *matching(_EXACT, "one host such as `api.github.com` or `registry.corp:8443`")]
HeaderName = Annotated[str, *matching(_HEADER, "the name of a header such as `Private-Token`")]
UserName = Annotated[str, *matching(_USER, "a user name without `:` and white space")]
RequestRule = Annotated[
    str, *matching(REQUEST_RULE, "a method and a path such as `GET /repos/acme/**`, or the path alone")
]


class SentSecret(Shape):
    """Credential that is added to requests, in one of three ways."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [one], "properties": {each: {"not": _NULL} if each == one else _NULL for each in _KINDS}}
                for one in _KINDS
            ]
        }
    )

    name: VariableName = Field(description="Name of the secret, in the plan and where it is redacted.")
    from_: SecretSource = Field(alias="from", description="Place of the value on the host that runs `apply`.")
    bearer: Literal[True] | None = Field(None, description="Sends it as `Authorization: Bearer`.")
    basic: UserName | None = Field(None, description="Sends it as the password of this user.")
    header: HeaderName | None = Field(None, description="Sends it as this header.")

    @model_validator(mode="after")
    def _sent_in_one_way(self) -> SentSecret:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise Faults(Fault((), "a credential is sent in exactly one way", f"write one of {', '.join(_KINDS)}"))
        if self.header is not None and self.header.lower() in _RESERVED:
            raise Faults(Fault(("header",), f"`{self.header}` cannot be set", "name the header that the host asks for"))
        return self

    def injection_for(self, host: str, port: int, origin: str, allow: tuple[str, ...] = ()) -> Injection:
        """Return what is added to requests to a host, as the manifest line at ``origin`` says."""
        how = next(kind for kind in _KINDS if getattr(self, kind) is not None)
        return Injection(
            host=host,
            port=port,
            secret=self.name,
            how=how,  # type: ignore[arg-type]  # one of the three
            name=self.basic or self.header or "",
            allow=allow,
            origin=origin,
        )


class InjectedSecret(SentSecret):
    """Credential that the proxy adds to requests to a host, outside the workspace; commands never have it."""

    host: ExactHost = Field(description="The host, or `HOST:PORT`; port 443 if none is named. It must speak TLS.")
    allow: list[RequestRule] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="The only requests that are sent to the host: `METHOD /PATH`, or a path; `*` stands for a part of a"
        " path, `**` for any.",
    )

    @model_validator(mode="after")
    def _one_spelling(self) -> InjectedSecret:
        faults = [
            Fault(("allow", at), f"`{rule}` is a path that servers read in several ways", "leave out `..` and `//`")
            for at, rule in enumerate(self.allow or ())
            if canonical_path(rule.rpartition(" ")[2]) is None
        ]
        if faults:
            raise Faults(*faults)
        return self

    def injection(self, origin: str) -> Injection:
        """Return what the proxy has to do, as the manifest line at ``origin`` says."""
        host, _, port = self.host.partition(":")
        rules = [one.rpartition(" ") for one in self.allow or ()]
        allow = tuple(f"{method} {canonical_path(path)}".strip() for method, _, path in rules)
        return self.injection_for(host, int(port) if port else TLS_PORT, origin, allow)
