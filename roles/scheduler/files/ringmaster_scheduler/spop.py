# SPDX-License-Identifier: GPL-3.0-or-later
"""SPOP 2.0, the protocol between HAProxy and its stream processing offload agents, as pure functions on bytes.

Source of every constant and layout: HAProxy's ``doc/SPOE.txt``, chapter 3. Integers of fixed size are big-endian.
Whatever the bytes are, a decoder returns a value or raises `ProtocolError`, whose status is what the peer is told in
a DISCONNECT frame. The decoders take a buffer with two offsets instead of slices: a connection that pipelines brings
many frames in one read, and copying each of them would cost more than decoding it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Union

Buffer = Union[bytes, bytearray]
Value = Union[None, bool, int, str, bytes, ipaddress.IPv4Address, ipaddress.IPv6Address]

VERSION: Final = "2.0"
MINIMUM_FRAME_SIZE: Final = 256
LENGTH_PREFIX_SIZE: Final = 4
# Type, flags, and one byte each for the two identifiers: nothing shorter is a frame.
_SHORTEST_FRAME: Final = 7

_FLAG_FIN: Final = 0x1
_FLAG_ABORT: Final = 0x2
_FIN_BYTES: Final = _FLAG_FIN.to_bytes(4, "big")
_TYPE_MASK: Final = 0x0F
_BOOLEAN_TRUE: Final = 0x10

_UINT64_LIMIT: Final = 1 << 64
_INT64_LIMIT: Final = 1 << 63
_UINT32_LIMIT: Final = 1 << 32
_INT32_LIMIT: Final = 1 << 31


class FrameType(IntEnum):
    """First byte of a frame."""

    UNSET = 0
    HAPROXY_HELLO = 1
    HAPROXY_DISCONNECT = 2
    NOTIFY = 3
    AGENT_HELLO = 101
    AGENT_DISCONNECT = 102
    ACK = 103


class Status(IntEnum):
    """Status codes of DISCONNECT frames (section 3.5)."""

    NORMAL = 0
    IO_ERROR = 1
    TIMEOUT = 2
    FRAME_TOO_BIG = 3
    INVALID_FRAME = 4
    NO_VERSION = 5
    NO_MAX_FRAME_SIZE = 6
    NO_CAPABILITIES = 7
    UNSUPPORTED_VERSION = 8
    BAD_FRAME_SIZE = 9
    FRAGMENTATION_NOT_SUPPORTED = 10
    INTERLACED_FRAMES = 11
    FRAME_ID_NOT_FOUND = 12
    RESOURCE_ERROR = 13
    UNKNOWN_ERROR = 99


class DataType(IntEnum):
    """Low four bits of a typed value's first byte."""

    NULL = 0
    BOOLEAN = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    IPV4 = 6
    IPV6 = 7
    STRING = 8
    BINARY = 9


class Scope(IntEnum):
    """Scope of a variable that an action sets."""

    PROCESS = 0
    SESSION = 1
    TRANSACTION = 2
    REQUEST = 3
    RESPONSE = 4


class ActionType(IntEnum):
    """First byte of an action in an ACK frame."""

    SET_VARIABLE = 1
    UNSET_VARIABLE = 2


