# SPDX-License-Identifier: GPL-3.0-or-later
"""Units, kernel settings, mounts, packages, swap and commands, with programs that only note their calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ansible_collections.ringmaster.inference.plugins.action import raw_apt, raw_info, raw_mount, raw_swap, raw_sysctl

if TYPE_CHECKING:
    from tests.unit.plugins.action.conftest import RawHost

# A systemd with one unit, whose state is in files of this folder.
SYSTEMCTL = """
cd "$(dirname "$LOG")/unit" || exit 1
case $1 in
  show)
    [ -e load ] || { printf "LoadState=not-found\\nActiveState=inactive\\nSubState=dead\\nUnitFileState=\\n"; exit; }
    for name in LoadState=load ActiveState=active SubState=sub UnitFileState=file NeedDaemonReload=reload \\
      Result=result; do
      printf "%s=%s\\n" "${name%%=*}" "$(cat "${name#*=}")"
    done ;;
  start | restart | reload) cat on_start >active ;;
  stop) echo inactive >active ;;
  enable) echo enabled >file ;;
  disable) echo disabled >file ;;
  daemon-reload) echo no >reload ;;
  status) echo "the unit's last words"; exit 3 ;;
esac
"""


def calls(host: RawHost) -> list[str]:
    """What was done, less what only looks."""
    return [call for call in host.calls() if not call.startswith("systemctl [show]")]


@pytest.fixture
def unit(plain_host: RawHost) -> Path:
    """A unit that is loaded, stopped and disabled."""
    folder = plain_host.folder / "unit"
    folder.mkdir()
    plain_host.stub("systemctl", SYSTEMCTL)
    values = {"load": "loaded", "active": "inactive", "sub": "dead", "file": "disabled", "reload": "no"}
    for name, value in {**values, "result": "success", "on_start": "active"}.items():
        (folder / name).write_text(value)
    return folder


def test_unit_is_enabled_and_started_once(plain_host: RawHost, unit: Path) -> None:
    result = plain_host.twice("raw_systemd_service", name="example", enabled=True, state="started")
    assert calls(plain_host) == [
        "systemctl [enable] [--] [example.service]",
        "systemctl [start] [--] [example.service]",
    ]
    assert (result["state"], result["enabled"]) == ("active", True)
    plain_host.twice("raw_systemd_service", name="example.service", enabled=False, state="stopped")
    assert (unit / "active").read_text().strip() == "inactive"


def test_unit_whose_file_changed_is_read_again_first(plain_host: RawHost, unit: Path) -> None:
    (unit / "reload").write_text("yes")
    plain_host.run("raw_systemd_service", name="example", state="started")
    assert calls(plain_host) == ["systemctl [daemon-reload]", "systemctl [start] [--] [example.service]"]


@pytest.mark.parametrize(
    ("active", "state", "verb"),
    [
        ("active", "restarted", "restart"),
        ("inactive", "restarted", "restart"),
        ("active", "reloaded", "reload"),
        ("failed", "reloaded", "start"),
        ("failed", "started", "start"),
        ("activating", "stopped", "stop"),
    ],
)
def test_verb_fits_the_state(plain_host: RawHost, unit: Path, active: str, state: str, verb: str) -> None:
    (unit / "active").write_text(active)
    dry = plain_host.run("raw_systemd_service", name="example", state=state, check=True, diff=True)
    assert dry["diff"]["after"]["done"] == [verb]
    assert calls(plain_host) == []
    assert plain_host.run("raw_systemd_service", name="example", state=state)["changed"]
    assert calls(plain_host) == [f"systemctl [{verb}] [--] [example.service]"]


@pytest.mark.parametrize(("active", "state"), [("active", "started"), ("inactive", "stopped"), ("failed", "stopped")])
def test_nothing_is_done_where_it_is_so(plain_host: RawHost, unit: Path, active: str, state: str) -> None:
    (unit / "active").write_text(active)
    assert not plain_host.run("raw_systemd_service", name="example", state=state)["changed"]
    assert calls(plain_host) == []


def test_unit_that_fails_at_once_is_told_with_its_last_words(plain_host: RawHost, unit: Path) -> None:
    (unit / "on_start").write_text("failed")
    (unit / "result").write_text("exit-code")
    result = plain_host.run("raw_systemd_service", name="example", state="started")
    assert result["failed"]
    assert result["changed"]
    assert "exit-code" in result["msg"]
    assert "last words" in result["msg"]


def test_unit_that_dies_and_is_started_again_and_again_is_told(plain_host: RawHost, unit: Path) -> None:
    (unit / "on_start").write_text("activating")
    (unit / "sub").write_text("auto-restart")
    result = plain_host.run("raw_systemd_service", name="example", state="started")
    assert result["failed"]
    assert "auto-restart" in result["msg"]


def test_unit_that_has_done_its_work_is_no_failure(plain_host: RawHost, unit: Path) -> None:
    (unit / "on_start").write_text("inactive")
    assert not plain_host.run("raw_systemd_service", name="example", state="restarted").get("failed")


def test_unit_that_is_not_there(plain_host: RawHost, unit: Path) -> None:
    (unit / "load").unlink()
    assert not plain_host.run("raw_systemd_service", name="example", state="stopped", enabled=False)["changed"]
    assert plain_host.run("raw_systemd_service", name="example", state="started", check=True)["changed"]
    result = plain_host.run("raw_systemd_service", name="example", state="started")
    assert result["failed"]
    assert "knows none" in result["msg"]


@pytest.mark.parametrize("file", ["static", "generated", "masked", "bad"])
def test_unit_that_can_not_be_enabled_is_refused(plain_host: RawHost, unit: Path, file: str) -> None:
    (unit / "file").write_text(file)
    result = plain_host.run("raw_systemd_service", name="example", enabled=True, check=True)
    assert result["failed"]
    assert not plain_host.run("raw_systemd_service", name="example", enabled=False)["changed"]


@pytest.mark.parametrize("name", ["--root=/", "a b", "a;b", "$(x)", "", "a/b", "x" * 300])
def test_name_that_is_no_unit_is_refused(plain_host: RawHost, unit: Path, name: str) -> None:
    result = plain_host.run("raw_systemd_service", name=name, state="stopped")
    assert result["failed"]
    assert plain_host.commands == []


def test_systemd_alone(plain_host: RawHost, unit: Path) -> None:
    assert not plain_host.run("raw_systemd_service", daemon_reload=True, daemon_reexec=True)["changed"]
    assert calls(plain_host) == ["systemctl [daemon-reload]", "systemctl [daemon-reexec]"]
    assert plain_host.run("raw_systemd_service")["failed"]


def test_host_without_systemd_is_told(plain_host: RawHost) -> None:
    plain_host.stub("systemctl", 'echo "System has not been booted with systemd" >&2; exit 1')
    result = plain_host.run("raw_systemd_service", name="example", state="started")
    assert result["failed"]
    assert "booted" in result["msg"]


@pytest.fixture
def kernel(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = raw_host.folder / "sys"
    (folder / "net" / "core").mkdir(parents=True)
    (folder / "net" / "core" / "somaxconn").write_text("128\n")
    (folder / "net" / "core" / "three").write_text("1\t2\t3\n")
    monkeypatch.setattr(raw_sysctl, "KERNEL", str(folder))
    return folder


def test_setting_is_live_and_kept(raw_host: RawHost, kernel: Path) -> None:
    file = raw_host.folder / "sysctl.d" / "90.conf"
    result = raw_host.twice("raw_sysctl", name="net.core.somaxconn", value="4096", file=str(file))
    assert result["value"] == "4096"
    assert (kernel / "net/core/somaxconn").read_text() == "4096\n"
    assert file.read_text() == "net.core.somaxconn = 4096\n"
    assert file.stat().st_mode & 0o777 == 0o644
    raw_host.twice("raw_sysctl", name="net/core/three", value="1 2 3", file=str(file))
    assert (kernel / "net/core/three").read_text() == "1\t2\t3\n", "the kernel's own way to write it is the same"
    raw_host.twice("raw_sysctl", name="net.core.three", state="absent", file=str(file))
    raw_host.twice("raw_sysctl", name="net.core.somaxconn", state="absent", file=str(file))
    assert not file.exists()
    assert (kernel / "net/core/somaxconn").read_text() == "4096\n"


def test_setting_live_or_kept_alone(raw_host: RawHost, kernel: Path) -> None:
    file = raw_host.folder / "90.conf"
    raw_host.twice("raw_sysctl", name="net.core.somaxconn", value="256", file=str(file), persist=False)
    assert not file.exists()
    raw_host.twice("raw_sysctl", name="net.core.somaxconn", value="512", file=str(file), live=False)
    assert (kernel / "net/core/somaxconn").read_text() == "256\n"
    raw_host.twice("raw_sysctl", name="module.setting", value="1", file=str(file), live=False)
    assert file.read_text() == "net.core.somaxconn = 512\nmodule.setting = 1\n"


def test_setting_that_the_kernel_has_not_leaves_the_file(raw_host: RawHost, kernel: Path) -> None:
    file = raw_host.folder / "90.conf"
    for check in (True, False):
        result = raw_host.run("raw_sysctl", name="net.core.nothing", value="1", file=str(file), check=check)
        assert result["failed"]
        assert "this kernel has none" in result["msg"]
    assert not file.exists()


def test_value_that_the_kernel_makes_another_of_is_not_kept(
    plain_host: RawHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_host.folder / "sys" / "net"
    folder.mkdir(parents=True)
    (folder / "setting").symlink_to("/dev/null")
    monkeypatch.setattr(raw_sysctl, "KERNEL", str(folder.parent))
    file = plain_host.folder / "90.conf"
    result = plain_host.run("raw_sysctl", name="net.setting", value="7", file=str(file))
    assert result["failed"]
    assert "made  of it" in result["msg"]
    assert not file.exists()


@pytest.fixture
def table(plain_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose mount and umount keep their books in `mounted`."""
    mounted = plain_host.folder / "mounted"
    mounted.write_text("/dev/root / ext4 rw,relatime 0 0\n")
    monkeypatch.setattr(raw_mount, "MOUNTED", str(mounted))
    plain_host.stub("systemctl")
    plain_host.stub(
        "mount",
        f'case $1 in -T) grep -F " $4 " "$2" | head -n 1 >>"{mounted}" ;;\n'
        f'-o) sed -i "s/ext4 [^ ]*/ext4 ${{2#remount,}}/" "{mounted}" ;; esac',
    )
    plain_host.stub("umount", f'grep -v -F " $2 " "{mounted}" >"{mounted}.new"; mv "{mounted}.new" "{mounted}"')
    fstab = plain_host.folder / "fstab"
    fstab.write_text("# mine\nLABEL=root / ext4 defaults 0 1")
    return fstab


