"""The wall clock jumps by a day and back under a run with all its processes: it trains on as if nothing had happened.

Databases have a clock of their own: tests/transports/test_postgres_clocks.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from tests.support.eventually import HANG_S, eventually
from tests.support.small_runs import DIGITS

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
JUMPS = ("+1d", "+0", "-1d", "+0")
MORE = """\
training: {max_steps: 400, batch_size: 16}
evaluation: {strategy: never}
transport: {kind: zmq, port: 0}
coordinator: {heartbeat_interval_s: 1.0}
strategy: {kind: workunits, batches_per_unit: 2, units_per_update: 3, lease_timeout_s: 20.0}
"""


@pytest.mark.long
@pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime (Debian's package faketime)")
def test_a_run_trains_on_while_the_clock_jumps_by_a_day(tmp_path: Path) -> None:
    clock, ledger = tmp_path / "clock", tmp_path / "run" / "coordinator" / "ledger.jsonl"
    clock.write_text("+0")
    (tmp_path / "config.yaml").write_text(DIGITS + MORE)
    faked = {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1"}
    command = [sys.executable, "-m", "shoal", "train", "config.yaml", "--workers", "2", "--run-dir", "run"]
    run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | faked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for jump, _ in zip(cycle(JUMPS), range(8), strict=False):
            versions = ledger.read_text().count('"version"') if ledger.exists() else 0
            eventually(lambda before=versions: ledger.exists() and ledger.read_text().count('"version"') > before + 10)  # type: ignore[misc]
            clock.write_text(jump)
        printed, _ = run.communicate(timeout=HANG_S)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(HANG_S)
    assert run.returncode == 0, printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 400)
    assert set(summary["contributions"]) <= {"accepted", "cancelled", "finished"}, "no lease ended before its time"
    assert not [line for line in printed.splitlines() if "warning" in line], printed
