# SPDX-License-Identifier: GPL-3.0-or-later
"""The built-in catalogue, and documents that are none."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils import engine_flags_history as history
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import (
    CatalogueError,
    built_in,
    from_document,
    release,
)


def test_the_built_in_catalogue_is_whole() -> None:
    catalogue = built_in("vllm", "0.32.0+cpu")
    assert catalogue is not None
    assert len(catalogue.options) == 317
    long = [name for name in catalogue.by_name if name.startswith("--")]
    assert len(long) == 406  # as many as `vllm serve --help=all` of 0.32.0 names
    assert catalogue.find("-tp") is catalogue.options["--tensor-parallel-size"]
    assert catalogue.find("--no-enforce-eager") is catalogue.options["--enforce-eager"]
    assert catalogue.options["--headless"].negations == ()
    assert catalogue.options["--disable-log-stats"].negations == ()
    assert catalogue.options["--gpu-memory-utilization"].names[1] == "--device-memory-utilization"
    assert catalogue.options["--max-lora-rank"].choices == (1, 8, 16, 32, 64, 128, 256, 320, 512)
    assert "qwen3_xml" in catalogue.options["--tool-call-parser"].known
    assert "cuda" in catalogue.options["--mm-processor-device"].choices


def test_every_kind_has_a_reader() -> None:
    catalogue = built_in("vllm", "0.32.0")
    assert catalogue is not None
    assert {option.kind for option in catalogue.options.values()} == {
        *("integer", "number", "size", "size_or_auto", "json", "json_or_text", "object"),
        *("text", "lowered", "comma_list", "lora_modules"),
    }


def test_the_catalogue_and_the_history_agree() -> None:
    catalogue = built_in("vllm", "0.32.0")
    assert catalogue is not None
    assert history.flags_at("0.32.0") == sorted(
        {name for option in catalogue.options.values() for name in option.names if name.startswith("--")} - {"--help"}
    )


def test_other_versions_have_none() -> None:
    assert built_in("vllm", "0.31.0") is None
    assert built_in("trtllm", "0.32.0") is None


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.32.0", (0, 32)),
        ("v0.10.1.1", (0, 10, 1, 1)),
        ("0.32.0+cpu", (0, 32)),
        ("0.8.5.post1", (0, 8, 5)),
        ("0.11.0rc2", (0, 11)),
        ("0", (0,)),
        ("", ()),
        ("latest", ()),
        ("9" * 99, ()),
    ],
)
def test_releases(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        "x",
        {"--a": None},
        {"a": {}},
        {"--a": {"takes": "three"}},
        {"--a": {"takes": -1}},
        {"--a": {"names": "--a"}},
        {"--a": {"names": [1]}},
        {"--a": {"choices": 3}},
        {"--a": {"limits": []}},
        {"--a": {"fields": "any"}},
    ],
)
def test_what_is_no_catalogue(document: Any) -> None:
    with pytest.raises(CatalogueError):
        from_document("vllm", "1.0", document)
