# SPDX-License-Identifier: GPL-3.0-or-later
"""Bodies of answers, in vLLM 0.32's order of fields, and the stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from .engine import Generation
from .protocol import GenerationRequest
from .tokenizer import END_OF_TEXT, Tokenizer
from .tools import CallStream
from .trace import IntervalTrace

BUFFER_LIMIT = 65536
"""Bytes that may wait for a slow client; beyond that its tokens are gathered into larger chunks, as vLLM does."""


def encode(document: Any) -> bytes:
    """JSON as vLLM writes it: compact, UTF-8; lone surrogates become question marks."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def usage(prompt_tokens: int, completion_tokens: int, cached: int | None = None, full: bool = True) -> dict[str, Any]:
    """Usage of a request; ``full`` writes the empty fields, too."""
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if full or cached is not None:
        details = {"cached_tokens": cached}
        if full:
            details.update({"created_cache_tokens": None, "multimodal_tokens": None})
        result["prompt_tokens_details"] = None if cached is None else details
    if full:
        result["completion_tokens_details"] = None
    return result


class Vocabulary:
    """Tokens as text and as parts of JSON strings, and the log probabilities that the stand-in pretends to have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = [piece.decode("utf-8", errors="replace") for piece in tokenizer.pieces]
        self.texts[END_OF_TEXT] = ""
        self.json = [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in self.texts]
        self._tokenizer = tokenizer

    def logprob(self, token: int, position: int) -> float:
        """Log probability of the token at a place: between ln 0.35 and ln 0.95, the same each time."""
        return math.log(0.35 + 0.6 * ((token * 2654435761 + position * 40503) % 1000) / 1000)

    def alternatives(self, token: int, position: int, count: int) -> list[tuple[int, float]]:
        """The token itself and the ``count`` - 1 next best ones, each with its log probability."""
        best = self.logprob(token, position)
        rest = 1 - math.exp(best)
        result = [(token, best)]
        for rank in range(1, count):
            other = (token + rank * 7919) % self._tokenizer.size
            result.append((other, math.log(rest) - rank * math.log(2)))
        return result


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[int], first: int, offset: int, count: int
) -> dict[str, Any]:
    """Log probabilities in the form of ``/v1/completions``.

    Args:
        vocabulary: gives texts and probabilities.
        tokens: the tokens they are about.
        first: place of the first of them in the answer.
        offset: characters before it.
        count: alternatives to each token.
    """
    texts = [vocabulary.texts[token] for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [vocabulary.logprob(token, first + place) for place, token in enumerate(tokens)],
        "tokens": texts,
        "top_logprobs": [
            {
                vocabulary.texts[other]: logprob
                for other, logprob in vocabulary.alternatives(token, first + place, max(count, 1))
            }
            for place, token in enumerate(tokens)
        ],
    }


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[int], first: int, count: int) -> dict[str, Any]:
    """Log probabilities in the form of ``/v1/chat/completions``."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = vocabulary.texts[token]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(token, vocabulary.logprob(token, first + place)),
                "top_logprobs": [
                    entry(other, logprob) for other, logprob in vocabulary.alternatives(token, first + place, count)
                ]
                if count > 0
                else [],
            }
            for place, token in enumerate(tokens)
        ]
    }


