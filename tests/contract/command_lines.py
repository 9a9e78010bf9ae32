# SPDX-License-Identifier: GPL-3.0-or-later
"""Command lines, and which of them vLLM's own parser takes: recorded once, asked of the stand-in at each test.

Usage: PYTHON tests/contract/command_lines.py > tests/contract/vllm-0.32.0-command-lines.json, with the Python of an
environment that has vLLM; a build for CPUs serves. Only the parser is asked, and no engine is started.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

PROBE = Path(__file__).resolve().parents[2] / "plugins" / "module_utils" / "engine_flags_probe.py"

# What follows `vllm serve`.
COMMAND_LINES = (
    "m",
    "m --max-model-len 8192 --max-num-seqs 256 --gpu-memory-utilization 0.85",
    "m --max_model_len 8k",
    "m --max-model-len 8.5K",
    "m --max-model-len auto",
    "m --max-num-batched-tokens 8.5k",
    "m --max-num-seqs many",
    "m --max-num-seqs",
    "m --num-scheduler-steps 4",
    "m --disable-nccl-p2p",
    "m --use-v2-block-manager",
    "m --swap-space 4",
    "m --worker-use-ray",
    "m --disable-log-requests",
    "m --task generate",
    "m --device cuda",
    "m --kv-cache-dtype fp16",
    "m --kv-cache-dtype fp8_e4m3",
    "m --block-size 32",
    "m --quantization awq",
    "m --dtype int8",
    "m --enforce-eager",
    "m --enforce-eager=yes",
    "m --no-enforce-eager",
    "m --no-max-num-seqs",
    "m -tp 4 -pp 2",
    "m -tp=4",
    "m -O3",
    "m -O 3",
    "m --compilation-config.mode 3",
    "m -cc.mode=3",
    "m --compilation-config []",
    "m --kv-transfer-config {",
    'm --kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}',
    "m --served-model-name a b",
    "m --enable-lora --max-lora-rank 7",
    "m --enable-lora --max-lora-rank 16",
    "m --enable-lora --lora-modules sql=/x",
    "m --uvicorn-log-level loud",
    "m --seed None",
    "m --tokenizer-mode slow",
    "m --limit-mm-per-prompt {}",
    "m n",
    "m --port 8000 --host 0.0.0.0",
    "m --api-key",
    "m --max-num",
    "m --enable-prefix",
)


def main() -> None:
    """Print what the parser of this environment's vLLM takes."""
    probe = runpy.run_path(str(PROBE), run_name="probe")
    sys.stdout, answer = sys.stderr, sys.stdout
    found = probe["take_parser"]("vllm")
    taken = {line: probe["complaint"](found, line.split(" ")) is None for line in COMMAND_LINES}
    print(json.dumps(taken, indent=1), file=answer)


if __name__ == "__main__":
    main()
