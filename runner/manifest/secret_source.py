"""The place of a secret's value, as a manifest has it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from runner.manifest.kinds._fields import Fault, Faults, Shape, Word

_NULL: JsonDict = {"type": "null"}
_WRITTEN: JsonDict = {"not": _NULL}
_SOURCES = ("command", "env", "file", "keyring")


class Keyring(Shape):
    """An entry of the keyring of the person who applies."""

    service: Word = Field(description="The service that it is for.")
    user: Word = Field(description="The user name there.")


class SecretSource(Shape):
    """Place of a secret's value on the machine that runs ``apply``."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {one: _WRITTEN if one == name else _NULL for one in _SOURCES}}
                for name in _SOURCES
            ]
        }
    )

    env: Word | None = Field(None, description="Name of a variable in the environment of `runner`.")
    file: Word | None = Field(
        None, description="A file that only its owner can read: absolute, below `~/`, or relative to the manifest."
    )
    command: Annotated[list[Word], Field(min_length=1)] | None = Field(
        None, description="A command that prints it, as a list of words; run on this machine, without a shell."
    )
    keyring: Keyring | None = Field(None, description="An entry of the keyring, read by the program `keyring`.")

    @model_validator(mode="after")
    def _exactly_one(self) -> SecretSource:
        if sum(getattr(self, name) is not None for name in _SOURCES) != 1:
            hint = f"write one of {', '.join(_SOURCES)}"
            raise Faults(Fault((), "a secret comes from exactly one place", hint))
        return self
