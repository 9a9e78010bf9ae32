# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hooks that take a card's engine out of service and back: a request or a command.

Both must bear being called twice: a run that was interrupted calls them again. Nothing here imports Ansible; who calls
gives the function that sends a request, ``ansible.module_utils.urls.open_url`` or what stands in for it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner

INTERVAL = 2.0  # seconds until an answer "not yet" is asked for again, unless Retry-After says otherwise
ONE_REQUEST = 30.0  # seconds
NOT_YET = (202, 429, 503)


class Hook:
    """A hook as the option describes it: ``{url, method, headers, body, validate_certs}`` or ``{command}``,
    ``timeout``."""

    def __init__(
        self,
        option: Mapping[str, Any],
        commands: CommandRunner,
        open_url: Callable[..., Any],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.option = option
        self._commands, self._open_url, self._monotonic, self._sleep = commands, open_url, monotonic, sleep

    def run(self) -> str:
        """Call the hook and wait until it has done its work. Gives a complaint, empty if all went well."""
        if self.option.get("url"):
            return self._request()
        words = list(self.option.get("command") or [])
        if not words:
            return "a hook without url and command"
        answer = self._commands.run(words, timeout=float(self.option["timeout"]))
        if answer.ok:
            return ""
        said = (answer.complaint or answer.output).strip()[-500:] or "nothing"
        ended = "no end" if answer.status is None else f"status {answer.status}"
        return f"{describe(self.option)}: {ended}, it said: {said}"

    def _request(self) -> str:
        """Ask until the answer is a success other than 202, for as long as it is "not yet"."""
        end = self._monotonic() + float(self.option["timeout"])
        while True:
            try:
                status, wait = self._ask(min(ONE_REQUEST, max(end - self._monotonic(), 1.0)))
            # What open_url raises for a refused connection, a name that does not resolve, a certificate, a bad URL.
            except (OSError, ValueError) as error:
                return f"{describe(self.option)}: {error}"
            if status not in NOT_YET:
                return "" if 200 <= status < 300 else f"{describe(self.option)}: status {status}"
            if self._monotonic() + wait >= end:
                return f"{describe(self.option)}: still status {status} after {self.option['timeout']} s"
            self._sleep(wait)

    def _ask(self, timeout: float) -> tuple[int, float]:
        body = self.option.get("body")
        headers = dict(self.option.get("headers") or {})
        data = None
        if isinstance(body, str):
            data = body.encode("utf-8")
        elif body is not None:
            data = json.dumps(body).encode("utf-8")
            if not any(name.lower() == "content-type" for name in headers):
                headers["Content-Type"] = "application/json"
        try:
            answer = self._open_url(
                self.option["url"],
                data=data,
                headers=headers,
                method=self.option.get("method") or "POST",
                timeout=timeout,
                validate_certs=self.option.get("validate_certs", True),
                follow_redirects="none",
            )
        except HTTPError as error:
            answer = error
        try:
            return int(answer.status or 0), _retry_after(answer.headers)
        finally:
            answer.close()


def describe(option: Mapping[str, Any]) -> str:
    """The hook for people: its method and URL without what may be secret in it, or its command's name."""
    if option.get("url"):
        shown = re.sub(r"//[^/@]*@", "//", str(option["url"]).partition("?")[0])
        return f"{option.get('method') or 'POST'} {shown}"
    return f"command {option['command'][0]}"


def _retry_after(headers: Any) -> float:
    text = str(headers.get("Retry-After") or "")
    return min(max(float(text), INTERVAL), 60.0) if text.isascii() and text.isdigit() else INTERVAL
