"""Frames come back as they were put together, however the bytes are cut; other bytes are refused in one way only."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.guest import framing
from runner.guest.framing import MAX_CHUNK, MAX_PAYLOAD, MAX_REQUEST, Frame, Parser, Request, Type, Violation
from tests.support import fake_guest

IDS = st.integers(0, 2**32 - 1)
OFFSETS = st.integers(0, 2**64 - 1)
WORDS = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=20)

STATES = st.builds(
    framing.State,
    phase=st.sampled_from(framing.Phase),
    pid=WORDS,
    status=st.integers(-(2**31), 2**31 - 1),
    serial=WORDS,
    stage=st.sampled_from(framing.Stage),
    marks=st.sampled_from(list(framing.Mark)),
)
FRAMES = st.one_of(
    st.builds(lambda nonce: framing.hello(nonce), st.binary(min_size=16, max_size=16)),
    st.builds(framing.data, IDS, st.integers(0, 2), OFFSETS, st.binary(min_size=1, max_size=200)),
    st.builds(framing.offset, st.sampled_from([Type.EOF, Type.ACK]), IDS, st.integers(0, 2), OFFSETS),
    st.builds(framing.signal, IDS, WORDS, WORDS),
    st.builds(framing.listen, IDS, WORDS),
    st.builds(fake_guest.state, IDS, STATES),
    st.builds(fake_guest.opened, IDS, WORDS),
    st.builds(framing.frame, st.sampled_from([Type.FORGET, Type.RESET, Type.READY]), IDS),
)


def parse(*chunks: bytes) -> list[tuple[Type, int, int, bytes]]:
    parser = Parser()
    return [flat(frame) for chunk in chunks for frame in parser.feed(chunk)]


def flat(frame: Frame) -> tuple[Type, int, int, bytes]:
    return frame.type, frame.id, frame.stream, bytes(frame.payload)


@settings(deadline=None)
@given(id=IDS, stream=st.integers(0, 2), at=OFFSETS, chunk=st.binary(min_size=1, max_size=500), state=STATES)
def test_what_is_put_into_frames_about_a_command_comes_back(
    id: int, stream: int, at: int, chunk: bytes, state: framing.State
) -> None:
    frames = (framing.data(id, stream, at, chunk), fake_guest.state(id, state))
    ends = (framing.offset(kind, id, stream, at) for kind in (Type.EOF, Type.ACK))

    (*heads, data), told, eof, ack = parse(*frames, *ends)

    assert (heads, framing.read_offset(data), data[8:]) == ([Type.DATA, id, stream], at, chunk)
    assert (told[:3], framing.read_state(told[3])) == ((Type.STATE, id, 0), state)
    for kind, end in ((Type.EOF, eof), (Type.ACK, ack)):
        assert (end[:3], framing.read_offset(end[3])) == ((kind, id, stream), at)


@settings(deadline=None)
@given(id=IDS, serial=WORDS, number=WORDS, port=WORDS, nonce=st.binary(min_size=16, max_size=16))
def test_signals_ports_and_greetings_come_back(id: int, serial: int, number: int, port: int, nonce: bytes) -> None:
    frames = (framing.signal(id, serial, number), framing.listen(id, port), framing.hello(nonce))

    signalled, listened, greeted = parse(*frames)

    assert signalled == (Type.SIGNAL, id, 0, struct.pack("<II", serial, number))
    assert (*listened[:3], framing.read_word(listened[3])) == (Type.LISTEN, id, 0, port)
    assert (greeted[0], framing.read_hello(greeted[3]).nonce) == (Type.HELLO, nonce)


@settings(deadline=None)
@given(
    argv=st.lists(TEXT, min_size=1, max_size=5),
    env=st.dictionaries(TEXT, TEXT, max_size=5),
    cwd=TEXT,
    limits=st.dictionaries(WORDS, st.tuples(OFFSETS, OFFSETS), max_size=3),
)
def test_a_request_comes_back(
    argv: list[str], env: dict[str, str], cwd: str, limits: dict[int, tuple[int, int]]
) -> None:
    [(*head, payload)] = parse(framing.execute(7, Request(argv=argv, env=env, cwd=cwd, limits=limits)))

    assert head == [Type.EXEC, 7, 1]
    assert fake_guest.words_of(payload) == (cwd, argv, env)


def test_a_long_request_goes_in_pieces_of_which_only_the_last_is_marked() -> None:
    frames = parse(framing.execute(7, Request(argv=["x" * (2 * MAX_PAYLOAD)], env={})))

    assert [(id, last) for _, id, last, _ in frames] == [(7, 0), (7, 0), (7, 1)]
    assert fake_guest.words_of(b"".join(payload for *_, payload in frames))[1] == ["x" * (2 * MAX_PAYLOAD)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(argv=["a\0b"], env={}), "holds a NUL"),
        (Request(argv=["a"], env={"N": "\0"}), "holds a NUL"),
        (Request(argv=["a"], env={}, cwd="/\0"), "holds a NUL"),
        (Request(argv=["x" * MAX_REQUEST], env={}), f"at most {MAX_REQUEST} can be sent"),
    ],
    ids=["NUL in argv", "NUL in env", "NUL in cwd", "too long"],
)
def test_a_request_that_cannot_be_sent_is_refused(request_: Request, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        framing.execute(1, request_)


def test_each_cut_of_a_recorded_stream_gives_the_same_frames() -> None:
    recorded = b"".join(
        [
            fake_guest.hello(),
            fake_guest.state(1, framing.State(phase=framing.Phase.RUNNING, pid=7)),
            framing.data(1, 1, 0, b"some output"),
            framing.offset(Type.EOF, 1, 1, 11),
            framing.execute(2, Request(argv=["true"], env={"A": "b"})),
            fake_guest.ready(),
        ]
    )
    whole = parse(recorded)

    assert len(whole) == 6
    for at in range(len(recorded) + 1):
        assert parse(recorded[:at], recorded[at:]) == whole
    assert parse(*(recorded[at : at + 1] for at in range(len(recorded)))) == whole


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(FRAMES, max_size=20), cuts=st.lists(st.integers(0, 5000), max_size=10))
def test_however_frames_are_cut_they_come_back(frames: list[bytes], cuts: list[int]) -> None:
    together = b"".join(frames)
    places = [0, *sorted(min(cut, len(together)) for cut in cuts), len(together)]

    chunks = [together[start:end] for start, end in pairwise(places)]

    assert [framing.frame(kind, id, payload, stream=stream) for kind, id, stream, payload in parse(*chunks)] == frames


READERS = {
    Type.HELLO: framing.read_hello,
    Type.STATE: framing.read_state,
    Type.OPEN: framing.read_word,
    Type.DATA: framing.read_offset,
    Type.EOF: framing.read_offset,
    Type.ACK: framing.read_offset,
    Type.PONG: framing.read_offset,
}
HOSTILE = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda length, kind, stream, zero, id, rest: struct.pack("<IBBHI", length, kind, stream, zero, id) + rest,
        st.sampled_from([0, 4, 8, 9, 16, 20, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2**32 - 1]),
        st.integers(0, 255),
        st.integers(0, 4),
        st.sampled_from([0, 0, 0, 1]),
        IDS,
        st.binary(max_size=100),
    ),
)


@settings(max_examples=500, deadline=None)
@given(chunks=st.lists(HOSTILE, max_size=5))
def test_hostile_bytes_are_a_violation_and_never_another_error(chunks: list[bytes]) -> None:
    parser = Parser()
    with suppress(Violation):
        for chunk in chunks:
            for frame in parser.feed(chunk):
                if reader := READERS.get(frame.type):
                    reader(frame.payload)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (Type.HELLO, 20),
        (Type.EOF, 8),
        (Type.ACK, 8),
        (Type.SIGNAL, 8),
        (Type.STATE, 16),
        (Type.FORGET, 0),
        (Type.LISTEN, 4),
        (Type.OPEN, 4),
        (Type.RESET, 0),
        (Type.PING, 8),
        (Type.PONG, 8),
        (Type.READY, 0),
    ],
)
def test_a_frame_has_exactly_its_size(kind: Type, size: int) -> None:
    assert parse(framing.frame(kind, payload=bytes(size)))
    for wrong in {size + 1, max(size - 1, 0)} - {size}:
        with pytest.raises(Violation, match=f"a frame of type {kind.name} has {wrong} bytes"):
            parse(framing.frame(kind, payload=bytes(wrong)))


@pytest.mark.parametrize("kind", [Type.DATA, Type.EXEC])
def test_a_frame_of_bytes_has_some_and_not_too_many(kind: Type) -> None:
    least = 9 if kind is Type.DATA else 1

    assert parse(framing.frame(kind, payload=bytes(least)), framing.frame(kind, payload=bytes(MAX_PAYLOAD)))
    for wrong in (least - 1, MAX_PAYLOAD + 1):
        with pytest.raises(Violation, match=f"has {wrong} bytes"):
            parse(framing.frame(kind, payload=bytes(wrong)))


def test_the_largest_chunk_fits_a_frame() -> None:
    assert parse(framing.data(1, 1, 0, bytes(MAX_CHUNK)))


def test_a_length_is_judged_before_its_bytes_are_there() -> None:
    """So a parser never holds more than one frame of the largest size."""
    with pytest.raises(Violation):
        parse(struct.pack("<IBBHI", 2**32 - 1, Type.DATA, 1, 0, 1))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(struct.pack("<BBHIiI", 0, 0, 0, 1, 0, 0), id="phase 0"),
        pytest.param(struct.pack("<BBHIiI", 5, 0, 0, 1, 0, 0), id="phase 5"),
        pytest.param(struct.pack("<BBHIiI", 1, 0, 7, 1, 0, 0), id="stage 7"),
    ],
)
def test_an_unknown_state_is_a_violation(payload: bytes) -> None:
    with pytest.raises(Violation, match="a state has an unknown phase, stage or mark"):
        framing.read_state(payload)


def test_another_version_is_a_violation() -> None:
    [(*_, payload)] = parse(fake_guest.hello(version=2))

    with pytest.raises(Violation, match="the other side speaks version 2, not 1"):
        framing.read_hello(payload)
