# SPDX-License-Identifier: GPL-3.0-or-later
"""The fingerprint of a model's tokenizer and chat template, made by `transformers`.

Started with the engine's own Python: `python fingerprint.py DIR [COUNT]`. Prints what `ringmaster-preprocessor
--selftest DIR [COUNT]` prints, made from the same texts and conversations. Where the two differ, the preprocessor
would count other tokens than the engine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from typing import Any

TEXTS = 2000
MASK = 2**64 - 1

# The pieces, conversations and order of draws of selftest.rs.
PIECES = [
    *[
        "Hello",
        "world",
        " the",
        " quick",
        " brown fox",
        "ing",
        "'s",
        "'LL",
        "n't",
        "I'm",
        " 3.14159",
        "1234567890",
        "007",
    ],
    *[
        " -1",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " ",
        "  ",
        "   ",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\ufeff",
        ".",
        "...",
        "!?",
        ", ",
    ],
    *[" (", ")", '{"a": [1, 2]}', "def f(x):\n    return x", "https://example.org/a?b=c&d", "user@example.org", "_"],
    *[
        "__init__",
        "camelCase",
        "SHOUT",
        "ÀÉÎõü",
        "e\u0301",
        "ﬁ",
        "Straße",
        "ΑΒΓ αβγ",
        "Привет",
        " мир",
        "שלום",
        "مرحبا",
    ],
    *[
        "नमस्ते",
        "ไทย",
        "你好",
        "世界",
        "。",
        "，",
        "東京",
        "カタカナ",
        "ひらがな",
        "한국어",
        "😀",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "\U0001f3fd",
    ],
    *["\x00", "\ufffd"],
]
CONVERSATIONS: list[list[tuple[str, Any]]] = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", " What is 2+2?\n")],
    [("user", "你好"), ("assistant", "Hi! 😀"), ("user", "<b>&amp;</b> 'quoted' \"double\"")],
    [("user", ["one", "two"])],
    [("user", ""), ("assistant", "  spaces  "), ("user", "line\r\nline")],
]


class Random:
    """xorshift64*."""

    def __init__(self, state: int) -> None:
        self.state = state

    def below(self, bound: int) -> int:
        """Return a number from 0 to `bound` - 1."""
        self.state ^= self.state >> 12
        self.state ^= self.state << 25 & MASK
        self.state ^= self.state >> 27
        return ((self.state * 0x2545F4914F6CDD1D & MASK) >> 33) % bound


def texts(count: int, tokens: list[str]) -> Iterator[str]:
    """Yield the texts of a self-test, always the same; `tokens` are named tokens of the model."""
    random = Random(0x9E3779B97F4A7C15)
    for _index in range(count):
        parts = []
        for _piece in range(random.below(24)):
            kind = random.below(16)
            if kind == 0:
                code = random.below(0x10000)
                parts.append("\ufffd" if 0xD800 <= code < 0xE000 else chr(code))
            elif kind == 1:
                parts.append(chr(0x20 + random.below(0x5F)))
            elif kind == 2 and tokens:
                parts.append(tokens[random.below(len(tokens))])
            else:
                parts.append(PIECES[random.below(len(PIECES))])
        yield "".join(parts)


def packed(ids: list[int]) -> bytes:
    """Return ids with their number in front, little-endian."""
    return struct.pack(f"<{len(ids) + 1}I", len(ids), *ids)


def as_the_engine_does(tokenizer: Any, turns: list[tuple[str, Any]], content_format: str) -> list[int]:
    """Return the token ids of a conversation, with content as text or as parts."""
    conversation = []
    for role, content in turns:
        parts = [content] if isinstance(content, str) else content
        as_parts = [{"type": "text", "text": part} for part in parts]
        conversation.append({"role": role, "content": "\n".join(parts) if content_format == "string" else as_parts})
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def packed_conversation(tokenizer: Any, turns: list[tuple[str, Any]], content_format: str) -> bytes:
    """Return the ids of a conversation, or a mark if the template refuses it; both sides have to agree on that, too."""
    import jinja2

    try:
        return packed(as_the_engine_does(tokenizer, turns, content_format))
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError):
        return struct.pack("<I", 2**32 - 1)


def content_format_of(template: str) -> str:
    """Return vLLM's name for the form in which the template takes content; vLLM is asked where it is there."""
    try:
        detect = importlib.import_module("vllm.renderers.hf")._detect_content_format
    except ImportError:
        from jinja2 import Environment, nodes

        # Without vLLM: whether there is a loop over an attribute `content`.
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            template.replace("generation %}", "if true %}").replace("endif true", "endif")
        )
        for loop in tree.find_all(nodes.For):
            iterated: nodes.Node | None = loop.iter
            while isinstance(iterated, (nodes.Filter, nodes.Test)):
                iterated = iterated.node
            if isinstance(iterated, nodes.Getattr) and iterated.attr == "content":
                return "openai"
            if isinstance(iterated, nodes.Getitem) and getattr(iterated.arg, "value", None) == "content":
                return "openai"
        return "string"
    return str(detect(template, default="string"))


def fingerprint(tokenizer: Any, count: int = TEXTS) -> dict[str, Any]:
    """Return the fingerprints of a tokenizer that has the interface of `transformers`, made from so many texts."""
    digest = hashlib.sha256()
    total = 0
    named = [str(token) for token in tokenizer.special_tokens_map.values() if isinstance(token, str)]
    for text in texts(count, named):
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            total += len(ids)
            digest.update(packed(ids))
    template = None
    if tokenizer.chat_template:
        chosen = tokenizer.get_chat_template()
        content_format = content_format_of(chosen)
        conversations = hashlib.sha256()
        for turns in CONVERSATIONS:
            conversations.update(packed_conversation(tokenizer, turns, content_format))
        template = conversations.hexdigest()
    return {"texts": count, "tokens": total, "tokenizer": digest.hexdigest(), "chat_template": template}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = importlib.import_module("transformers")  # only here: others bring their own tokenizer
    result = fingerprint(
        transformers.AutoTokenizer.from_pretrained(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else TEXTS
    )
    print(json.dumps(result, separators=(",", ":")))