class ProtocolError(Exception):
    """The peer broke the protocol; `status` is the code of the DISCONNECT frame it deserves."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Frame(NamedTuple):
    """Head of a frame; `identifiers` are its STREAM-ID and FRAME-ID as they stood, for an ACK repeats them unread."""

    type: int
    identifiers: bytes
    payload: int


class Hello(NamedTuple):
    """What HAProxy offers in HAPROXY-HELLO; `max_frame_size` in bytes, without the length prefix."""

    max_frame_size: int
    healthcheck: bool
    pipelining: bool
    engine_id: str


class AgentHello(NamedTuple):
    """What an agent answers in AGENT-HELLO."""

    version: str
    max_frame_size: int
    capabilities: str


class Disconnect(NamedTuple):
    """Payload of either DISCONNECT frame."""

    status: int
    message: str


class Variable(NamedTuple):
    """One variable that an ACK sets."""

    scope: int
    name: str
    value: Value


NO_IDENTIFIERS: Final = b"\x00\x00"


def _truncated() -> ProtocolError:
    return ProtocolError(Status.INVALID_FRAME, "the frame ends in the middle of a value")


# Primitive values --------------------------------------------------------------------------------------------------


def encode_varint(value: int) -> bytes:
    """Return the bytes of an unsigned integer below 2^64.

    Raises ValueError for a number out of range.
    """
    if not 0 <= value < _UINT64_LIMIT:
        raise ValueError(f"{value} is not an unsigned 64-bit integer")
    if value < 240:
        return bytes((value,))
    encoded = bytearray((value & 0xFF | 0xF0,))
    value = (value - 240) >> 4
    while value >= 128:
        encoded.append(value & 0xFF | 0x80)
        value = (value - 128) >> 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(buffer: Buffer, offset: int, end: int) -> tuple[int, int]:
    """Return an unsigned integer and the offset behind it."""
    if offset >= end:
        raise _truncated()
    value = buffer[offset]
    offset += 1
    if value < 240:
        return value, offset
    shift = 4
    while True:
        if offset >= end:
            raise _truncated()
        byte = buffer[offset]
        offset += 1
        value += byte << shift
        if value >= _UINT64_LIMIT:
            raise ProtocolError(Status.INVALID_FRAME, "an integer is over 64 bits")
        if byte < 128:
            return value, offset
        shift += 7


def encode_string(value: str) -> bytes:
    """Return the bytes of a bare string: names of messages, arguments and variables."""
    encoded = value.encode()
    return encode_varint(len(encoded)) + encoded


def _decode_bytes(buffer: Buffer, offset: int, end: int) -> tuple[Buffer, int]:
    length, offset = decode_varint(buffer, offset, end)
    stop = offset + length
    if stop > end:
        raise _truncated()
    return buffer[offset:stop], stop


def decode_string(buffer: Buffer, offset: int, end: int) -> tuple[str, int]:
    """Return a bare string and the offset behind it; bytes that are not UTF-8 become U+FFFD.

    HAProxy passes on what clients send, so that text with broken encoding is no fault of the frame.
    """
    encoded, offset = _decode_bytes(buffer, offset, end)
    return encoded.decode("utf-8", "replace"), offset


def encode_typed(kind: DataType, value: Value) -> bytes:
    """Return the bytes of a typed value.

    Raises ValueError for a value that is not of the type or out of its range.
    """
    head = bytes((kind,))
    if kind is DataType.NULL and value is None:
        return head
    if kind is DataType.BOOLEAN and isinstance(value, bool):
        return bytes((kind | _BOOLEAN_TRUE,)) if value else head
    if kind is DataType.STRING and isinstance(value, str):
        return head + encode_string(value)
    if kind is DataType.BINARY and isinstance(value, bytes):
        return head + encode_varint(len(value)) + value
    if kind is DataType.IPV4 and isinstance(value, ipaddress.IPv4Address):
        return head + value.packed
    if kind is DataType.IPV6 and isinstance(value, ipaddress.IPv6Address):
        return head + value.packed
    if kind in _INTEGER_RANGES and isinstance(value, int) and not isinstance(value, bool):
        lowest, highest = _INTEGER_RANGES[kind]
        if lowest <= value <= highest:
            # Negative numbers travel as the two's complement of 64 bits, whatever their type's width.
            return head + encode_varint(value % _UINT64_LIMIT)
    raise ValueError(f"{value!r} is no {kind.name}")


_INTEGER_RANGES: Final[Mapping[int, tuple[int, int]]] = {
    DataType.INT32: (-_INT32_LIMIT, _INT32_LIMIT - 1),
    DataType.UINT32: (0, _UINT32_LIMIT - 1),
    DataType.INT64: (-_INT64_LIMIT, _INT64_LIMIT - 1),
    DataType.UINT64: (0, _UINT64_LIMIT - 1),
}

# Plain integers: comparing with members of an IntEnum costs a noticeable part of a decision.
_STRING: Final = int(DataType.STRING)
_BINARY: Final = int(DataType.BINARY)
_NULL: Final = int(DataType.NULL)
_BOOLEAN: Final = int(DataType.BOOLEAN)
_SIGNED: Final = (int(DataType.INT32), int(DataType.INT64))


def decode_typed(buffer: Buffer, offset: int, end: int) -> tuple[Value, int]:
    """Return a typed value and the offset behind it."""
    if offset >= end:
        raise _truncated()
    first = buffer[offset]
    kind = first & _TYPE_MASK
    offset += 1
    if kind == _STRING:
        return decode_string(buffer, offset, end)
    if kind in _INTEGER_RANGES:
        number, offset = decode_varint(buffer, offset, end)
        if number >= _INT64_LIMIT and kind in _SIGNED:
            number -= _UINT64_LIMIT
        lowest, highest = _INTEGER_RANGES[kind]
        if not lowest <= number <= highest:
            raise ProtocolError(Status.INVALID_FRAME, "an integer is out of its type's range")
        return number, offset
    if kind == _NULL:
        return None, offset
    if kind == _BOOLEAN:
        return bool(first & _BOOLEAN_TRUE), offset
    if kind == _BINARY:
        encoded, offset = _decode_bytes(buffer, offset, end)
        return bytes(encoded), offset
    if kind == DataType.IPV4:
        if offset + 4 > end:
            raise _truncated()
        return ipaddress.IPv4Address(bytes(buffer[offset : offset + 4])), offset + 4
    if kind == DataType.IPV6:
        if offset + 16 > end:
            raise _truncated()
        return ipaddress.IPv6Address(bytes(buffer[offset : offset + 16])), offset + 16
    raise ProtocolError(Status.INVALID_FRAME, f"data type {kind} is not defined")


def _decode_pairs(buffer: Buffer, offset: int, end: int) -> dict[str, Value]:
    pairs: dict[str, Value] = {}
    while offset < end:
        name, offset = decode_string(buffer, offset, end)
        pairs[name], offset = decode_typed(buffer, offset, end)
    return pairs


# Frames ------------------------------------------------------------------------------------------------------------


def frame_end(buffer: Buffer, offset: int, max_frame_size: int) -> int | None:
    """Return the offset behind the frame whose length prefix is at `offset`, or None while it is not all there.

    Raises ProtocolError as soon as the length is known to be wrong, before the frame would be waited for.
    """
    start = offset + LENGTH_PREFIX_SIZE
    if start > len(buffer):
        return None
    length = int.from_bytes(buffer[offset:start], "big")
    if length > max_frame_size:
        raise ProtocolError(Status.FRAME_TOO_BIG, f"a frame of {length} bytes, {max_frame_size} were agreed")
    if length < _SHORTEST_FRAME:
        raise ProtocolError(Status.INVALID_FRAME, f"a frame of {length} bytes")
    end = start + length
    return end if end <= len(buffer) else None


def decode_frame(buffer: Buffer, offset: int, end: int) -> Frame:
    """Return the head of the frame that lies behind the length prefix at `offset`.

    Fragments are refused: the agent never offers that capability, and HAProxy itself dropped it in 3.1.
    """
    start = offset + LENGTH_PREFIX_SIZE
    identifiers = start + 5
    if identifiers > end:
        raise _truncated()
    kind = buffer[start]
    flags = int.from_bytes(buffer[start + 1 : identifiers], "big")
    if flags & _FLAG_ABORT:
        raise ProtocolError(Status.INVALID_FRAME, "the frame is aborted, but no fragment came before")
    if not flags & _FLAG_FIN or kind == FrameType.UNSET:
        raise ProtocolError(Status.FRAGMENTATION_NOT_SUPPORTED, "payload fragmentation is not supported")
    _unused, payload = decode_varint(buffer, identifiers, end)
    _unused, payload = decode_varint(buffer, payload, end)
    return Frame(kind, bytes(buffer[identifiers:payload]), payload)


def encode_frame(kind: FrameType, identifiers: bytes, payload: bytes) -> bytes:
    """Return a whole frame with its length prefix."""
    return b"".join(
        (
            (5 + len(identifiers) + len(payload)).to_bytes(LENGTH_PREFIX_SIZE, "big"),
            bytes((kind,)),
            _FIN_BYTES,
            identifiers,
            payload,
        )
    )


def encode_identifiers(stream_id: int, frame_id: int) -> bytes:
    """Return STREAM-ID and FRAME-ID as a frame carries them."""
    return encode_varint(stream_id) + encode_varint(frame_id)


# The agent's side --------------------------------------------------------------------------------------------------


def decode_haproxy_hello(buffer: Buffer, offset: int, end: int) -> Hello:
    """Return what HAProxy offers, from the payload of a HAPROXY-HELLO frame.

    Raises ProtocolError with the status that names the missing or unusable item.
    """
    items = _decode_pairs(buffer, offset, end)
    versions = items.get("supported-versions")
    if not isinstance(versions, str):
        raise ProtocolError(Status.NO_VERSION, "supported-versions is missing")
    if "2" not in (version.strip().partition(".")[0] for version in versions.split(",")):
        raise ProtocolError(Status.UNSUPPORTED_VERSION, f"this agent speaks SPOP {VERSION}")
    size = items.get("max-frame-size")
    if not isinstance(size, int) or isinstance(size, bool):
        raise ProtocolError(Status.NO_MAX_FRAME_SIZE, "max-frame-size is missing")
    if size < MINIMUM_FRAME_SIZE:
        raise ProtocolError(Status.BAD_FRAME_SIZE, f"max-frame-size {size} is under {MINIMUM_FRAME_SIZE}")
    capabilities = items.get("capabilities")
    if not isinstance(capabilities, str):
        raise ProtocolError(Status.NO_CAPABILITIES, "capabilities is missing")
    engine_id = items.get("engine-id")
    return Hello(
        max_frame_size=size,
        healthcheck=items.get("healthcheck") is True,
        pipelining="pipelining" in _split_list(capabilities),
        engine_id=engine_id if isinstance(engine_id, str) else "",
    )


def _split_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def encode_agent_hello(max_frame_size: int, pipelining: bool) -> bytes:
    """Return an AGENT-HELLO frame."""
    return encode_frame(
        FrameType.AGENT_HELLO,
        NO_IDENTIFIERS,
        b"".join(
            (
                encode_string("version"),
                encode_typed(DataType.STRING, VERSION),
                encode_string("max-frame-size"),
                encode_typed(DataType.UINT32, max_frame_size),
                encode_string("capabilities"),
                encode_typed(DataType.STRING, "pipelining" if pipelining else ""),
            )
        ),
    )


def decode_notify(buffer: Buffer, offset: int, end: int) -> list[tuple[str, dict[str, Value]]]:
    """Return the messages of a NOTIFY frame's payload, each with its arguments by name, in their order."""
    messages: list[tuple[str, dict[str, Value]]] = []
    while offset < end:
        name, offset = decode_string(buffer, offset, end)
        if offset >= end:
            raise _truncated()
        count = buffer[offset]
        offset += 1
        arguments: dict[str, Value] = {}
        for _unused in range(count):
            argument, offset = decode_string(buffer, offset, end)
            arguments[argument], offset = decode_typed(buffer, offset, end)
        messages.append((name, arguments))
    return messages


