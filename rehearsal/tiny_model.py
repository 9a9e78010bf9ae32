# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a tiny random Qwen2 with a tokenizer of its own, a model for real engines that have to answer, not to be right.

Usage: PYTHON tiny_model.py FOLDER, with the Python of an environment that has vLLM (transformers, tokenizers, torch).
Seeded: the same libraries give the same weights, so that two engines answer alike. 2 MB, some seconds, nothing fetched.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SEED = 20260
VOCABULARY = 2000
POSITIONS = 4096
END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
# What the byte-level pairs are learnt from: this program, and words that prompts of the rehearsal have.
TEXT = [
    Path(__file__).read_text(encoding="utf-8"),
    "Say in one paragraph what a ringmaster does. The operator reads the log and measures each answer before day.",
    '{"city": "Oslo", "temperature": 21} Hello, world! What is the weather like in Oslo today?',
]
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make(folder: Path) -> None:
    """Write the model into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=SPECIAL[0], model_max_length=POSITIONS
    )
    wrapped.chat_template = CHAT_TEMPLATE
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(wrapped),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            eos_token_id=wrapped.eos_token_id,
            pad_token_id=wrapped.pad_token_id,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    # Engines load it by the kind of model, whose class puts a split and a normalization of its own in place of what the
    # file says: saved as loaded so, the file says what they do, and others that read it cut texts in the same way.
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # the engine's user is another one


if __name__ == "__main__":
    make(Path(sys.argv[1]))
