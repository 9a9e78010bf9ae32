# SPDX-License-Identifier: GPL-3.0-or-later
"""Take an engine out of service at the gateways, or put it back: the hook that the rehearsal gives to gpu_reset.

    haproxy_server.py drain|ready BACKEND/SERVER SECONDS SSH-COMMAND…      one SSH command line for each gateway

``drain`` puts HAProxy's server in maintenance at each gateway, so that it gets no new request, and returns when none is
left in flight or in its queue. Both may be called twice.
"""

from __future__ import annotations

import csv
import io
import shlex
import subprocess
import sys
import time

# HAProxy's socket speaks lines; Python is what a gateway has to speak to it.
ASK = (
    "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect('/run/haproxy/admin.sock'); "
    "s.sendall(sys.argv[1].encode()+b'\\n'); print(b''.join(iter(lambda: s.recv(65536), b'')).decode())"
)


def ask(gateway: str, command: str) -> str:
    """HAProxy's answer to a command of its socket. Raises CalledProcessError if the gateway can't be asked."""
    remote = f"sudo python3 -c {shlex.quote(ASK)} {shlex.quote(command)}"
    finished = subprocess.run([*shlex.split(gateway), remote], capture_output=True, text=True, timeout=60, check=True)
    return finished.stdout.strip()


def requests(gateway: str, backend: str, server: str) -> int:
    """Requests at the server now, in flight or in its queue."""
    table = csv.DictReader(io.StringIO(ask(gateway, f"show stat {backend} 4 -1").lstrip("# ")))
    return sum(int(row["scur"]) + int(row["qcur"]) for row in table if row["svname"] == server)


def main(arguments: list[str]) -> int:
    """Carry out the command; 0 when it is done."""
    state, name, seconds, *gateways = arguments
    backend, server = name.split("/")
    for gateway in gateways:
        said = ask(gateway, f"set server {name} state {'maint' if state == 'drain' else 'ready'}")
        if said:
            print(said, file=sys.stderr)
            return 1
    end = time.monotonic() + float(seconds)
    while state == "drain":
        left = sum(requests(gateway, backend, server) for gateway in gateways)
        if not left:
            break
        if time.monotonic() > end:
            print(f"{left} requests are still at {name} after {seconds} s", file=sys.stderr)
            return 1
        time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
