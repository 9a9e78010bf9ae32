# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers of a form that a client asked for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standin_engine import documents
from standin_engine.answers import Writer, WrittenAnswer, build_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 3}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({}, {}),
        (CITY, {"city": "aaa"}),
        ({"type": "array", "items": CITY, "minItems": 2}, [{"city": "aaa"}] * 2),
        ({"enum": ["x", "y"]}, "x"),
        ({"const": 7}, 7),
        ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, 5),
        ({"type": "number", "exclusiveMinimum": 2}, 3),
        ({"type": ["boolean", "null"]}, False),
        ({"type": "null"}, None),
        ({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, {"city": "aaa"}),
    ],
)
def test_a_document_fits_its_schema(schema: dict[str, Any], document: Any) -> None:
    assert json.loads(documents.text(schema)) == document


def test_a_schema_that_refers_to_itself_has_an_end() -> None:
    itself = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"], "$ref": "#"}
    assert json.loads(documents.text(itself)) == {}


NODE = {"properties": {name: {"$ref": "#/$defs/n"} for name in "abc"}, "required": ["a", "b", "c"]}
NESTED: dict[str, Any] = {"type": "string"}
for _level in range(6):
    NESTED = {"type": "array", "minItems": 32, "items": NESTED}
LARGE = {"type": "array", "minItems": 32, "items": {"type": "array", "minItems": 32, "items": {"const": "x" * 50_000}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
        NESTED,
        LARGE,
        {"type": "integer", "exclusiveMinimum": int("9" * 4300)},
    ],
    ids=["references", "lists", "values", "digits"],
)
def test_a_schema_that_asks_for_too_much_gets_a_document_of_some_size(schema: dict[str, Any]) -> None:
    """Made in the engine's loop, where every stream waits for it."""
    begun_at = time.process_time()
    document = documents.text(schema)
    assert time.process_time() - begun_at < 1
    assert len(document) < 200_000
    json.loads(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
KEYWORDS = st.sampled_from(["type", "properties", "required", "items", "minItems", "enum", "anyOf", "$ref", "minimum"])


@given(st.dictionaries(KEYWORDS, JSON) | JSON)
def test_whatever_a_client_sends_gives_a_document(schema: Any) -> None:
    json.loads(documents.text(schema))


def test_an_answer_is_the_document_and_ends_with_it() -> None:
    writer = Writer(build_tokenizer())
    answer = WrittenAnswer(writer, 1, '{"city": "Århus"}')
    assert writer.tokenizer.decode([answer.next_token() for _token in range(answer.length)]) == '{"city": "Århus"}'
