# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose package it is: by names of Debian's and NVIDIA's repositories, and of the shipped profiles."""

from __future__ import annotations

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS, owner
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import packages
from tests.support.stack import NAMES, profile


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("linux-image-6.1.0-57-amd64", "kernel"),
        ("linux-headers-amd64", "kernel"),
        ("kernel-devel-matched", "kernel"),
        ("linux-modules-nvidia-580-server-open-generic", "driver"),
        ("linux-libc-dev", None),  # headers for programs, which compilers need
        ("kernelshark", None),
        ("libcuda1:i386", "driver"),
        ("firmware-nvidia-gsp", "driver"),
        ("nvidia-cuda-mps", "driver"),
        ("cuda-drivers-580", "driver"),
        ("cuda-drivers-fabricmanager-580", "driver"),
        ("nvidia-fabricmanager-580", "driver"),
        ("kmod-nvidia-open-dkms", "driver"),
        ("nvidia-cuda-toolkit", "cuda"),
        ("libnvidia-ml-dev", "cuda"),
        ("libcublas11", "cuda"),
        ("cuda-toolkit-13-0", "cuda"),
        ("libnccl2", "nccl"),
        ("doca-ofed", "rdma"),
        ("libibverbs1", "rdma"),
        ("nvidia-container-toolkit", None),
        ("dkms", None),
        ("gcc-12", None),
        ("datacenter-gpu-manager-4-cuda13", None),
    ],
)
def test_owner_by_name(name: str, operation: str | None) -> None:
    assert owner(name) == operation


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_profile_agree_with_the_patterns(name: str) -> None:
    for operation in OPERATIONS:
        for package in packages(profile(name), operation):
            assert owner(package) == operation, package