def mount_of(host: RawHost, fstab: Path, **given: Any) -> dict[str, Any]:
    return host.twice("raw_mount", fstab=str(fstab), **given)


def test_file_system_is_mounted_and_kept(plain_host: RawHost, table: Path) -> None:
    point = plain_host.folder / "log files"
    log = {"path": str(point), "src": "tmpfs", "fstype": "tmpfs", "opts": ["rw", "size=1m"]}
    escaped = str(point).replace(" ", "\\040")
    # The stub looks for the path as the table has it.
    plain_host.stub("mount", f'printf "%s\\n" "tmpfs {escaped} tmpfs rw 0 0" >>"{plain_host.folder}/mounted"')
    plain_host.stub("umount", f'sed -i /tmpfs/d "{plain_host.folder}/mounted"')
    mount_of(plain_host, table, **log, state="mounted")
    assert table.read_text().endswith(f"LABEL=root / ext4 defaults 0 1\ntmpfs {escaped} tmpfs rw,size=1m 0 0\n")
    assert point.is_dir()
    assert [call for call in plain_host.calls() if call.startswith("mount")] == [f"mount [-T] [{table}] [--] [{point}]"]
    log["opts"] = ["rw", "size=2m"]
    mount_of(plain_host, table, **log, state="mounted")
    assert plain_host.calls()[-1] == f"mount [-o] [remount,rw,size=2m] [--] [{point}]"
    mount_of(plain_host, table, path=str(point), state="absent_from_fstab")
    assert "umount" not in plain_host.log.read_text()
    mount_of(plain_host, table, path=str(point), state="absent")
    assert plain_host.calls()[-1] == f"umount [--] [{point}]"
    assert table.read_text() == "# mine\nLABEL=root / ext4 defaults 0 1\n"


