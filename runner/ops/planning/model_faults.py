"""Faults in what manifests demand of an agent's model, as far as the manifests show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runner.core import plugins
from runner.core.errors import BadValue, NoWriter, RunnerError, Unpriced
from runner.spec.model import RunSpec
from runner.spec.select import Selected

if TYPE_CHECKING:
    from runner.ports.agent import ModelAgent


def model_faults(selected: Selected, spec: RunSpec) -> list[RunnerError]:
    """Return findings at their places. Imports are local, since most manifests have no model."""
    if spec.model is None:
        return []
    from runner.gateway.gateway import check_prices
    from runner.ports.agent import ModelAccess, ModelAgent
    from runner.ports.gateway import ModelGrant

    agent = plugins.load("runner.agents", spec.agent).agent
    assert isinstance(agent, ModelAgent)  # as every one whose manifests may name a model
    own = agent.set_up(ModelAccess(model=spec.model.name, key="none", base_url="http://127.0.0.1:1")).env
    document = selected.agent_type
    read = (*agent.variables, *(_variables() if spec.env else ()))
    found: list[RunnerError] = [
        BadValue(
            f"`{name}` decides how `{spec.agent}` works and reaches its model, which runner sets itself",
            at=document.place("env", name),
            hint="leave it out; `model`, `budget` and `credentials` say what can be said",
        )
        for name in spec.env
        if name in own or name.startswith(read)
    ]
    found += _no_writer(selected, spec, agent)
    if not spec.model.key_inside:
        try:
            check_prices(ModelGrant(agent.api, (spec.model.name,), spec.model.budget))
        except Unpriced as error:
            found.append(Unpriced(error.message, at=document.place("budget", "cost_usd"), hint=error.hint))
    return found


def _variables() -> Iterator[str]:
    """Yield the prefixes of all that built-in CLIs read: one may use the API of another."""
    for name in plugins.names("runner.agents"):
        yield from getattr(plugins.load("runner.agents", name).agent, "variables", ())


def _no_writer(selected: Selected, spec: RunSpec, agent: ModelAgent) -> Iterator[RunnerError]:
    """Return a warning if no tool of the agent can write the report that is asked for."""
    tools, report = spec.model.tools if spec.model else None, spec.verify.report if spec.verify else None
    writers = agent.writers
    if report is None or tools is None or not writers or {*tools} & {*writers}:
        return
    given = f"with {', '.join(tools)} alone" if tools else "without a tool"
    message = f"{given} the agent cannot write `{report.path}`"
    hint = f"add {' or '.join(f'`{name}`' for name in writers[:2])}"
    yield NoWriter(message, at=selected.agent_type.place("cli_tools"), hint=hint)
