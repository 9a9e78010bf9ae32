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


def text(schema: Any) -> str:
    """The document as vLLM's models write it: JSON with a space after each colon and comma."""
    return json.dumps(sample(schema, schema), ensure_ascii=False)


def sample(schema: Any, whole: Any, depth: int = DEEPEST) -> Any:
    """A value that `schema` takes; ``whole`` is what references in it lead into."""
    if not isinstance(schema, Mapping) or depth == 0:
        return {}
    if isinstance(schema.get("$ref"), str):
        return sample(_referred(schema["$ref"], whole), whole, depth - 1)
    if "const" in schema:
        return schema["const"]
    for name in ("enum", "anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        if isinstance(choices, list) and choices:
            return choices[0] if name == "enum" else sample(choices[0], whole, depth - 1)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    if kind == "object":
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        return {name: sample(known.get(name), whole, depth - 1) for name in _names(schema.get("required"))}
    if kind == "array":
        return [sample(schema.get("items"), whole, depth - 1)] * _least(schema, "minItems")
    if kind == "string":
        return "a" * max(_least(schema, "minLength"), 1)
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        over = 1 if "exclusiveMinimum" in schema else 0
        return least + over if isinstance(least, (int, float)) else 0
    return False if kind == "boolean" else None


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
