# SPDX-License-Identifier: GPL-3.0-or-later
"""Tokenizers of all the kinds that served models have, trained on the spot from text that is made here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CL100K = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN2 = _CL100K.replace("DIGITS", r"\p{N}")
LLAMA3 = _CL100K.replace("DIGITS", r"\p{N}{1,3}")
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ]
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by
hot word but what some we can out other were all there when up use your how said an each she which do
their time if will way about many then them write would like so these her long make thing see him two
has look more day could go come did number sound no most people over know water than call first who
may down side been now find tokenizer engine prompt latency Hello World I'm don't straße naïve
Ελληνικά Привет мир שלום مرحبا नमस्ते 你好 世界 敏感 東京 カタカナ ひらがな 한국어 ไทย 😀 👍 3.14 2026 1000
"""
_WORDS = _TEXT.split()


def corpus(seed: int = 7, lines: int = 4000) -> Iterator[str]:
    """Yield lines of words, numbers, signs and rare characters."""
    source = random.Random(seed)
    made = [
        "".join(source.choice("bcdfghklmnprst") + source.choice("aeiou") for _i in range(source.randint(1, 4)))
        for _w in range(3000)
    ]
    for _line in range(lines):
        words = [source.choice(_WORDS if source.random() < 0.6 else made) for _word in range(source.randint(1, 14))]
        words = [
            word.upper() if source.random() < 0.05 else word.title() if source.random() < 0.1 else word
            for word in words
        ]
        yield source.choice([" ", " ", " ", "  ", ", ", "\n", ". ", "-"]).join(words) + source.choice(
            ["", ".", "!\n", "\t", "?", " "]
        )


def bpe(pattern: str | None, **options: object) -> Tokenizer:
    """Return a byte-level BPE that is not trained yet; without a pattern it splits as GPT-2's does."""
    tokenizer = Tokenizer(models.BPE(**options))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        tokenizer.pre_tokenizer = level
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _train_bytes(tokenizer: Tokenizer, special: list[str], size: int = 3000) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    """Return a byte-level BPE with the pattern that is built in."""
    return _train_bytes(bpe(None), ["<|endoftext|>"])


def gpt2_prefix_space() -> Tokenizer:
    """Return a byte-level BPE that puts a space in front (RoBERTa)."""
    tokenizer = bpe(None)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    _train_bytes(tokenizer, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def qwen2() -> Tokenizer:
    """Return a byte-level BPE with NFC in front."""
    tokenizer = bpe(QWEN2)
    tokenizer.normalizer = normalizers.NFC()
    return _train_bytes(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def llama3() -> Tokenizer:
    """Return a byte-level BPE that takes whole words from the vocabulary without merging, with a token in front."""
    tokenizer = _train_bytes(bpe(LLAMA3, ignore_merges=True), ["<|begin_of_text|>", "<|eot_id|>"])
    begin = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def o200k() -> Tokenizer:
    """Return a byte-level BPE whose pattern tells cases apart (GPT-4o, gpt-oss)."""
    return _train_bytes(bpe(O200K), ["<|endoftext|>"])


def deepseek() -> Tokenizer:
    """Return a byte-level BPE behind several splits."""
    tokenizer = bpe(None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(
                Regex(DEEPSEEK),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _train_bytes(tokenizer, ["<begin>", "<end>"])


def added_tokens() -> Tokenizer:
    """Return a BPE with added tokens of every kind."""
    tokenizer = _train_bytes(bpe(QWEN2), ["<|endoftext|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("<both>", lstrip=True, rstrip=True),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True),
            AddedToken("<tool_call>", normalized=False),
            AddedToken("é!", normalized=True),
            AddedToken("  ", normalized=False),
            AddedToken("<tool", normalized=False),
            "敏感",
            "😀😀",
        ]
    )
    return tokenizer


def llama2() -> Tokenizer:
    """Return a BPE over characters with bytes for what is unknown, as converted from SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=special, limit_alphabet=120, show_progress=False, max_token_length=16
    )
    # Trained word by word, used on whole texts, like the original.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = None
    kept = json.loads(tokenizer.to_str())
    kept["added_tokens"] = kept["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(kept))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unknown_characters(fuse: bool = False) -> Tokenizer:
    """Return a BPE over characters in which unknown ones have a token."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=fuse))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=800, special_tokens=["[UNK]"], limit_alphabet=60, show_progress=False)
    )
    return tokenizer


def unknown_characters_fused() -> Tokenizer:
    """Return the same with neighbouring unknowns made one."""
    return unknown_characters(fuse=True)


def clip() -> Tokenizer:
    """Return a BPE that marks the ends of words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<end>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def subword_prefix() -> Tokenizer:
    """Return a BPE that marks what continues a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["[UNK]"], continuing_subword_prefix="##", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """Return a Unigram model behind NFKC, as T5 and XLM-RoBERTa have."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def wordpiece() -> Tokenizer:
    """Return a WordPiece model as BERT has."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        corpus(), trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def wordlevel() -> Tokenizer:
    """Return a vocabulary of whole words."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.train_from_iterator(
        corpus(), trainers.WordLevelTrainer(vocab_size=1500, special_tokens=["[UNK]"], show_progress=False)
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind
    for kind in [
        gpt2,
        gpt2_prefix_space,
        qwen2,
        llama3,
        o200k,
        deepseek,
        added_tokens,
        llama2,
        unknown_characters,
        unknown_characters_fused,
        clip,
        subword_prefix,
        unigram,
        wordpiece,
        wordlevel,
    ]
}


def write_model(directory: Path, kind: str, **configuration: object) -> Tokenizer:
    """Write a model's directory as `transformers` expects it, and return the tokenizer."""
    tokenizer = KINDS[kind]()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    # PreTrainedTokenizerFast takes the file as it is; other classes build their own pipeline.
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **configuration}
    (directory / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return tokenizer


def strings(seed: int, count: int) -> Iterator[str]:
    """Yield random strings: words, signs, runs of white space, any character, broken and composed ones."""
    source = random.Random(seed)
    spaces = [" ", "  ", "   ", "\n", "\n\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x0b", "\u200b"]
    signs = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + [
        "...",
        "'s",
        "'LL",
        "\u2019s",
        "<tool_call>",
        "<left>",
        "<both>",
        "▁",
        "##",
        "</w>",
    ]
    blocks = [
        (0x20, 0x7E),
        (0xA0, 0x17F),
        (0x300, 0x36F),
        (0x370, 0x5FF),
        (0x900, 0xDFF),
        (0x1F00, 0x20CF),
        (0x3040, 0x30FF),
    ]
    blocks += [
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0xFB00, 0xFFFD),
        (0x1F300, 0x1FAFF),
        (0x0, 0x1F),
        (0xE000, 0xE0FF),
        (0x10000, 0x10FFFF),
    ]
    for _string in range(count):
        parts: list[str] = []
        for _part in range(source.choice([0, 1, 2, 4, 8, 16, 32])):
            draw = source.random()
            if draw < 0.45:
                word = source.choice(_WORDS)
                parts.append(source.choice([word, " " + word, word.upper(), word.title()]))
            elif draw < 0.6:
                parts.append(source.choice(spaces) * source.choice([1, 1, 1, 2, 5]))
            elif draw < 0.72:
                parts.append(source.choice(signs) * source.choice([1, 1, 3]))
            elif draw < 0.8:
                parts.append(str(source.randrange(10 ** source.randint(1, 9))))
            else:
                low, high = source.choice(blocks)
                parts.append("".join(chr(source.randint(low, high)) for _character in range(source.randint(1, 4))))
        yield "".join(parts)