def encode_set_variable(scope: Scope, name: str, kind: DataType, value: Value) -> bytes:
    """Return an action that sets a variable, for an ACK frame."""
    return (
        bytes((ActionType.SET_VARIABLE, 3, scope))  # 3: the number of arguments, fixed by the protocol
        + encode_string(name)
        + encode_typed(kind, value)
    )


_ACK_HEAD: Final = bytes((FrameType.ACK,)) + _FIN_BYTES


def encode_ack(identifiers: bytes, actions: bytes) -> bytes:
    """Return the ACK frame for the NOTIFY frame that had these identifiers."""
    length = 5 + len(identifiers) + len(actions)
    return length.to_bytes(LENGTH_PREFIX_SIZE, "big") + _ACK_HEAD + identifiers + actions


def encode_disconnect(kind: FrameType, status: Status, message: str) -> bytes:
    """Return an AGENT-DISCONNECT or HAPROXY-DISCONNECT frame."""
    return encode_frame(
        kind,
        NO_IDENTIFIERS,
        encode_string("status-code")
        + encode_typed(DataType.UINT32, int(status))
        + encode_string("message")
        + encode_typed(DataType.STRING, message),
    )


def decode_disconnect(buffer: Buffer, offset: int, end: int) -> Disconnect:
    """Return status and message of a DISCONNECT frame's payload; items that are missing count as an unknown error."""
    items = _decode_pairs(buffer, offset, end)
    status = items.get("status-code")
    message = items.get("message")
    return Disconnect(
        status if isinstance(status, int) else int(Status.UNKNOWN_ERROR),
        message if isinstance(message, str) else "",
    )


