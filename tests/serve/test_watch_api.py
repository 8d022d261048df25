"""The dashboard's server: what it tells, to whom, and that nothing that a stranger wrote gets further than it should."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from shoal.cli.main import main
from shoal.coordinator.durable.ledger import FileLedger
from shoal.dashboard.app import make_dashboard_app, qr_rows
from shoal.dashboard.ledger_digest import LedgerDigest
from shoal.dashboard.server import GUARDED, require_token
from shoal.dashboard.watched_runs import StreamPosition, WatchedRun
from shoal.errors import ShoalError
from shoal.runs.folder.run_reader import RunFolder
from shoal.runs.invitation import write_join_command
from shoal.runs.monitoring.prometheus import exposition, run_metrics
from shoal.web.auth import AuthMiddleware

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"
LOCAL = "http://localhost"


def folder_with(path: Path, records: int = 20, **status: Any) -> RunFolder:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("dialect: shoal\n")
    (path / "provenance.json").write_text(json.dumps({"format": 1, "settings": {"name": {"value": HOSTILE, "origin": "default"}}}))
    lines = [{"step": step, "split": "train", "loss": 1 / (1 + step), "wall_s": step / 2, "samples": 8 * step} for step in range(records)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"worker": "ann", "state": "computing", "rate": 1.0, "lag": 0, "accepted": 1, "rejected": 0, "bytes": 10, "computing_s": 2.5}
    known = {"schema": 2, "at": time.time(), "pid": os.getpid(), "state": "running", "version": records, "strategy": "x", "members": [row]}
    (path / "status.json").write_text(json.dumps(known | status))
    return RunFolder(path)


def client(folder: RunFolder, token: str | None = None, password: str = "") -> TestClient:
    app: Any = AuthMiddleware(make_dashboard_app([WatchedRun(folder)], owner_password=password), token, GUARDED, "token")
    return TestClient(app, base_url=LOCAL)


def test_a_reader_hears_everything_once_and_then_what_is_new(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    run = WatchedRun(folder)
    run.refresh()
    first, place = run.since(StreamPosition())
    assert (first["reset"], len(first["records"])) == (True, 20)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "split": "eval", "loss": 0.1, "wall_s": 11.0}\n')
    run.refresh()
    then, place = run.since(place)
    assert (then["reset"], [one["step"] for one in then["records"]]) == (False, [21])
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n')
    run.refresh()
    again, _ = run.since(place)
    assert (again["reset"], len(again["records"])) == (True, 1)


def test_a_hundred_thousand_records_are_thinned_and_evaluations_kept(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", records=0)
    lines = [b'{"step":%d,"split":"train","loss":1.5,"wall_s":%d}\n' % (step, step) for step in range(100_000)]
    lines[77_777] = b'{"step":77777,"split":"eval","loss":1.0,"wall_s":77777}\n'
    (folder.path / "metrics.jsonl").write_bytes(b"".join(lines))
    run = WatchedRun(folder)
    for _ in range(3):
        run.refresh()
    told, _ = run.since(StreamPosition())
    steps = [one["step"] for one in told["records"]]
    assert 1500 <= len(steps) <= 4000
    assert 77_777 in steps
    assert steps[0] < 100
    assert steps[-1] > 99_000


def test_the_stream_and_the_files_are_there_and_what_is_hostile_is_cleaned(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", run=HOSTILE, events=[{"at": 1.0, "text": HOSTILE}])
    (folder.path / "samples").mkdir()
    (folder.path / "samples" / "step-00000003.png").write_bytes(b"PNG")
    (folder.path / "samples" / "step-00000004.txt").write_text("two\nlines \x1b[2J")
    with client(folder) as asks:
        status = asks.get("/api/runs/0/status")
        assert status.json()["members"][0]["worker"] == "ann"
        assert "\x1b" not in status.json()["run"]
        assert status.headers["content-type"] == "application/json"
        assert asks.get("/api/runs/0/samples/step-00000003.png").content == b"PNG"
        assert asks.get("/api/runs/0/samples/step-00000004.txt").text == "two\nlines ?[2J"
        for name in ("..%2fconfig.yaml", "config.yaml", "step-1.html", "step-00000009.png"):
            assert asks.get(f"/api/runs/0/samples/{name}").status_code == 404
        assert asks.get("/api/runs/7/status").status_code == 404
        page = asks.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("look.css", "style.css", "main.js", "icon.svg"):
            assert asks.get(f"/{name}").status_code == 200
        assert asks.get("/api/runs/0/status", headers={"host": "evil.example"}).status_code == 403
        assert asks.post("/api/runs/0/status").status_code == 405


def test_whoever_only_watches_needs_the_token_and_never_learns_how_to_join(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    write_join_command(folder.path, "shoal join tcp://127.0.0.1:1 --token secret")
    assert (folder.path / "invitation.json").stat().st_mode & 0o77 == 0
    token = "a" * 20
    with client(folder, token) as asks:
        assert asks.get("/api/runs/0/status").status_code == 401
        assert asks.get("/metrics").status_code == 401
        assert "a token is needed" in asks.get("/metrics").text
        assert "the token is wrong" in asks.get("/metrics", headers={"authorization": "Bearer x"}).text
        bearer = {"authorization": f"Bearer {token}"}
        assert asks.get("/api/runs/0/status", headers=bearer).status_code == 200
        assert asks.get("/api/runs/0/invitation", headers=bearer).status_code == 404
        assert asks.get("/api/runs/0/invitation", headers=bearer | {"x-shoal-owner": ""}).status_code == 404


def test_how_to_join_needs_the_owners_password(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    write_join_command(folder.path, "shoal join tcp://127.0.0.1:1 --token secret", "the class's token")
    with client(folder, password="a" * 20) as asks:
        for wrong in ({}, {"x-shoal-owner": ""}, {"x-shoal-owner": "b" * 20}, {"authorization": f"Bearer {'a' * 20}"}):
            refused = asks.get("/api/runs/0/invitation", headers=wrong)
            assert refused.status_code == 403
            assert "token" not in refused.text
        for path in ("/api/runs", "/api/runs/0/status", "/api/runs/0/settings", "/metrics"):
            assert "secret" not in asks.get(path).text
        told = asks.get("/api/runs/0/invitation", headers={"x-shoal-owner": "a" * 20}).json()
        assert told["line"].endswith("--token secret")
        assert told["token"] == "the class's token"
        assert len(told["code"]) == len(told["code"][0]) >= 29


def test_orders_need_the_owners_password_and_a_page_for_watching_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given = folder_with(tmp_path / "run"), list[tuple[str, str | None]]()
    monkeypatch.setattr("shoal.dashboard.app.read_owner_file", lambda path: path)
    monkeypatch.setattr("shoal.dashboard.app.send_command", lambda owner, action, name: given.append((action, name)) or "done")
    password = {"x-shoal-owner": "a" * 20}
    with client(folder) as asks:
        assert asks.post("/api/runs/0/orders", json={"action": "stop"}, headers=password).status_code == 405
        assert asks.get("/api/owner", headers=password).status_code == 404
    with client(folder, password="a" * 20) as asks:
        for wrong in ({}, {"x-shoal-owner": ""}, {"x-shoal-owner": "b" * 20}):
            assert asks.post("/api/runs/0/orders", json={"action": "stop"}, headers=wrong).status_code == 403
            assert asks.get("/api/owner", headers=wrong).status_code == 403
        form = password | {"content-type": "application/x-www-form-urlencoded"}
        assert asks.post("/api/runs/0/orders", content='{"action": "stop"}', headers=form).status_code == 400
        for body in ({"action": "rm"}, {"action": "evict", "name": 7}, [], {"name": "x"}):
            assert asks.post("/api/runs/0/orders", json=body, headers=password).status_code == 400
        assert asks.post("/api/runs/0/orders", json={"action": "x" * 2000}, headers=password).status_code == 413
        assert asks.post("/api/runs/3/orders", json={"action": "stop"}, headers=password).status_code == 404
        assert given == []
        assert asks.post("/api/runs/0/orders", json={"action": "evict", "name": "ann"}, headers=password).json() == {"text": "done"}
        assert given == [("evict", "ann")]


def test_nobody_else_may_look_without_a_token() -> None:
    for host, token in (("0.0.0.0", None), ("192.0.2.1", None), ("127.0.0.1", "short")):
        with pytest.raises(ShoalError):
            require_token(host, token)
    require_token("127.0.0.1", None)
    require_token("0.0.0.0", "a" * 20)


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder_with(tmp_path / "run")
    assert main(["watch", "nowhere"]) == 2
    assert "no run's folder" in capsys.readouterr().err
    assert main(["watch", "run", "--host", "0.0.0.0"]) == 2
    assert "--public" in capsys.readouterr().err


def test_a_growing_ledger_is_checked_line_by_line(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    ledger.append(
        {"version": 1, "batches": 2, "from": [["ann", 0, 0, 1.0, 8, 0, 0, 1, 1], ["bo", 0, 0, 1.0, 8, 1, 0, 1, 1]], "dropped": ["bo"]}
    )
    ledger.append({"version": 2, "batches": 3, "from": [["ann", 1, 0, 1.0, 8, 0, 0, 2, 1]]})
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines()
    digest = LedgerDigest()
    for line in lines:
        digest.add(line)
    told = digest.summary()
    assert (told["version"], told["contributions"], told["samples"], told["problems"]) == (2, 3, 24, [])
    assert told["lags"][:2] == [2, 1]
    assert told["dropped"] == {"bo": 1}
    digest.add(lines[1])
    digest.add(b"[nonsense")
    problems = " ".join(digest.summary()["problems"])
    assert "twice" in problems
    assert "checksum" in problems
    assert "cannot be read" in problems


def test_a_viewer_who_goes_back_gets_a_bounded_number_of_earlier_ledgers() -> None:
    digest = LedgerDigest()
    for version in range(1, 1001):
        line = {"version": version, "from": [["ann", version, version - 1, 1.0, 8, 0, 0, 1, 1], ["bo", version, 0, 1.0, 8, 0, 0, 1, 1]]}
        digest.add(json.dumps(line | {"dropped": ["bo"]}).encode())
    assert digest.summary()["contributions"] == 2000
    versions = [one["version"] for one in digest.earlier]
    assert (len(versions), versions[0], versions[-1]) == (125, 8, 1000)
    assert all((one["contributions"], one["dropped"]) == (2 * one["version"], {"bo": one["version"]}) for one in digest.earlier)


def test_a_line_that_was_cut_off_is_one_problem(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    for version in (1, 2):
        ledger.append({"version": version, "batches": 1, "from": [["ann", version, version - 1, 1.0, 8, 0, 0, 1, 1]]})
    first, second = (tmp_path / "ledger.jsonl").read_bytes().splitlines()
    digest = LedgerDigest()
    for line in (first, second[:20], second):
        digest.add(line)
    assert digest.summary()["problems"] == ["line 2 cannot be read"]


def test_prometheus_reads_the_figures_and_no_name_ends_a_label(tmp_path: Path) -> None:
    row = {"worker": 'ann"} 1\nshoal_up{run="x', "state": "computing", "rate": 1.0, "lag": 0, "accepted": 1, "rejected": 0, "bytes": 10}
    folder = folder_with(tmp_path / "run", members=[row], contributions={"accepted": 5}, figures={"train": {"loss": 0.5}, "eval": {}})
    text = exposition(run_metrics({"run": folder.status()}))
    assert 'shoal_contributions_total{run="run",outcome="accepted"} 5' in text
    assert 'shoal_figure{run="run",split="train",figure="loss"} 0.5' in text
    assert 'shoal_up{run="run"} 1' in text
    assert all(line.startswith(("#", "shoal_")) for line in text.splitlines())
    assert [line for line in text.splitlines() if line.startswith("shoal_up")] == ['shoal_up{run="run"} 1']


@pytest.mark.parametrize(("length", "side"), [(1, 21), (14, 21), (15, 25), (150, 49), (213, 57), (666, 97)])
def test_a_qr_code_has_the_size_that_its_text_needs(length: int, side: int) -> None:
    rows = qr_rows("x" * length)
    assert (len(rows), {len(row) for row in rows}) == (side, {side})
    assert all(row.startswith("1111111") for row in (rows[0], rows[6])), "the finder pattern at the corner"


def test_no_qr_code_is_made_of_nothing_or_of_a_text_too_long_to_scan() -> None:
    assert qr_rows("") == qr_rows("x" * 667) == qr_rows("x" * 5000) == []
