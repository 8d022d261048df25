"""Alerts: when a person is told, once, and that every way to a person works with what listens there."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config.fields import Secret
from shoal.config.load import ConfigFile, resolve
from shoal.config.schema.output import Alerts, Email
from shoal.config.show import brief, show
from shoal.errors import ShoalError
from shoal.reporters.alert_channels import Alert, Channel, channels_of
from shoal.reporters.alerts import AlertReporter, DiskCondition, LossCondition, MachinesCondition, ProgressCondition
from shoal.runs.monitoring.members import Members

ALERT = Alert("loss", "ship", "the loss is not a number", "http://127.0.0.1:8650/")
NOTE = [sys.executable, "-c", "import os, sys; open(sys.argv[1], 'a').write(os.environ['ALERT'] + ' ' + sys.stdin.read())"]


def test_no_progress_is_told_once_until_the_next_step() -> None:
    condition = ProgressCondition(None, now=0.0)
    assert condition.check(599.0) == ""
    assert condition.check(601.0) == "no step for 10 minutes"
    assert condition.check(9999.0) == ""
    condition.step(10_000.0)
    assert condition.limit_s == 600.0, "the pause that was told is no measure of a step"
    assert condition.check(10_600.0) == "no step for 10 minutes"


def test_slow_steps_are_no_alert_and_a_paused_run_is_none() -> None:
    condition = ProgressCondition(None, now=0.0)
    condition.step(300.0)
    assert condition.check(3299.0) == ""
    condition.wait(3299.0)
    assert condition.check(6298.0) == ""
    assert condition.check(6300.0)


def test_a_loss_that_jumps_is_told_once_and_again_after_it_came_back() -> None:
    condition = LossCondition(5.0)
    assert not any(condition.record(2.0 + 0.1 * (step % 3)) for step in range(20))
    assert condition.record(2.5) == "", "within a quarter of the median"
    assert condition.record(9.0) == "the loss has jumped from 2.1 to 9"
    assert condition.record(9.5) == ""
    assert condition.record(2.0) == ""
    assert condition.record(float("nan")) == "the loss is not a number"
    assert condition.record(float("inf")) == ""


def test_losses_below_zero_and_a_falling_loss_are_no_jump() -> None:
    condition = LossCondition(5.0)
    assert not any(condition.record(-100.0 - step) for step in range(30))
    assert condition.record(-10.0)


def test_each_machine_that_vanishes_is_told_once_until_it_comes_back() -> None:
    condition = MachinesCondition()
    assert condition.check({"old"}) == "", "before this start"
    assert condition.check({"old", "ann"}) == "1 worker has vanished: ann"
    assert condition.check({"ann"}) == ""
    assert condition.check({"ann", *(f"w{number:02}" for number in range(12))}).endswith("w09 and 2 more")
    condition.check(set())
    assert condition.check({"ann"}) == "1 worker has vanished: ann"


def test_a_disk_is_told_when_it_becomes_full() -> None:
    condition = DiskCondition(2_000_000_000)
    assert [condition.check(free) for free in (3 * 10**9, 10**9, 5 * 10**8)] == [
        "",
        "the disk of the run's folder has only 1.00 GB left",
        "",
    ]
    assert condition.check(3 * 10**9) == ""
    assert condition.check(1)


# --- the ways to a person ------------------------------------------------------------------------------------


@contextmanager
def web_server(status: int = 200) -> Iterator[tuple[str, list[dict[str, str]]]]:
    received: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hooks/secret-part", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def mail_server(answers: Callable[[str], str]) -> Iterator[tuple[int, list[str]]]:
    """A mail server that takes one connection, without encryption."""
    listener, lines = socket.create_server(("127.0.0.1", 0)), list[str]()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw", newline="\r\n") as file:
            file.write("220 here\r\n")
            file.flush()
            for line in file:
                lines.append(line.rstrip("\r\n"))
                if answer := answers(lines[-1]):
                    file.write(answer + "\r\n")
                    file.flush()
                if line.upper().startswith("QUIT"):
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], lines
    finally:
        listener.close()
        thread.join()


def test_a_webhook_gets_what_slack_and_discord_show() -> None:
    with web_server() as (address, received):
        (channel,) = channels_of(Alerts(webhook=Secret(address)))
        channel.send(ALERT)
    assert received[0]["text"] == received[0]["content"] == "ship: the loss is not a number\nhttp://127.0.0.1:8650/"
    assert (received[0]["alert"], received[0]["run"]) == ("loss", "ship")
    assert "secret" not in channel.name


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_webhook_that_does_not_take_it_is_told_without_its_path(status: int) -> None:
    with web_server(status) as (address, _):
        (channel,) = channels_of(Alerts(webhook=Secret(address)))
        with pytest.raises(ShoalError, match=f"127.0.0.1 answered with status {status}") as told:
            channel.send(ALERT)
    assert "secret" not in str(told.value)
    with pytest.raises(ShoalError, match="does not answer"):
        channel.send(ALERT)


def test_a_command_reads_the_text_and_its_failure_is_told(tmp_path: Path) -> None:
    (channel,) = channels_of(Alerts(command=(*NOTE, str(tmp_path / "note"))))
    channel.send(ALERT)
    assert (tmp_path / "note").read_text() == "loss ship: the loss is not a number\nhttp://127.0.0.1:8650/\n"
    (failing,) = channels_of(Alerts(command=(sys.executable, "-c", "raise SystemExit('no phone')")))
    with pytest.raises(ShoalError, match="exit code 1: no phone"):
        failing.send(ALERT)
    with pytest.raises(ShoalError, match="no program `not-there`"):
        channels_of(Alerts(command=("not-there",)))


def test_a_mail_server_gets_one_message_for_all() -> None:
    def answer(line: str) -> str:
        known = {"EHLO": "250 here", "MAIL": "250 ok", "RCPT": "250 ok", "DATA": "354 go on", ".": "250 ok", "QUIT": "221 bye"}
        return known.get(line[:4].upper(), "")

    with mail_server(answer) as (port, lines):
        settings = Email(to=("ann@example.org", "bo@example.org"), host="127.0.0.1", port=port, encryption="none")
        (channel,) = channels_of(Alerts(email=settings))
        channel.send(ALERT._replace(run="a\nb"))
    assert [line[4:] for line in lines if line.upper().startswith("RCPT")] == [" TO:<ann@example.org>", " TO:<bo@example.org>"]
    assert "Subject: Shoal: a b: loss" in lines


def test_a_mail_server_without_encryption_gets_nothing_where_it_is_asked_for() -> None:
    with mail_server(lambda line: "250 here" if line.upper().startswith("EHLO") else "221 bye") as (port, lines):
        (channel,) = channels_of(Alerts(email=Email(to=("ann@example.org",), host="127.0.0.1", port=port)))
        with pytest.raises(ShoalError, match="STARTTLS"):
            channel.send(ALERT)
    assert not any("ann@" in line for line in lines)


def test_a_desktop_without_a_screen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ShoalError, match="no screen"):
        channels_of(Alerts(desktop=True))


# --- settings and runs ----------------------------------------------------------------------------------------


def test_the_environment_has_the_secrets_and_no_file_shows_them() -> None:
    loaded = resolve([ConfigFile("starter")], environ={"SHOAL_ALERT_WEBHOOK": "https://example.org/a-secret-path"})
    assert loaded.run.alerts.webhook == Secret("https://example.org/a-secret-path")
    assert "a-secret-path" not in brief(loaded) + show(loaded)


def test_a_run_tells_once_that_it_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "note"
    command = f"--set=alerts.command={json.dumps([*NOTE, str(note)])}"
    short = ["train", "starter", "--max-steps", "2", command, "--run-dir", str(tmp_path / "run")]
    assert main(short) == 0
    assert note.read_text().startswith("ended digits: the run has ended (completed) at step 2/2 after")
    assert note.read_text().count("ended digits") == 1
    assert f"shoal watch {tmp_path / 'run'}" in note.read_text()
    note.unlink()
    assert main(["alerts", "starter", command]) == 0
    assert note.read_text().startswith("test digits: this is a test")
    capsys.readouterr()
    assert main(["alerts", "starter"]) == 2
    assert "nothing sends alerts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        (["alerts.command=[not-there]"], 0, "warning[alerts]: there is no program `not-there` on this machine"),
        (["alerts.webhook=http://127.0.0.1:99999/x"], 2, "a port in it is 1 to 65535"),
        (["alerts.webhook=http://127.0.0.1:1/x", "alerts.about=[]"], 2, "this list is empty, so no alert would be sent"),
    ],
)
def test_a_check_says_what_would_not_be_sent(settings: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "starter", *(f"--set={text}" for text in settings)]) == code
    assert told in "".join(capsys.readouterr())


def test_a_run_without_workers_says_so_and_one_whose_workers_paused_is_silent(tmp_path: Path) -> None:
    run, told, members = resolve([ConfigFile("starter")]).run, list[str](), Members([], False)
    recorder: Any = SimpleNamespace(members=lambda: members, directory=SimpleNamespace(path=tmp_path), dashboard="http://127.0.0.1:1/")
    watch = AlertReporter(run, [Channel("a list", lambda alert: told.append(alert.text))])
    watch.recorder, watch.disk, watch.machines = recorder, DiskCondition(0), MachinesCondition()
    watch.progress = ProgressCondition(None, now=0.0)
    members = members._replace(rests=True)
    watch.check(900.0)
    members = members._replace(rests=False)
    watch.check(1400.0)
    watch.check(1501.0)
    watch._waiting.put(None)
    watch._send()
    assert told == ["no step for 10 minutes: no worker is here"]
