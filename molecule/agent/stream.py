# SPDX-License-Identifier: GPL-3.0-or-later
"""Listens to an agent's stream for some seconds, applies every change, and compares the outcome with the state.

Usage: python3 stream.py URL SECONDS. Prints how many messages came; status 1 if they do not add up.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any


def apply(state: dict[str, Any], message: dict[str, Any]) -> None:
    """Apply a change as docs/conventions.md has it."""
    for subject, quantities in message["values"].items():
        if quantities is None:
            state["values"].pop(subject, None)
        else:
            state["values"].setdefault(subject, {}).update(quantities)
    state["read"].update(message["read"])
    for name, reason in message["unknown"].items():
        if reason is None:
            state["unknown"].pop(name, None)
        else:
            state["unknown"][name] = reason
    state["sequence"] = message["sequence"]


def main(url: str, seconds: float) -> int:
    """Listen; gives the exit status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + seconds
    with opener.open(f"{url}/v1/stream", timeout=5) as stream:
        state = json.loads(stream.readline())
        count, last = 1, time.monotonic()
        if state["type"] != "snapshot":
            print(f"the first message is {state['type']}")
            return 1
        # The snapshot that is asked for has no more than the change that was sent just before it.
        snapshot: dict[str, Any] = {"sequence": -1}
        while snapshot["sequence"] != state["sequence"]:
            message = json.loads(stream.readline())
            now = time.monotonic()
            if message["type"] == "change" and message["sequence"] != state["sequence"] + 1:
                print(f"after {state['sequence']} came {message['sequence']}")
                return 1
            if now - last > 2:
                print(f"nothing came for {now - last:.1f} s")
                return 1
            count, last = count + 1, now
            apply(state, message)
            if now > end and snapshot["sequence"] < state["sequence"]:
                with opener.open(f"{url}/v1/state", timeout=5) as answer:
                    snapshot = json.load(answer)
    different = [key for key in ("values", "read", "unknown") if snapshot[key] != state[key]]
    print(f"{count} messages, different: {', '.join(different) or 'nothing'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
