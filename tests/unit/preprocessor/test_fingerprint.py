# SPDX-License-Identifier: GPL-3.0-or-later
"""The fingerprint of the binary and the one of `transformers`, and that it changes with what it stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.preprocessor import made_tokenizers

FINGERPRINT = Path(__file__).parents[3] / "roles/preprocessor/files/fingerprint.py"

TEMPLATES = {
    "chatml": made_tokenizers.CHATML,
    "parts": (
        "{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}\n"
        "{{ bos_token }}[S]{{ message.content | tojson }}\n"
        "    {%- else %}\n{{- '<' ~ message.role ~ '>' }}"
        "{% for part in message['content'] %}{{ part.text | trim }};{% endfor %}\n"
        "    {%- endif %}\n{%- endfor %}"
        "{% if add_generation_prompt %}{% generation %}<assistant>{% endgeneration %}{% endif %}\n"
    ),
    "strict": (
        "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('Only user and assistant') }}{% endif %}{{ message.content.strip().split('\\n')[-1] }}"
        "{{ loop.index0 }}{{ message | tojson(indent=2) }}{% if not loop.last %}{% continue %}{% endif %}"
        "{{ [1, none, true, 1.5] }}{% endfor %}"
    ),
}


def of_binary(binary: Path, directory: Path, count: int = 500) -> dict[str, object]:
    done = subprocess.run([str(binary), "--selftest", str(directory), str(count)], capture_output=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["qwen2", "llama3", "llama2", "unigram", "added_tokens"])
def test_both_sides_print_the_same(kind: str, template: str, binary: Path, tmp_path: Path) -> None:
    named = (
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if kind == "llama2" else {"bos_token": "<bos>"}
    )
    made_tokenizers.write_model(tmp_path, kind, chat_template=TEMPLATES[template], **named)
    done = subprocess.run([sys.executable, str(FINGERPRINT), str(tmp_path), "500"], capture_output=True, check=True)
    assert of_binary(binary, tmp_path) == json.loads(done.stdout)


def test_a_change_shows(binary: Path, tmp_path: Path) -> None:
    for name, kind, template in [("a", "qwen2", "chatml"), ("b", "llama3", "chatml"), ("c", "qwen2", "parts")]:
        made_tokenizers.write_model(tmp_path / name, kind, chat_template=TEMPLATES[template])
    first, other_tokenizer, other_template = (of_binary(binary, tmp_path / name) for name in "abc")
    assert first["tokenizer"] == other_template["tokenizer"] != other_tokenizer["tokenizer"]
    assert first["chat_template"] != other_template["chat_template"]
