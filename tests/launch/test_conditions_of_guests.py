"""What `shoal join --when` reads of a computer, as each system reports it; limits of a worker; and the services of `--service`."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.cli.join import _parsed
from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.launch.volunteer import cpu_load, idle_time, limits, power, process_tree
from shoal.launch.volunteer.conditions import Conditions, Hours, Idle, LowLoad, PluggedIn, Sensors, parse
from shoal.launch.volunteer.cpu_load import OtherLoad
from shoal.launch.volunteer.service import ServiceCommand, launchd_agent, systemd_unit, windows_task
from shoal.runs.connections import JoinOptions

FREE = Sensors(idle_s=lambda: 1e6, on_battery=lambda: False, other_load=lambda pid: 0.0, minute_of_day=lambda: 0)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux reports")


def why_not(text: str, **reported: Any) -> str:
    return Conditions(parse([text]), FREE._replace(**reported)).why_not()


# --- conditions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reported", "why"),
    [
        ("idle", {"idle_s": lambda: 299.0}, "its computer is in use"),
        ("idle", {"idle_s": lambda: 300.0}, ""),
        ("idle 10min", {"idle_s": lambda: 300.0}, "its computer is in use"),
        ("plugged-in", {"on_battery": lambda: True}, "it runs on battery"),
        ("plugged-in", {}, ""),
        ("load", {"other_load": lambda pid: 0.26}, "other programs use 26% of CPUs"),
        ("load", {"other_load": lambda pid: 0.25}, ""),
        ("load 40%", {"other_load": lambda pid: 0.39}, ""),
        ("idle and plugged-in and load", {"on_battery": lambda: True}, "it runs on battery"),
        ("plugged-in and 22:00-07:00", {"minute_of_day": lambda: 12 * 60}, "not within 22:00-07:00"),
    ],
)
def test_a_worker_waits_until_every_condition_holds(text: str, reported: dict[str, Any], why: str) -> None:
    assert why_not(text, **reported) == why
    assert len(why) <= 32


@pytest.mark.parametrize(
    ("hours", "within", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9:00-17:30", ["09:00", "17:29"], ["08:59", "17:30", "00:00"]),
        ("18:00-24:00", ["18:00", "23:59"], ["00:00", "17:59"]),
    ],
)
def test_hours_may_cross_midnight(hours: str, within: list[str], outside: list[str]) -> None:
    for clock in within + outside:
        minute = 60 * int(clock[:2]) + int(clock[3:])
        assert (why_not(hours, minute_of_day=lambda minute=minute: minute) == "") == (clock in within), clock


def test_the_hours_are_those_of_this_computers_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1_800_000_000.0  # 08:00 in UTC
    local = time.localtime
    monkeypatch.setattr("shoal.launch.volunteer.conditions.time", SimpleNamespace(localtime=lambda: local(moment)))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert Sensors.here().minute_of_day() == 17 * 60
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["night", "idle and", "idle or load", "load 0%", "load 101%", "25:00-07:00", "07:00-07:00", "00:00-24:00"])
def test_what_is_no_condition_is_refused_before_anything_starts(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "tcp://127.0.0.1:1", "--token", "t", "--when", text]) == 2
    assert "--when" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--memory 100M", "512M at least"),
        ("--memory much", "an amount such as 2G"),
        ("--upload 100kbit", "500kbit at least"),
        ("--upload fast", "a rate such as 5mbit"),
        ("--cores 0", "one at least"),
        ("--cores 4000", "this computer has"),
        ("--node --when load", "a node holds layers for others, and does not give way"),
        ("--service --ask", "a service cannot ask"),
    ],
)
def test_limits_that_are_none_are_refused(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "tcp://127.0.0.1:1", "--token", "t", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_amounts_and_rates_are_read_as_they_are_written() -> None:
    assert (limits.parse_memory("2G"), limits.parse_memory("1.5GiB"), limits.parse_memory("800 MB")) == (2 << 30, 3 << 29, 800 << 20)
    assert (limits.parse_upload("5mbit"), limits.parse_upload("800kbit"), limits.parse_upload("1Gbit/s")) == (625_000, 100_000, 125_000_000)


def test_the_command_of_the_volunteers_page_is_understood() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "volunteers.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^shoal (join .*--when.*)$", page, re.MULTILINE)
    arguments = _parsed(shlex.split(line.replace("tcp://… --token … --key …", "tcp://h:1 --token t"))[1:])
    assert (arguments.when, arguments.cores, arguments.memory, arguments.upload) == (["idle and plugged-in"], 2, "2G", "5mbit")
    shown = re.findall(r"^\| `--when ([^`]*)` \|", page, re.MULTILINE)
    assert [type(parse([text])[0]) for text in shown] == [Idle, PluggedIn, LowLoad, Hours]


# --- idle time -----------------------------------------------------------------------------------------------------------


def test_idleness_that_nothing_reports_is_refused_and_load_is_named() -> None:
    with pytest.raises(ShoalError, match="--when load"):
        Conditions(parse(["idle"]), FREE._replace(idle_s=None)).check()


def test_what_this_computer_reports_is_a_time_or_nothing() -> None:
    source = idle_time.idle_source()
    assert source is None or source() >= 0.0


@pytest.mark.parametrize(
    ("said", "idle_s"),
    [
        ("IdleHint=no\nIdleSinceHint=0\n", 0.0),
        ("IdleHint=yes\nIdleSinceHint=1700000000000000\n", 60.0),
        ("IdleHint=yes\nIdleSinceHint=\n", None),
        ("", None),
        (None, None),
    ],
)
def test_logind_reports_idleness_by_a_hint_and_its_time(said: str | None, idle_s: float | None) -> None:
    assert idle_time.logind_idle_s(lambda command: said, lambda: 1_700_000_060.0) == idle_s


def test_desktops_report_idleness_in_milliseconds() -> None:
    assert idle_time.mutter_idle_s(lambda command: "t 61500\n") == 61.5
    assert idle_time.screen_saver_idle_s(lambda command: "u 2000\n") == 2.0
    assert idle_time.mutter_idle_s(lambda command: None) is idle_time.screen_saver_idle_s(lambda command: "s what\n") is None


def test_macos_and_windows_report_idleness_in_units_of_their_own() -> None:
    line = '    | |   "HIDIdleTime" = 2500000000\n    | |   "HIDIdleTimeDelta" = 7\n'
    assert idle_time.macos_idle_s(lambda command: line) == 2.5

    def last_input(pointer: Any) -> bool:
        pointer._obj.time = 2**32 - 500
        return True

    windows = SimpleNamespace(user32=SimpleNamespace(GetLastInputInfo=last_input), kernel32=SimpleNamespace(GetTickCount=lambda: 1500))
    assert idle_time.windows_idle_s(windows) == 2.0, "the counter has wrapped around between the two"


# --- power ---------------------------------------------------------------------------------------------------------------

MAINS, BATTERY = {"type": "Mains", "online": "1"}, {"type": "Battery", "status": "Discharging", "scope": "System"}


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ([], False),
        ([MAINS], False),
        ([MAINS, BATTERY], False),
        ([MAINS | {"online": "0"}, BATTERY], True),
        ([MAINS | {"online": "0"}, {"type": "USB", "online": "1"}, BATTERY], False),
        ([BATTERY], True),
        ([BATTERY | {"status": "Full"}], False),
        ([BATTERY | {"scope": "Device"}], False),
    ],
)
def test_a_computer_without_a_battery_is_plugged_in(tmp_path: Path, supplies: list[dict[str, str]], on_battery: bool) -> None:
    for number, fields in enumerate(supplies):
        (tmp_path / f"supply-{number}").mkdir()
        for name, value in fields.items():
            (tmp_path / f"supply-{number}" / name).write_text(f"{value}\n")
    assert power.linux_on_battery(tmp_path) is on_battery
    assert power.linux_on_battery(tmp_path / "missing") is False


def test_macos_and_windows_report_their_power() -> None:
    assert power.macos_on_battery(lambda command: "Now drawing from 'Battery Power'\n -InternalBattery-0 90%; discharging\n")
    assert not power.macos_on_battery(lambda command: "Now drawing from 'AC Power'\n")
    assert not power.macos_on_battery(lambda command: None)
    for mains, on_battery in ((0, True), (1, False), (255, False)):

        def status(pointer: Any, mains: int = mains) -> bool:
            pointer._obj.mains = mains
            return True

        assert power.windows_on_battery(SimpleNamespace(kernel32=SimpleNamespace(GetSystemPowerStatus=status))) is on_battery


@LINUX
def test_this_computers_power_and_load_are_read() -> None:
    assert power.on_battery() in (True, False)
    first = cpu_load.busy_seconds_here()
    assert first is not None
    assert first > 0.0
    assert 0.0 <= OtherLoad().share(os.getpid()) <= 1.0


# --- load ----------------------------------------------------------------------------------------------------------------


def test_the_load_of_others_is_that_of_all_without_the_workers_own() -> None:
    now, busy, own = [0.0], [100.0], [5.0]
    load = OtherLoad(lambda: busy[0], lambda pid: own[0], lambda: now[0], cores=4)
    shares = [load.share(7)]
    for _ in range(6):  # the worker fills two cores, and another program one
        now[0], busy[0], own[0] = now[0] + 1, busy[0] + 3, own[0] + 2
        shares.append(load.share(7))
    assert shares == [0.0, *[0.25] * 6]
    own[0] = 0.0
    assert load.share(8) == 0.0, "another worker is measured from its own beginning"


def test_a_program_that_begins_is_seen_within_the_window() -> None:
    now, busy = [0.0], [0.0]
    load = OtherLoad(lambda: busy[0], lambda pid: 0.0, lambda: now[0], cores=1)
    for second in range(60):
        now[0], busy[0] = float(second), max(0.0, second - 50.0)
        if load.share(None) > 0.25:
            break
    assert second - 50 <= cpu_load.WINDOW_S


def test_macos_and_windows_count_their_processors_time() -> None:
    def statistics(host: int, kind: int, ticks: Any, count: Any) -> int:
        ticks[:] = [100, 200, 9999, 50]
        return 0

    library = SimpleNamespace(mach_host_self=lambda: 1, host_statistics=statistics)
    assert cpu_load.macos_busy_s(library) == 3.5

    def times(idle: Any, kernel: Any, user: Any) -> bool:
        idle._obj.value, kernel._obj.value, user._obj.value = 50_000_000, 70_000_000, 20_000_000
        return True

    assert cpu_load.windows_busy_s(SimpleNamespace(kernel32=SimpleNamespace(GetSystemTimes=times))) == 4.0


@pytest.fixture
def family() -> Iterator[int]:
    """A process with a child that each hold 64 MB and have computed for a while."""
    program = "hold = b'x' * (64 << 20); sum(range(3_000_000)); print('ready', flush=True); import sys; sys.stdin.read()"
    parent = f"import subprocess, sys; own = subprocess.Popen([sys.executable, '-c', {program!r}]); " + program
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    yield process.pid
    process.stdin.close()
    process.stdout.close()
    process.wait()


@LINUX
def test_a_process_counts_with_all_that_it_started(family: int) -> None:
    assert 128 << 20 <= process_tree.memory_bytes(family) <= 192 << 20
    assert process_tree.cpu_seconds(family) > 0.05
    assert process_tree.cpu_seconds(2**22 + 1) == process_tree.memory_bytes(2**22 + 1) == 0


@LINUX
def test_the_program_ps_reports_the_same_processes(family: int) -> None:
    printed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss=,time="], capture_output=True, text=True, check=True).stdout
    uses = process_tree.parse_ps(printed)
    assert sum(uses[one].memory_bytes for one in process_tree._tree(family, uses)) >= 128 << 20


def test_the_times_of_ps_have_days_hours_and_parts_of_seconds() -> None:
    found = process_tree.parse_ps("  7     1  2048 1-02:03:04\n  8  7 10 1:02.50\n  what\n")
    assert found == {7: process_tree.ProcessUse(1, 93784.0, 2 << 20), 8: process_tree.ProcessUse(7, 62.5, 10240)}


def test_windows_reports_time_and_memory_of_the_process() -> None:
    def times(handle: Any, *pointers: Any) -> bool:
        pointers[2]._obj.value, pointers[3]._obj.value = 10_000_000, 5_000_000
        return True

    def memory(handle: Any, pointer: Any, size: int) -> bool:
        pointer._obj.private = 12345
        return True

    class Open:
        restype: Any = None

        def __call__(self, *given: Any) -> int:
            return 1

    kernel = SimpleNamespace(OpenProcess=Open(), CloseHandle=lambda handle: True, GetProcessTimes=times, K32GetProcessMemoryInfo=memory)
    windows = SimpleNamespace(kernel32=kernel)
    assert (process_tree.windows_cpu_s(3, windows), process_tree.windows_memory_bytes(3, windows)) == (1.5, 12345)


# --- limits --------------------------------------------------------------------------------------------------------------

LIMITED = """
import ctypes, os, platform, threading
from shoal.launch.volunteer import limits
print(limits.take_lowest_priority())
limits.use_cores(1)
limits.bound_allocations(512 << 20)
found = []
def look():
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    disk = ctypes.CDLL(None).syscall(number, 1, 0) >> 13 if number else 3
    found.append((os.sched_getscheduler(0) == os.SCHED_IDLE, disk, len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]))
