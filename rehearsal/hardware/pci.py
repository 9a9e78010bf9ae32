# SPDX-License-Identifier: GPL-3.0-or-later
"""PCI configuration space, so that the real lspci and setpci read and write the simulated tree.

Offsets and bits are those of the PCI Express Base Specification (registers as in Linux's ``pci_regs.h``).
"""

from __future__ import annotations

import struct

SIZE = 4096
CAPABILITY = 0x60  # where this simulation puts the PCI Express capability
AER = 0x100
ACS = 0x150
LINK_CAPABILITIES = CAPABILITY + 0x0C
LINK_CONTROL = CAPABILITY + 0x10
LINK_STATUS = CAPABILITY + 0x12
ACS_CONTROL = ACS + 6
# SrcValid, ReqRedir, CmpltRedir, UpstreamFwd: what Linux switches on where an IOMMU translates.
ACS_ISOLATING = 0x001D
_TYPES = {"root": 4, "upstream": 5, "downstream": 6}  # else 0: endpoint
_BRIDGES = tuple(_TYPES)


def space(
    *, kind: str, vendor: int, device: int, class_code: int, revision: int, subsystem: int, buses: tuple[int, int, int]
) -> bytearray:
    """A function's space after the firmware and the kernel set it up; `buses`: primary, secondary, subordinate."""
    content = bytearray(SIZE)
    bridge = kind in _BRIDGES
    # Memory and bus master on; capabilities list.
    struct.pack_into("<HHHH", content, 0, vendor, device, 0x0406, 0x0010)
    content[0x08] = revision
    content[0x09:0x0C] = class_code.to_bytes(3, "little")
    content[0x0E] = 1 if bridge else 0
    if bridge:
        content[0x18:0x1B] = bytes(buses)
    else:
        struct.pack_into("<HH", content, 0x2C, vendor, subsystem)
    content[0x34] = CAPABILITY
    slot = 0x100 if kind in ("root", "downstream") else 0
    # Capability 0x10, version 2; role-based error reporting; 256 bytes of payload.
    struct.pack_into("<BBHI", content, CAPABILITY, 0x10, 0, 2 | _TYPES.get(kind, 0) << 4 | slot, 0x8001)
    struct.pack_into("<H", content, CAPABILITY + 0x08, 0x2930)
    struct.pack_into("<HH", content, LINK_CONTROL, 0x0040, 0)  # common clock
    acs = kind in ("root", "downstream")
    struct.pack_into("<I", content, AER, 0x0001 | 2 << 16 | (ACS if acs else 0) << 20)
    if acs:
        struct.pack_into("<IHH", content, ACS, 0x000D | 1 << 16, 0x005F, ACS_ISOLATING)
    return content


def set_link(content: bytearray, link: dict[str, int], aspm_l1: bool) -> None:
    """Write the link's capabilities and state: generation and width, now and at most, and whether ASPM L1 is on."""
    # ASPM L1 is offered, exit within 32 us (the code 5).
    capabilities = link["generation_maximum"] | link["width_maximum"] << 4 | 2 << 10 | 5 << 15
    struct.pack_into("<I", content, LINK_CAPABILITIES, capabilities)
    (control,) = struct.unpack_from("<H", content, LINK_CONTROL)
    struct.pack_into("<H", content, LINK_CONTROL, control & ~3 | (2 if aspm_l1 else 0))
    struct.pack_into("<H", content, LINK_STATUS, link["generation"] | link["width"] << 4 | 0x1000)
    struct.pack_into("<I", content, CAPABILITY + 0x2C, (1 << link["generation_maximum"] + 1) - 2)
    struct.pack_into("<H", content, CAPABILITY + 0x30, link["generation_maximum"])
