"""Places that runs are carried out at, as ``--on`` names them."""

from __future__ import annotations

from msgspec.structs import replace

from runner.core.errors import UsageError
from runner.core.sanitize import excerpt
from runner.core.settings import Settings


def place_of(on: str, settings: Settings) -> Settings:
    """Return the settings for runs that are Jobs. Raises ``UsageError``."""
    where, colon, context = on.partition(":")
    if where != "kubernetes" or bool(colon) != bool(context):
        raise UsageError(f"`--on` is `{excerpt(on)}`", hint="write kubernetes, or kubernetes:CONTEXT of the kubeconfig")
    return replace(settings, kubernetes_context=context or settings.kubernetes_context)
