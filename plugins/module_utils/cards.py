# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is to be expected of a card of a given model: one table, by the names that the driver gives them.

A model that is not in the table is unknown, and nothing is expected of it. Nothing here imports Ansible.

Sources: the cards' data sheets and product briefs (number of links = NVLink bandwidth of both directions over that of
one link); NVIDIA's health validation checks for the speeds of Hopper and Blackwell (nvlink_bandwidth_count_speed);
the speeds of the others as ``nvidia-smi nvlink -s`` shows them; for ECC NVIDIA's "GPU Memory Error Management".
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CardModel:
    """A model of card.

    `name` is its short name, as the inventory's ``ringmaster_card`` has it. `nvlinks` is the number of its NVLinks
    (None: not known), `nvlink_mb_per_second` the speed of one link in one direction. With `bridge`, links are up only
    where a bridge joins two cards: none or all. `ecc_can_be_off` is None where only the driver can tell.
    """

    name: str
    nvlinks: int | None = 0
    nvlink_mb_per_second: int | None = None
    bridge: bool = False
    ecc_can_be_off: bool | None = None


# The driver's name in small letters without maker and family ("NVIDIA", "Tesla"), each run of other characters than
# letters and digits a hyphen. Older drivers and newer ones differ in those.
_MODELS: tuple[tuple[str, CardModel], ...] = (
    ("v100-sxm[23]-16gb", CardModel("v100-16g", 6, 25781)),
    ("v100-sxm[23]-32gb(-ls)?", CardModel("v100-32g", 6, 25781)),
    ("v100-pcie-16gb", CardModel("v100-16g")),
    ("v100s?-pcie-32gb", CardModel("v100-32g")),
    ("t4", CardModel("t4", ecc_can_be_off=True)),
    # On by default, free of cost in capacity, and turning it off is not supported.
    ("a100-sxm4-40gb", CardModel("a100-40g", 12, 25000, ecc_can_be_off=False)),
    ("a100-sxm4-80gb", CardModel("a100-80g", 12, 25000, ecc_can_be_off=False)),
    ("a100-pcie-40gb", CardModel("a100-40g", 12, 25000, bridge=True, ecc_can_be_off=False)),
    ("a100-(80gb-pcie|pcie-80gb)", CardModel("a100-80g", 12, 25000, bridge=True, ecc_can_be_off=False)),
    ("a2", CardModel("a2")),
    ("a10", CardModel("a10")),
    ("a16", CardModel("a16")),
    ("a30", CardModel("a30", 4, 25000, bridge=True)),
    ("a40", CardModel("a40", 4, 14062, bridge=True)),
    ("l4", CardModel("l4")),
    ("l40", CardModel("l40")),
    ("l40s", CardModel("l40s", ecc_can_be_off=True)),
    ("h100-80gb-hbm3", CardModel("h100-80g", 18, 26562)),
    ("h100-pcie", CardModel("h100-80g", None, bridge=True)),
    ("h100-nvl", CardModel("h100-94g", None, bridge=True)),
    ("h200", CardModel("h200", 18, 26562)),
    ("h200-nvl", CardModel("h200", None, bridge=True)),
    ("b200", CardModel("b200", 18, 53125)),
    ("rtx-pro-6000-blackwell-server-edition", CardModel("rtx-pro-6000")),
)


def card_model(model: str | None) -> CardModel | None:
    """What is known of the `model` that the driver names; None if it is not in the table."""
    if model is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    name = re.sub(r"^(nvidia-)?(tesla-)?", "", name)
    for pattern, found in _MODELS:
        if re.fullmatch(pattern, name):
            return found
    return None
