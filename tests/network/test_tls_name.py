"""The name in a client's first TLS message, of Python's own client, cut and damaged anywhere."""

from __future__ import annotations

import random
import ssl
from contextlib import suppress

import pytest

from runner.network.tls_name import Incomplete, server_name


def hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same message in records of so many bytes."""
    message = data[5:]
    pieces = (message[at : at + size] for at in range(0, len(message), size))
    return b"".join(data[:3] + len(piece).to_bytes(2) + piece for piece in pieces)


@pytest.mark.parametrize("name", ["pypi.org", None])
@pytest.mark.parametrize("size", [1, 100, 16_000])
def test_the_name_is_read_however_the_message_is_cut(name: str | None, size: int) -> None:
    data = in_records(hello(name), size)

    assert server_name(data) == name
    assert server_name(data + b"more") == name
    for end in range(1, len(data), 37):
        with pytest.raises(Incomplete):
            server_name(data[:end])


@pytest.mark.parametrize("data", [b"", b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_not_tls_has_no_name(data: bytes) -> None:
    assert server_name(data) is None


def test_a_damaged_message_is_refused_or_read_and_nothing_else() -> None:
    whole, dice = hello("pypi.org"), random.Random(0)
    for _ in range(5_000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(1, len(data))] = dice.randrange(256)
        with suppress(Incomplete, ValueError):
            server_name(bytes(data))
