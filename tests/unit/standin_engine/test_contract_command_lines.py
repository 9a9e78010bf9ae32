# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in takes the command lines that vLLM's own parser takes, and no others: held to what was recorded of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from standin_engine import flags
from tests.contract.command_lines import COMMAND_LINES

RECORDED = Path(__file__).resolve().parents[2] / "contract" / "vllm-0.32.0-command-lines.json"
LINES: dict[str, bool] = json.loads(RECORDED.read_text(encoding="utf-8"))


def test_every_command_line_was_recorded() -> None:
    assert tuple(LINES) == COMMAND_LINES


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_standin_takes_the_command_lines_that_vllm_takes(line: str) -> None:
    words = line.split(" ")
    if LINES[line]:
        flags.parse(words)
        return
    with pytest.raises(SystemExit) as ended:
        flags.parse(words)
    assert ended.value.code == 2
