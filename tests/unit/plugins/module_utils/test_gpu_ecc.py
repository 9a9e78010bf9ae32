# SPDX-License-Identifier: GPL-3.0-or-later
"""ECC brought to a desired state: what is set, what waits for a reboot, what is refused before anything is set."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import UnknownGpuError
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_ecc import EccReader, bring_ecc
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import GpuError, Nvml, ReaderProcess
from tests.support.nvml import Code, Hang, Library, a100, driver_files, l40s


def bring(library: Library, enabled: bool, *wanted: str, **options: Any) -> dict[str, Any]:
    files = FileTree("/nowhere")
    reader = EccReader(Nvml(library, files), files)
    found = bring_ecc(lambda method, *given: getattr(reader, method)(*given), files, enabled, wanted, **options)
    json.dumps(found)
    return found


@pytest.mark.parametrize(
    ("before", "enabled", "after", "changed", "reboot"),
    [
        ([1, 1], True, (True, True), False, False),
        ([0, 0], True, (False, True), True, True),
        ([0, 1], True, (False, True), False, True),
        ([1, 0], True, (True, True), True, False),
        ([1, 1], False, (True, False), True, True),
        ([0, 0], False, (False, False), False, False),
        ([1, 0], False, (True, False), False, True),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_what_is_pending_is_what_counts(
    before: list[int], enabled: bool, after: tuple[bool, bool], changed: bool, reboot: bool, write: bool
) -> None:
    library = Library(l40s(0, EccMode=before))
    (card,) = bring(library, enabled, write=write)["gpus"]
    assert (card["after"]["current"], card["after"]["pending"]) == after
    assert (card["before"]["current"], card["before"]["pending"]) == (bool(before[0]), bool(before[1]))
    assert (card["changed"], card["reboot_required"]) == (changed, reboot)
    assert library.calls == ([("EccMode", 0, int(enabled))] if changed and write else [])


def test_cards_without_ecc_are_reported_or_refused() -> None:
    library = Library(l40s(0, EccMode=Code(3)), l40s(1, EccMode=[0, 0]))
    found = bring(library, True)
    assert [card["index"] for card in found["unsupported"]] == [0]
    assert "not supported" in found["unsupported"][0]["reason"]
    assert [card["index"] for card in found["gpus"]] == [1]
    library = Library(l40s(0, EccMode=Code(3)), l40s(1, EccMode=[0, 0]))
    with pytest.raises(GpuError, match=r"Expected cards that have ECC\. Found card 0000:07:00\.0"):
        bring(library, True, refuse_without=True)
    assert library.calls == []


def test_only_the_named_cards() -> None:
    library = Library(l40s(0, EccMode=[0, 0]), l40s(1, EccMode=[0, 0]))
    assert [card["index"] for card in bring(library, True, "0f:00.0")["gpus"]] == [1]
    assert library.calls == [("EccMode", 1, 1)]
    with pytest.raises(UnknownGpuError):
        bring(library, True, "GPU-none")


def test_ecc_of_an_a100_is_not_turned_off_and_nothing_else_is_either() -> None:
    library = Library(l40s(0), a100(1))
    with pytest.raises(GpuError, match=r"NVIDIA does not support that.*Nothing was changed"):
        bring(library, False)
    assert library.calls == []
    assert bring(library, False, "0")["gpus"][0]["changed"]
    # One that is off for whatever reason is turned on.
    assert bring(Library(a100(0, EccMode=[0, 0])), True)["gpus"][0]["changed"]
    assert not bring(Library(a100(0, EccMode=[0, 0])), False)["gpus"][0]["changed"]


@pytest.mark.parametrize("mode", [Code(15), Code(4), [1], [1, 7], "text", None, []])
def test_a_mode_that_can_not_be_read_stops_all_before_anything_is_set(mode: Any) -> None:
    library = Library(l40s(0, EccMode=[0, 0]), l40s(1, EccMode=mode))
    with pytest.raises(GpuError, match=r"Expected card 0000:0f:00\.0 .* to tell its ECC mode"):
        bring(library, True)
    assert library.calls == []


def test_a_lost_card_stops_all_unless_it_is_left_out() -> None:
    library = Library(l40s(0, EccMode=[0, 0]), l40s(1, handle=Code(15)))
    with pytest.raises(GpuError, match="fallen off the bus"):
        bring(library, True)
    assert bring(library, True, "0")["gpus"][0]["changed"]


def test_refusals_of_nvml_say_what_was_set_before() -> None:
    library = Library(l40s(0, EccMode=[0, 0]), l40s(1, EccMode=[0, 0], **{"set EccMode": Code(4)}))
    with pytest.raises(GpuError, match=r"root.*Set before that: card 0000:07:00\.0.*become"):
        bring(library, True)
    with pytest.raises(GpuError, match="fallen off the bus"):
        bring(Library(l40s(0, EccMode=[0, 0], **{"set EccMode": Code(15)})), True)


def test_what_nvml_only_says_it_did_is_an_error() -> None:
    with pytest.raises(GpuError, match=r"stays disabled, although NVML reported no error"):
        bring(Library(l40s(0, EccMode=[0, 0], deaf=True)), True)


def test_a_card_that_hangs_when_it_is_set(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    files = FileTree(str(tmp_path))
    library = Library(l40s(0, EccMode=[0, 0], **{"set EccMode": Hang()}), l40s(1))
    with ReaderProcess(EccReader(Nvml(library, files), files), seconds=0.3) as process:
        with pytest.raises(GpuError, match=r"no answer within 0\.3 s"):
            bring_ecc(process.call, files, True)


def test_a_card_that_hangs_when_it_is_asked_who_it_is(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0")
    files = FileTree(str(tmp_path))
    library = Library(l40s(0, UUID=Hang()), l40s(1, EccMode=[0, 0]))
    with ReaderProcess(EccReader(Nvml(library, files), files), seconds=0.3) as process:
        with pytest.raises(GpuError, match=r"0000:07:00\.0.*no answer within 0\.3 s"):
            bring_ecc(process.call, files, True)


def test_a_host_without_cards() -> None:
    assert bring(Library(), True) == {"gpus": [], "unsupported": []}


anything = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(-1, 2), max_size=3)
codes = st.sampled_from([Code(2), Code(3), Code(4), Code(15), Code("odd"), TypeError("odd")])


@given(anything | codes, codes | st.none(), st.booleans())
def test_whatever_nvml_answers_is_what_was_desired_or_an_error(mode: Any, setting: Any, enabled: bool) -> None:
    changes: dict[str, Any] = {"EccMode": mode} | ({} if setting is None else {"set EccMode": setting})
    with contextlib.suppress(GpuError):
        for card in bring(Library(l40s(0) | changes), enabled)["gpus"]:
            assert card["after"]["pending"] is enabled
