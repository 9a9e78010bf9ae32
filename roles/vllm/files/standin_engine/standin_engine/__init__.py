# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in engine: vLLM 0.32's HTTP interface over a model of its scheduler, for hosts without a GPU.

It answers with canned sentences, so it is of use in a rehearsal only. What is real in it is everything that a client,
HAProxy, Prometheus and the scheduler can see: the routes and bodies, the metrics, and the consequences of load, which
come from a model of paged key-value memory and continuous batching with the figures of a card.
"""

from __future__ import annotations

VLLM_VERSION = "0.32.0"
"""The version of vLLM whose interface is spoken."""
