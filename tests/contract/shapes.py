# SPDX-License-Identifier: GPL-3.0-or-later
"""What of an answer two engines have to agree on: everything but the words.

Of a body remain its fields and the types of their values; a few fields keep their values, because a client acts on
them. Items of a list have one shape, which is that of all of them together. Of a stream remain the shapes of its
events, how they are framed, and their order within each answer: equal ones in a row count once, and how several answers
take turns is a matter of time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# Fields whose values a client acts on.
KEPT = frozenset({"object", "role", "finish_reason", "type", "code", "param", "owned_by"})
# Headers that belong to a connection or a moment.
PASSING = frozenset({"date", "server", "connection", "keep-alive", "content-length", "transfer-encoding"})
DONE = "[DONE]"


def shape(value: Any, key: str = "") -> Any:
    """The shape of a value of JSON."""
    if isinstance(value, dict):
        # A table of alternatives by their texts: the texts are no fields.
        if key == "top_logprobs":
            return {"TEXT": merged([shape(each) for each in value.values()])}
        return {name: shape(each, name) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [merged([shape(each, key) for each in value])] if value else []
    if key in KEPT or value is None or isinstance(value, bool):
        return value if not isinstance(value, bool) else "boolean"
    return "number" if isinstance(value, (int, float)) else "text"


def merged(shapes: list[Any]) -> Any:
    """One shape for several: equal ones once, different ones side by side."""
    different: list[Any] = []
    for each in shapes:
        if each not in different:
            different.append(each)
    return different[0] if len(different) == 1 else {"ANY": sorted(different, key=json.dumps)}


def events(text: str) -> list[Any]:
    """The shapes of a stream's events: those of the first answer, of the second …, and those of no answer (usage).

    Raises:
        ValueError: the stream is not framed as ``data: DOCUMENT``, an empty line after each, or does not end with the
            mark of the end.
    """
    *parts, rest = text.split("\n\n")
    if rest or not parts or not all(part.startswith("data: ") and "\n" not in part for part in parts):
        raise ValueError(f"not framed as data: DOCUMENT with an empty line after each: {text[:200]!r}")
    documents = [part[len("data: ") :] for part in parts]
    if documents[-1] != DONE or DONE in documents[:-1]:
        raise ValueError(f"expected {DONE} once, as the last event, found {documents[-1][:200]!r} there")
    answers: dict[float, list[Any]] = {}
    for document in map(json.loads, documents[:-1]):
        place = document["choices"][0]["index"] if document.get("choices") else math.inf
        of_answer, each = answers.setdefault(place, []), shape(document)
        if not of_answer or of_answer[-1] != each:
            of_answer.append(each)
    return [each for _place, of_answer in sorted(answers.items()) for each in of_answer]


def answer(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """What remains of an answer."""
    names = {name.lower(): value for name, value in headers.items()}
    result: dict[str, Any] = {
        "status": status,
        "headers": sorted(set(names) - PASSING),
        "type": names.get("content-type"),
    }
    text = body.decode()
    if text and str(result["type"]).startswith("text/event-stream"):
        result["events"] = events(text)
    elif text:
        document = json.loads(text)
        result["body"] = shape(document)
        error = document.get("error") if isinstance(document, dict) else None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            result["message"] = wording(error["message"])
    return result


def wording(message: str) -> str:
    """A refusal's words without what a client sent, without numbers, and of several only the first."""
    first = re.sub(r"'input': .*", "'input': …", message, flags=re.DOTALL)
    return re.sub(r"[0-9]+", "N", first.replace("validation errors", "validation error"))
