# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in engine: vLLM 0.32's HTTP interface over a model of its scheduler, for hosts without a GPU.

It answers with canned sentences, so it is of use in a rehearsal only. What is real in it is everything that a client,
HAProxy, Prometheus and the scheduler can see: the routes and bodies, the metrics, and the consequences of load, which
come from a model of paged key-value memory and continuous batching with the figures of a card.
"""

from __future__ import annotations

from pathlib import Path

_NAMED = Path(__file__).resolve().parents[1] / "VERSION"

VLLM_VERSION = _NAMED.read_text(encoding="utf-8").strip() if _NAMED.is_file() else "0.32.0"
"""The version that it says it is: the one that it was installed as, so that an upgrade can be rehearsed. Whatever that
is, the interface is the one of vLLM 0.32.0."""
