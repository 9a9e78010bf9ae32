# SPDX-License-Identifier: GPL-3.0-or-later
"""Scripts for hosts without Python: quoting, answers, and the two file formats that are edited."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.plugin_utils import raw_mounts, raw_settings, raw_shell
from ansible_collections.ringmaster.inference.plugins.plugin_utils.raw_shell import RawError, StepError

# What an argument of a program can be: any bytes but NUL.
words = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
awkward = st.text(alphabet="'\"\\$`!*?[]{}()<>|&;~#% \t\n\r-=aé☃", max_size=30)


@settings(max_examples=60)
@given(st.lists(words | awkward, max_size=5))
def test_shell_gives_back_what_was_quoted(given_words: list[str]) -> None:
    line = "printf '%s\\0' " + " ".join(raw_shell.quote(word) for word in ["", *given_words])
    output = subprocess.run(["/bin/sh", "-c", line], stdout=subprocess.PIPE, check=True).stdout
    assert output.split(b"\0")[1:-1] == [word.encode("utf-8", "surrogateescape") for word in given_words]


@settings(max_examples=60)
@given(st.lists(words | awkward, max_size=4))
def test_script_tells_its_arguments_as_they_are(given_words: list[str]) -> None:
    line = raw_shell.command('for word in "$@"; do say word "$word"; done', given_words)
    # As become plugins and connections do: quoted once more.
    nested = f"/bin/sh -c {shlex.quote(line)}"
    output = subprocess.run(["/bin/sh", "-c", nested], stdout=subprocess.PIPE, check=True).stdout.decode("ascii")
    assert raw_shell.read(output).texts("word") == given_words
    assert raw_shell.read("Last login: never\r\n" + output.replace("\n", "\r\n") + "bye").texts("word") == given_words


@given(words)
def test_python_reads_quoting_as_the_shell_does(word: str) -> None:
    assert shlex.split(raw_shell.quote(word)) == [word]


def test_nul_is_refused() -> None:
    with pytest.raises(RawError, match="NUL"):
        raw_shell.quote("a\0b")


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_junk_is_no_answer(junk: str) -> None:
    with pytest.raises(ValueError, match="no answer"):
        raw_shell.read(junk.replace(raw_shell.BEGIN, ""))
    assert raw_shell.read(f"{raw_shell.BEGIN}\nname 61\n{raw_shell.END}\n{junk}").pairs == [("name", b"a")]


@pytest.mark.parametrize("cut", range(1, 60, 3))
def test_answer_without_its_end_is_none(cut: int) -> None:
    whole = f"{raw_shell.BEGIN}\nname 616263\nother 64\n{raw_shell.END}\n"
    with pytest.raises(ValueError, match="answer"):
        raw_shell.read(whole[: -min(cut + 1, len(whole))])


def test_noise_between_the_lines_is_no_part_of_the_answer() -> None:
    lines = [raw_shell.BEGIN, "name 61", "dpkg: warning: something", "half 6", "upper 6A", "", "name 62", raw_shell.END]
    assert raw_shell.read("\n".join(lines)).pairs == [("name", b"a"), ("name", b"b")]


def test_step_that_failed_is_told() -> None:
    line = raw_shell.command('say before x; attempt "do it" sh -c "echo no; echo way >&2; exit 3"; say after y', [])
    finished = subprocess.run(["/bin/sh", "-c", line], stdout=subprocess.PIPE, text=True, check=False)
    assert finished.returncode == 1
    with pytest.raises(StepError) as found:
        raw_shell.read(finished.stdout)
    assert (found.value.step, found.value.complaint) == ("do it", "no\nway")
    assert "after" not in finished.stdout


def test_text_that_is_no_utf8_can_be_shown() -> None:
    assert raw_shell.shown("a\udcffb") == "a\\xffb"


fields = st.text(
    alphabet=st.characters(min_codepoint=1, max_codepoint=0x2FFF, exclude_categories=["Cs"]), min_size=1, max_size=12
)
options = st.lists(fields.map(lambda text: text.replace(",", "x")), min_size=1, max_size=3).map(tuple)
mounts = st.builds(raw_mounts.Mount, fields, fields, fields, options, st.integers(0, 9), st.integers(0, 9))


@given(mounts)
def test_line_of_a_table_is_read_as_it_was_written(mount: raw_mounts.Mount) -> None:
    assert raw_mounts.parse_table(mount.line() + "\n") == [mount]


@given(st.text(max_size=200), mounts)
def test_table_keeps_all_other_lines(text: str, mount: raw_mounts.Mount) -> None:
    before = [line for line in text.split("\n") if (raw_mounts.parse_line(line) or mount).key != mount.key]
    with_it = raw_mounts.replaced(text, mount.key, mount)
    assert [each for each in raw_mounts.parse_table(with_it) if each.key == mount.key] == [mount]
    assert raw_mounts.replaced(with_it, mount.key, mount) == with_it
    without = raw_mounts.replaced(with_it, mount.key, None)
    assert mount.key not in [each.key for each in raw_mounts.parse_table(without)]
    assert [line for line in without.split("\n") if (raw_mounts.parse_line(line) or mount).key != mount.key] == before


def test_table_of_a_real_host() -> None:
    text = (
        "# comment /boot\n\nproc\t/proc  proc defaults 0 0\n"
        "PARTUUID=1-02 / ext4 defaults,noatime 0 1\n#none none swap sw\n/swap\\040file none swap sw 0 0\nshort line\n"
        "tmpfs /tmp tmpfs"
    )
    table = raw_mounts.parse_table(text)
    assert [each.path for each in table] == ["/proc", "/", "none", "/tmp"]
    assert table[2].source == "/swap file"
    assert table[3].options == ("defaults",)
    log = raw_mounts.Mount("tmpfs", "/var/log", "tmpfs", ("rw", "size=1m"))
    assert raw_mounts.replaced(text, log.key, log) == f"{text}\ntmpfs /var/log tmpfs rw,size=1m 0 0\n"
    assert raw_mounts.replaced(text, ("none", "/swap file"), None).count("swap") == 1
    assert raw_mounts.replaced(text, ("none", "/other"), None) == text


def test_same_line_in_another_hand_stays() -> None:
    text = "tmpfs\t/tmp\ttmpfs\trw,nosuid\t0\t0\n"
    same = raw_mounts.Mount("tmpfs", "/tmp", "tmpfs", ("rw", "nosuid"))
    assert raw_mounts.replaced(text, same.key, same) == text
    twice = text + "tmpfs /tmp tmpfs rw 0 0\n"
    assert raw_mounts.replaced(twice, same.key, same) == text


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("net.core.somaxconn", "net/core/somaxconn"),
        ("net/core/somaxconn", "net/core/somaxconn"),
        ("net.ipv4.conf.eth0/100.forwarding", "net/ipv4/conf/eth0.100/forwarding"),
        ("net/ipv4/conf/eth0.100/forwarding", "net/ipv4/conf/eth0.100/forwarding"),
    ],
)
def test_name_of_a_setting_leads_to_its_file(name: str, path: str) -> None:
    assert raw_settings.path_of(name) == path


@pytest.mark.parametrize(
    "name",
    ["", "somaxconn", "net..core", "../etc/passwd", "net/../../etc", "/net/core", "net.core=1", "net. core", "a.b\n"],
)
def test_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(RawError, match="kernel setting"):
        raw_settings.path_of(name)


@pytest.mark.parametrize("value", ["", " ", "1\n2", "1\0", "é"])
def test_value_that_no_line_can_hold_is_refused(value: str) -> None:
    with pytest.raises(RawError, match="one line"):
        raw_settings.checked_value(value)


@given(st.text(max_size=200), st.integers(0, sys.maxsize))
def test_settings_keep_all_other_lines(text: str, number: int) -> None:
    name, value = "net.core.somaxconn", str(number)
    with_it = raw_settings.replaced(text, name, value)
    found = [setting for setting in map(raw_settings.parse_line, with_it.split("\n")) if setting]
    assert [setting[1] for setting in found if setting[0] == "net/core/somaxconn"] == [value]
    assert raw_settings.replaced(with_it, name, value) == with_it
    others = [line for line in text.split("\n") if line and not _is(line, name)]
    assert [line for line in with_it.split("\n") if line and not _is(line, name)] == others
    without = raw_settings.replaced(with_it, name, None)
    assert [line for line in without.split("\n") if line] == others


def _is(line: str, name: str) -> bool:
    setting = raw_settings.parse_line(line)
    return setting is not None and setting[0] == raw_settings.path_of(name)


def test_settings_of_a_real_file() -> None:
    text = "# a\n; b\n-net/core/somaxconn=128\nnet.ipv4.tcp_rmem = 4096\t131072  6291456\njunk\nnet.core.somaxconn = 1"
    assert raw_settings.replaced(text, "net.core.somaxconn", "128") == (
        "# a\n; b\n-net/core/somaxconn=128\nnet.ipv4.tcp_rmem = 4096\t131072  6291456\njunk"
    )
    assert raw_settings.replaced(text, "net.ipv4.tcp_rmem", "4096 131072 6291456") == text