# HAProxy's side, for the probe and whatever else asks a scheduler ---------------------------------------------------


def encode_haproxy_hello(max_frame_size: int, healthcheck: bool) -> bytes:
    """Return a HAPROXY-HELLO frame that offers pipelining."""
    return encode_frame(
        FrameType.HAPROXY_HELLO,
        NO_IDENTIFIERS,
        b"".join(
            (
                encode_string("supported-versions"),
                encode_typed(DataType.STRING, VERSION),
                encode_string("max-frame-size"),
                encode_typed(DataType.UINT32, max_frame_size),
                encode_string("capabilities"),
                encode_typed(DataType.STRING, "pipelining"),
                encode_string("healthcheck"),
                encode_typed(DataType.BOOLEAN, healthcheck),
            )
        ),
    )


def decode_agent_hello(buffer: Buffer, offset: int, end: int) -> AgentHello:
    """Return what the agent answered, from the payload of an AGENT-HELLO frame.

    Raises ProtocolError if an item is missing.
    """
    items = _decode_pairs(buffer, offset, end)
    version, size, capabilities = (items.get(name) for name in ("version", "max-frame-size", "capabilities"))
    if not isinstance(version, str):
        raise ProtocolError(Status.NO_VERSION, "version is missing")
    if not isinstance(size, int) or isinstance(size, bool):
        raise ProtocolError(Status.NO_MAX_FRAME_SIZE, "max-frame-size is missing")
    if not isinstance(capabilities, str):
        raise ProtocolError(Status.NO_CAPABILITIES, "capabilities is missing")
    return AgentHello(version, size, capabilities)


