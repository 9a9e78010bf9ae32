# SPDX-License-Identifier: GPL-3.0-or-later
"""What is expected of a card, by the names that drivers give it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.cards import card_model


@pytest.mark.parametrize(
    ("model", "name", "links", "bridge"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g", 12, False),
        ("NVIDIA A100-SXM4-40GB", "a100-40g", 12, False),
        ("A100-SXM4-40GB", "a100-40g", 12, False),
        ("NVIDIA A100-PCIE-40GB", "a100-40g", 12, True),
        ("NVIDIA A100 80GB PCIe", "a100-80g", 12, True),
        ("NVIDIA L40S", "l40s", 0, False),
        ("NVIDIA L40", "l40", 0, False),
        ("Tesla T4", "t4", 0, False),
        ("NVIDIA T4", "t4", 0, False),
        ("NVIDIA Tesla T4", "t4", 0, False),
        ("NVIDIA H100 80GB HBM3", "h100-80g", 18, False),
        ("NVIDIA H100 PCIe", "h100-80g", None, True),
        ("NVIDIA H200", "h200", 18, False),
        ("Tesla V100-SXM2-32GB", "v100-32g", 6, False),
        ("Tesla V100-PCIE-16GB", "v100-16g", 0, False),
        ("NVIDIA B200", "b200", 18, False),
        ("NVIDIA A30", "a30", 4, True),
    ],
)
def test_known_models(model: str, name: str, links: int | None, bridge: bool) -> None:
    found = card_model(model)
    assert found is not None
    assert (found.name, found.nvlinks, found.bridge) == (name, links, bridge)
    assert (found.nvlink_mb_per_second is not None) == bool(links)


@pytest.mark.parametrize(
    "model",
    [None, "", "NVIDIA", "GRID A100-4C", "NVIDIA A100", "NVIDIA L40SX", "A100-SXM4-80GBX"],
)
def test_nothing_is_expected_of_other_models(model: str | None) -> None:
    assert card_model(model) is None


def test_ecc_of_an_a100_stays_on_and_that_of_an_l40s_can_be_switched() -> None:
    a100, l40s, h100 = (card_model(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H200"))
    assert a100 is not None
    assert a100.ecc_can_be_off is False
    assert l40s is not None
    assert l40s.ecc_can_be_off is True
    assert h100 is not None
    assert h100.ecc_can_be_off is None


@given(st.text())
def test_any_name(model: str) -> None:
    card_model(model)
