# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration space of a PCI function, as ``/sys/bus/pci/devices/*/config`` gives it.

Offsets and bits are those of the PCI Express Base Specification; Linux names them in ``pci_regs.h``. The file holds 64
bytes for users other than root, 256 for a function without extended space, else 4096. Whatever is in it, reading never
fails and never goes in circles. Nothing here imports Ansible.
"""

from __future__ import annotations

import struct

HEADER_SIZE = 64  # bytes that every user may read
CONVENTIONAL_SIZE = 256
EXTENDED_SIZE = 4096

PCI_EXPRESS = 0x10  # capability
ACCESS_CONTROL_SERVICES = 0x000D  # extended capability
DEVICE_SERIAL_NUMBER = 0x0003  # extended capability

ACS_CONTROL_OFFSET = 6  # of the ACS control register from the capability's start, as in setpci's ECAP_ACS+6
# Bit of the ACS control register -> name. lspci prints the first seven as SrcValid, TransBlk, ReqRedir, CmpltRedir,
# UpstreamFwd, EgressCtrl and DirectTrans.
ACS_CONTROLS = {
    0: "source_validation",
    1: "translation_blocking",
    2: "request_redirect",
    3: "completion_redirect",
    4: "upstream_forwarding",
    5: "egress_control",
    6: "direct_translated",
}
# Controls that send traffic between two devices below one switch up to the root complex.
ACS_REDIRECTING = ("request_redirect", "completion_redirect", "upstream_forwarding")

PORT_TYPES = {
    0: "endpoint",
    1: "legacy_endpoint",
    4: "root_port",
    5: "switch_upstream_port",
    6: "switch_downstream_port",
    7: "bridge_to_pci",
    8: "bridge_from_pci",
    9: "integrated_endpoint",
    10: "event_collector",
}

_STATUS = 0x06
_STATUS_CAPABILITIES = 0x10
_CAPABILITIES = 0x34
_FIRST_EXTENDED = 0x100
_FLAGS, _LINK_CAPABILITIES, _LINK_CONTROL = 0x02, 0x0C, 0x10


class ConfigurationSpace:
    """Registers of one function in `content`. A register that lies outside of it is None."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    @property
    def silent(self) -> bool:
        """Whether the function does not answer: its vendor reads as all ones (it fell off the bus)."""
        return self.content[:4] == b"\xff\xff\xff\xff"

    def word(self, offset: int) -> int | None:
        """The 16 bits at `offset`."""
        return self._register("<H", offset, 2)

    def double_word(self, offset: int) -> int | None:
        """The 32 bits at `offset`."""
        return self._register("<I", offset, 4)

    def capability(self, identifier: int) -> int | None:
        """Offset of a capability in the first 256 bytes; None if it is not there or can't be read."""
        status = self.word(_STATUS)
        if status is None or not status & _STATUS_CAPABILITIES or len(self.content) <= _CAPABILITIES:
            return None
        offset = self.content[_CAPABILITIES] & 0xFC
        seen: set[int] = set()
        while offset >= HEADER_SIZE and offset not in seen:
            seen.add(offset)
            header = self.word(offset)
            if header is None:
                return None
            if header & 0xFF == identifier:
                return offset
            offset = header >> 8 & 0xFC
        return None

    def extended_capability(self, identifier: int) -> int | None:
        """Offset of an extended capability (from byte 256 on); None if it is not there or can't be read."""
        offset = _FIRST_EXTENDED
        seen: set[int] = set()
        while offset >= _FIRST_EXTENDED and offset not in seen:
            seen.add(offset)
            header = self.double_word(offset)
            if not header or header == 0xFFFFFFFF:
                return None
            if header & 0xFFFF == identifier:
                return offset
            offset = header >> 20 & 0xFFC
        return None

    @property
    def whole(self) -> bool:
        """Whether all of it could be read, so that a capability that is not found is not there."""
        size = CONVENTIONAL_SIZE if self.capability(PCI_EXPRESS) is None else EXTENDED_SIZE
        return len(self.content) >= size and not self.silent

    @property
    def port_type(self) -> str | None:
        """A word of PORT_TYPES; None if the function has no PCI Express capability or it can't be read."""
        flags = self._express(_FLAGS)
        return None if flags is None else PORT_TYPES.get(flags >> 4 & 0xF)

    @property
    def aspm_enabled(self) -> tuple[bool, bool] | None:
        """Whether the function lets its link go to L0s and to L1 (Link Control, bits 0 and 1)."""
        control = self._express(_LINK_CONTROL)
        return None if control is None else (bool(control & 1), bool(control & 2))

    @property
    def aspm_supported(self) -> tuple[bool, bool] | None:
        """Whether the function can do L0s and L1 (Link Capabilities, bits 10 and 11)."""
        capabilities = self._express(_LINK_CAPABILITIES)
        return None if capabilities is None else (bool(capabilities >> 10 & 1), bool(capabilities >> 11 & 1))

    @property
    def acs_control(self) -> int | None:
        """The ACS control register; None if the function has none or it can't be read."""
        offset = self.extended_capability(ACCESS_CONTROL_SERVICES)
        return None if offset is None else self.word(offset + ACS_CONTROL_OFFSET)

    @property
    def serial_number(self) -> str | None:
        """The device serial number as lspci writes it (``b8-3f-d2-03-00-a1-b2-c4``); None if there is none."""
        offset = self.extended_capability(DEVICE_SERIAL_NUMBER)
        if offset is None:
            return None
        number = self.content[offset + 4 : offset + 12]
        if len(number) < 8 or number in (b"\0" * 8, b"\xff" * 8):
            return None
        return "-".join(f"{byte:02x}" for byte in reversed(number))

    def _express(self, offset: int) -> int | None:
        start = self.capability(PCI_EXPRESS)
        return None if start is None else self.word(start + offset)

    def _register(self, layout: str, offset: int, size: int) -> int | None:
        if offset < 0 or offset + size > len(self.content):
            return None
        value: int = struct.unpack_from(layout, self.content, offset)[0]
        return value
