"""The model gateway: it checks keys and prices, and opens sessions on whatever stands for the provider.

Serving is imported with the first session: most runs have no model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import trio

from runner.core.errors import KeyMissing, Unpriced
from runner.core.settings import ModelKey, Settings
from runner.ports.gateway import ModelGrant, ModelRequest, ModelSession

if TYPE_CHECKING:
    from runner.network.upstream import Upstream


_MAX_KEY = 4096  # characters; a request's headers have no room for more


class ModelGateway:
    """The gateway to the providers themselves, with the keys of the settings."""

    rehearsal: str | None = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check(self, grant: ModelGrant) -> None:
        from runner.network.upstream import check_remote

        self._key(grant)
        check_remote(self._settings.model_url(grant.api.value), self._settings.reach)

    @asynccontextmanager
    async def open(self, grant: ModelGrant, on_request: Callable[[ModelRequest], None]) -> AsyncIterator[ModelSession]:
        from runner.network.upstream import open_remote

        key = self._key(grant)
        async with (
            open_remote(self._settings.model_url(grant.api.value), self._settings.reach) as upstream,
            open_session(grant, upstream, key, on_request) as session,
        ):
            yield session

    def _key(self, grant: ModelGrant) -> str:
        key = usable_key(self._settings.model_keys[grant.api.value])
        check_prices(grant)
        return key


@asynccontextmanager
async def open_session(
    grant: ModelGrant, upstream: Upstream, key: str, on_request: Callable[[ModelRequest], None]
) -> AsyncIterator[ModelSession]:
    """Open a session on whatever stands for the provider, for the length of the block; its deadline is the caller's."""
    from runner.gateway.session import GatewaySession

    api, deadline = import_module(f"runner.gateway.apis.{grant.api.value}").api, trio.current_effective_deadline()
    session = GatewaySession(grant=grant, api=api, upstream=upstream, key=key, on_request=on_request, deadline=deadline)
    try:
        yield session
    finally:
        session.close()


def usable_key(key: ModelKey) -> str:
    """Return the key's text. Raises ``KeyMissing`` when it is not set, or cannot be a key."""
    names = " or ".join(f"`{name}`" for name in key.variables)
    hint = "set it where runner is started, or rehearse without a key: `runner rehearse`"
    if not key.variable:
        raise KeyMissing(f"no key for the agent's model: {names} is not set", hint=hint)
    if why := _key_fault(key.text):
        raise KeyMissing(f"`{key.variable}` is not a key: {why}", hint=hint)
    return key.text


def _key_fault(text: str) -> str | None:
    if len(text) > _MAX_KEY:
        return f"it has {len(text)} characters"
    if not text.isascii():
        return "it holds a character that is not ASCII"
    if not text.isprintable() or " " in text:
        return "it is blank, or holds a blank or a line's end"
    return None


def check_prices(grant: ModelGrant) -> None:
    """Raise ``Unpriced`` when a budget in dollars could not be enforced."""
    from runner.gateway.prices import is_priced, nearest_priced

    if grant.budget.cost_usd is None:
        return
    for model in grant.models:
        if not is_priced(api := grant.api.value, model):
            raise Unpriced(
                f"the model `{model}` has no known price, so `budget.cost_usd` cannot be kept",
                hint=f"write `budget.tokens`, or name a model with a price, such as `{nearest_priced(api, model)}`",
            )
