"""The way from an agent's CLI to its model: through the gateway, whose exchanges become events of the step, or, marked
as the exception that it is, with the key inside.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import KeyInside
from runner.core.model import Outcome, Reason, failed
from runner.core.nurseries import open_services
from runner.events import events as ev
from runner.ports.agent import AgentResult, AgentSetup, McpAccess, ModelAccess, ModelAgent
from runner.ports.gateway import ModelGrant, ModelRequest, ModelSession
from runner.ports.provider import Workspace
from runner.runtime.agent_dependencies import AgentDependencies
from runner.runtime.context import RunContext
from runner.runtime.exec import emit_all
from runner.spec.model import ModelSpec

STANDS_FOR_KEY = "kept-by-the-gateway"  # a CLI without any key does not start
MODEL_BUSY, MODEL_SILENT = "gateway.model-busy", "gateway.model-silent"
SILENCE = 60.0  # seconds without a word of an answer that are told
_LOOK = 5.0  # seconds between looks at that


def grant_of(agent: ModelAgent, model: ModelSpec) -> ModelGrant:
    return ModelGrant(agent.api, (model.name,), model.budget)


def check(agent: ModelAgent, model: ModelSpec, deps: AgentDependencies) -> None:
    """Raise ``KeyMissing``, ``Unpriced`` or ``UsageError`` when the agent could not use its model."""
    if _has_key(model, deps):
        deps.model_key(agent.api)
        deps.model_url(agent.api)
    else:
        deps.gateway.check(grant_of(agent, model))


def _has_key(model: ModelSpec, deps: AgentDependencies) -> bool:
    """Tell whether the agent gets the key itself, which no rehearsal gives."""
    return model.key_inside and deps.gateway.rehearsal is None


class Way(Struct, frozen=True):
    """The connection of an agent to its model, and the gateway's session unless the agent has the key."""

    agent: ModelAgent
    access: ModelAccess
    session: ModelSession | None

    def prepare(self) -> AgentSetup:
        return self.agent.set_up(self.access)

    def _in_our_words(self, outcome: Outcome) -> Outcome:
        """Replace a CLI's message about its own limit of turns, which points at the CLI's settings."""
        turns = self.access.max_turns
        if outcome.reason is not Reason.TURNS or turns is None:
            return outcome
        spent = f"the budget of this run is used up: {turns} of {turns} turns are used"
        return failed(Reason.TURNS, spent, details=(f"the agent: {outcome.message}",))

    async def judge(self, ended: AgentResult, run: RunContext, step: str) -> Outcome:
        """Rule on the agent's step. The gateway's account counts before that of the agent's CLI."""
        outcome = self._in_our_words(self.agent.outcome(ended))
        if self.session is None:
            if claimed := self.agent.usage(ended):
                await run.emit(ev.UsageReportedByAgent(step, claimed))
            return outcome
        if verdict := self.session.failure:
            said = outcome.details if outcome.reason is Reason.TURNS else (f"the agent: {outcome.message}",)
            outcome = replace(verdict, details=(*verdict.details, *said))
        elif outcome.ok and not self.session.usage.requests:
            outcome = failed(Reason.NO_EVIDENCE, "it says that it has finished, but its model was never asked")
        return replace(outcome, warnings=(*outcome.warnings, *self.session.warnings))


@asynccontextmanager
async def open_way(
    agent: ModelAgent,
    model: ModelSpec,
    run: RunContext,
    workspace: Workspace,
    step: str,
    *,
    skills: tuple[str, ...],
    mcp_servers: tuple[McpAccess, ...] = (),
) -> AsyncIterator[Way]:
    """Connect an agent to its model for the length of the block. Raises what opening a session and listening raise."""
    paths = workspace.paths
    incident = (paths.incident,) if "incident" in run.plan.values else ()
    access = partial(
        ModelAccess,
        model=model.name,
        max_turns=model.budget.turns,
        tools=model.tools,
        skills=skills,
        mcp_servers=mcp_servers,
        workspace=paths.workspace,
        home=paths.home,
        extra_directories=(paths.output, *incident, *((paths.skills,) if skills else ())),
    )
    if _has_key(model, run.deps):
        await run.emit(ev.WarningIssued(KeyInside.code, f"the key of `{model.name}` was given to the agent", step))
        yield Way(agent, access(key=run.deps.model_key(agent.api), base_url=run.deps.model_url(agent.api)), None)
        return
    send, receive = trio.open_memory_channel[ev.Event](math.inf)

    def tell(exchange: ModelRequest) -> None:
        send.send_nowait(_asked(exchange, step))
        if exchange.retry_seconds is not None:
            pause = exchange.retry_seconds
            send.send_nowait(
                ev.RetryScheduled(
                    step=step,
                    operation="asking the model",
                    code=MODEL_BUSY,
                    reason=exchange.retry_reason,
                    pause_seconds=pause,
                )
            )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send:
            opened = run.deps.gateway.open(grant_of(agent, model), tell)
            async with opened as session:
                try:
                    async with open_services() as services, workspace.listen(session.serve) as port:
                        services.start_soon(tell_silence, session, step, send.send_nowait)
                        address = f"http://127.0.0.1:{port}{agent.api.base_path}"
                        yield Way(agent, access(key=STANDS_FOR_KEY, base_url=address), session)
                finally:
                    run.step.awaited = session.waiting_for


async def tell_silence(session: ModelSession, step: str, tell: Callable[[ev.Event], None]) -> None:
    """Warn of a silent model, after a minute and then each time that the silence has doubled."""
    worth = SILENCE
    while True:
        await trio.sleep(_LOOK)
        silent = session.silent_seconds
        if silent < SILENCE:
            worth = SILENCE
        elif silent >= worth:
            tell(ev.WarningIssued(MODEL_SILENT, f"the model has not answered for {silent:.0f}s", step))
            worth *= 2


def _asked(exchange: ModelRequest, step: str) -> ev.ModelRequestFinished:
    return ev.ModelRequestFinished(
        step=step,
        call=exchange.call,
        model=exchange.model,
        status=exchange.status,
        sent_bytes=exchange.sent_bytes,
        received_bytes=exchange.received_bytes,
        first_byte_seconds=exchange.first_byte_seconds,
        seconds=exchange.seconds,
        usage=exchange.usage,
        estimated=exchange.estimated,
        refusal=exchange.refusal,
    )
