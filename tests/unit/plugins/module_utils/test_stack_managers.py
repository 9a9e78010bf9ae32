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


SIGNATURES = """RSA/SHA256, Fri 10 May 2024 12:03:04 PM UTC, Key ID 8A3872BF3228467C (none)
(none) (none)
"""


def test_keys_that_signed_nothing_any_more_are_taken_from_rpm(tmp_path: Path) -> None:
    keys = ["gpg-pubkey-3228467c-6147ad9a", "gpg-pubkey-d42d0685-62589a51"]
    runner = Recorder({"gpg-pubkey": Answer(0, "\n".join(keys)), "--qf": Answer(0, SIGNATURES)})
    dnf = Dnf(runner, str(tmp_path), False)
    assert dnf.trusted_keys() == set(keys)
    dnf.distrust(keys)
    assert runner.asked[-1] == ["rpm", "--erase", keys[1]]
    runner.asked.clear()
    dnf.distrust(keys[:1])
    assert ["rpm", "--erase"] not in [words[:2] for words in runner.asked]
    assert Apt(Recorder({}), str(tmp_path), False).trusted_keys() == set()


@pytest.mark.parametrize("fails", ["--qf", "--erase"])
def test_key_that_rpm_does_not_give_up_is_said(tmp_path: Path, fails: str) -> None:
    runner = Recorder({fails: Answer(1, complaint="error: can't create transaction lock")})
    with pytest.raises(ManagerError, match="transaction lock"):
        Dnf(runner, str(tmp_path), False).distrust({"gpg-pubkey-1-2"})


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


class Repository(Recorder):
    """Brings `files` where they are asked for. `ends_in` is what happens while that goes on."""

    def __init__(self, files: dict[str, str], ends_in: BaseException | None = None) -> None:
        super().__init__({})
        self.files, self.ends_in = files, ends_in

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        super().run(command, timeout)
        if "download" in command:
            apt = "--chdir" in command
            folder = command[command.index("--chdir") + 1] if apt else command[-2].partition("=")[2]
            for name, content in self.files.items():
                (Path(folder) / name).write_text(content)
            if self.ends_in is not None:
                raise self.ends_in
        looked_at = "--contents" in command or "--checksig" in command
        return Answer(2 if looked_at and Path(command[-1]).read_text() != "whole" else 0)


MANAGERS = [(Apt, "a_1%3a2-1_amd64.deb"), (Dnf, "a-2-1.x86_64.rpm")]


@pytest.mark.parametrize(("manager", "file"), MANAGERS)
def test_a_file_counts_as_there_when_it_is_whole(tmp_path: Path, manager: type[Apt] | type[Dnf], file: str) -> None:
    folder, wanted = tmp_path / "files", [("a", "1:2-1")]
    folder.mkdir()

    def fetch(repository: Repository) -> dict[str, str]:
        return manager(repository, str(tmp_path), False).fetch(wanted, str(folder))

    # On a full disk apt leaves the beginning of a file, and says that all is well.
    assert fetch(Repository({file: "beginning"})) == {}
    assert list(folder.iterdir()) == []
    # Killed in the middle; what is left then is not taken for the file by the next run.
    with pytest.raises(KeyboardInterrupt):
        fetch(Repository({file: "begin"}, KeyboardInterrupt()))
    (folder / ".arriving").mkdir()
    (folder / ".arriving" / file).write_text("begin")
    assert manager(Recorder({}), str(tmp_path), False).file_of(str(folder), *wanted[0]) is None
    assert fetch(Repository({})) == {}
    assert fetch(Repository({file: "whole"})) == {"a": file}
    assert [path.name for path in folder.iterdir()] == [file]
    # Nobody is asked for what is there.
    again = Repository({})
    assert fetch(again) == {"a": file}
    assert again.asked == []


def test_what_the_cache_has_damaged_comes_from_the_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    file = "a_1%3a2-1_amd64.deb"
    (tmp_path / file).write_text("beginning")
    repository = Repository({file: "whole"})
    apt = Apt(repository, str(tmp_path), False)
    monkeypatch.setattr(apt, "_cached", lambda *_package: str(tmp_path / file))
    assert apt.fetch([("a", "1:2-1")], str(tmp_path / "files")) == {"a": file}
    assert (tmp_path / "files" / file).read_text() == "whole"
    # Each file is read to its end once.
    assert sum("--contents" in asked for asked in repository.asked) == 2


def test_one_that_cannot_be_had_does_not_keep_the_others_away(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()

    class Lacking(Repository):
        def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
            return Answer(100) if "b=1" in command else super().run(command, timeout)

    repository = Lacking({"a_1_amd64.deb": "whole"})
    found = Apt(repository, str(tmp_path), False).fetch([("a", "1"), ("b", "1")], str(tmp_path / "files"))
    assert found == {"a": "a_1_amd64.deb"}


def test_what_was_said_is_the_marked_lines_or_the_last() -> None:
    assert said(Answer(100, "Reading\nE: first\n", "E: second\nE: first")) == "E: first; E: second"
    assert said(Answer(1, "one\ntwo\n")) == "one; two"
    assert said(Answer(3)) == "status 3"
    curl = "  - Curl error (7): Couldn't connect to server for http://127.0.0.1:9/repodata/repomd.xml"
    assert said(Answer(1, "makecache\n", f"{curl}\nError: Cannot download repomd.xml")) == (
        f"{curl.strip()}; Error: Cannot download repomd.xml"
    )
