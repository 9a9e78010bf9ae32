# SPDX-License-Identifier: GPL-3.0-or-later
"""The requests of the bench on the mixed fleet: engine and edge find the length that the trace says."""

from __future__ import annotations

import json
import random

import pytest

from standin_engine.answers import build_tokenizer
from tests.bench.mixed_fleet import BYTES_PER_TOKEN, body
from tests.bench.simulator.traces import Ask

BLOCK = 16


@pytest.mark.parametrize("tokens", [100, 101, 700, 8000])
@pytest.mark.parametrize("output", [1, 4800])
def test_a_prompt_has_as_many_tokens_as_the_trace_says(tokens: int, output: int) -> None:
    content = body("qwen2-7b-instruct", Ask(0.0, tokens, output), random.Random(1))
    assert len(build_tokenizer().encode(json.loads(content)["prompt"])) == tokens
    assert len(content) == BYTES_PER_TOKEN * tokens


def test_prompts_share_no_beginning() -> None:
    source = random.Random(1)
    tokenizer = build_tokenizer()
    prompts = [json.loads(body("qwen2-7b-instruct", Ask(0.0, 100, 5), source))["prompt"] for _unused in range(1000)]
    assert len({tuple(tokenizer.encode(prompt)[:BLOCK]) for prompt in prompts}) == len(prompts)
