# SPDX-License-Identifier: GPL-3.0-or-later
"""The last decisions, so that a person can ask why a request went where it went.

Kept in memory only, and without anything of the request but its lengths and whose it is.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ringmaster_scheduler.domain import Decision, Request
from ringmaster_scheduler.in_flight import InFlight
from ringmaster_scheduler.status import terms_document


class Explanations:
    """A ring of the last `capacity` decisions. Times are turned into Unix time by `offset`, which is to be added."""

    def __init__(self, capacity: int, offset: float) -> None:
        self._ring: deque[tuple[float, Request, Decision, InFlight | None]] = deque(maxlen=capacity)
        self._offset = offset

    def keep(self, at: float, request: Request, decision: Decision, record: InFlight | None) -> None:
        """Keep a decision; `record` is what the core noted of it, if it was let in."""
        self._ring.append((at, request, decision, record))

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Return the decisions about a request, the last first; clients choose ids, so that there may be several."""
        found = [self._document(*entry) for entry in tuple(self._ring) if entry[1].id == request_id]
        return found[::-1]

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last decisions, the last first."""
        entries = tuple(self._ring)
        return [self._document(*entry) for entry in entries[len(entries) - min(count, len(entries)) :][::-1]]

    def _document(self, at: float, request: Request, decision: Decision, record: InFlight | None) -> dict[str, Any]:
        document: dict[str, Any] = {
            "id": request.id,
            "at": round(at + self._offset, 3),
            "model": request.model,
            "key_id": request.key_id,
            "outcome": decision.outcome.value,
            "reason": decision.reason,
            "engine": decision.engine,
            "status": decision.status,
            "retry_after_s": decision.retry_after,
            "deadline_ms": decision.priority,
        }
        if record is not None:
            document.update(self._of_record(record, decision))
        return document

    def _of_record(self, record: InFlight, decision: Decision) -> dict[str, Any]:
        document: dict[str, Any] = {
            "class": record.class_name,
            "prompt_tokens": record.prompt,
            "tokens_estimated": record.estimated,
            "expected_output_tokens": record.expected,
            "state": "waiting" if record.waiting else "ended" if record.state is None else "on engine",
        }
        if record.engine is not None and record.placed_at is not None:
            document["engine"] = record.engine
            document["waited_ms"] = round((record.placed_at - record.at) * 1000, 1)
            document["taken_from_queue"] = decision.engine is None
        if record.terms is not None:
            document["terms_s"] = terms_document(record.terms)
        if record.ended is not None:
            ended = record.ended
            document["engine"] = ended.engine
            document["ended"] = {
                "status": ended.status,
                "queue_s": ended.queue_time,
                "first_byte_s": ended.first_byte_time,
                "total_s": ended.total_time,
            }
        return document
