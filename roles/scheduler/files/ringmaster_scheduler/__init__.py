# SPDX-License-Identifier: GPL-3.0-or-later
"""Ringmaster's scheduler: tells HAProxy, request by request, which engine answers.

``core`` decides and knows neither sockets nor clocks; ``server``, ``engines``, ``members`` and ``http_api`` are the
thin adapters around it, over the pure parsers ``spop`` and ``exposition``; ``daemon`` ties them to one event loop.
"""

from __future__ import annotations

__version__ = "0.1.0"
