# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each Xid means and asks for. Sources: NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors) and "GPU Memory
Error Management" (…/a100-gpu-mem-error-mgmt).

Apart from :mod:`.xid`, because the scheduler judges by the same table and reads no log. Imports nothing of a card's.
"""

from __future__ import annotations

from dataclasses import dataclass

# From harmless to grave.
ACTIONS = (
    "none",
    "restart_application",
    "watch",
    "report",
    "reset_later",
    "drain",
    "reset",
    "reboot",
    "power_cycle",
)


@dataclass(frozen=True)
class Xid:
    """What a code means, one of ACTIONS, and that action in words."""

    meaning: str
    action: str
    to_do: str


_STOPPED = Xid(
    "an engine, the PMU or the GSP of the card stopped", "reset", "drain, reset the card; if it happens again, reboot"
)
_APPLICATION = "restart the application; if it happens across jobs, investigate the card"
XIDS: dict[int, Xid] = {
    13: Xid("an application made an engine fail", "restart_application", _APPLICATION),
    31: Xid("an application made the memory management unit fault", "restart_application", _APPLICATION),
    43: Xid("a channel was reset", "none", "none by itself; follow the Xid beside it"),
    45: Xid("a channel was cleaned up", "none", "none by itself; follow the Xid beside it"),
    **dict.fromkeys((46, 62, 109, 110, 119, 120, 136, 143, 155, 156, 158), _STOPPED),
    48: Xid("a double-bit ECC error", "drain", "drain; follow the Xid 63, 64, 94 or 95 beside it"),
    61: Xid("an internal microcontroller stopped (older cards)", "report", "report it"),
    63: Xid(
        "a memory row was remapped (T4: a page was retired)",
        "reset_later",
        "go on; reset the card at the next maintenance",
    ),
    64: Xid(
        "remapping a memory row (T4: retiring a page) failed",
        "reset",
        "drain, reset the card, then run the field diagnostics that decide on its replacement",
    ),
    74: Xid(
        "an NVLink error",
        "drain",
        "drain; look at the links' error counters (nvlink_info) and the card's seating; if it is repeated, ask support",
    ),
    79: Xid(
        "the card has fallen off the bus",
        "power_cycle",
        "drain, power-cycle the host, check seating, power cables and PCIe; a GPU reset can't work",
    ),
    92: Xid("a high rate of single-bit ECC errors", "watch", "watch it"),
    94: Xid(
        "a contained ECC error: one application is hit",
        "restart_application",
        "restart the application, reset the card later",
    ),
    95: Xid("an uncontained ECC error", "reset", "drain, reset the card; reboot if that fails"),
    140: Xid("an unrecoverable ECC error", "reset", "drain, reset the card; if it happens again, reboot"),
    154: Xid("the recovery action that the driver recommends has changed", "report", "do what the line says"),
}
