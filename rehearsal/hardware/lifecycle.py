# SPDX-License-Identifier: GPL-3.0-or-later
"""What a reset does to a card, and a boot to a machine: which values live on, and which start anew."""

from __future__ import annotations

import os
import uuid

from rehearsal.hardware.profiles import PORT_DEFAULTS
from rehearsal.hardware.state import State

LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")


def reset_card(state: State, index: str) -> None:
    """What a reset, or a boot, does to a card: pending settings become current, what is volatile starts anew.

    A test may have said before how the card comes back: with another `uuid_after_reset`, or with `present_after_reset`
    0 not at all.
    """
    gpu = f"gpus/{index}"
    for mode in ("ecc", "mig"):
        if state.has(f"{gpu}/{mode}_pending"):
            state.set(f"{gpu}/{mode}_current", state.text(f"{gpu}/{mode}_pending"))
    for name in ("remapped_rows_pending", "retired_pages_pending"):
        if state.has(f"{gpu}/{name}"):
            state.set(f"{gpu}/{name}", 0)
    values = {"recovery_action": 0, "pcie_replays": 0, "clocks_event_reasons": 1, "hang": 0, "busy_milliseconds": 0}
    state.update(gpu, {**values, "pcie_width": state.text(f"{gpu}/pcie_width_maximum")})
    for name in ("ecc/volatile", "processes", "memory_used_mib", "lost"):
        state.remove(f"{gpu}/{name}")
    for link in state.names(f"{gpu}/nvlinks"):
        for error in LINK_ERRORS:
            state.remove(f"{gpu}/nvlinks/{link}/{error}_errors")
    for name in ("uuid", "present"):
        if state.has(f"{gpu}/{name}_after_reset"):
            state.set(f"{gpu}/{name}", state.text(f"{gpu}/{name}_after_reset"))
            state.remove(f"{gpu}/{name}_after_reset")


def boot(state: State) -> None:
    """Start the machine anew: the driver's and the adapters' settings fall back to what their makers chose.

    What the boot loader was told becomes the command line. The boot has an id of its own.
    """
    state.set("host/boot_id", str(uuid.uuid4()))
    state.set("host/kernel_messages", 0)
    state.set("host/cpus", os.cpu_count() or 1)
    if state.has("host/cmdline_next"):
        state.set("host/cmdline", state.text("host/cmdline_next"))
    for index in state.names("gpus"):
        gpu = f"gpus/{index}"
        reset_card(state, index)
        limit = state.text(f"{gpu}/power_limit_default_milliwatts")
        state.update(gpu, {"persistence": 0, "compute_mode": 0, "power_limit_milliwatts": limit})
    for address in state.names("pci"):
        state.remove(f"pci/{address}/aer")
        if state.has(f"pci/{address}/pcie_width_maximum"):
            state.set(f"pci/{address}/pcie_width", state.text(f"pci/{address}/pcie_width_maximum"))
    for index in state.names("ports"):
        state.update(f"ports/{index}", PORT_DEFAULTS)
        for group in ("counters", "hw_counters", "ethtool"):
            state.remove(f"ports/{index}/{group}")
