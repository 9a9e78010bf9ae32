# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every module that speaks to cards needs, and the options of those that read all of them."""

from __future__ import annotations


class ModuleDocFragment:
    """Requirements of NVML, and under ``CARDS`` which cards are read and how long one may take."""

    # A fragment without options is refused.
    DOCUMENTATION = r"""
options: {}
requirements:
  - NVIDIA's driver with C(libnvidia-ml.so.1)
  - >-
    The Python library C(nvidia-ml-py) for the Python that Ansible uses on the host, or in
    C(/opt/ringmaster/gpu/venv), where the role P(ringmaster.inference.gpu#role) installs it
"""

    CARDS = r"""
options:
  gpus:
    description:
      - Cards to read, by uuid, by NVML's index or by PCI address in any usual form. All cards if empty.
      - An index may belong to another card after one failed; a uuid and a PCI address stay.
    type: list
    elements: str
    default: []
  timeout:
    description:
      - Seconds that one card may take to answer, more than 0. A card that no persistence daemon keeps ready takes up to
        three to start.
    type: float
    default: 20
"""
