# SPDX-License-Identifier: GPL-3.0-or-later
"""Links as NVML tells them, and how they differ from what a model of card should have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu import UnknownGpuError
from ansible_collections.ringmaster.inference.plugins.module_utils.nvlink import NvlinkReader, survey_links
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import Nvml, ReaderProcess
from tests.support.nvml import SPEED_FIELDS, Code, Hang, Library, a100, driver_files, field, l40s


def read(library: Library, root: Path, *wanted: str) -> list[dict[str, Any]]:
    files = FileTree(str(root))
    reader = NvlinkReader(Nvml(library, files), files)
    cards = survey_links(lambda method, *given: getattr(reader, method)(*given), files, wanted)
    json.dumps(cards, allow_nan=False)
    return cards


def states(*values: Any) -> dict[tuple[int], Any]:
    return {(link,): value for link, value in enumerate(values)}


def joined(position: int, peers: list[int]) -> dict[str, Any]:
    """An A100 whose twelve links lead to other cards, as on a board without switches."""
    buses = [a100(each)["PciInfo"] for each in peers]
    return a100(
        position,
        NvLinkRemoteDeviceType=states(*[0] * 12),
        NvLinkRemotePciInfo=states(*buses),
    )


def test_an_a100_at_switches(tmp_path: Path) -> None:
    (card,) = read(Library(a100(0)), tmp_path)
    assert card["as_expected"] is True
    assert card["links_active"] == 12
    assert card["expected"] == {"links": 12, "speed_mb_per_second": 25000, "bridge": False}
    assert card["unknown"] == {}
    assert card["links"][11] == {
        "link": 11,
        "state": "active",
        "speed_mb_per_second": 25000,
        "version": "3.1",
        "peer_kind": "switch",
        "peer_pci_address": "0000:c9:00.0",
        "replay_errors": 0,
        "recovery_errors": 0,
        "crc_flit_errors": 0,
        "crc_data_errors": 0,
        "ecc_data_errors": None,
        "unknown": {"ecc_data_errors": "NVML does not know this of this card (invalid argument)"},
    }


def test_an_l40s_has_no_link_and_that_is_right(tmp_path: Path) -> None:
    (card,) = read(Library(l40s(0)), tmp_path)
    assert (card["links"], card["links_active"], card["as_expected"], card["deviations"]) == ([], 0, True, [])
    told = l40s(0, fields={91: field(0)}, NvLinkState=Code(2))
    assert read(Library(told), tmp_path)[0]["links"] == []


def test_the_scan_ends_where_nvml_knows_no_more_links(tmp_path: Path) -> None:
    (card,) = read(Library(a100(0, fields=Code(3))), tmp_path)
    assert len(card["links"]) == 12
    assert card["links"][0]["speed_mb_per_second"] is None
    assert card["as_expected"] is None
    assert card["unknown"]["as_expected"] == "a link's state or speed is unknown"


def test_a_link_that_is_down_is_named_and_does_not_hide_the_next(tmp_path: Path) -> None:
    (card,) = read(Library(a100(0, NvLinkState=states(1, 1, 1, 0, *[1] * 8))), tmp_path)
    assert card["deviations"] == ["link 3 is inactive, expected active"]
    assert card["as_expected"] is False
    assert card["links_active"] == 11
    down = card["links"][3]
    assert (down["speed_mb_per_second"], down["peer_pci_address"], down["replay_errors"]) == (None, None, 0)
    assert down["unknown"]["speed_mb_per_second"] == "the link is not active"


def test_a_link_that_nvml_can_not_tell_does_not_end_the_scan(tmp_path: Path) -> None:
    (card,) = read(Library(a100(0, NvLinkState=states(1, 1, Code(999), *[1] * 9))), tmp_path)
    assert len(card["links"]) == 12
    assert card["links"][2]["state"] is None
    assert (card["as_expected"], card["deviations"]) == (None, [])


def test_missing_and_slow_links(tmp_path: Path) -> None:
    slow = {number: field(25000) for number in SPEED_FIELDS} | {SPEED_FIELDS[5]: field(20000)}
    (card,) = read(Library(a100(0, fields=slow, NvLinkState=states(*[1] * 11))), tmp_path)
    assert card["deviations"] == ["11 links, expected 12", "link 5 runs at 20000 MB/s, expected 25000"]


def test_links_beyond_the_twelfth_have_their_speed_by_scope(tmp_path: Path) -> None:
    count = {91: field(18)} | {(164, link): field(26562) for link in range(18)}
    hopper = a100(
        0,
        Name="NVIDIA H100 80GB HBM3",
        NvLinkState=states(*[1] * 18),
        NvLinkVersion=states(*[6] * 18),
        fields=count,
    )
    (card,) = read(Library(hopper), tmp_path)
    assert card["as_expected"] is True
    assert {(link["speed_mb_per_second"], link["version"]) for link in card["links"]} == {(26562, "4.0")}


def test_bridged_cards_have_all_links_or_none(tmp_path: Path) -> None:
    name = "NVIDIA A100 80GB PCIe"
    for up, right in ((12, True), (0, True), (8, False)):
        (card,) = read(Library(a100(0, Name=name, NvLinkState=states(*[1] * up, *[0] * (12 - up)))), tmp_path)
        assert card["as_expected"] is right
        assert len(card["deviations"]) == (0 if right else 4)


def test_a_model_that_nobody_knows_is_not_judged(tmp_path: Path) -> None:
    (card,) = read(Library(a100(0, Name="NVIDIA Z900")), tmp_path)
    assert (card["expected"], card["as_expected"], card["deviations"]) == (None, None, [])
    assert card["unknown"]["as_expected"] == "the number of NVLinks of the model NVIDIA Z900 is not known here"
    assert card["links_active"] == 12


def test_cards_without_switches_agree_on_what_joins_them(tmp_path: Path) -> None:
    """Four A100 have four links to each of the others."""
    four = [joined(one, sorted([other for other in range(4) if other != one] * 4)) for one in range(4)]
    assert [card["as_expected"] for card in read(Library(*four), tmp_path)] == [True] * 4
    four[0]["NvLinkState"] = states(0, *[1] * 11)
    cards = read(Library(*four), tmp_path)
    assert cards[0]["deviations"] == [
        "link 0 is inactive, expected active",
        "3 links to 0000:0f:00.0, which has 4 links to it",
    ]
    assert cards[1]["deviations"] == ["4 links to 0000:07:00.0, which has 3 links to it"]
    assert [card["as_expected"] for card in cards] == [False, False, True, True]
    assert read(Library(*four), tmp_path, "1")[0]["deviations"] == cards[1]["deviations"]


def test_lost_and_hanging_cards_are_unknown(tmp_path: Path) -> None:
    driver_files(tmp_path, "0000:07:00.0", "0000:0f:00.0", "0000:47:00.0", "0000:4e:00.0")
    files = FileTree(str(tmp_path))
    library = Library(a100(0, handle=Code(15)), a100(1, NvLinkState=Hang()), a100(2), a100(3, NvLinkState=Code(15)))
    with ReaderProcess(NvlinkReader(Nvml(library, files), files), seconds=0.5) as process:
        cards = survey_links(process.call, files)
    assert [card["pci_address"][5:7] for card in cards] == ["07", "0f", "47", "4e"]
    assert [card["links"] is None for card in cards] == [True, True, False, True]
    assert [card["as_expected"] for card in cards] == [None, None, True, None]
    assert "fallen off the bus" in cards[0]["unknown"]["links"]
    assert cards[1]["unknown"]["links_active"] == "no answer within 0.5 s"
    assert cards[1]["uuid"].startswith("GPU-00000001")
    assert "fallen off the bus" in cards[3]["unknown"]["as_expected"]


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownGpuError):
        read(Library(a100(0)), tmp_path, "GPU-none")


answers = st.one_of(
    st.none(),
    st.integers(-1, 1 << 65),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([Code(2), Code(3), Code(15), Code(999), Code("odd"), TypeError("odd")]),
    st.builds(SimpleNamespace, busId=st.text(max_size=3)),
    st.lists(st.integers(), max_size=3),
)
links = st.one_of(answers, st.dictionaries(st.integers(0, 20).map(lambda link: (link,)), answers, max_size=6))


@given(
    st.dictionaries(
        st.sampled_from(["handle", "Name", "fields", "PciInfo", *(name for name in a100() if "NvLink" in name)]), links
    )
)
def test_whatever_nvml_answers_is_a_document(changes: dict[str, Any]) -> None:
    for card in read(Library(a100(0) | changes, a100(1)), Path("/nowhere")):
        assert (card["links"] is None) == ("links" in card["unknown"])
        assert (card["as_expected"] is None) == ("as_expected" in card["unknown"])
        for link in card["links"] or []:
            assert {name for name, value in link.items() if value is None} == link["unknown"].keys()


def healthy(**changes: Any) -> dict[str, Any]:
    """An A100 whose driver tells states and errors of links by field, each error once a link."""
    card = a100(**changes)
    card["fields"] = {
        **card["fields"],
        **{(165, link): field(1) for link in range(12)},
        **{number: field(12) for number in (38, 45, 52, 59)},
    }
    return card


def health(library: Library, tmp_path: Path, model: str | None = "NVIDIA A100-SXM4-80GB") -> Any:
    files = FileTree(str(tmp_path))
    reader = NvlinkReader(Nvml(library, files), files)
    return lambda: reader.health(0, model)


def test_health_of_links(tmp_path: Path) -> None:
    library = Library(healthy())
    ask = health(library, tmp_path)
    for _unused in range(2):
        assert ask() == {"links": 12, "expected": 12, "bridge": False, "down": [], "errors": 48, "unknown": {}}
    library.cards[0]["fields"][165, 3] = field(0)
    library.cards[0]["NvLinkState"] = AssertionError("asked for each link")
    assert ask()["down"] == [3]
    library.cards[0]["fields"][165, 3] = field(2)
    assert ask()["down"] == []  # it sleeps


def test_health_by_single_calls_where_the_driver_tells_no_states_by_field(tmp_path: Path) -> None:
    card = a100(NvLinkState=states(*[1] * 11, 0))
    card["fields"] |= {52: field(5)}
    ask = health(Library(card), tmp_path)
    for _unused in range(2):
        assert ask() == {"links": 12, "expected": 12, "bridge": False, "down": [11], "errors": 5, "unknown": {}}


def test_health_counts_on_what_a_link_counted_before_it_went_down(tmp_path: Path) -> None:
    card = healthy()
    card["fields"] = {key: value for key, value in card["fields"].items() if key not in (38, 45, 52, 59)}
    card["fields"] |= {(161, link): field(2) for link in range(12)}
    library = Library(card)
    ask = health(library, tmp_path)
    assert ask()["errors"] == 24
    del card["fields"][161, 0]
    card["fields"][161, 1] = field(3)
    assert ask()["errors"] == 25


def test_health_without_any_counter_says_so(tmp_path: Path) -> None:
    told = health(Library(a100()), tmp_path)()
    assert told["errors"] is None
    assert "counts no errors" in told["unknown"]["errors"]


@pytest.mark.parametrize("code", [15, 999, 4])
def test_health_that_can_not_be_read_is_unknown(tmp_path: Path, code: int) -> None:
    told = health(Library(healthy(handle=Code(code))), tmp_path)()
    assert (told["links"], told["down"], told["errors"]) == (None, None, None)
    card = healthy()
    card["fields"][52] = field(code=code)
    told = health(Library(card), tmp_path)()
    assert told["errors"] is None
    assert told["unknown"]["errors"]
    card = healthy()
    card["fields"][165, 4] = field(code=code)
    ask = health(Library(card), tmp_path)
    ask()
    assert ask()["down"] is None


def test_health_of_a_card_without_links_asks_once(tmp_path: Path) -> None:
    library = Library(l40s())
    ask = health(library, tmp_path, "NVIDIA L40S")
    assert ask() == {"links": 0, "expected": 0, "bridge": False, "down": [], "errors": 0, "unknown": {}}
    library.cards[0]["fields"] = AssertionError("asked again")
    assert ask()["links"] == 0


def test_health_of_cards_that_a_bridge_may_join(tmp_path: Path) -> None:
    model = "NVIDIA A100 80GB PCIe"
    card = healthy()
    card["fields"] |= {(165, link): field(0) for link in range(12)}
    card["NvLinkState"] = states(*[0] * 12)
    ask = health(Library(card), tmp_path, model)
    assert (ask()["down"], ask()["bridge"]) == (list(range(12)), True)
    card["fields"] |= {(165, link): field(1) for link in range(6)}
    assert ask()["down"] == [6, 7, 8, 9, 10, 11]


def test_health_of_a_model_that_is_not_known(tmp_path: Path) -> None:
    told = health(Library(healthy()), tmp_path, "NVIDIA Z900")()
    assert told["expected"] is None
    assert told["unknown"] == dict.fromkeys(("expected", "bridge"), "it is not known for this model")
