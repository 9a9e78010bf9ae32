# SPDX-License-Identifier: GPL-3.0-or-later
"""The smallest document that a JSON schema takes, for clients that ask for an answer of a form.

What is known of a schema is what such clients write: types, properties that have to be there, ``enum`` and ``const``,
least lengths and numbers, alternatives, and references into ``$defs`` or ``definitions``. A pattern is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DEEPEST = 32
"""Levels of a document; a schema that refers to itself would have no end."""

MOST = 1000
"""Values of a document: each level of a schema can ask for many of the next."""


def text(schema: Any) -> str:
    """The document as vLLM's models write it: JSON with a space after each colon and comma. What is not ASCII is
    escaped, for the tokenizer has no letters but those."""
    try:
        return json.dumps(_Sampler(schema).sample(schema))
    except ValueError:  # a number of more digits than Python writes
        return "{}"


class _Sampler:
    """Makes the values; ``whole`` is what references lead into."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._left = MOST

    def sample(self, schema: Any, depth: int = DEEPEST) -> Any:
        """A value that `schema` takes, as far as one is found in so many levels and values."""
        self._left -= 1
        if not isinstance(schema, Mapping) or depth == 0 or self._left < 0:
            return {}
        if isinstance(schema.get("$ref"), str):
            return self.sample(_referred(schema["$ref"], self._whole), depth - 1)
        if "const" in schema:
            return self._given(schema["const"])
        for name in ("enum", "anyOf", "oneOf", "allOf"):
            choices = schema.get(name)
            if isinstance(choices, list) and choices:
                return self._given(choices[0]) if name == "enum" else self.sample(choices[0], depth - 1)
        kind = schema.get("type", "object")
        if isinstance(kind, list):
            kind = kind[0] if kind else "null"
        if kind == "object":
            properties = schema.get("properties")
            known = properties if isinstance(properties, Mapping) else {}
            return {name: self.sample(known.get(name), depth - 1) for name in _names(schema.get("required"))}
        if kind == "array":
            return [self.sample(schema.get("items"), depth - 1) for _unused in range(_least(schema, "minItems"))]
        if kind == "string":
            return "a" * max(_least(schema, "minLength"), 1)
        if kind in ("integer", "number"):
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            over = 1 if "exclusiveMinimum" in schema else 0
            return least + over if isinstance(least, (int, float)) else 0
        return False if kind == "boolean" else None

    def _given(self, value: Any) -> Any:
        """A value that stands in the schema, which can be large, and can be asked for again and again."""
        self._left -= len(json.dumps(value)) // 50
        return value


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _least(schema: Mapping[str, Any], name: str) -> int:
    value = schema.get(name, 0)
    return value if isinstance(value, int) and 0 <= value <= DEEPEST else 0


def _referred(reference: str, whole: Any) -> Any:
    place = whole
    for part in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place
