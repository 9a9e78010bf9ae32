# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a running scheduler what HAProxy would ask it, from the outside: a health check and one decision."""

from __future__ import annotations

import socket
import time
from typing import Final

from ringmaster_scheduler import spop
from ringmaster_scheduler.server import MESSAGE

# A model that nobody serves: the question goes all the way and places nothing.
UNSERVED_MODEL: Final = "ringmaster/probe"
_FRAME_SIZE: Final = 16380


class ProbeError(Exception):
    """The scheduler did not answer as one."""


def probe(address: str, port: int, timeout: float, model: str | None = None) -> dict[str, object]:
    """Return what a scheduler answers: its version of SPOP, the variables of the decision, and how long that took.

    Without `model` the question is about a model that nobody serves. Raises ProbeError if it does not answer within
    `timeout` seconds, or not in SPOP.
    """
    try:
        version = _ask_hello(address, port, timeout)
        begun_at = time.monotonic()
        variables = _ask_decision(address, port, timeout, model or UNSERVED_MODEL)
        milliseconds = (time.monotonic() - begun_at) * 1000
    except (OSError, spop.ProtocolError) as error:
        raise ProbeError(f"SPOE at {address} port {port}: {error}") from error
    return {"spop": version, "decision": variables, "milliseconds": round(milliseconds, 3)}


def _ask_hello(address: str, port: int, timeout: float) -> str:
    with socket.create_connection((address, port), timeout) as connection:
        connection.sendall(spop.encode_haproxy_hello(_FRAME_SIZE, healthcheck=True))
        return _read_hello(connection).version


def _ask_decision(address: str, port: int, timeout: float, model: str) -> dict[str, object]:
    question = spop.encode_notify(1, 1, [(MESSAGE, [("model", spop.DataType.STRING, model)])])
    with socket.create_connection((address, port), timeout) as connection:
        connection.sendall(spop.encode_haproxy_hello(_FRAME_SIZE, healthcheck=False))
        _read_hello(connection)
        connection.sendall(question)
        buffer, frame = _read_frame(connection, spop.FrameType.ACK)
        variables = spop.decode_ack(buffer, frame.payload, len(buffer))
        connection.sendall(
            spop.encode_disconnect(spop.FrameType.HAPROXY_DISCONNECT, spop.Status.NORMAL, "the probe ends")
        )
        return {variable.name: variable.value for variable in variables}


def _read_hello(connection: socket.socket) -> spop.AgentHello:
    buffer, frame = _read_frame(connection, spop.FrameType.AGENT_HELLO)
    return spop.decode_agent_hello(buffer, frame.payload, len(buffer))


def _read_frame(connection: socket.socket, expected: spop.FrameType) -> tuple[bytes, spop.Frame]:
    buffer = b""
    while True:
        end = spop.frame_end(buffer, 0, _FRAME_SIZE)
        if end is not None:
            break
        received = connection.recv(65536)
        if not received:
            raise ProbeError("the scheduler closed the connection without an answer")
        buffer += received
    frame = spop.decode_frame(buffer, 0, end)
    if frame.type == spop.FrameType.AGENT_DISCONNECT:
        reason = spop.decode_disconnect(buffer, frame.payload, end)
        raise ProbeError(f"the scheduler refuses, status {reason.status}: {reason.message}")
    if frame.type != expected:
        raise ProbeError(f"expected a frame of type {expected.name}, found {frame.type}")
    return buffer[:end], frame