class Envelope:
    """What is the same in all parts of an answer: ids, names, and the form of the route."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        chat: bool,
        identifier: str,
        model: str,
        fingerprint: str | None,
        vocabulary: Vocabulary,
        show_cached: bool,
    ) -> None:
        self.request = request
        self.chat = chat
        self.identifier = identifier
        self.model = model
        self.fingerprint = fingerprint
        self.vocabulary = vocabulary
        self.show_cached = show_cached
        self.created = int(time.time())

    def _logprobs(self, tokens: Sequence[int], first: int, offset: int) -> dict[str, Any] | None:
        count = self.request.sampling.logprobs
        if count is None:
            return None
        if self.chat:
            return chat_logprobs(self.vocabulary, tokens, first, count)
        return completion_logprobs(self.vocabulary, tokens, first, offset, count)

    def body(self, generations: Sequence[Generation], texts: Sequence[str], prompts: Sequence[str]) -> dict[str, Any]:
        """The answer to a request that is not streamed.

        Args:
            generations: the finished answers.
            texts: their texts.
            prompts: texts of the prompts to be echoed, one an answer.
        """
        choices: list[dict[str, Any]] = []
        for generation, text, prompt in zip(generations, texts, prompts):
            logprobs = self._logprobs(generation.outputs, 0, len(prompt))
            token_ids = generation.outputs if self.request.return_token_ids else None
            call, reason = self.request.call, generation.finish_reason
            reason = reason if call is None else call.finish_reason(reason)
            end = {"finish_reason": reason, "stop_reason": generation.stop_reason}
            if self.chat:
                said = {"content": text} if call is None else call.message(text)
                message = {
                    "role": "assistant",
                    "content": prompt + said.pop("content"),
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    **said,
                    "reasoning": None,
                }
                choices.append(
                    {"index": generation.index, "message": message, "logprobs": logprobs, **end,
                     "token_ids": token_ids, "routed_experts": None}
                )  # fmt: skip
            else:
                choices.append(
                    {"index": generation.index, "text": prompt + text, "logprobs": logprobs, **end,
                     "token_ids": token_ids, "prompt_logprobs": None,
                     "prompt_token_ids": list(generation.prompt) if self.request.return_token_ids else None,
                     "routed_experts": None}
                )  # fmt: skip
        result: dict[str, Any] = {
            "id": self.identifier,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": self.usage(generations, full=True),
        }
        if self.chat:
            result["prompt_logprobs"] = None
            result["prompt_token_ids"] = list(generations[0].prompt) if self.request.return_token_ids else None
            result["prompt_text"] = None
        result.update({"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})
        return result

    def usage(self, generations: Sequence[Generation], full: bool) -> dict[str, Any]:
        """Usage of all answers; a prompt counts once, whatever ``n``."""
        prompts = generations[:: self.request.sampling.n]
        return usage(
            sum(len(generation.prompt) for generation in prompts),
            sum(len(generation.outputs) for generation in generations),
            generations[-1].cached if self.show_cached else None,
            full,
        )

    def _usage_so_far(self, generation: Generation, tokens: int) -> dict[str, Any]:
        result = usage(len(generation.prompt), tokens, full=False)
        return {**result, "completion_tokens_details": None} if self.chat else result

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def role_chunk(self, generation: Generation) -> dict[str, Any]:
        """The chunk that opens an answer of a chat."""
        choice = {
            "index": generation.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if self.request.continuous_usage:
            chunk["usage"] = self._usage_so_far(generation, 0)
        chunk["prompt_token_ids"] = list(generation.prompt) if self.request.return_token_ids else None
        chunk["prompt_text"] = None
        return chunk

    def echo_chunk(self, generation: Generation, text: str) -> dict[str, Any]:
        """The chunk of a chat that repeats the assistant's last message."""
        choice = {"index": generation.index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if self.request.continuous_usage:
            chunk["usage"] = self._usage_so_far(generation, 0)
        return chunk

    def chunk(
        self,
        generation: Generation,
        text: str,
        tokens: Sequence[int],
        offset: int,
        first: bool,
        call: CallStream | None = None,
    ) -> dict[str, Any] | None:
        """A chunk with text, or with what is new of a call; None if there is nothing to be told.

        Args:
            generation: the answer it belongs to; its last tokens are ``tokens``.
            text: the new text.
            tokens: the new tokens.
            offset: characters of the answer before them.
            first: whether it is the first one of this answer.
            call: the call that the answer is, if it is one.
        """
        logprobs = self._logprobs(tokens, len(generation.outputs) - len(tokens), offset)
        token_ids = list(tokens) if self.request.return_token_ids else None
        finished = generation.finish_reason is not None
        delta: dict[str, Any] = {"content": text}
        reason = generation.finish_reason
        if call is not None:
            delta, reason = call.delta(text, finished), call.finish_reason(reason)
            if not (delta or finished or logprobs or token_ids):
                return None
        choice: dict[str, Any] = {"index": generation.index}
        if self.chat:
            choice.update({"delta": delta, "logprobs": logprobs, "finish_reason": reason})
            if finished:
                choice["stop_reason"] = generation.stop_reason
        else:
            prompt = list(generation.prompt) if first and self.request.return_token_ids else None
            choice.update(
                {"text": text, "logprobs": logprobs, "finish_reason": generation.finish_reason,
                 "stop_reason": generation.stop_reason, "prompt_token_ids": prompt}
            )  # fmt: skip
        choice["token_ids"] = token_ids
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if self.request.continuous_usage:
            chunk["usage"] = self._usage_so_far(generation, len(generation.outputs))
        if finished and not self.request.include_usage and self.fingerprint is not None:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk

    def usage_chunk(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The last chunk, if usage is wanted."""
        chunk = {**self._head(), "choices": [], "usage": self.usage(generations, full=False)}
        if self.fingerprint is not None:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk

    def split_chunk(self, generation: Generation) -> tuple[bytes, bytes]:
        """A chunk in the middle of an answer, cut where the text goes: all that changes from token to token."""
        empty = b'"delta":{"content":""' if self.chat else b'"text":""'
        # Names that a client gives (request id, model) stand before the text, so the last place is the right one.
        before, found, after = encode(self.chunk(generation, "", (), 0, first=False)).rpartition(empty)
        return b"data: " + before + found[:-1], found[-1:] + after + b"\n\n"


class EventStream:
    """Writes the tokens of a request as server-sent events, straight to the transport.

    The web library's own writer costs several times what the engine does for a token. Framing is chunked transfer
    encoding, one frame an event; HTTP/1.0 clients get the bare events.

    Args:
        envelope: the form of the answer.
        transport: where the events go; the headers have been sent.
        framed: whether the answer uses chunked transfer encoding.
        prompts: texts of the prompts to be echoed, one an answer.
        interval: tokens a chunk; the first and the last token are never held back.
        trace: where the times between chunks are noted, if at all.
    """

    def __init__(
        self,
        envelope: Envelope,
        transport: asyncio.Transport,
        *,
        framed: bool,
        prompts: Sequence[str],
        interval: int,
        trace: IntervalTrace | None,
    ) -> None:
        self._envelope = envelope
        self._transport = transport
        self._framed = framed
        self._prompts = prompts
        self._interval = interval
        self._trace = trace
        self._last_write = 0.0
        self._json = envelope.vocabulary.json
        self._parts: dict[int, tuple[bytes, bytes]] = {}
        self._waiting: dict[int, tuple[list[str], list[int]]] = {}
        self._offsets: dict[int, int] = {}
        request = envelope.request
        self._simple = (
            interval == 1
            and request.sampling.logprobs is None
            and not request.continuous_usage
            and not request.return_token_ids
            and request.call is None
        )
        self._calls: dict[int, CallStream] = {}

    def push(self, generation: Generation, token: int, text: str | None) -> None:
        """Take a token; it is written now, unless the client reads too slowly."""
        parts = self._parts.get(generation.index)
        if (
            parts is not None
            and self._simple
            and generation.finish_reason is None
            and not self._waiting
            and self._transport.get_write_buffer_size() < BUFFER_LIMIT
        ):
            delta = self._json[token] if text is None else json.dumps(text, ensure_ascii=False)[1:-1].encode()
            self._write(b"%b%b%b" % (parts[0], delta, parts[1]))
            return
        self._push_slowly(generation, token, self._envelope.vocabulary.texts[token] if text is None else text)

    def _push_slowly(self, generation: Generation, token: int, text: str) -> None:
        index = generation.index
        first = index not in self._parts
        if first:
            self._open(generation)
            if not self._envelope.chat:
                text = self._prompts[index] + text
        texts, tokens = self._waiting.setdefault(index, ([], []))
        texts.append(text)
        tokens.append(token)
        full = self._transport.get_write_buffer_size() >= BUFFER_LIMIT
        if generation.finish_reason is None and not first and (full or len(tokens) < self._interval):
            return
        self._flush(generation, first)

    def _open(self, generation: Generation) -> None:
        if self._envelope.chat and not self._parts:
            # As in vLLM, all answers of a chat are opened when the first token of any of them is there.
            assert generation.group is not None
            for member in generation.group.generations:
                self._event(encode(self._envelope.role_chunk(member)))
            for member in generation.group.generations:
                if self._prompts[member.index]:
                    self._event(encode(self._envelope.echo_chunk(member, self._prompts[member.index])))
        self._parts[generation.index] = self._envelope.split_chunk(generation)
        self._offsets[generation.index] = 0
        if self._envelope.request.call is not None:
            self._calls[generation.index] = CallStream(self._envelope.request.call)

    def _flush(self, generation: Generation, first: bool) -> None:
        index = generation.index
        texts, tokens = self._waiting.pop(index)
        text = "".join(texts)
        offset = self._offsets[index]
        self._offsets[index] = offset + len(text)
        chunk = self._envelope.chunk(generation, text, tokens, offset, first, self._calls.get(index))
        if chunk is not None:
            self._event(encode(chunk))

    def _event(self, document: bytes) -> None:
        self._write(b"data: %b\n\n" % document)

    def _write(self, event: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._framed else event)
        if self._trace is not None:
            now = time.time()
            if self._last_write:
                self._trace.record(now, (now - self._last_write) * 1000)
            self._last_write = now

    def close(self, generations: Sequence[Generation]) -> None:
        """Write what ends the stream, when all answers have ended."""
        if self._envelope.request.include_usage:
            self._event(encode(self._envelope.usage_chunk(generations)))
        self._write(b"data: [DONE]\n\n")