for one in (look, lambda: os.waitpid(os.fork() or (look(), print(found[-1], flush=True), os._exit(0)), 0)):
    thread = threading.Thread(target=one); thread.start(); thread.join()
print(found[0])
try:
    bytearray(600 << 20)
except MemoryError:
    print("no memory")
"""


@LINUX
def test_limits_hold_for_later_threads_and_children() -> None:
    """A real process: SCHED_IDLE, the idle class of the disk, one core, and an allocation that fails."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said == ["['SCHED_IDLE', 'idle disk priority']", "(True, 3, 1, '1')", "(True, 3, 1, '1')", "no memory"], done.stderr


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system does not divide its processors between sessions")
def test_a_workers_session_comes_last_until_it_is_asked_to_leave() -> None:
    program = "from shoal.launch.volunteer import limits; import sys; print(limits.take_lowest_priority(), flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    session = Path(f"/proc/{process.pid}/autogroup")
    assert process.stdout is not None
    assert process.stdin is not None
    assert "lowest session" in process.stdout.readline()
    assert session.read_text().endswith("nice 19\n")
    limits.let_leave(process.pid)
    assert session.read_text().endswith("nice 0\n")
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_windows_lowers_priority_and_its_background_mode() -> None:
    asked: list[int] = []
    kernel = SimpleNamespace(GetCurrentProcess=lambda: 1, SetPriorityClass=lambda process, number: asked.append(number) or True)
    assert limits.take_lowest_priority(SimpleNamespace(kernel32=kernel)) == ["idle priority", "background mode"]
    assert asked == [0x40, 0x00100000]


