# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter that judges what the role nccl is to write."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.ringmaster.inference.plugins.filter.nccl_values import nccl_values


def test_values_that_nccl_takes() -> None:
    judged = nccl_values({"NCCL_IB_TC": 106, "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NOT_KNOWN_YET": "1"})
    assert [each["refused"] for each in judged] == [False, False, False]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_IB_TC", 256, "from 0 to 255"),
        ("NCCL_IB_TC", True, "text in one line"),
        ("NCCL_IB_TC", None, "text in one line"),
        ("NCCL_IB_TIMEOUT", 60, "1 to 31"),
        ("NCCL_ALGO", "ring", "debugging"),
        ("NCCL_DEBUG_FILE", "a\nNCCL_IB_DISABLE=1", "text in one line"),
        ("LD_PRELOAD", "/tmp/x.so", "a name of NCCL"),
        ("NCCL_X\n", "1", "a name of NCCL"),
    ],
)
def test_values_that_are_refused(name: str, value: Any, words: str) -> None:
    [judged] = nccl_values({name: value})
    assert judged["refused"]
    assert words in judged["message"]


def test_something_else_is_an_error() -> None:
    with pytest.raises(AnsibleFilterError):
        nccl_values(["NCCL_IB_TC=106"])
