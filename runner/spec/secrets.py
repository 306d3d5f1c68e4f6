"""Secrets of a run: whether it may have them, and the features that providers need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.core.errors import BadValue, RunnerError, SecretForbidden, Untrusted
from runner.core.model import Feature
from runner.manifest.kinds.agent_type import GivenSecret
from runner.manifest.secret_source import SecretSource
from runner.spec.model import Demand, FromCommand, FromEnv, FromFile, FromKeyring, PolicySpec, SecretSpec
from runner.spec.select import Selected


def secrets_of(selected: Selected) -> tuple[SecretSpec, ...]:
    place = selected.agent_type.place
    return tuple(
        SecretSpec(
            name=secret.name,
            source=_source(secret.from_, selected),
            steps=tuple(secret.steps),
            as_file=secret.as_ == "file",
            at=place("secrets", position, "from"),
        )
        for position, secret in enumerate(selected.agent.secrets)
    )


def _source(source: SecretSource, selected: Selected) -> FromEnv | FromFile | FromCommand | FromKeyring:
    if source.env is not None:
        return FromEnv(source.env)
    if source.file is not None:
        beside = "" if source.file.startswith("~/") else f"{selected.agent_type.directory.absolute()}/"
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
        for policy in policies:
            if policy.secrets is not None and secret.name not in policy.secrets:
                message = f"policy `{policy.name}` does not allow secret `{secret.name}`"
                allowed = f"allowed: {', '.join(policy.secrets)}" if policy.secrets else "it allows none"
                yield SecretForbidden(message, at=at, hint=f"{allowed}   {policy.origin}")


def variable_of(secret: GivenSecret) -> str:
    return f"{secret.name}_FILE" if secret.as_ == "file" else secret.name


def untrusted_secrets(selected: Selected) -> Iterator[RunnerError]:
    hint = "apply it without --untrusted"
    for position, secret in enumerate(selected.agent.secrets):
        at = selected.agent_type.place("secrets", position, "name")
        yield Untrusted(f"an untrusted manifest may not have secret `{secret.name}`", at=at, hint=hint)


def secret_demands(selected: Selected) -> Iterator[Demand]:
    for position, secret in enumerate(selected.agent.secrets):
        if secret.as_ == "file":
            at = selected.agent_type.place("secrets", position, "as")
            yield Demand(Feature.SECRET_FILES, f"a file in memory for secret {secret.name}", at, True)
