"""The network of a workspace or of a policy, as a manifest has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from runner.core.hosts import LONGEST, RULE, NetworkRule, NetworkSpec, parse_rule
from runner.manifest.injection import InjectedSecret
from runner.manifest.kinds._fields import FORM, Fault, Faults, Shape

if TYPE_CHECKING:
    from runner.manifest.load import Document

TOOLS = ("apt", "cargo", "git", "go", "npm", "pip", "uv")  # names of sets of hosts
WHOLE = ("dependencies", "setup", "agent", "post_hook")  # steps that a network of the whole workspace is for
_WORD, _BLOCK = FORM + "word", FORM + "block"


def _form(value: Any) -> str:
    return _BLOCK if isinstance(value, Mapping | Shape) else _WORD


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


Hosts = Annotated[
    list[
        Annotated[
            Annotated[NetworkHost, Tag(_WORD)] | Annotated[PrivateHost, Tag(_BLOCK)],
            Discriminator(_form),
        ]
    ],
    Field(max_length=200),
]
_HOSTS = (
    "Hosts: `HOST` for ports 80 and 443, `HOST:PORT`, `*.HOST` for all names below it. The name of a `NetworkSet` means"
    " its hosts; `apt`, `cargo`, `git`, `go`, `npm`, `pip` and `uv` mean those that the tool is configured to use."
    " An empty list is no network."
)
_INJECT = "Credentials that requests to some of these hosts get, outside the workspace."


def _check_inject(allow: Sequence[str | PrivateHost], inject: Sequence[InjectedSecret]) -> None:
    """Raise a fault for each credential of a host that is not allowed."""
    rules = [parse_rule(one if isinstance(one, str) else one.host) for one in allow]
    hosts = [(one.host, one.injection("")) for one in inject]
    faults = [
        Fault(("inject", position, "host"), f"`{written}` is not allowed here", f"add `{written}` to `allow`")
        for position, (written, found) in enumerate(hosts)
        if not any(rule.allows(found.host, found.port) for rule in rules)
    ]
    if faults:
        raise Faults(*faults)


class HostList(Shape):
    """Hosts that can be reached."""

    allow: Hosts = Field(description=_HOSTS)


class AllowedHosts(HostList):
    """The only hosts that can be reached."""

    inject: list[InjectedSecret] | None = Field(None, description=_INJECT)

    @model_validator(mode="after")
    def _credentials_for_allowed_hosts(self) -> AllowedHosts:
        _check_inject(self.allow, self.inject or ())
        return self


_Word = Annotated[Literal["none", "open"], Tag(_WORD)]
StepNetwork = Annotated[_Word | Annotated[AllowedHosts, Tag(_BLOCK)], Discriminator(_form)]


_WHOLE_FORM = ("allow", "inject")


class Networks(Shape):
    """The only hosts that can be reached: by all steps that run commands, or by each its own."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "if": {"required": ["allow"]},
            "then": {"properties": {"allow": {"type": "array"}}, "propertyNames": {"enum": [*_WHOLE_FORM]}},
            "else": {"not": {"required": ["inject"]}},
        }
    )

    allow: Hosts | None = Field(None, description=_HOSTS)
    inject: list[InjectedSecret] | None = Field(None, description=_INJECT)
    dependencies: StepNetwork = Field("none", description="Network of the commands that install dependencies.")
    setup: StepNetwork = Field("none", description="Network of setup commands.")
    agent: StepNetwork = Field("none", description="Network of the agent.")
    post_hook: StepNetwork = Field("none", description="Network of post-hooks.")
    verify: StepNetwork = Field("none", description="Network of the checks on a clean checkout.")

    @model_validator(mode="after")
    def _one_form(self) -> Networks:
        if not self.model_fields_set:
            raise Faults(Fault((), "a network has hosts or steps", "write `allow`, or the name of a step"))
        whole = [name for name in _WHOLE_FORM if name in self.model_fields_set]
        if whole and (self.allow is None or self.model_fields_set - {*_WHOLE_FORM}):
            hint = "write the network of each step, or `allow` for all of them"
            raise Faults(Fault((whole[0],), f"`{whole[0]}` is for all steps, and stands alone", hint))
        _check_inject(self.allow or (), self.inject or ())
        return self


