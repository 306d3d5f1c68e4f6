"""Parse access reviews, the questions to a Kubernetes API about permissions, in either form that clients write. Pure.

``kubectl`` before 1.33 writes JSON, a newer one protobuf (``runtime.Unknown`` behind four bytes), and neither falls
back to the other form. Every client reads an answer in JSON.
"""

from __future__ import annotations

import json
from typing import Any

_MAGIC = b"k8s\0"
_KIND, _RAW = 1, 2  # of runtime.Unknown
_NAMES = {1: "apiVersion", 2: "kind"}
_ATTRIBUTES = {1: "namespace", 2: "verb", 3: "group", 4: "version", 5: "resource", 6: "subresource", 7: "name"}
_SPEC, _RESOURCE = 2, 1  # of SelfSubjectAccessReview, and of its spec
_WIDTHS = {1: 8, 5: 4}  # of numbers, in bytes, by the wire's type


def parse_review(body: bytes) -> dict[str, Any] | None:
    """Return the document of a review, of one in protobuf only its resource; ``None`` for anything else."""
    if not body.startswith(_MAGIC):
        return json_object(body.decode(errors="replace"))
    try:
        whole = _fields(body[len(_MAGIC) :])
        names = _words(_fields(whole.get(_KIND, b"")), _NAMES)
        spec = _fields(_fields(whole.get(_RAW, b"")).get(_SPEC, b""))
        attributes = _words(_fields(spec.get(_RESOURCE, b"")), _ATTRIBUTES)
    except (ValueError, IndexError):
        return None
    return {**names, "metadata": {}, "spec": {"resourceAttributes": attributes} if attributes else {}}


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; ``None`` when it is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _words(fields: dict[int, bytes], names: dict[int, str]) -> dict[str, str]:
    return {name: fields[number].decode() for number, name in names.items() if number in fields}


def _fields(message: bytes) -> dict[int, bytes]:
    """Return the texts and messages within a message by number, the last of each. Raises ``ValueError``,
    ``IndexError``.
    """
    found: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        if (wire := tag & 7) == 2:
            size, at = _number(message, at)
            found[tag >> 3] = message[at : at + size]
            at += size
        elif wire == 0:
            _, at = _number(message, at)
        else:
            at += _WIDTHS.get(wire, len(message) + 1)
    if at > len(message):
        raise ValueError("cut off")
    return found


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number without an end")
