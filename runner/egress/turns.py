"""The script of a rehearsal: what stands for the model does, one turn for each request that offers tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from runner.errors import Rejected
from runner.manifest import text
from runner.manifest.kinds._fields import Duration, Fault, Faults, Shape, Text
from runner.manifest.load import load_value


class Write(Shape):
    path: Text = Field(description="The file, from where the agent's commands start.")
    content: str = Field(description="All that is in it afterwards.")


class Call(Shape):
    tool: Text = Field(description="The tool's name, whether the CLI has offered it or not.")
    arguments: dict[str, Any] = Field({}, description="What it is called with.")


class Fail(Shape):
    status: int = Field(ge=400, le=599, description="The HTTP status, such as 429.")
    message: Text = Field("rehearsed", description="What the error says.")
    retry_after: Duration | None = Field(None, description="How long the CLI is told to wait before it tries again.")


class Used(Shape):
    input: int = Field(ge=0, description="Tokens of the request, cached ones included.")
    output: int = Field(ge=0, description="Tokens of the answer, reasoning included.")
    cached: int = Field(0, ge=0, description="Of the input, those that were read from the cache.")
    reasoning: int = Field(0, ge=0, description="Of the output, those that are not shown.")


class Turn(Shape):
    """Parts that are written together are one answer: thinking, text, then the tools."""

    think: Text | None = Field(None, description="What the model thinks aloud.")
    say: Text | None = Field(None, description="What the model says; a turn without a tool ends the agent's work.")
    run: Text | None = Field(None, description="A command for the CLI's shell tool.")
    write: Write | None = Field(None, description="A file, by the CLI's tool for that, else by its shell tool.")
    call: Call | None = Field(None, description="Any tool by its name, as a model may make one up.")
    fail: Fail | None = Field(None, description="The provider answers with an error.")
    stall: Duration | None = Field(None, description="How long nothing comes, before the answer.")
    pace: float | None = Field(None, gt=0, le=1000, description="How many pieces of the answer come in a second.")
    cut_off: bool = Field(False, description="Whether the connection breaks before the answer's end.")
    usage: Used | None = Field(None, description="What the provider says was used; else it is estimated.")

    @model_validator(mode="after")
    def _consistent(self) -> Turn:
        answers = [name for name in ("think", "say", "run", "write", "call") if getattr(self, name) is not None]
        if self.fail is not None:
            others = [*answers, *(name for name in ("pace", "usage") if getattr(self, name) is not None)]
            others += ["cut_off"] * self.cut_off
            if others:
                raise Faults(*(Fault((name,), "a turn that fails has no answer", "remove it") for name in others))
        elif not answers:
            raise Faults(Fault((), "a turn does something", "say, think, run, write, call or fail"))
        return self


class Script(Shape):
    turns: list[Turn] = Field(min_length=1, description="One for each request that offers tools, in their order.")


def read_turns(path: Path) -> Sequence[Turn]:
    """The turns of a file. Raises ``Rejected`` with every finding, and what reading a file raises."""
    script, findings = load_value(Script, str(path), text.read(path, str(path)))
    if script is None:
        raise Rejected(findings)
    return script.turns
