"""Secrets of a run: whether it may have them, and the features that providers need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.core.errors import BadValue, Place, RunnerError, SecretForbidden, Untrusted
from runner.core.model import Feature
from runner.manifest.injection import InjectedSecret
from runner.manifest.kinds.agent_type import GivenSecret
from runner.manifest.load import Document
from runner.manifest.network import injected_in
from runner.manifest.secret_source import SecretSource
from runner.spec.model import Demand, FromCommand, FromEnv, FromFile, FromKeyring, PolicySpec, SecretSpec
from runner.spec.select import Selected


def secrets_of(selected: Selected) -> tuple[SecretSpec, ...]:
    place = selected.agent_type.place
    given = tuple(
        SecretSpec(
            name=secret.name,
            source=source_of(secret.from_, selected.agent_type),
            steps=tuple(secret.steps),
            as_file=secret.as_ == "file",
            at=place("secrets", position, "from"),
        )
        for position, secret in enumerate(selected.agent.secrets)
    )
    injected = (
        SecretSpec(
            name=secret.name,
            source=source_of(secret.from_, selected.agent_type),
            steps=steps,
            as_file=False,
            at=place(*keys, "from"),
            injection=secret.injection(selected.agent_type.origin(*keys)),
        )
        for secret, steps, keys in _injected(selected)
    )
    return (*given, *injected)


def _injected(selected: Selected) -> Iterator[tuple[InjectedSecret, tuple[str, ...], tuple[str | int, ...]]]:
    return injected_in(selected.agent.workspace.network, "workspace", "network")


def source_of(source: SecretSource, document: Document) -> FromEnv | FromFile | FromCommand | FromKeyring:
    if source.env is not None:
        return FromEnv(source.env)
    if source.file is not None:
        beside = "" if source.file.startswith("~/") else f"{document.directory.absolute()}/"
        return FromFile(source.file if source.file.startswith("/") else f"{beside}{source.file}")
    if source.command is not None:
        return FromCommand(tuple(source.command))
    assert source.keyring is not None  # the manifest model wants exactly one
    return FromKeyring(source.keyring.service, source.keyring.user)


def secret_faults(selected: Selected, policies: Sequence[PolicySpec]) -> Iterator[RunnerError]:
    """Secrets that a policy does not name, and those whose variable ``env`` sets as well."""
    types, env = selected.agent_type, selected.agent.env
    for position, secret in enumerate(selected.agent.secrets):
        at = types.place("secrets", position, "name")
        if variable_of(secret) in env:
            message = f"`{variable_of(secret)}` is the variable of a secret, and in `env` as well"
            yield BadValue(message, at=at, hint="rename one of the two")
        yield from _forbidden(secret.name, policies, at)
    sources = {secret.name: secret.from_ for secret, _, _ in reversed([*_injected(selected)])}
    for injected, _, keys in _injected(selected):
        at = types.place(*keys, "name")
        yield from _forbidden(injected.name, policies, at)
        if injected.name in {secret.name for secret in selected.agent.secrets}:
            message = f"`{injected.name}` is a secret that commands get, and added outside as well"
            yield BadValue(message, at=at, hint="remove it from `secrets`, or rename one of the two")
        elif injected.from_ != sources[injected.name]:
            message = f"`{injected.name}` comes from another place further up"
            yield BadValue(message, at=at, hint="rename one of the two")


def _forbidden(name: str, policies: Sequence[PolicySpec], at: Place) -> Iterator[RunnerError]:
    for policy in policies:
        if policy.secrets is not None and name not in policy.secrets:
            allowed = f"allowed: {', '.join(policy.secrets)}" if policy.secrets else "it allows none"
            message = f"policy `{policy.name}` does not allow secret `{name}`"
            yield SecretForbidden(message, at=at, hint=f"{allowed}   {policy.origin}")


def variable_of(secret: GivenSecret) -> str:
    return f"{secret.name}_FILE" if secret.as_ == "file" else secret.name


def untrusted_secrets(selected: Selected) -> Iterator[RunnerError]:
    hint = "apply it without --untrusted"
    for position, secret in enumerate(selected.agent.secrets):
        at = selected.agent_type.place("secrets", position, "name")
        yield Untrusted(f"an untrusted manifest may not have secret `{secret.name}`", at=at, hint=hint)
    for injected, _, keys in _injected(selected):
        at = selected.agent_type.place(*keys, "name")
        yield Untrusted(f"an untrusted manifest may not have secret `{injected.name}`", at=at, hint=hint)


def secret_demands(selected: Selected) -> Iterator[Demand]:
    for position, secret in enumerate(selected.agent.secrets):
        if secret.as_ == "file":
            at = selected.agent_type.place("secrets", position, "as")
            yield Demand(Feature.SECRET_FILES, f"a file in memory for secret {secret.name}", at, True)
