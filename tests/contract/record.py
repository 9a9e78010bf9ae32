# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what an engine answers, normalised, as the contract that the stand-in is held to.

Usage, from the checkout's root: python -m tests.contract.record HOST:PORT > tests/contract/vllm-VERSION.json

The engine is vLLM with any small model (rehearsal/tiny_model.py makes one; a build for CPUs serves):

    VLLM_API_KEY=secret-for-contract vllm serve FOLDER --served-model-name tiny --max-model-len 2048 \\
        --enable-auto-tool-choice --tool-call-parser hermes
"""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any

from tests.contract.exchanges import EXCHANGES, Exchange
from tests.contract.shapes import answer

SECONDS = 120.0  # until an answer counts as one that never comes


def ask(address: str, exchange: Exchange) -> dict[str, Any]:
    """Send one request; gives what remains of the answer."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        body = exchange.body if isinstance(exchange.body, str) or exchange.body is None else json.dumps(exchange.body)
        connection.request(exchange.method, exchange.path, body, exchange.headers)
        response = connection.getresponse()
        return answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def main(address: str) -> None:
    """Print the answers, one a line, so that a difference between two recordings is one line."""
    lines = [f"{json.dumps(each.name)}: {json.dumps(ask(address, each), sort_keys=True)}" for each in EXCHANGES]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1])