def test_line_alone(plain_host: RawHost, table: Path) -> None:
    mount_of(plain_host, table, path="none", src="/swap file", fstype="swap", state="present")
    mount_of(plain_host, table, path="none", src="/other", fstype="swap", opts=["sw"], state="present")
    mount_of(plain_host, table, path="none", src="/swap file", state="absent")
    assert table.read_text().endswith("1\n/other none swap sw 0 0\n")
    assert [call for call in plain_host.calls() if "mount" in call] == []


def test_mount_that_fails_leaves_its_line_for_the_next_run(plain_host: RawHost, table: Path) -> None:
    plain_host.stub("mount", 'echo "mount: unknown filesystem type" >&2; exit 32')
    result = plain_host.run(
        "raw_mount", fstab=str(table), path=str(plain_host.folder / "x"), src="a", fstype="b", state="mounted"
    )
    assert result["failed"]
    assert result["changed"]
    assert "unknown filesystem" in result["msg"]


def test_other_file_system_in_the_place_is_refused(plain_host: RawHost, table: Path) -> None:
    for check in (True, False):
        result = plain_host.run(
            "raw_mount", fstab=str(table), path="/", src="tmpfs", fstype="tmpfs", state="mounted", check=check
        )
        assert result["failed"]
        assert "ext4" in result["msg"]
    assert "tmpfs" not in table.read_text()


