# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults by name while the fleet runs, with an end of their own: those of the stand-in engines, and of the hardware."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import textwrap
import time

from rehearsal import fleet, inventory
from rehearsal.checkout import Checkout, RehearsalError, say
from rehearsal.hardware import faults as hardware_faults
from rehearsal.hardware import installation, profiles

# The stand-in engine watches this file on its host; roles/vllm/files/standin_engine says what each fault does.
FAULTS_FILE = "/run/standin-engine/{name}/faults.json"
FAULTS = ("hang", "slow", "garbage", "crash", "oom_at_start", "none")
NONE = "none"
EXAMPLES = textwrap.indent(textwrap.fill(", ".join(fault.example for fault in hardware_faults.FAULTS), 116), "  ")
HELP = f"""
an engine:    HOST.ENGINE FAULT, with FAULT one of {", ".join(FAULTS)}
hardware:     WORDS [on HOST[/PART]], with a card's number or a port's device or interface as PART
  gpu-a1.main hang --seconds 30
  xid 79 on gpu-a1/2
  roce loss 0.1 % on gpu-b1 --seconds 60
  pfc off on gpu-a2/ens1f0np0
  none on gpu-a1

Hardware faults, with numbers of your own:
{EXAMPLES}

Without a host it is the first that has such hardware, without a part the first card or all ports. `none` ends what
still lasts, on all hosts if none is named; counts and lines in the log stay.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `fault`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument("words", nargs="+", help="what to break, see below; none: mend it")
    parser.add_argument("--seconds", type=float, help="mend it by itself after so long; default: it stays")
    parser.add_argument("--factor", type=float, default=5.0, help="how many times slower, for an engine's slow (5)")


def switch(checkout: Checkout, options: argparse.Namespace) -> None:
    """Switch a fault on or off. Raises RehearsalError for one that nothing knows and for hosts that are not there."""
    words = " ".join(options.words).split()
    first, dot, name = words[0].partition(".")
    if dot and len(words) == 2:
        if words[1] not in FAULTS:
            raise RehearsalError(f"expected a fault of an engine ({', '.join(FAULTS)}), found {words[1]!r}")
        switch_fault(checkout, first, name, words[1], seconds=options.seconds, factor=options.factor)
        done = {words[0]: words[1]}
    else:
        done = switch_hardware_fault(checkout, " ".join(words), seconds=options.seconds)
    for what, fault in done.items():
        say(f"{what}: {fault}" + (f" for {options.seconds:g} s" if options.seconds else ""))


def switch_fault(
    checkout: Checkout, host: str, name: str, fault: str, *, seconds: float | None = None, factor: float = 5.0
) -> None:
    """Write the faults file of engine `name` on `host`; `seconds` None: until it is switched off."""
    document: dict[str, dict[str, float | None]] = {}
    if fault != NONE:
        document[fault] = {"until": None if seconds is None else time.time() + seconds}
        if fault == "slow":
            document[fault]["factor"] = factor
    path = FAULTS_FILE.format(name=name)
    # Written beside and renamed, so that the engine never reads a half of it; the folder is the engine's own, and a
    # link that it put there is not followed.
    remote = f"""sudo sh -c 'new=$(mktemp {path}.XXXXXX) && cat >"$new" && chmod 0644 "$new" && mv -T "$new" {path}'"""
    finished = _on_host(checkout, host, remote, json.dumps(document))
    if finished.returncode != 0:
        raise RehearsalError(f"expected the engine {host}.{name}, found: {finished.stderr.strip()}")


def switch_hardware_fault(checkout: Checkout, phrase: str, *, seconds: float | None = None) -> dict[str, str]:
    """Break hardware by the words of `phrase` (``xid 79 on gpu-a1/2``), or mend it (``none on gpu-a1``).

    Gives what was broken, ``HOST: PARTS``, with the words. Raises RehearsalError for words, hosts or parts that nothing
    knows.
    """
    words, host, part = _split(phrase)
    machines = {
        name: str(values["rehearsal_hardware"])
        for name, values in sorted(inventory.read(checkout).variables.items())
        if values.get("rehearsal_hardware")
    }
    if host and host not in machines:
        raise RehearsalError(f"expected a host with hardware ({', '.join(machines) or 'none has any'}), found {host!r}")
    if words == NONE:
        arguments = ["mend", *([part] if part else [])]
        return {name: _run(checkout, name, arguments) for name in ([host] if host else machines)}
    try:
        hardware_faults.find(words)
    except hardware_faults.UnknownFaultError as error:
        raise RehearsalError(str(error)) from None
    if not host:
        # An L40S has no NVLink; cards and ports every profile has.
        suitable = [name for name, one in machines.items() if profiles.PROFILES[one].nvlinks or "nvlink" not in words]
        if not suitable:
            raise RehearsalError("expected a host with such hardware, found none in the inventory")
        host = suitable[0]
    arguments = ["inject", "-" if seconds is None else str(seconds), part or "-", words]
    return {f"{host}: {_run(checkout, host, arguments)}": words}


def _split(phrase: str) -> tuple[str, str, str]:
    """The fault's words, the host and the part that ``WORDS on HOST/PART`` names; empty where it names none."""
    words = phrase.split()
    if len(words) > 2 and words[-2] == "on":
        host, _slash, part = words[-1].partition("/")
        return " ".join(words[:-2]), host, part
    return " ".join(words), "", ""


def _run(checkout: Checkout, host: str, arguments: list[str]) -> str:
    """Run the program of faults on a host; gives what it says."""
    command = ["sudo", "env", f"PYTHONPATH=/{installation.PROGRAM}", "/usr/bin/python3", "-m"]
    finished = _on_host(checkout, host, shlex.join([*command, "rehearsal.hardware.faults", *arguments]))
    if finished.returncode != 0:
        raise RehearsalError(f"{host}: {finished.stderr.strip()}")
    return finished.stdout.strip()


def _on_host(checkout: Checkout, host: str, command: str, standard_input: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*fleet.ssh_command(checkout, fleet.address_of(checkout, host)), command],
        input=standard_input,
        capture_output=True,
        text=True,
        check=False,
    )
