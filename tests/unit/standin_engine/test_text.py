# SPDX-License-Identifier: GPL-3.0-or-later
"""Tokenizer, canned answers, and the search for stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standin_engine.answers import MAX_LENGTH, MEDIAN_LENGTH, Writer, answer_seed, build_tokenizer
from standin_engine.engine import StopScanner
from standin_engine.tokenizer import TURN_END, TURN_START

TOKENIZER = build_tokenizer()
WRITER = Writer(TOKENIZER)


@given(st.text())
def test_tokens_give_the_text_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text.encode("utf-8", errors="replace").decode()
    assert all(0 <= token < TOKENIZER.size for token in tokens)


@given(st.lists(st.sampled_from(["the scheduler reads", "  ", " a", "Zürich", "\n", "1234", "日本", "x" * 50])))
def test_mixed_text_comes_back_too(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_english_text_costs_a_token_for_about_three_characters() -> None:
    text = "Tell me in a few sentences why the measured latency of a proxy depends on the size of its buffers. " * 10
    assert 2.5 <= len(text) / len(TOKENIZER.encode(text)) <= 4


def test_a_second_tokenizer_gives_the_same_ids() -> None:
    text = "The same on every engine, über alles."
    assert build_tokenizer().encode(text) == TOKENIZER.encode(text)


def test_a_token_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        TOKENIZER.decode([TOKENIZER.size])


def test_the_chat_template_frames_every_turn_and_text_cannot_forge_a_frame() -> None:
    tokens = TOKENIZER.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert tokens.count(TURN_START) == 2
    assert tokens.count(TURN_END) == 1
    assert TOKENIZER.decode(tokens) == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"


def answer_text(seed: int, length: int) -> str:
    answer = WRITER.answer(seed)
    return TOKENIZER.decode([answer.next_token() for _unused in range(length)])


def test_an_answer_is_readable_and_the_same_for_the_same_seed() -> None:
    text = answer_text(12345, 60)
    assert text == answer_text(12345, 60)
    assert text != answer_text(12346, 60)
    assert text[0].isupper()
    assert ". " in text
    assert text.replace(" ", "").replace(".", "").isalpha()


@given(st.integers(0, 2**64 - 1))
def test_answers_end_by_themselves_and_garbage_is_within_the_vocabulary(seed: int) -> None:
    answer = WRITER.answer(seed)
    assert 1 <= answer.length <= MAX_LENGTH
    assert TURN_END < answer.garbage_token() < TOKENIZER.size


def test_the_median_length_is_what_it_is_said_to_be() -> None:
    lengths = sorted(WRITER.answer(answer_seed("m", [number], "greedy")).length for number in range(1001))
    assert MEDIAN_LENGTH * 0.9 < lengths[500] < MEDIAN_LENGTH * 1.1


def test_the_seed_depends_on_model_prompt_and_sampling_alone() -> None:
    seed = answer_seed("m", [1, 2], "greedy")
    assert seed == answer_seed("m", (1, 2), "greedy")
    others = {answer_seed("n", [1, 2], "greedy"), answer_seed("m", [1], "greedy"), answer_seed("m", [1, 2], "seed 1")}
    assert len(others | {seed}) == 4


def scan(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """What a client sees of the pieces."""
    scanner = StopScanner(stops, include)
    shown = ""
    for index, piece in enumerate(pieces):
        text, stop = scanner.feed(piece, last=index == len(pieces) - 1, active=True)
        shown += text
        if stop is not None:
            return shown, stop
    return shown, None


@given(
    st.lists(st.text("ab ", max_size=4), min_size=1, max_size=12),
    st.text("ab ", min_size=1, max_size=4),
    st.booleans(),
)
def test_a_stop_string_is_found_wherever_the_pieces_are_cut(pieces: list[str], stop: str, include: bool) -> None:
    text = "".join(pieces)
    at = text.find(stop)
    if at < 0:
        expected: tuple[str, str | None] = (text, None)
    else:
        expected = (text[: at + len(stop)] if include else text[:at], stop)
    assert scan(pieces, [stop], include) == expected


@given(st.lists(st.text("abc", max_size=4), min_size=1, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4)))
def test_no_stop_string_is_ever_shown(pieces: list[str], stops: list[str]) -> None:
    shown, _unused = scan(pieces, stops or ["abc"], include=False)
    assert not any(stop in shown for stop in stops or ["abc"])
    assert "".join(pieces).startswith(shown)


@pytest.mark.parametrize(
    ("stops", "expected"), [(["b", "a"], ("", "a")), (["abc", "c"], ("", "abc")), (["c", "bc"], ("ab", "c"))]
)
def test_the_stop_string_that_is_complete_first_counts(stops: list[str], expected: tuple[str, str]) -> None:
    assert scan(["abc"], stops, include=False) == expected


def test_stop_strings_do_not_count_before_they_are_active() -> None:
    scanner = StopScanner(["end"], include=False)
    shown = scanner.feed("the end", last=False, active=False)[0]
    text, stop = scanner.feed(" and the end", last=False, active=True)
    assert shown + text == "the end and the "
    assert stop == "end"