def test_remount_only_where_an_option_is_missing(plain_host: RawHost, table: Path) -> None:
    assert not plain_host.run("raw_mount", path="/", opts=["rw"], state="remounted")["changed"]
    plain_host.twice("raw_mount", path="/", opts=["ro"], state="remounted")
    assert plain_host.calls() == ["mount [-o] [remount,ro] [--] [/]"]
    assert plain_host.run("raw_mount", path="/not/mounted", opts=["ro"], state="remounted")["failed"]


@pytest.mark.parametrize(
    "given",
    [
        {"path": "none", "state": "mounted", "src": "a", "fstype": "swap"},
        {"path": "none", "state": "absent"},
        {"path": "relative", "state": "absent"},
        {"path": "/a/../b", "state": "absent"},
        {"path": "/a", "state": "present", "src": "", "fstype": "x"},
        {"path": "/a", "state": "present", "src": "x", "fstype": "x", "opts": ["rw,ro"]},
        {"path": "/a", "state": "present", "src": "x", "fstype": "x", "opts": [""]},
        {"path": "/a", "state": "present", "src": "x", "fstype": "x", "passno": -1},
    ],
)
def test_mount_that_makes_no_sense_is_refused(plain_host: RawHost, table: Path, given: dict[str, Any]) -> None:
    assert plain_host.run("raw_mount", fstab=str(table), **given)["failed"]
    assert plain_host.commands == []


# A dpkg that knows what is in the folder `packages`.
DPKG = """
for name in "$@"; do :; done
file=$(dirname "$LOG")/packages/$name
[ -e "$file" ] || { echo "dpkg-query: no packages found matching $name" >&2; exit 1; }
cat "$file"
"""
APT = """
folder=$(dirname "$LOG")/packages
case $* in
  *update*) [ ! -e "$folder/../locked" ] || { rm "$folder/../locked"; echo "E: Could not get lock" >&2; exit 100; } ;;
  *--*install*) for name in "$@"; do :; done; echo "installed 1.0" >"$folder/${name%%=*}" ;;
  *remove* | *purge*) for name in "$@"; do :; done; echo "config-files 1.0" >"$folder/$name" ;;
esac
"""


