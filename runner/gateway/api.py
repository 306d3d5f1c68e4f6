"""The protocol that each API's module implements for the gateway, and helpers that the modules share."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from runner.core.model import ModelRefusal, Reason

MAX_NODES = 1_000_000  # values of one request; parsed ones take some 20 times the bytes of their text
MAX_MODEL = 200

_ALIAS = re.compile(r"[a-z]+")
_SNAPSHOT = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|\d{3}|latest)")


class Kind(Enum):
    ANSWER = "answer"  # the model is asked for something: it is paid for, and counts as a turn
    COUNT = "count"
    LIST = "list"


@dataclass(frozen=True)
class Call:
    """A call of an API. ``path`` is below the provider's base URL; ``model`` is the one in it, empty where the body
    names it.
    """

    name: str
    kind: Kind
    path: str
    model: str = ""


@dataclass(frozen=True)
class Counts:
    """Tokens by price. ``fresh``, ``cached``, ``written`` and ``written_hour`` add up to the input.

    The written ones go into the provider's cache, for minutes or for an hour; ``reasoning`` is part of ``output``.
    """

    fresh: int = 0
    cached: int = 0
    written: int = 0
    written_hour: int = 0
    output: int = 0
    reasoning: int = 0

    @property
    def input(self) -> int:
        return self.fresh + self.cached + self.written + self.written_hour

    def largest(self, other: Counts) -> Counts:
        """Return the higher count of each kind: an event may omit what another says, and streams count up."""
        mine, theirs = vars(self), vars(other)
        return Counts(**{name: max(value, theirs[name]) for name, value in mine.items()})


@dataclass(frozen=True)
class End:
    """The end of an answer, as one of its events says: it is complete, or there is a ``reason`` why it is not."""

    reason: Reason | None = None
    said: str = ""


@dataclass(frozen=True)
class SmokeRequest:
    """The cheapest request that has an answer, below the provider's base URL."""

    model: str
    target: str
    body: Mapping[str, object]


class Api(Protocol):
    """A provider's API. ``forwarded`` are the headers of a request that are forwarded, beside the usual few.

    Each event that says how an answer ends contains one of ``marks``. ``headers`` go with the runner's own requests:
    ``smoke`` to a model, and ``models`` for the list of them.
    """

    forwarded: frozenset[bytes]
    marks: tuple[bytes, ...]
    headers: tuple[tuple[bytes, bytes], ...]
    smoke: SmokeRequest
    models: str

    def route(self, method: str, path: str) -> Call | None:
        """Return the call that a request makes; ``None`` when it must not be forwarded."""

    def external_access(self, body: Mapping[str, Any]) -> str | None:
        """Name what in a request the provider would have to fetch, run or bill otherwise; ``None`` if nothing.

        A workspace without network has none through its model either: everything that is not known to stay in the
        conversation is refused.
        """

    def auth(self, key: str) -> tuple[bytes, bytes]: ...

    def counts(self, message: Mapping[str, Any]) -> tuple[Counts, bool] | None:
        """Return the tokens in an event of a stream, or in a whole answer, and whether they are final."""

    def end(self, message: Mapping[str, Any]) -> End | None:
        """Return the answer's end, if an event of a stream, or a whole answer, tells it."""

    def error(self, status: int, refusal: ModelRefusal, message: str) -> bytes:
        """Return an error's body, in the shape that the API's clients read."""

    def reason(self, status: int, body: bytes) -> Reason | None:
        """Return the reason of an error; ``None`` where only the agent can tell."""

    def pause(self, body: bytes) -> float | None:
        """Return the seconds that an error's body asks to wait, infinite when waiting is of no use; ``None`` for no
        word of it.
        """


class BadBody(ValueError):
    """A request's body cannot be forwarded."""


def read_body(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ``BadBody``; equal keys are refused, for the provider might read the other one."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_NODES:
        raise BadBody(f"the body has more than {MAX_NODES} values")
    try:
        found = json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body cannot be checked: {error}") from error
    if not isinstance(found, dict):
        raise BadBody("the body is not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadBody("two keys of one object are equal")
    return found


def model_matches(granted: str, asked: str) -> bool:
    """Tell whether a model that a manifest grants covers the one that a request asks for.

    It covers itself, its dated snapshots, and as one word (``sonnet``) every version of that family.
    """
    if granted == asked:
        return True
    if _ALIAS.fullmatch(granted):
        return re.fullmatch(rf"claude(-[\d-]+)?-{granted}(-[\d-]+)?(-latest)?", asked) is not None
    return asked.startswith(granted) and _SNAPSHOT.fullmatch(asked[len(granted) :]) is not None


def whole(value: object) -> int:
    """Return a count of tokens; 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def inner(value: object, *names: str) -> Mapping[str, Any]:
    """Return the object at the end of a path of keys; empty when there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def objects(value: object) -> Iterable[Mapping[str, Any]]:
    """Return the objects of a list; none when it is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else ()


_STATUSES = {401: Reason.AUTH, 402: Reason.QUOTA, 403: Reason.AUTH, 404: Reason.MODEL, 429: Reason.QUOTA}
_OF_API = (401, 403, 404)  # what only the API itself can say of a key or a model


def json_of(body: bytes) -> Any:
    """Return the JSON value of a body; ``None`` when it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def failed_end(error: Mapping[str, Any], words: Mapping[str, Reason]) -> End:
    """Return the end of an answer that is an error: by the provider's word for it, and its message."""
    reason = _reason_of_words(error, words) or Reason.GATEWAY
    return End(reason, f"its answer ended with an error: {error.get('message') or 'without a message'}")


def end_of(word: object, whole: Container[str]) -> End | None:
    """Return the end that a provider's ``word`` means, complete for those in ``whole``; ``None`` without a word."""
    if not isinstance(word, str):
        return None
    return End() if word in whole else End(Reason.CUT_OFF, f"it stopped its answer with `{word[:MAX_MODEL]}`")


def reason_of(status: int, body: bytes, words: Mapping[str, Reason]) -> Reason | None:
    """Return the reason of an error by the provider's word for it, else by the status.

    A page, or a body that does not mention models, did not come from the API, but from what stands in its place.
    """
    found = json_of(body)
    if reason := _reason_of_words(inner(found, "error"), words):
        return reason
    if status >= 500:
        return Reason.GATEWAY
    foreign = found is None and body.lstrip().startswith(b"<")
    if status == 404:
        foreign = (not inner(found, "error") and b"model" not in body) or b"Invalid URL" in body or foreign
    return Reason.GATEWAY if foreign and status in _OF_API else _STATUSES.get(status)


def _reason_of_words(error: Mapping[str, Any], words: Mapping[str, Reason]) -> Reason | None:
    told = (error.get(name) for name in ("code", "type", "status"))
    return next((words[word] for word in told if isinstance(word, str) and word in words), None)
