# SPDX-License-Identifier: GPL-3.0-or-later
"""What apt and dnf are asked, and how their words are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_managers import Apt, Dnf, ManagerError, said


class Recorder(CommandRunner):
    """Gives recorded answers by a word of the command, and keeps what was asked."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        self.asked.append(list(command))
        return next((answer for word, answer in self.answers.items() if word in command), Answer(0))


AUDIT = """The following packages are only half configured, probably due to problems
configuring them the first time.  The configuration should be retried using
dpkg --configure <package> or the configure menu option in dselect:
 nvidia-open-kernel-dkms stand-in
 nvidia-smi           a tool

"""


def test_what_dpkg_left_half_done_is_named(tmp_path: Path) -> None:
    apt = Apt(Recorder({"--audit": Answer(0, AUDIT)}), str(tmp_path), False)
    assert "dpkg left half done: nvidia-open-kernel-dkms, nvidia-smi" in apt.interrupted()
    assert Dnf(Recorder({}), str(tmp_path), False).interrupted() == []


def test_words_ask_for_exact_versions(tmp_path: Path) -> None:
    wanted = {"a": "1-1", "b": "2-*", "c": None, "d": None}
    assert Apt(Recorder({}), str(tmp_path), False).words(wanted, {"c": ["9"]}) == ["a=1-1", "b=2-*", "d"]
    assert Dnf(Recorder({}), str(tmp_path), False).words(wanted, {"c": ["9"]}) == ["a-1-1", "b-2-*", "d"]


def test_version_lock_comes_along_where_dnf_has_none(tmp_path: Path) -> None:
    runner = Recorder({"versionlock": Answer(1, complaint="No such command: versionlock")})
    assert Dnf(runner, str(tmp_path), False).words({}, {}) == ["python3-dnf-plugin-versionlock"]


def test_sources_of_the_host_alone_tell_where_its_archive_is(tmp_path: Path) -> None:
    rows = (
        "http://a.example.org/debian/|bookworm|main|$(SIGNED_BY)|/etc/apt/sources.list:1\n"
        "http://a.example.org/debian/|bookworm|contrib|$(SIGNED_BY)|/etc/apt/sources.list.d/ringmaster-debian.sources:1\n"
        "http://a.example.org/security/|bookworm-security|main|/usr/share/keyrings/k.gpg|/etc/apt/sources.list:2\n"
        "broken\n"
    )
    apt = Apt(Recorder({"indextargets": Answer(0, rows)}), str(tmp_path), False)
    assert apt.archive("bookworm") == ("http://a.example.org/debian/", ["main"], None)
    assert apt.archive("bookworm-security") == (
        "http://a.example.org/security/",
        ["main"],
        "/usr/share/keyrings/k.gpg",
    )
    assert apt.archive("trixie") is None


@pytest.mark.parametrize(
    "answer",
    [
        Answer(100, complaint="E: Failed to fetch http://x/"),
        Answer(0, complaint="W: GPG error: http://x InRelease: The signatures couldn't be verified"),
        Answer(None, complaint="no answer within 900 s: apt-get update"),
    ],
)
def test_indexes_that_are_not_whole_are_an_error(tmp_path: Path, answer: Answer) -> None:
    with pytest.raises(ManagerError):
        Apt(Recorder({"update": answer}), str(tmp_path), False).refresh()


def test_offline_no_source_of_the_host_is_asked(tmp_path: Path) -> None:
    runner = Recorder({})
    apt = Apt(runner, str(tmp_path), True)
    apt.stage({"/etc/apt/sources.list.d/ringmaster-mirror.sources": b"Types: deb\n"}, [])
    assert [path.name for path in (tmp_path / "sources.list.d").iterdir()] == ["ringmaster-mirror.sources"]
    assert "Dir::Etc::SourceList=/dev/null" in apt.options


def test_keys_of_the_trial_are_those_of_the_trial(tmp_path: Path) -> None:
    apt = Apt(Recorder({}), str(tmp_path), True)
    key, source = "/etc/apt/keyrings/ringmaster-x.asc", "/etc/apt/sources.list.d/ringmaster-x.sources"
    apt.stage({key: b"KEY", source: f"Types: deb\nSigned-By: {key}\n".encode()}, [])
    assert (
        f"Signed-By: {tmp_path}/keyrings/ringmaster-x.asc"
        in (tmp_path / "sources.list.d/ringmaster-x.sources").read_text()
    )
    assert (tmp_path / "keyrings/ringmaster-x.asc").read_bytes() == b"KEY"


def test_beginning_of_a_file_on_a_full_disk_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()

    class Full(Recorder):
        def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
            if "download" in command:
                (tmp_path / "files" / "a_1%3a2-1_amd64.deb").write_text("beginning")
                return Answer(0)
            return Answer(2) if "--contents" in command else Answer(0)

    assert Apt(Full({}), str(tmp_path), False).fetch([("a", "1:2-1")], str(tmp_path / "files")) == {}
    assert list((tmp_path / "files").iterdir()) == []


def test_what_was_said_is_the_marked_lines_or_the_last() -> None:
    assert said(Answer(100, "Reading\nE: first\n", "E: second\nE: first")) == "E: first; E: second"
    assert said(Answer(1, "one\ntwo\n")) == "one; two"
    assert said(Answer(3)) == "status 3"
    curl = "  - Curl error (7): Couldn't connect to server for http://127.0.0.1:9/repodata/repomd.xml"
    assert said(Answer(1, "makecache\n", f"{curl}\nError: Cannot download repomd.xml")) == (
        f"{curl.strip()}; Error: Cannot download repomd.xml"
    )