@pytest.fixture
def packages(plain_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = plain_host.folder / "packages"
    folder.mkdir()
    lists = plain_host.folder / "lists"
    lists.mkdir()
    for name in ("_AGE", "_UPDATE"):
        monkeypatch.setattr(raw_apt, name, getattr(raw_apt, name).replace("/var/lib/apt/lists", str(lists)))
    plain_host.stub("dpkg-query", DPKG)
    plain_host.stub("apt-get", APT)
    plain_host.stub("sleep")
    return folder


def apt_calls(host: RawHost) -> list[str]:
    return [call for call in host.calls() if call.startswith("apt-get")]


def test_package_is_installed_once_without_a_question(plain_host: RawHost, packages: Path) -> None:
    assert plain_host.twice("raw_apt", name=["tool"])["packages"] == ["tool"]
    quiet = "[--quiet] [--yes] [--option=DPkg::Lock::Timeout=300]"
    kept = "[--option=Dpkg::Options::=--force-confdef] [--option=Dpkg::Options::=--force-confold]"
    assert apt_calls(plain_host) == [f"apt-get {quiet} {kept} [install] [--no-install-recommends] [--] [tool]"]
    plain_host.twice("raw_apt", name=["tool"], state="absent", purge=True)
    assert "[purge] [--] [tool]" in apt_calls(plain_host)[-1]


def test_what_is_left_of_a_removed_package_is_not_installed(plain_host: RawHost, packages: Path) -> None:
    (packages / "tool").write_text("config-files 1.0\n")
    assert not plain_host.run("raw_apt", name=["tool"], state="absent")["changed"]
    assert plain_host.run("raw_apt", name=["tool"], check=True)["changed"]


def test_version_is_compared(plain_host: RawHost, packages: Path) -> None:
    (packages / "tool").write_text("installed 1.0\n")
    assert not plain_host.run("raw_apt", name=["tool=1.0"])["changed"]
    dry = plain_host.run("raw_apt", name=["tool=1:2.0~rc1-1+b1"], check=True, diff=True)
    assert dry["diff"]["before"] == {"tool": "1.0"}
    assert dry["diff"]["after"] == {"tool": "1:2.0~rc1-1+b1"}


def test_lists_are_refreshed_when_they_are_old(plain_host: RawHost, packages: Path) -> None:
    given = {"name": ["tool"], "update_cache": True, "cache_valid_time": 3600}
    (plain_host.folder / "locked").touch()
    (packages / "tool").write_text("installed 1.0\n")
    first = plain_host.run("raw_apt", **given)
    assert first["cache_updated"]
    assert not first["changed"]
    assert [call for call in plain_host.calls() if call == "sleep [5]"] == ["sleep [5]"], "another apt is waited for"
    (plain_host.folder / "lists" / "list").touch()
    assert not plain_host.run("raw_apt", **given)["cache_updated"]


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("E: Unable to locate package tool", "update_cache"),
        ("E: dpkg was interrupted, you must manually run 'dpkg --configure -a'", "earlier run was cut"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend", "lock_timeout"),
    ],
)
def test_complaint_of_apt_comes_with_what_to_do(
    plain_host: RawHost, packages: Path, complaint: str, remedy: str
) -> None:
    plain_host.stub("apt-get", f'echo "{complaint}" >&2; exit 100')
    result = plain_host.run("raw_apt", name=["tool"])
    assert result["failed"]
    assert complaint in result["msg"]
    assert remedy in result["msg"].split("To do:")[1]


def test_dpkg_that_can_not_tell_is_not_taken_for_absent(plain_host: RawHost, packages: Path) -> None:
    plain_host.stub("dpkg-query", 'echo "dpkg-query: error: database is locked" >&2; exit 2')
    result = plain_host.run("raw_apt", name=["tool"], state="absent")
    assert result["failed"]
    assert "database is locked" in result["msg"]


