# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls of tools, as vLLM 0.32 gives them with ``--tool-call-parser hermes``, whatever parser is named here.

A client that insists on a call (``tool_choice`` "required", or a function that is named) gets one: of the first tool,
or of that function. With "auto" a model decides, and the stand-in answers with sentences.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

BEGINNING = "<tool_call>"
END = "</tool_call>"


@dataclass(frozen=True)
class ForcedCall:
    """The call that an answer consists of.

    Attributes:
        name: the function that is called.
        arguments: its arguments, as JSON in ASCII.
        named: whether the client named the function; it is told of the end in another way then.
    """

    name: str
    arguments: str
    named: bool

    @cached_property
    def announcement(self) -> str:
        """What the engine writes until it is clear which function is called. In ASCII, as all that it writes."""
        return f'{BEGINNING}{{"name": {json.dumps(self.name)}'

    @cached_property
    def opening(self) -> str:
        """What the engine writes before the arguments."""
        return f'{self.announcement}, "arguments": '

    @cached_property
    def text(self) -> str:
        """What the engine writes."""
        return f"{self.opening}{self.arguments}}}{END}"

    def message(self, text: str) -> dict[str, Any]:
        """Fields of the message of an answer that has ended with this text: of a call, or of what was said instead."""
        if not text.startswith(self.text) and text != self.text[: -len(END)]:
            return {"content": text}
        # vLLM reads the arguments, and writes them anew.
        arguments = json.dumps(json.loads(self.arguments), ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"content": "", "tool_calls": [{"id": _identifier(), "type": "function", "function": function}]}

    def finish_reason(self, reason: str | None, called: bool = True) -> str | None:
        """How the client is told that the answer has ended.

        Args:
            reason: why it has.
            called: whether a client that reads a stream was told of a call. One that gets the answer whole is told so
                in any case, as vLLM does it.
        """
        return "tool_calls" if called and reason == "stop" and not self.named else reason


class CallStream:
    """An answer that is a call, chunk by chunk."""

    def __init__(self, call: ForcedCall) -> None:
        self._call = call
        # Characters that the engine has written as the call has them, what it wrote before it was clear whether a call
        # begins, and whether it has written something else since.
        self._place = 0
        self._held = ""
        self._strays = False
        self._called = False

    def delta(self, text: str, last: bool = False) -> dict[str, Any]:
        """What a chunk says when the engine has written `text`, which is the answer's `last` or not; nothing while the
        call is being opened or closed."""
        call, before = self._call, self._place
        if not self._strays:
            pairs = zip(text, call.text[before : before + len(text)])
            same = sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._place += same
            self._strays = self._place < min(before + len(text), len(call.text))
        if before < len(BEGINNING):
            self._held += text
            if self._strays and not self._held.startswith(BEGINNING):
                said, self._held = self._held, ""
                return {"content": said} if said else {}
        news: list[dict[str, Any]] = []
        if not self._called and self._place >= len(call.announcement):
            self._called = True
            news.append({"id": _identifier(), "type": "function", "index": 0, "function": {"name": call.name}})
        start = len(call.opening)
        piece = call.text[max(before, start) : min(self._place, start + len(call.arguments))]
        if piece:
            news.append({"index": 0, "function": {"arguments": piece}})
        if news and last:
            # vLLM adds what it has not sent yet of the arguments to the last chunk, and if it is nothing.
            news[-1]["function"].setdefault("arguments", "")
        return {"content": None, "tool_calls": news} if news else {}

    def finish_reason(self, reason: str | None) -> str | None:
        """How the client is told that the answer has ended."""
        return self._call.finish_reason(reason, self._called)


def _identifier() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"
