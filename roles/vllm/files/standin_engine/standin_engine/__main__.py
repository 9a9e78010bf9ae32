# SPDX-License-Identifier: GPL-3.0-or-later
"""``python3 -m standin_engine serve MODEL [vLLM's options]``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from . import VLLM_VERSION, flags
from .config import Config, ConfigError, build
from .faults import Faults
from .server import serve

logger = logging.getLogger("standin_engine")

_LEVELS = {"trace": logging.DEBUG}


def _describe(config: Config) -> None:
    logger.info(
        "Stand-in for vLLM %s, not a model: answers are canned. Card %s, time scale %g, %d KV blocks of %d tokens, "
        "max_model_len %d, max_num_seqs %d, max_num_batched_tokens %d, adapters: %s",
        VLLM_VERSION,
        config.card,
        config.time_scale,
        config.blocks,
        config.block_size,
        config.max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        ", ".join(adapter.name for adapter in config.adapters) or "none",
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command line; gives the exit status."""
    if not arguments or arguments[0] != "serve":
        print("usage: standin-engine serve [model_tag] [options]", file=sys.stderr)
        return 2
    options = flags.parse(arguments[1:])
    level = options.uvicorn_log_level or "info"
    logging.basicConfig(
        stream=sys.stdout,
        level=_LEVELS.get(level, level.upper()),
        format="%(levelname)s %(asctime)s [%(name)s] %(message)s",
    )
    try:
        config = build(options, os.environ)
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    _describe(config)
    faults = Faults(config.faults_file)
    faults.refresh()
    if faults.is_on("oom_at_start"):
        logger.error(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has no free memory. "
            "(simulated by the fault oom_at_start)"
        )
        return 1
    # Not uvloop.install() or uvloop.run(): one is deprecated in new versions, the other is missing in old ones.
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(serve(config, faults))
    except OSError as error:
        logger.error("The engine stops: %s", error)
        return 1
    finally:
        loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
