"""Webhooks of a server: messages that are proved wait for their turn, and start the runs that manifests name.

What waits is lost when the server ends. A key for each alert and change makes that a message sent again starts nothing
twice, in any server that shares the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import trio

from runner.core.errors import RunnerError, Unauthorized, WebhookLimit
from runner.core.settings import Settings
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.webhooks import Delivery, Hook, Message, read_message, write_incident
from runner.server.route import Server

MOST_WAITING = 100  # runs of a webhook that have not begun
MOST_BODY = 4 << 20  # bytes of a message
_KNOWN = 1000  # keys that are remembered, so that nothing is planned for what was seen
_HOUR = 3600.0


class Waiting:
    """One webhook: what of it waits, and what it has started lately."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.sends, self.receives = trio.open_memory_channel[Delivery](MOST_WAITING)
        self._begun: deque[float] = deque()
        self._seen: dict[str, None] = {}

    def take(self, message: Message) -> tuple[int, list[str]]:
        """Let the runs of a message wait; return how many these are, and why no others. Raises ``WebhookLimit``."""
        now, taken, ignored = trio.current_time(), 0, [*message.ignored]
        for delivery in message.deliveries:
            if delivery.key in self._seen:
                ignored.append("it was there before")
                continue
            while self._begun and self._begun[0] <= now - _HOUR:
                self._begun.popleft()
            if len(self._begun) >= self.hook.webhook.per_hour:
                most = self.hook.webhook.per_hour
                raise WebhookLimit(f"webhook `{self.hook.run}` starts {most} runs an hour", hint="send it again later")
            try:
                self.sends.send_nowait(delivery)
            except trio.WouldBlock:
                message_ = f"webhook `{self.hook.run}` has {MOST_WAITING} runs that wait"
                raise WebhookLimit(message_, hint="send it again later") from None
            self._begun.append(now)
            self._seen[delivery.key] = None
            if len(self._seen) > _KNOWN:
                del self._seen[next(iter(self._seen))]
            taken += 1
        return taken, ignored

    def forget(self, delivery: Delivery) -> None:
        """Let a delivery come again."""
        self._seen.pop(delivery.key, None)


class Webhooks:
    """All webhooks of a server, by the names of their runs."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._all = {name: Waiting(hook) for name, hook in hooks.items()}

    def start(self, server: Server, nursery: trio.Nursery) -> None:
        for waiting in self._all.values():
            for _ in range(waiting.hook.webhook.max_parallel):
                nursery.start_soon(_work, waiting, server)

    def receive(self, name: str, headers: Mapping[str, str], body: bytes) -> tuple[int, list[str]]:
        """Take a message. Raises ``Unauthorized``, also for a webhook that is not there."""
        waiting = self._all.get(name)
        if waiting is None or not waiting.hook.is_proved(headers, body):
            raise Unauthorized(
                "the message is not proved", hint="its secret and name are those of a manifest's webhook"
            )
        return waiting.take(read_message(waiting.hook, headers, body))


async def _work(waiting: Waiting, server: Server) -> None:
    """Start the runs of deliveries, one after the other."""
    async for delivery in waiting.receives:
        try:
            await _start(waiting.hook, delivery, server, server.env.settings)
        except RunnerError as error:  # of this delivery only
            waiting.forget(delivery)
            server.env.advise(error)


async def _start(hook: Hook, delivery: Delivery, server: Server, settings: Settings) -> None:
    assert server.manifests is not None  # which the webhooks are of
    incident = await trio.to_thread.run_sync(write_incident, hook, delivery, settings)
    request = Request(only=hook.run, task=delivery.task, incident=incident)
    planned = await make_plan(server.manifests, settings, request)
    for handle, attached in await server.running.start(planned, f"webhook-{delivery.key}"):
        if not attached:
            await handle.wait()
