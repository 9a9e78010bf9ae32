#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done on the controller, by the action plugin of the same name. This file is its documentation.

from __future__ import annotations

DOCUMENTATION = r"""
module: raw_file
short_description: A file on a host without Python
version_added: 0.1.0
description:
  - Keeps a file with its content, mode and owner. Compared by SHA-256, so that nothing is sent to a host that has it.
  - Needs no Python on the host, but C(sh) and coreutils or busybox.
  - A new content is sent to Ansible's temporary folder on the host, written beside the file with mode 0600, compared
    with its checksum, given owner and mode, validated, brought to the disk and renamed. A run that is killed, or a disk
    that fills up, leaves the old file whole.
  - The content is never on a command line. A task that handles a secret needs C(no_log), since what O(validate) says of
    it is shown when it fails.
  - A symbolic link is neither followed nor replaced, but refused. SELinux label, extended attributes and access control
    list of the old file are not kept, and other hard links to it keep the old content.
options:
  path:
    description: Absolute path of the file on the host.
    type: str
    required: true
  state:
    description:
      - V(present) keeps the file as it is described. V(absent) removes a file or a link, but no directory.
    type: str
    choices: [present, absent]
    default: present
  content:
    description:
      - What is to be in the file, as text. Nothing is added to its end.
      - Without O(content) and O(src) only mode and owner of an existing file are kept.
      - Use the lookup P(ansible.builtin.template#lookup) for a template.
    type: raw
  src:
    description:
      - A file on the controller, searched for as M(ansible.builtin.copy) does. A file of ansible-vault is decrypted.
      - Mutually exclusive with O(content).
    type: str
  validate:
    description:
      - A command that ends with status 0 if the new file may take its place. V(%s) stands for the new file. It is run
        without a shell.
    type: str
  mode:
    description:
      - Permission bits as three or four octal digits in quotation marks, like V('0644'). A number is refused, because
        YAML reads V(0644) and V(644) as other modes than they look like.
      - Without it, an existing file keeps its mode, and a new one gets V(0600).
    type: raw
  owner:
    description:
      - Name or number of the owner. Without it, the owner stays as it is.
    type: str
  group:
    description:
      - Name or number of the group. Without it, the group stays as it is.
    type: str
attributes:
  diff_mode:
    description:
      - Shows mode, owner and content. A content that not every user of the host can read, before or after, is never
        shown, nor is one that is no text or larger than 102 KiB.
    support: full
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.setter
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Configuration is in place
  ringmaster.inference.raw_file:
    path: /etc/example.conf
    content: "{{ lookup('ansible.builtin.template', 'example.conf.j2') }}"
    owner: root
    group: root
    mode: "0644"

- name: Rules of sudo are in place
  ringmaster.inference.raw_file:
    path: /etc/sudoers.d/operators
    content: "%operators ALL=(ALL:ALL) ALL\n"
    mode: "0440"
    validate: visudo -cf %s

- name: Program is in place
  ringmaster.inference.raw_file:
    path: /opt/example/program
    src: program-aarch64
    mode: "0755"
"""

RETURN = r"""
path:
  description: The path, normalised.
  type: str
  returned: success
  sample: /etc/example.conf
checksum:
  description: SHA-256 of the content.
  type: str
  returned: if O(content) or O(src) is given
  sample: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
"""