Written = Literal["none", "open"] | HostList | Networks
STEPS = tuple(name for name in Networks.model_fields if name not in _WHOLE_FORM)
Network = Annotated[_Word | Annotated[Networks, Tag(_BLOCK)], Discriminator(_form)]


def words_in(written: Written, *keys: str) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield the words of a network at ``keys`` that may be names of sets, each with the keys that lead to it."""
    blocks: list[tuple[Written, tuple[str, ...]]] = [(written, keys)]
    blocks += [(getattr(written, step), (*keys, step)) for step in STEPS] if isinstance(written, Networks) else []
    for block, path in blocks:
        for position, one in enumerate((not isinstance(block, str) and block.allow) or ()):
            if isinstance(one, str):
                yield one, (*path, "allow", position)


def names_in(written: Written) -> set[str]:
    """Return the words of a network that may be names of sets."""
    return {word for word, _ in words_in(written)}


def networks_of(
    document: Document,
    written: Literal["none", "open"] | Networks,
    *keys: str,
    whole: Sequence[str] = WHOLE,
    sets: Mapping[str, NetworkSpec],
) -> dict[str, NetworkSpec]:
    """Return what each step may reach, by the field at ``keys`` of a document, with the hosts of ``sets`` by name.

    A network that is not given by step is for the steps ``whole``.
    """
    if isinstance(written, Networks) and written.allow is None:
        return {step: hosts_of(document, getattr(written, step), *keys, step, sets=sets) for step in STEPS}
    every = hosts_of(document, written, *keys, sets=sets)
    return {step: every if step in whole else NetworkSpec(origin=every.origin) for step in STEPS}


def injected_in(
    written: Literal["none", "open"] | Networks, *keys: str
) -> Iterator[tuple[InjectedSecret, tuple[str, ...], tuple[str | int, ...]]]:
    """Yield each credential of a network, the steps whose requests get it, and the keys that lead to it."""
    if not isinstance(written, Networks):
        return
    blocks: list[tuple[AllowedHosts | Networks, tuple[str, ...], tuple[str, ...]]] = [(written, WHOLE, keys)]
    blocks += [
        (one, (step,), (*keys, step)) for step in STEPS if isinstance(one := getattr(written, step), AllowedHosts)
    ]
    for block, steps, path in blocks:
        for position, one in enumerate(block.inject or ()):
            yield one, steps, (*path, "inject", position)


def without_credentials(
    written: Literal["none", "open"] | Networks | None,
) -> Literal["none", "open"] | Networks | None:
    """Raise a fault for each credential of a network that is a ceiling."""
    found = [keys[:-1] for _, _, keys in injected_in(written)] if written is not None else []
    if found:
        hint = "remove it; `secrets` names those that may be used"
        raise Faults(*(Fault(keys, "a policy allows, and adds no credential", hint) for keys in dict.fromkeys(found)))
    return written


_WITHOUT: JsonDict = {"properties": {"inject": {"type": "null"}}}
CEILING: JsonDict = {"properties": {"inject": {"type": "null"}, **dict.fromkeys(STEPS, _WITHOUT)}}


def hosts_of(document: Document, written: Written, *keys: str, sets: Mapping[str, NetworkSpec]) -> NetworkSpec:
    """Return what a network means that is written at ``keys`` of a document."""
    if isinstance(written, str):
        return NetworkSpec(open=written == "open", origin=document.origin(*keys))
    unique: dict[tuple[str, int | None, bool], NetworkRule] = {}
    environment: dict[str, str] = {}
    for position, one in enumerate(written.allow or ()):
        origin = document.origin(*keys, "allow", position)
        if isinstance(one, str) and one in sets:
            environment |= sets[one].environment
            rules = [replace(rule, origin=f"{origin} {one}: {rule.origin}") for rule in sets[one].rules]
        else:
            host, private = (one, False) if isinstance(one, str) else (one.host, True)
            rules = [parse_rule(host, private=private, origin=origin)]
        for rule in rules:
            unique.setdefault((rule.host, rule.port, rule.private), rule)
    return NetworkSpec(tuple(unique.values()), origin=document.origin(*keys), environment=environment)
