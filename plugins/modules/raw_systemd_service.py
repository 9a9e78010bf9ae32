#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_systemd_service
short_description: A unit of systemd on a host without Python
version_added: 0.1.0
description:
  - Starts, stops, restarts, reloads, enables or disables a unit.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - systemd is reloaded by itself where it says that the unit's file changed on the disk.
  - After a start the unit is looked at. If it has failed, the task fails with what C(systemctl status) says.
options:
  name:
    description: Name of the unit. Without a type it is a service. Required if O(state) or O(enabled) is given.
    type: str
  state:
    description:
      - V(started) and V(stopped) do nothing where it is so. V(restarted) always restarts. V(reloaded) reloads a unit
        that runs, and starts one that does not.
      - A unit that systemd does not know is as good as stopped. In check mode it is expected to come with an earlier
        task.
    type: str
    choices: [started, stopped, restarted, reloaded]
  enabled:
    description:
      - Whether it is started with the system. A unit that can't be enabled (static, generated, transient or masked) is
        refused if this is V(true).
    type: bool
  daemon_reload:
    description: Have systemd read all units anew first. This alone is not a change.
    type: bool
    default: false
  daemon_reexec:
    description: Have systemd start itself anew first, for a change of its own settings. This alone is not a change.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says what would be changed and changes nothing.
    support: full
  diff_mode:
    description: Shows the state of the unit and what is done.
    support: full
  idempotent:
    description: A second run changes nothing, except with O(state=restarted) and O(state=reloaded).
    support: partial
extends_documentation_fragment:
  - ringmaster.inference.attributes
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Service is enabled and runs
  ringmaster.inference.raw_systemd_service:
    name: example
    enabled: true
    state: started

- name: Settings of systemd itself are taken up
  ringmaster.inference.raw_systemd_service:
    daemon_reexec: true
"""

RETURN = r"""
name:
  description: The unit with its type.
  type: str
  returned: if O(name) is given
  sample: example.service
state:
  description: systemd's C(ActiveState) at the end.
  type: str
  returned: if O(name) is given
  sample: active
enabled:
  description: Whether the unit is started with the system.
  type: bool
  returned: if O(name) is given
  sample: true
"""
