# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in engine's tokenizer as the files that a model's directory has, and its fingerprint.

The stand-in makes one token of a word that it knows whole, and of others pieces of up to three small letters; all else
falls to bytes. As a `tokenizer.json` that is a split by one expression, and a vocabulary that has each piece.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from rehearsal.checkout import write_atomically

ROLES = Path(__file__).resolve().parent.parent / "roles"
PROGRAMS = (ROLES / "vllm" / "files" / "standin_engine", ROLES / "preprocessor" / "files")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_CONTROL = 256


def write(directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `fingerprint.json`; files that are right stay untouched."""
    sys.path[:0] = [str(program) for program in PROGRAMS]
    try:
        tokenizer = importlib.import_module("standin_engine.answers").build_tokenizer()
        fingerprint = importlib.import_module("fingerprint").fingerprint
    finally:
        del sys.path[: len(PROGRAMS)]
    documents = {
        "tokenizer.json": tokenizer_document(tokenizer.pieces),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE},
    }
    texts = {name: json.dumps(document, ensure_ascii=False) for name, document in documents.items()}
    # The comparison of thousands of texts takes seconds; it has to be made again only for another tokenizer.
    kept = {name: directory / name for name in [*texts, "fingerprint.json"]}
    if all(path.exists() for path in kept.values()) and all(
        kept[name].read_text(encoding="utf-8") == text for name, text in texts.items()
    ):
        return
    texts["fingerprint.json"] = json.dumps(fingerprint(AsTransformers(tokenizer)))
    for name, text in texts.items():
        write_atomically(kept[name], text, 0o644)


def tokenizer_document(pieces: list[bytes]) -> dict[str, Any]:
    """The content of `tokenizer.json`; `pieces` are the tokens' bytes in the order of their ids."""
    texts = [piece.decode("latin-1") for piece in pieces]
    words = sorted(
        {text.strip() for text in texts if re.fullmatch(" ?[A-Za-z]+", text)}, key=lambda word: (-len(word), word)
    )
    words = [word for word in words if not re.fullmatch("[a-z]{1,3}", word)]
    # Known whole, or a piece of a word that is not: up to three letters, the longest first.
    whole = f"(?: |(?<![A-Za-z]))(?:{'|'.join(words)})(?![A-Za-z])"
    pieces_of_words = f" ?(?:{'|'.join(word for word in words if len(word) <= 3)}|[a-z]{{1,3}})"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": rf"{whole}|{pieces_of_words}|[\s\S]"},
        "behavior": "Isolated",
        "invert": False,
    }
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    alphabet = byte_characters()
    control = range(FIRST_CONTROL, FIRST_CONTROL + len(CONTROL))
    vocabulary = {
        piece.decode() if index in control else "".join(alphabet[byte] for byte in piece): index
        for index, piece in enumerate(pieces)
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": CONTROL[index - FIRST_CONTROL], **added} for index in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary: itself if it can be seen, else one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


class AsTransformers:
    """The stand-in's tokenizer with as much of the interface of `transformers` as a fingerprint needs."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012  the interface has it so
    chat_template = CHAT_TEMPLATE

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_chat_template(self) -> str:
        """The only template."""
        return self.chat_template

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text, in which control tokens are themselves; none is added."""
        del add_special_tokens
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, CONTROL))})", text):
            ids += [FIRST_CONTROL + CONTROL.index(part)] if part in CONTROL else self._tokenizer.encode(part)
        return ids

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation."""
        del tokenize
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")
