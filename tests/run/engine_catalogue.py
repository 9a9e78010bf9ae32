# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the catalogue of engine options that is built in, from an installed engine, and the stand-in's table of it.

Run it when a new version of vLLM becomes the one to plan for. The engine is asked as module engine_flags asks it; only
what it takes is kept, nothing of its text.

Usage: engine_catalogue.py PYTHON > plugins/module_utils/engine_flags_catalogue_vllm.py
       engine_catalogue.py --standin > roles/vllm/files/standin_engine/standin_engine/vllm_flags.json
PYTHON is the Python of a virtual environment with vLLM; a build for CPUs serves. The second makes the table that the
stand-in engine's parser is built from, out of that catalogue: what module engine_flags refuses by its catalogue, the
stand-in refuses as well.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "plugins" / "module_utils" / "engine_flags_probe.py"
CATALOGUE = ROOT / "plugins" / "module_utils" / "engine_flags_catalogue_vllm.py"

# What a build for CPUs does not tell: arg_utils.py adds the device of the platform to these choices.
OF_CUDA = {"--mm-processor-device": ["cuda"]}

HEADER = '''\
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of `vllm serve` {version}, taken from its own parser by tests/run/engine_catalogue.py. Not edited by
hand.

The form is described at `Option` in engine_flags_catalogue.py; what is as usual (one word of text) is left out. Facts
only: names, kinds, choices and declared ranges.
"""

from __future__ import annotations

VERSION = "{version}"

OPTIONS = r"""{{
{options}
}}"""
'''


def ask(python: str) -> dict[str, Any]:
    """What the engine of an environment says of its options."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request:
        json.dump({"engine": "vllm", "words": None, "catalogue": True, "environment": {}}, request)
        request.flush()
        command = [python, "-I", "-B", "-c", PROBE.read_text(encoding="utf-8"), request.name]
        answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def catalogue(answer: dict[str, Any]) -> str:
    """Source of the built-in catalogue."""
    entries = []
    for flag, option in sorted(answer["catalogue"].items()):
        option["choices"] = option.get("choices", []) + OF_CUDA.get(flag, [])
        option = {name: value for name, value in option.items() if value != []}
        line = f'"{flag}": ' + json.dumps(option)
        entries.append("\n ".join(textwrap.wrap(line, 118, break_on_hyphens=False, break_long_words=False)))
    return HEADER.format(version=answer["version"].partition("+")[0], options=",\n".join(entries))


def standin(options: dict[str, Any]) -> str:
    """The stand-in's table, in the form that its flags.py describes."""
    entries = []
    for flag, option in sorted(options.items()):
        if option.get("ends"):
            continue
        entry = {name: option[name] for name in ("takes", "kind", "choices", "none", "limits") if name in option}
        names = [name for name in option.get("names", ()) if name != flag]
        entry.update({"names": names} if names else {})
        entry.update({"negatable": True} if option.get("negations") else {})
        entries.append(f'  "{flag}": {json.dumps(entry)}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main() -> None:
    """Print what was asked for."""
    if sys.argv[1] == "--standin":
        sys.stdout.write(standin(json.loads(runpy.run_path(str(CATALOGUE))["OPTIONS"])))
    else:
        sys.stdout.write(catalogue(ask(sys.argv[1])))


if __name__ == "__main__":
    main()
