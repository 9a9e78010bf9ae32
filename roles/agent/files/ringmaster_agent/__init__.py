# SPDX-License-Identifier: GPL-3.0-or-later
"""Ringmaster's node agent: reads what tells of a GPU node's health and hands it on, as metrics and as a stream."""

__version__ = "1.0.0"
