# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ECC of cards brought to a desired state: what is pending is set, and takes effect with a reboot.

Nothing here imports Ansible.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.cards import card_model
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import (
    Call,
    GpuReader,
    ask,
    identities,
    select,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    NO_PERMISSION,
    NOT_SUPPORTED,
    GpuError,
    NoAnswerError,
    Reading,
    as_flag,
    element,
)


class EccReader(GpuReader):
    """Reads and sets the ECC mode of one card at a time."""

    def ecc(self, index: int) -> dict[str, Any]:
        """``{supported, current, pending, reason}``, the modes as flags.

        `supported` is False without ECC and None if the mode can't be read. Then both modes are None, and `reason` says
        why.
        """
        self.nvml.open()
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        answer = handle if handle.reason else self.nvml.call("nvmlDeviceGetEccMode", handle.value)
        current, pending = as_flag(element(answer, 0)), as_flag(element(answer, 1))
        reason = current.reason or pending.reason
        return {
            "supported": True if not reason else False if answer.code == NOT_SUPPORTED else None,
            "current": None if reason else current.value,
            "pending": None if reason else pending.value,
            "reason": reason,
        }

    def set_ecc(self, index: int, enabled: bool) -> dict[str, Any]:
        """Set what is pending. ``{code, reason}``: `reason` is empty if NVML did it."""
        self.nvml.open()
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
        answer: Reading = handle
        if not handle.reason:
            answer = self.nvml.call("nvmlDeviceSetEccMode", handle.value, 1 if enabled else 0)
        return {"code": answer.code, "reason": answer.reason}


def bring_ecc(
    call: Call,
    files: FileTree,
    enabled: bool,
    wanted: Iterable[str] = (),
    *,
    refuse_without: bool = False,
    write: bool = True,
) -> dict[str, Any]:
    """Bring ECC of the cards that `wanted` names (by uuid, index or PCI address; empty is all) to `enabled`.

    ``{gpus, unsupported}``: each of `gpus` is ``{index, uuid, pci_address, model, before, after, changed,
    reboot_required}`` with modes ``{current, pending}``; `unsupported` are cards without ECC, ``{index, uuid,
    pci_address, model, reason}``, which are an error with `refuse_without`. `call` runs an :class:`EccReader`'s
    methods. Without `write`, `after` is what would be.

    No card is set before it is known that all of them can be. Raises GpuError.
    """
    cards = [card for card in identities(call, files) if card["state"] != "not_listed"]
    wanted = list(wanted)
    if wanted:
        cards = select(cards, wanted)
    with_ecc: list[tuple[dict[str, Any], dict[str, Any]]] = []
    unsupported = []
    for card in cards:
        mode = _mode(call, card)
        if mode["supported"] is False:
            unsupported.append({**_who(card), "reason": mode["reason"]})
        else:
            with_ecc.append((card, mode))
    if unsupported and refuse_without:
        names = ", ".join(f"{_name(card)}, a {card['model']}" for card in unsupported)
        raise GpuError("cards that have ECC", names, "leave them out with the option gpus, or set unsupported=report")
    to_set = [card for card, mode in with_ecc if mode["pending"] != enabled]
    if not enabled:
        _refuse_to_disable(to_set)
    done: list[str] = []
    results = []
    for card, mode in with_ecc:
        before = {"current": mode["current"], "pending": mode["pending"]}
        after = {**before, "pending": enabled}
        changed = before != after
        if changed and write:
            _set(call, card, enabled, done)
            after = {name: value for name, value in _mode(call, card).items() if name in ("current", "pending")}
            if after["pending"] != enabled:
                raise GpuError(
                    f"ECC of {_name(card)} to be {_word(enabled)} after the next reboot",
                    f"that it stays {_word(after['pending'])}, although NVML reported no error{_already(done)}",
                    "run `nvidia-smi -q -d ECC` and read the kernel log; some virtual machines and vGPU hosts rule ECC",
                )
            done.append(_name(card))
        results.append(
            {
                **_who(card),
                "before": before,
                "after": after,
                "changed": changed,
                "reboot_required": after["current"] != after["pending"],
            }
        )
    return {"gpus": results, "unsupported": unsupported}


def _mode(call: Call, card: dict[str, Any]) -> dict[str, Any]:
    mode = ask(call, "ecc", card["index"]) if card["state"] != "no_answer" else {"reason": card["reason"]}
    if mode.get("supported") is None:
        raise GpuError(
            f"{_name(card)} to tell its ECC mode",
            mode["reason"],
            "read the card's verdict (gpu_info) and the kernel log (xid_info); leave the card out with the option gpus",
        )
    return mode


def _refuse_to_disable(cards: list[dict[str, Any]]) -> None:
    for card in cards:
        model = card_model(card["model"])
        if model is not None and model.ecc_can_be_off is False:
            raise GpuError(
                f"a card whose ECC can be turned off instead of {_name(card)}",
                f"a {card['model']}, for which NVIDIA does not support that; its ECC costs no memory",
                "leave ECC enabled on it, and name the other cards with the option gpus. Nothing was changed",
            )


def _set(call: Call, card: dict[str, Any], enabled: bool, done: list[str]) -> None:
    try:
        answer = call("set_ecc", card["index"], enabled)
    except NoAnswerError as error:
        answer = {"code": None, "reason": str(error)}
    if not answer["reason"]:
        return
    if answer["code"] == NO_PERMISSION:
        to_do = "run as root (become); in a virtual machine or container ECC may be the host's to set"
    else:
        to_do = "read the card's verdict (gpu_info) and the kernel log (xid_info)"
    raise GpuError(f"to turn ECC of {_name(card)} {_word(enabled)}", f"{answer['reason']}{_already(done)}", to_do)


def _already(done: list[str]) -> str:
    return f". Set before that: {', '.join(done)}" if done else ""


def _who(card: dict[str, Any]) -> dict[str, Any]:
    return {name: card[name] for name in ("index", "uuid", "pci_address", "model")}


def _name(card: dict[str, Any]) -> str:
    return f"card {card['pci_address'] or card['index']} ({card['uuid'] or 'uuid unknown'})"


def _word(enabled: bool | None) -> str:
    return "enabled" if enabled else "disabled"
