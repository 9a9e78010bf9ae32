# SPDX-License-Identifier: GPL-3.0-or-later
"""The SPOP codec: round trips, frames as HAProxy 2.6 really sent them, and no bytes that make anything but an error."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler import spop
from ringmaster_scheduler.spop import DataType, FrameType, ProtocolError, Scope, Status

# Recorded from HAProxy 2.6.12: greeting, health check (option spop-check), and one question.
RECORDED_HELLO = bytes.fromhex(
    "000000810100000001000012737570706f727465642d76657273696f6e730803322e300e6d61782d6672616d652d73697a6503fcf006"
    "0c6361706162696c69746965730810706970656c696e696e672c6173796e6309656e67696e652d6964082466336638323535622d3334"
    "32322d346139652d623139342d393063613436376661326238"
)
RECORDED_HEALTH_CHECK = bytes.fromhex(
    "0000004e0100000001000012737570706f727465642d76657273696f6e730803322e300e6d61782d6672616d652d73697a6503fcf006"
    "0c6361706162696c697469657308000b6865616c7468636865636b11"
)
RECORDED_NOTIFY = bytes.fromhex(
    "00000070030000000100010664656369646506026964082464353339636565612d363263302d343331362d383033612d393262323364"
    "653231326562056d6f64656c08016d0d70726f6d70745f746f6b656e73040c0a626f64795f62797465730400066b65795f696408016b"
    "0670726566697800"
)

TYPED_VALUES = st.one_of(
    st.just((DataType.NULL, None)),
    st.tuples(st.just(DataType.BOOLEAN), st.booleans()),
    st.tuples(st.just(DataType.INT32), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just(DataType.UINT32), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(DataType.INT64), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(DataType.UINT64), st.integers(0, 2**64 - 1)),
    st.tuples(st.just(DataType.IPV4), st.ip_addresses(v=4)),
    st.tuples(st.just(DataType.IPV6), st.ip_addresses(v=6)),
    st.tuples(st.just(DataType.STRING), st.text()),
    st.tuples(st.just(DataType.BINARY), st.binary()),
)
VARIABLES = st.lists(st.tuples(st.sampled_from(Scope), st.text(max_size=9), TYPED_VALUES), max_size=5)
# Names in frames are free text; equal names in one message would hide each other.
ARGUMENTS = st.dictionaries(st.text(max_size=20), TYPED_VALUES, max_size=10)


def only_frame(encoded: bytes) -> tuple[spop.Frame, int]:
    end = spop.frame_end(encoded, 0, 1 << 20)
    assert end == len(encoded)
    return spop.decode_frame(encoded, 0, end), end


def test_recorded_hello() -> None:
    frame, end = only_frame(RECORDED_HELLO)
    assert frame == (FrameType.HAPROXY_HELLO, spop.NO_IDENTIFIERS, 11)
    hello = spop.decode_haproxy_hello(RECORDED_HELLO, frame.payload, end)
    assert hello == (16380, False, True, "f3f8255b-3422-4a9e-b194-90ca467fa2b8")


def test_recorded_health_check() -> None:
    frame, end = only_frame(RECORDED_HEALTH_CHECK)
    assert spop.decode_haproxy_hello(RECORDED_HEALTH_CHECK, frame.payload, end) == (16380, True, False, "")


def test_recorded_notify() -> None:
    frame, end = only_frame(RECORDED_NOTIFY)
    assert frame[:2] == (FrameType.NOTIFY, spop.encode_identifiers(0, 1))
    arguments = {
        "id": "d539ceea-62c0-4316-803a-92b23de212eb",
        "model": "m",
        "prompt_tokens": 12,
        "body_bytes": 0,
        "key_id": "k",
        "prefix": None,
    }
    assert spop.decode_notify(RECORDED_NOTIFY, frame.payload, end) == [("decide", arguments)]


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        # The borders of the table in section 3.1.
        (0, "00"),
        (239, "ef"),
        (240, "f000"),
        (2287, "ff7f"),
        (2288, "f08000"),
        (264431, "ffff7f"),
        (264432, "f0808000"),
        (33818863, "ffffff7f"),
        (33818864, "f080808000"),
        (4328786159, "ffffffff7f"),
        (4328786160, "f08080808000"),
    ],
)
def test_varint_as_specified(value: int, encoded: str) -> None:
    assert spop.encode_varint(value).hex() == encoded
    assert spop.decode_varint(bytes.fromhex(encoded), 0, len(encoded) // 2) == (value, len(encoded) // 2)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_varint_round_trip_between_other_bytes(value: int, before: bytes, behind: bytes) -> None:
    encoded = before + spop.encode_varint(value) + behind
    assert spop.decode_varint(encoded, len(before), len(encoded)) == (value, len(encoded) - len(behind))


@pytest.mark.parametrize("value", [-1, 2**64])
def test_varint_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        spop.encode_varint(value)


def test_varint_that_never_ends_is_refused_after_64_bits() -> None:
    with pytest.raises(ProtocolError, match="over 64 bits"):
        spop.decode_varint(b"\xff" * 100_000, 0, 100_000)


@given(TYPED_VALUES)
def test_typed_round_trip(typed: tuple[DataType, spop.Value]) -> None:
    kind, value = typed
    encoded = spop.encode_typed(kind, value)
    decoded, offset = spop.decode_typed(encoded, 0, len(encoded))
    assert (decoded, type(decoded), offset) == (value, type(value), len(encoded))


@given(TYPED_VALUES, st.data())
def test_typed_value_cut_short_is_an_error(typed: tuple[DataType, spop.Value], data: st.DataObject) -> None:
    encoded = spop.encode_typed(*typed)
    end = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ProtocolError) as raised:
        spop.decode_typed(encoded, 0, end)
    assert raised.value.status is Status.INVALID_FRAME


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (DataType.INT32, 2**31),
        (DataType.UINT32, -1),
        (DataType.INT64, 2**63),
        (DataType.UINT64, 2**64),
        (DataType.INT32, True),
        (DataType.STRING, b"bytes"),
        (DataType.BINARY, "text"),
        (DataType.NULL, 0),
        (DataType.IPV4, ipaddress.ip_address("::1")),
    ],
)
def test_value_of_another_type_is_not_encoded(kind: DataType, value: spop.Value) -> None:
    with pytest.raises(ValueError, match=kind.name):
        spop.encode_typed(kind, value)


@pytest.mark.parametrize("kind", [DataType.INT32, DataType.UINT32])
def test_number_beyond_its_type_is_refused(kind: DataType) -> None:
    encoded = bytes((kind,)) + spop.encode_varint(2**40)
    with pytest.raises(ProtocolError, match="range"):
        spop.decode_typed(encoded, 0, len(encoded))


@pytest.mark.parametrize("kind", range(10, 16))
def test_undefined_type_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="not defined"):
        spop.decode_typed(bytes((kind, 0, 0)), 0, 3)


def test_text_that_is_no_utf8_is_marked() -> None:
    assert spop.decode_typed(b"\x08\x03a\xffb", 0, 5) == ("a\ufffdb", 5)


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.dictionaries(st.text(max_size=9), ARGUMENTS, max_size=3))
def test_notify_round_trip(
    stream_id: int, frame_id: int, messages: dict[str, dict[str, tuple[DataType, spop.Value]]]
) -> None:
    encoded = spop.encode_notify(
        stream_id,
        frame_id,
        [(name, [(key, *typed) for key, typed in arguments.items()]) for name, arguments in messages.items()],
    )
    frame, end = only_frame(encoded)
    assert frame.type == FrameType.NOTIFY
    assert frame.identifiers == spop.encode_identifiers(stream_id, frame_id)
    assert spop.decode_notify(encoded, frame.payload, end) == [
        (name, {key: value for key, (_unused, value) in arguments.items()}) for name, arguments in messages.items()
    ]


@given(
    st.lists(st.tuples(st.sampled_from(Scope), st.text(max_size=9), TYPED_VALUES), max_size=5),
    st.integers(0, 2**64 - 1),
)
def test_ack_round_trip(variables: list[tuple[Scope, str, tuple[DataType, spop.Value]]], stream_id: int) -> None:
    identifiers = spop.encode_identifiers(stream_id, 1)
    actions = b"".join(spop.encode_set_variable(scope, name, *typed) for scope, name, typed in variables)
    encoded = spop.encode_ack(identifiers, actions)
    frame, end = only_frame(encoded)
    assert (frame.type, frame.identifiers) == (FrameType.ACK, identifiers)
    assert spop.decode_ack(encoded, frame.payload, end) == [
        (scope, name, value) for scope, name, (_unused, value) in variables
    ]


@given(st.sampled_from(Status), st.text(max_size=50))
def test_disconnect_round_trip(status: Status, message: str) -> None:
    encoded = spop.encode_disconnect(FrameType.AGENT_DISCONNECT, status, message)
    frame, end = only_frame(encoded)
    assert spop.decode_disconnect(encoded, frame.payload, end) == (status, message)


@given(st.integers(256, 2**32 - 1), st.booleans())
def test_hello_round_trips(size: int, flag: bool) -> None:
    encoded = spop.encode_haproxy_hello(size, healthcheck=flag)
    frame, end = only_frame(encoded)
    assert spop.decode_haproxy_hello(encoded, frame.payload, end) == (size, flag, True, "")
    encoded = spop.encode_agent_hello(size, flag)
    frame, end = only_frame(encoded)
    assert spop.decode_agent_hello(encoded, frame.payload, end) == ("2.0", size, "pipelining" if flag else "")


def hello_payload(**replaced: tuple[DataType, spop.Value] | None) -> bytes:
    items: dict[str, tuple[DataType, spop.Value] | None] = {
        "supported-versions": (DataType.STRING, "2.0, 1.5"),
        "max-frame-size": (DataType.UINT32, 16380),
        "capabilities": (DataType.STRING, "fragmentation, async,pipelining"),
        "engine-id": (DataType.STRING, "one"),
    }
    items.update({key.replace("_", "-"): value for key, value in replaced.items()})
    return b"".join(spop.encode_string(key) + spop.encode_typed(*typed) for key, typed in items.items() if typed)


def test_hello_with_capabilities_that_are_not_ours() -> None:
    payload = hello_payload(healthcheck=(DataType.BOOLEAN, False))
    assert spop.decode_haproxy_hello(payload, 0, len(payload)) == (16380, False, True, "one")


@pytest.mark.parametrize(
    ("replaced", "status"),
    [
        ({"supported_versions": None}, Status.NO_VERSION),
        ({"supported_versions": (DataType.UINT32, 2)}, Status.NO_VERSION),
        ({"supported_versions": (DataType.STRING, "1.0,3.2,20.1")}, Status.UNSUPPORTED_VERSION),
        ({"max_frame_size": None}, Status.NO_MAX_FRAME_SIZE),
        ({"max_frame_size": (DataType.BOOLEAN, True)}, Status.NO_MAX_FRAME_SIZE),
        ({"max_frame_size": (DataType.UINT32, 255)}, Status.BAD_FRAME_SIZE),
        ({"capabilities": None}, Status.NO_CAPABILITIES),
    ],
)
def test_hello_that_cannot_be_agreed_on(
    replaced: dict[str, tuple[DataType, spop.Value] | None], status: Status
) -> None:
    payload = hello_payload(**replaced)
    with pytest.raises(ProtocolError) as raised:
        spop.decode_haproxy_hello(payload, 0, len(payload))
    assert raised.value.status is status


@pytest.mark.parametrize(
    ("kind", "flags", "status"),
    [
        (FrameType.NOTIFY, 0, Status.FRAGMENTATION_NOT_SUPPORTED),
        (FrameType.UNSET, 1, Status.FRAGMENTATION_NOT_SUPPORTED),
        (FrameType.UNSET, 0, Status.FRAGMENTATION_NOT_SUPPORTED),
        (FrameType.NOTIFY, 2, Status.INVALID_FRAME),
        (FrameType.UNSET, 3, Status.INVALID_FRAME),
    ],
)
def test_fragments_are_refused(kind: FrameType, flags: int, status: Status) -> None:
    frame = b"\0\0\0\x07" + bytes((kind, 0, 0, 0, flags)) + b"\x05\x01"
    with pytest.raises(ProtocolError) as raised:
        spop.decode_frame(frame, 0, len(frame))
    assert raised.value.status is status


def test_length_is_judged_before_the_frame_is_there() -> None:
    assert spop.frame_end(b"\0\0\x40", 0, 16384) is None
    assert spop.frame_end(b"\0\0\x40\0", 0, 16384) is None
    with pytest.raises(ProtocolError) as raised:
        spop.frame_end(b"\0\0\x40\x01", 0, 16384)
    assert raised.value.status is Status.FRAME_TOO_BIG
    with pytest.raises(ProtocolError) as raised:
        spop.frame_end(b"\0\0\0\x06", 0, 16384)
    assert raised.value.status is Status.INVALID_FRAME


@pytest.mark.parametrize(
    "decode",
    [
        spop.decode_varint,
        spop.decode_typed,
        spop.decode_string,
        spop.decode_frame,
        spop.decode_haproxy_hello,
        spop.decode_agent_hello,
        spop.decode_notify,
        spop.decode_ack,
        spop.decode_disconnect,
    ],
)
@given(junk=st.binary(max_size=300))
def test_junk_is_a_value_or_a_protocol_error(decode: Callable[[bytes, int, int], object], junk: bytes) -> None:
    with suppress(ProtocolError):
        decode(junk, 0, len(junk))


@given(st.binary(max_size=300))
def test_length_of_junk_stays_within_the_buffer(junk: bytes) -> None:
    with suppress(ProtocolError):
        end = spop.frame_end(junk, 0, 200)
        assert end is None or 7 + 4 <= end <= len(junk)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_question_is_a_value_or_a_protocol_error(damages: list[tuple[int, int]]) -> None:
    encoded = bytearray(
        spop.encode_notify(
            300, 1, [("decide", [("model", DataType.STRING, "m" * 250), ("prompt_tokens", DataType.INT64, -5)])]
        )
    )
    for position, byte in damages:
        encoded[position % len(encoded)] = byte
    with suppress(ProtocolError):
        end = spop.frame_end(encoded, 0, 16380)
        if end is not None:
            spop.decode_notify(encoded, spop.decode_frame(encoded, 0, end).payload, end)
