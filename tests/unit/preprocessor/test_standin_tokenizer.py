# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in engine's tokenizer as the rehearsal hands it to preprocessors: the same ids, the same fingerprint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rehearsal import standin_tokenizer
from standin_engine.answers import build_tokenizer
from tests.unit.preprocessor import made_tokenizers

STANDIN = standin_tokenizer.AsTransformers(build_tokenizer())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    standin_tokenizer.write(made)
    return made


@pytest.fixture(scope="module")
def reference(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_the_binary_has_the_fingerprint_of_the_engine(binary: Path, directory: Path) -> None:
    expected = json.loads((directory / "fingerprint.json").read_text())
    found = subprocess.run([str(binary), "--selftest", str(directory)], capture_output=True, check=True).stdout
    assert json.loads(found) == expected
    assert expected["chat_template"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text()
    | st.text("aAbT 'wo.\n<|")
    | st.lists(st.sampled_from(["Two", "The", " a", "record", "ß"])).map("".join)
)
def test_any_text_has_the_ids_of_the_engine(reference: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert reference.encode(text, add_special_tokens=False).ids == STANDIN.encode(text, add_special_tokens=False)


def test_made_texts_have_the_ids_of_the_engine(reference: Tokenizer) -> None:
    for text in made_tokenizers.strings(5, 2000):
        assert reference.encode(text, add_special_tokens=False).ids == STANDIN.encode(text, add_special_tokens=False)


def test_files_that_are_right_stay_and_a_damaged_one_is_made_anew(directory: Path) -> None:
    path = directory / "tokenizer.json"
    before = path.stat().st_mtime_ns
    standin_tokenizer.write(directory)
    assert path.stat().st_mtime_ns == before
    text = path.read_text()
    path.write_text(text[:-10])
    standin_tokenizer.write(directory)
    assert path.read_text() == text