def test_memory_above_the_limit_is_reported_once() -> None:
    import threading

    used, told = iter([10, 20, 31, 40]), list[int]()
    reported = threading.Event()
    check = limits.MemoryCheck(30, lambda count: (told.append(count), reported.set())[0], lambda pid: next(used))
    assert reported.wait(60)
    check.close()
    assert told == [31]


# --- services ------------------------------------------------------------------------------------------------------------

COMMAND = ServiceCommand(
    "Ada's laptop", ["/opt/my python", "-m", "shoal", "--when", "load 40% and plugged-in", "a$b", 'c"d'], Path("/home/ada")
)


def test_a_systemd_unit_starts_the_command_as_it_is(tmp_path: Path) -> None:
    service = systemd_unit(COMMAND, tmp_path)
    assert service.path == tmp_path / "systemd/user/shoal-Ada-s-laptop.service"
    text = service.content.decode()
    assert 'ExecStart="/opt/my python" -m shoal --when "load 40%% and plugged-in" a$$b "c\\"d"\n' in text
    assert "WorkingDirectory=/home/ada\n" in text
    assert "WantedBy=default.target" in text
    assert service.enable == "systemctl --user daemon-reload && systemctl --user enable --now shoal-Ada-s-laptop"
    assert service.remove.startswith("systemctl --user disable --now shoal-Ada-s-laptop && rm ")