@pytest.mark.parametrize(
    "name", ["", "-tool", "tool-", "Tool", "tool name", "tool=", "tool;x", "../x", "tool=1 2", "x"]
)
def test_name_that_apt_would_read_otherwise_is_refused(plain_host: RawHost, packages: Path, name: str) -> None:
    assert plain_host.run("raw_apt", name=[name])["failed"]
    assert plain_host.commands == []


SWAPS = (
    "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    "/var/swap\\040file    file\t524284\t\t0\t\t-2\n/dev/zram0 partition 1 0 100\n"
)


@pytest.fixture
def swaps(plain_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = plain_host.folder / "swaps"
    table.write_text(SWAPS)
    monkeypatch.setattr(raw_swap, "SWAPS", str(table))
    monkeypatch.setattr(raw_swap, "CONTAINER_MARKS", (str(plain_host.folder / "container"),))
    header = SWAPS.split("\n", 1)[0]
    plain_host.stub("swapoff", f'grep -v "^${{2%% *}}" "{table}" >"{table}.new"; mv "{table}.new" "{table}"')
    plain_host.stub("swapon", f'[ -s "{table}" ] || echo "{header}" >"{table}"; echo "$2 file 1 0 0" >>"{table}"')
    return table


def test_all_swap_is_switched_off_once(plain_host: RawHost, swaps: Path) -> None:
    plain_host.twice("raw_swap", state="off")
    assert plain_host.calls() == ["swapoff [--] [/var/swap file]", "swapoff [--] [/dev/zram0]"]
    plain_host.twice("raw_swap", state="on", devices=["/dev/zram0"])
    assert plain_host.calls()[-1] == "swapon [--] [/dev/zram0]"


def test_named_swap_alone_is_switched_off(plain_host: RawHost, swaps: Path) -> None:
    result = plain_host.twice("raw_swap", state="off", devices=["/dev/zram0", "/dev/other"])
    assert result["swaps"] == ["/var/swap file"]


def test_swap_of_the_machine_is_left_alone_in_a_container(plain_host: RawHost, swaps: Path) -> None:
    (plain_host.folder / "container").touch()
    result = plain_host.run("raw_swap", state="off")
    assert not result["changed"]
    assert result["unavailable"]
    assert plain_host.calls() == []


def test_command_gets_its_words_as_they_are(raw_host: RawHost) -> None:
    raw_host.stub("program", 'echo out; echo err >&2; printf "tail"; exit ${STATUS:-0}')
    result = raw_host.run("raw_command", argv=["program", "a b", "$(x)", "", "-n", "li\nne"])
    assert raw_host.log.read_text() == "program [a b] [$(x)] [] [-n] [li\nne]\n"
    assert (result["rc"], result["stdout"], result["stderr"]) == (0, "out\ntail", "err")
    assert result["stdout_lines"] == ["out", "tail"]
    assert result["changed"]
    failed = raw_host.run("raw_command", argv=["sh", "-c", "echo no >&2; exit 3"])
    assert failed["failed"]
    assert (failed["rc"], failed["stderr"]) == (3, "no")
    missing = raw_host.run("raw_command", argv=["no-such-program"])
    assert missing["rc"] == 127
    dry = raw_host.run("raw_command", argv=["program"], check=True)
    assert dry["skipped"]
    assert raw_host.log.read_text().count("program") == 1


def test_command_that_reads_gets_nothing(raw_host: RawHost) -> None:
    assert raw_host.run("raw_command", argv=["cat"])["stdout"] == ""


PI = {
    "etc/os-release": 'PRETTY_NAME="Debian 13 (trixie)"\nID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n',
    "proc/meminfo": (
        "MemTotal:        4050608 kB\nMemAvailable:    3731888 kB\nSwapTotal:        524284 kB\nHugePages_Total: 0\n"
    ),
    "proc/swaps": SWAPS,
    "proc/self/mounts": "/dev/mmcblk0p2 / ext4 ro,noatime 0 0\ntmpfs /var/log tmpfs rw 0 0\n",
    "etc/fstab": "PARTUUID=1-02 / ext4 ro,noatime 0 1\n",
}


def made_up(host: RawHost, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    root = host.folder / "root"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    root.mkdir(exist_ok=True)
    monkeypatch.setattr(raw_info, "ROOT", str(root))
    return root


def test_raspberry_pi_is_described(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(raw_host, monkeypatch, {**PI, "etc/rpi/swap.conf": "", "etc/dphys-swapfile": ""})
    host = raw_host.run("raw_info", check=True)["host"]
    assert (host["distribution"], host["version"], host["codename"], host["family"]) == (
        "debian",
        "13",
        "trixie",
        "Debian",
    )
    assert host["memory_total_bytes"] == 4050608 * 1024
    assert host["swap_total_bytes"] == 524284 * 1024
    assert host["swaps"][0] == {"path": "/var/swap file", "type": "file", "size_bytes": 524284 * 1024}
    assert host["swap_tool"] == "rpi-swap"
    assert host["fstab"][0]["options"] == ["ro", "noatime"]
    assert host["mounts"][1]["path"] == "/var/log"
    assert host["python"] == []
    assert host["container"] == ""
    assert not host["systemd"]
    assert host["unknown"] == {}


def test_what_can_not_be_read_is_unknown(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(
        raw_host,
        monkeypatch,
        {"etc/os-release": '\0\xff junk ID=\nID=\'un\nID_LIKE="ubuntu debian"', "proc/meminfo": "MemTotal: x"},
    )
    host = raw_host.run("raw_info")["host"]
    assert host["memory_total_bytes"] is None
    assert host["swaps"] is None
    assert host["mounts"] is None
    assert host["family"] == "Debian"
    assert set(host["unknown"]) == {"swaps", "fstab", "mounts"}
    assert host["swap_tool"] == "none"


@pytest.mark.parametrize(
    "place",
    [
        "usr/bin/python3",
        "usr/bin/python3.13",
        "usr/local/bin/python",
        "usr/local/bin/pypy3",
        "usr/bin/micropython",
        "usr/libexec/platform-python",
        "opt/tool with space/bin/python3.14t",
        "home/pi/.pyenv/versions/3.12.1/bin/python3.12",
    ],
)
def test_interpreter_is_found(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    root = made_up(raw_host, monkeypatch, {**PI, place: ""})
    assert raw_host.run("raw_info")["host"]["python"] == [], "it can't be run"
    (root / place).chmod(0o755)
    assert raw_host.run("raw_info")["host"]["python"] == [str(root / place)]


def test_what_only_looks_like_an_interpreter_is_none(raw_host: RawHost, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "usr/bin/python3-config",
        "usr/bin/python3.13-config",
        "usr/bin/dh_python3",
        "usr/bin/pythonx",
        "bin/ipython",
    ]
    root = made_up(raw_host, monkeypatch, {**PI, **dict.fromkeys(names, "")})
    for name in names:
        (root / name).chmod(0o755)
    (root / "usr/bin/python3").symlink_to("nowhere")
    (root / "usr/bin/python2").mkdir()
    assert raw_host.run("raw_info")["host"]["python"] == []


def test_paths_are_looked_at(raw_host: RawHost) -> None:
    file, link = raw_host.folder / "a\nb", raw_host.folder / "link"
    file.write_text("x")
    file.chmod(0o640)
    link.symlink_to("ends in line\n")
    paths = raw_host.run("raw_info", paths=[str(file), str(link), str(raw_host.folder), "/no/such"])["paths"]
    assert paths[str(file)]["state"] == "file"
    assert paths[str(file)]["mode"] == "0640"
    assert paths[str(file)]["size_bytes"] == 1
    assert paths[str(link)]["target"] == "ends in line\n"
    assert paths[str(raw_host.folder)]["state"] == "directory"
    assert paths["/no/such"] == {"state": "absent"}
