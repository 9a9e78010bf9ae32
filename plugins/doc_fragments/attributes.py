# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules say of themselves in the same words."""

from __future__ import annotations


class ModuleDocFragment:
    """Attributes. Where a module has more to say of one, its own words stand."""

    DOCUMENTATION = r"""
attributes:
  platform:
    description: Systems on which the module works.
    support: full
    platforms: linux
"""

    # For a module that brings the host to a state.
    SETTER = r"""
attributes:
  check_mode:
    description: Says what would be changed and changes nothing.
    support: full
  idempotent:
    description: A second run changes nothing.
    support: full
"""

    # For a module that only reads.
    READER = r"""
attributes:
  check_mode:
    description: Changes nothing, in check mode or not.
    support: full
  diff_mode:
    description: Has nothing to show, because it changes nothing.
    support: none
  idempotent:
    description: Changes nothing however often it runs.
    support: full
"""