def test_a_launchd_agent_and_a_windows_task_start_the_command_as_it_is(tmp_path: Path) -> None:
    agent = plistlib.loads(launchd_agent(COMMAND, tmp_path).content)
    assert agent["ProgramArguments"] == list(COMMAND.command)
    assert agent["RunAtLoad"]
    assert agent["WorkingDirectory"] == "/home/ada"
    task = windows_task(COMMAND, tmp_path)
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    tree = ElementTree.fromstring(task.content.decode("utf-16"))
    assert tree.findtext(".//t:Command", namespaces=names) == "/opt/my python"
    words = tree.findtext(".//t:Arguments", namespaces=names)
    assert words == subprocess.list2cmdline(COMMAND.command[1:])
    assert tree.find(".//t:LogonTrigger", names) is not None
    assert re.search(r"schtasks /Create /TN shoal-Ada-s-laptop /XML", task.enable)
    assert "/Delete" in task.remove


@LINUX
def test_join_writes_a_service_whose_token_only_its_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = ["--when", "load and plugged-in", "--cores", "1", "--memory", "2G", "--upload", "5mbit", "--name", "ada"]
    assert main(["join", "tcp://127.0.0.1:9", "--token", "secret-token", *options, "--service"]) == 0
    text = (tmp_path / "config/systemd/user/shoal-ada.service").read_text()
    secret = tmp_path / "state/shoal/service-ada.token"
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("secret-token", 0o600)
    assert "secret-token" not in text
    assert f"--token-file {secret}" in text
    assert '--when "load and plugged-in"' in text
    assert "--upload 5mbit" in text
    printed = capsys.readouterr().out
    assert "systemctl --user enable --now shoal-ada" in printed
    assert "systemctl --user disable --now shoal-ada" in printed


def test_a_worker_says_where_its_key_is_also_with_a_file_for_receipts(tmp_path: Path) -> None:
    options = JoinOptions("tcp://127.0.0.1:1", "", None, name="ada", state=tmp_path, receipts=Path("ada.jsonl"))
    assert options.written == [f"this worker's key and what it keeps in {tmp_path}", "ada.jsonl"]
    assert options._replace(checkpoints=options.guest_folder).written == options.written
    assert str(options.key_file("ada").path).startswith(str(tmp_path))