def encode_notify(
    stream_id: int,
    frame_id: int,
    messages: Sequence[tuple[str, Sequence[tuple[str, DataType, Value]]]],
) -> bytes:
    """Return a NOTIFY frame; each message is its name and its arguments as (name, type, value), 255 at most."""
    payload = bytearray()
    for name, arguments in messages:
        payload += encode_string(name)
        payload.append(len(arguments))
        for argument, kind, value in arguments:
            payload += encode_string(argument) + encode_typed(kind, value)
    return encode_frame(FrameType.NOTIFY, encode_identifiers(stream_id, frame_id), bytes(payload))


def decode_ack(buffer: Buffer, offset: int, end: int) -> list[Variable]:
    """Return the variables that an ACK frame's payload sets.

    Raises ProtocolError for any other action: this agent has no use for them.
    """
    variables: list[Variable] = []
    while offset < end:
        if offset + 3 > end:
            raise _truncated()
        action, count, scope = buffer[offset : offset + 3]
        if action != ActionType.SET_VARIABLE or count != 3:
            raise ProtocolError(Status.INVALID_FRAME, f"action {action} with {count} arguments")
        name, offset = decode_string(buffer, offset + 3, end)
        value, offset = decode_typed(buffer, offset, end)
        variables.append(Variable(scope, name, value))
    return variables
