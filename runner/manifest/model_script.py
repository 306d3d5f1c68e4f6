"""The script of a rehearsal: one turn of the fake model for each request that offers tools."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, JsonValue, model_validator

from runner.manifest.kinds._fields import Duration, Fault, Faults, Shape, Text


class Write(Shape):
    path: Text = Field(description="The file, from where the agent's commands start.")
    content: str = Field(description="Whole content of the file.")


class Call(Shape):
    tool: Text = Field(description="The tool's name, whether the CLI has offered it or not.")
    server: Text | None = Field(
        None, description="MCP server that has the tool; the name is then the one by which the CLI offers it."
    )
    arguments: dict[str, Any] = Field({}, description="Arguments of the call.")


class Fail(Shape):
    status: int = Field(ge=400, le=599, description="The HTTP status, such as 429.")
    message: Text = Field("rehearsed", description="Text of the error.")
    retry_after: Duration | None = Field(None, description="Value of the `Retry-After` header.")


class Used(Shape):
    input: int = Field(ge=0, description="Tokens of the request, cached ones included.")
    output: int = Field(ge=0, description="Tokens of the answer, reasoning included.")
    cached: int = Field(0, ge=0, description="Input tokens read from the cache.")
    reasoning: int = Field(0, ge=0, description="Output tokens used for reasoning.")


_ANSWERS = ("think", "say", "run", "write", "call")
_WRITTEN: dict[str, JsonValue] = {"not": {"type": "null"}}
_SAYS: list[JsonValue] = [{"required": [name], "properties": {name: _WRITTEN}} for name in _ANSWERS]
_FAILS: dict[str, JsonValue] = {"required": ["fail"], "properties": {"fail": _WRITTEN}}


class Turn(Shape):
    """Parts that are written together are one answer: thinking, text, then the tools."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [_FAILS, *_SAYS],
            "if": _FAILS,
            "then": {
                "properties": {
                    **{name: {"type": "null"} for name in (*_ANSWERS, "pace", "usage")},
                    "cut_off": {"const": False},
                }
            },
        }
    )

    think: Text | None = Field(None, description="Reasoning that the model shows.")
    say: Text | None = Field(None, description="Text of the model; a turn without a tool ends the agent's work.")
    run: Text | None = Field(None, description="A command for the CLI's shell tool.")
    write: Write | None = Field(None, description="A file, by the CLI's tool for that, else by its shell tool.")
    call: Call | None = Field(None, description="Any tool by its name, as a model may make one up.")
    fail: Fail | None = Field(None, description="The provider answers with an error.")
    stall: Duration | None = Field(None, description="Pause before the answer.")
    pace: float | None = Field(None, gt=0, le=1000, description="Pieces of the answer per second.")
    cut_off: bool = Field(False, description="Breaks the connection before the end of the answer.")
    usage: Used | None = Field(None, description="Usage that the provider reports; else it is estimated.")

    @model_validator(mode="after")
    def _consistent(self) -> Turn:
        answers = [name for name in _ANSWERS if getattr(self, name) is not None]
        if self.fail is not None:
            others = [*answers, *(name for name in ("pace", "usage") if getattr(self, name) is not None)]
            others += ["cut_off"] * self.cut_off
            if others:
                raise Faults(*(Fault((name,), "a turn that fails has no answer", "remove it") for name in others))
        elif not answers:
            raise Faults(Fault((), "a turn does something", "say, think, run, write, call or fail"))
        return self


class Script(Shape):
    """Script of the fake model in a rehearsal."""

    turns: list[Turn] = Field(min_length=1, description="One for each request that offers tools, in their order.")
