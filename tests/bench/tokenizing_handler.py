# SPDX-License-Identifier: GPL-3.0-or-later
"""What the bench of the preprocessor is measured against: `transformers`' fast tokenizer in a web handler in Python.

Usage: python -m tests.bench.tokenizing_handler PORT MODEL-DIRECTORY
"""

from __future__ import annotations

import sys

from aiohttp import web
from transformers import AutoTokenizer


def main(port: int, directory: str) -> None:
    """Answer POST /tokenize with the tokens of a chat, as vLLM's own handler does."""
    tokenizer = AutoTokenizer.from_pretrained(directory)

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return web.json_response({"count": len(ids), "max_model_len": 32768, "tokens": ids, "token_strs": None})

    application = web.Application()
    application.router.add_post("/tokenize", tokenize)
    web.run_app(application, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
