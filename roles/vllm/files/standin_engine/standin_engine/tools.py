# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls of tools, as vLLM 0.32 gives them with ``--tool-call-parser hermes``; the stand-in takes every parser for that.

A client that insists on a call (``tool_choice`` "required", or a function that is named) gets one: of the first tool,
or of that function. With "auto" a model decides, and the stand-in answers with sentences.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

BEGINNING = "<tool_call>"
END = "</tool_call>"


@dataclass(frozen=True)
class ForcedCall:
    """The call that an answer consists of.

    Attributes:
        name: the function that is called.
        arguments: its arguments, as JSON.
        named: whether the client named the function; it is told of the end in another way then.
    """

    name: str
    arguments: str
    named: bool

    @property
    def announcement(self) -> str:
        """What the engine writes until it is clear which function is called."""
        return f'{BEGINNING}{{"name": {json.dumps(self.name, ensure_ascii=False)}'

    @property
    def opening(self) -> str:
        """What the engine writes before the arguments."""
        return f'{self.announcement}, "arguments": '

    @property
    def text(self) -> str:
        """What the engine writes."""
        return f"{self.opening}{self.arguments}}}{END}"

    def message(self, text: str) -> dict[str, Any]:
        """Fields of the message of an answer that has ended with this text: of a call, or of what was said instead."""
        if text not in (self.text, self.text[: -len(END)]):
            return {"content": text}
        function = {"name": self.name, "arguments": self.arguments}
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
        self._text = ""
        self._called = False

    def delta(self, text: str) -> dict[str, Any]:
        """What a chunk says when the engine has written `text`; nothing while the call is being opened or closed."""
        call, before = self._call, len(self._text)
        self._text += text
        if not call.text.startswith(self._text):
            return {"content": text} if text else {}
        news: list[dict[str, Any]] = []
        if not self._called and len(self._text) >= len(call.announcement):
            self._called = True
            news.append({"id": _identifier(), "type": "function", "index": 0, "function": {"name": call.name}})
        start = len(call.opening)
        piece = self._text[max(before, start) : start + len(call.arguments)]
        if piece:
            news.append({"index": 0, "function": {"arguments": piece}})
        return {"content": None, "tool_calls": news} if news else {}

    def finish_reason(self, reason: str | None) -> str | None:
        """How the client is told that the answer has ended."""
        return self._call.finish_reason(reason, self._called)


def _identifier() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"
