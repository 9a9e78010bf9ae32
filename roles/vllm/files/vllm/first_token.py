# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits until an engine has answered a first token, and tells the service manager: that an engine listens, or says that
it is healthy, proves nothing.

Usage: first_token.py URL MODEL, with the key in VLLM_API_KEY, the engine's process in ENGINE_PROCESS and the service
manager's socket in NOTIFY_SOCKET. It ends when the engine has ended; the service manager ends both when the time to
start is over. The exit status is 0 for a token, else 1.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SECONDS_BETWEEN = 0.5
SECONDS_FOR_AN_ANSWER = 60.0
"""The first answer of an engine that still compiles takes long; one that hangs is asked again."""
SECONDS_TO_BE_READ = 30.0

# The service manager's own proxy settings have nothing to do with an engine of this host.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def notify(address: str) -> None:
    """Tell the service manager that the engine is up (the protocol of ``sd_notify``), and wait until it has read that
    (its barrier): it looks for a sender's unit by the sender's process, which must not have ended before."""
    reading, writing = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(b"READY=1")
            # What comes with it is closed on the other side once all that was sent before has been read.
            socket.send_fds(connection, [b"BARRIER=1"], [writing])
    finally:
        os.close(writing)
    select.select([reading], [], [], SECONDS_TO_BE_READ)
    os.close(reading)


def alive(process: str) -> bool:
    """Whether the engine's process is there; one that has ended is not, and what is no number is none."""
    if not process.isdecimal():
        return False
    try:
        status = Path("/proc", process, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def asked(url: str, model: str, secret: str) -> str:
    """Ask for one token; gives an empty text if it came, else what is in the way."""
    body = {"model": model, "prompt": "Ready?", "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with OPENER.open(request, timeout=SECONDS_FOR_AN_ANSWER) as response:
            tokens = json.load(response)["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return type(error).__name__
    return "" if tokens == 1 else f"{tokens} tokens"


def main(url: str, model: str) -> int:
    """Wait for the token; gives the exit status."""
    process, secret, said = os.environ.get("ENGINE_PROCESS", ""), os.environ["VLLM_API_KEY"], ""
    while alive(process):
        complaint = asked(url, model, secret)
        if not complaint:
            print(f"the engine answered a first token of {model}", flush=True)
            notify(os.environ["NOTIFY_SOCKET"])
            return 0
        if complaint != said:
            print(f"no token yet: {complaint}", flush=True)
            said = complaint
        time.sleep(SECONDS_BETWEEN)
    print("the engine has ended before its first token", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
