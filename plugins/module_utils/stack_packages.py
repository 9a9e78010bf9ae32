# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which operation of the driver stack a package belongs to: kernel, rdma, driver, cuda or nccl.

A transaction of one operation may not touch another's packages (:mod:`stack_transactions`), and what is installed is
told by operation (:mod:`driver_stack`). A package of none of them (``gcc``, ``dkms``, ``libelf1``) is nobody's: it may
come along. Names: the package indexes of Debian 12 and 13, NVIDIA's Driver Installation Guide, CUDA Installation Guide
and NCCL Installation Guide, NVIDIA's DOCA-Host documentation. Nothing here imports Ansible.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# Operations 2 to 6 of the site, in their order.
OPERATIONS = ("kernel", "rdma", "driver", "cuda", "nccl")

# Programs of the driver whose version is one of their own, although it looks like a driver's: Debian 12 has
# nvidia-persistenced 535.171.04 with driver 535.309.01, Debian 13 nvidia-modprobe 570.133.07 with 550.163.01.
OWN_VERSION = ("nvidia-modprobe", "nvidia-persistenced", "nvidia-settings", "nvidia-xconfig")

# The first pattern that matches decides; so exceptions stand before what they are an exception from.
_OWNERS: tuple[tuple[str, str | None], ...] = (
    ("nvidia-container*", None),  # the runtime of containers has versions and an order of its own
    ("libnvidia-container*", None),
    ("linux-modules-nvidia-*", "driver"),  # Canonical's prebuilt modules
    ("linux-objects-nvidia-*", "driver"),
    ("linux-signatures-nvidia-*", "driver"),
    ("linux-image-*", "kernel"),
    ("linux-headers-*", "kernel"),
    ("linux-modules-*", "kernel"),
    ("linux-kbuild-*", "kernel"),
    ("linux-compiler-*", "kernel"),
    ("linux-generic*", "kernel"),
    ("linux-virtual*", "kernel"),
    ("kernel", "kernel"),
    ("kernel-core", "kernel"),
    ("kernel-modules*", "kernel"),
    ("kernel-devel*", "kernel"),
    ("kernel-headers", "kernel"),
    ("kernel-uki-virt*", "kernel"),
    ("doca-*", "rdma"),
    ("mlnx-*", "rdma"),
    ("kmod-mlnx-*", "rdma"),
    ("ofed-scripts*", "rdma"),
    ("rdma-core*", "rdma"),
    ("ibverbs-*", "rdma"),
    ("libibverbs*", "rdma"),
    ("librdmacm*", "rdma"),
    ("rdmacm-utils", "rdma"),
    ("libibumad*", "rdma"),
    ("libibmad*", "rdma"),
    ("libibnetdisc*", "rdma"),
    ("infiniband-diags*", "rdma"),
    ("libnccl*", "nccl"),
    ("nccl", "nccl"),
    ("cuda-drivers*", "driver"),
    ("nvidia-cuda-mps*", "driver"),  # comes with the driver, whatever its name says
    ("nvidia-cuda-*", "cuda"),
    ("nvidia-profiler", "cuda"),
    ("nvidia-visual-profiler", "cuda"),
    ("nvidia-opencl-dev", "cuda"),
    ("libnvidia-ml-dev", "cuda"),
    ("nvidia-*", "driver"),
    ("libnvidia-*", "driver"),
    ("kmod-nvidia*", "driver"),
    ("dkms-nvidia*", "driver"),
    ("firmware-nvidia-*", "driver"),
    ("xserver-xorg-video-nvidia*", "driver"),
    ("xorg-x11-nvidia*", "driver"),
    ("libcuda1*", "driver"),
    ("libcudadebugger1*", "driver"),
    ("libnvcuvid1*", "driver"),
    ("libnvoptix1*", "driver"),
    ("libegl-nvidia*", "driver"),
    ("libgles-nvidia*", "driver"),
    ("libglx-nvidia*", "driver"),
    ("libgl1-nvidia-*", "driver"),
    ("cuda", "cuda"),
    ("cuda-*", "cuda"),
    ("gds-tools-*", "cuda"),
    ("nsight-*", "cuda"),
    ("libaccinj64*", "cuda"),
    ("libcublas*", "cuda"),
    ("libcudart*", "cuda"),
    ("libcufft*", "cuda"),
    ("libcufile*", "cuda"),
    ("libcuinj64*", "cuda"),
    ("libcupti*", "cuda"),
    ("libcurand*", "cuda"),
    ("libcusolver*", "cuda"),
    ("libcusparse*", "cuda"),
    ("libnpp*", "cuda"),
    ("libnvblas*", "cuda"),
    ("libnvfatbin*", "cuda"),
    ("libnvjitlink*", "cuda"),
    ("libnvjpeg*", "cuda"),
    ("libnvrtc*", "cuda"),
    ("libnvtoolsext*", "cuda"),
    ("libnvvm*", "cuda"),
)


def plain_name(package: str) -> str:
    """A package's name without its architecture: ``libcuda1:i386`` → ``libcuda1``."""
    return package.partition(":")[0]


def owner(package: str) -> str | None:
    """The operation that a package belongs to by its name; None if it is nobody's."""
    name = plain_name(package)
    return next((operation for pattern, operation in _OWNERS if fnmatchcase(name, pattern)), None)
