"""What watching costs those who train, and what it is like for those who watch.

One run trains all the time. A dashboard stands beside it: in turn two subscribers listen to its events, and it is suspended as if it were
not there; the samples a second of neighbouring stretches are compared. Then a browser (Debian's chromium, with playwright) opens a run of
200 workers and 100,000 records: when there is something to see, and how many whole pictures a second it draws while somebody goes through
time. `watching:browser` measures the browser only, `watching:run` the run only, and `watching:run:2` does so with two pairs of stretches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import MLP, MNIST, PYTHON, QUIET, command, environment
from run import Row

STRETCH_S, SETTLE_S, START_S = 6.0, 1.5, 90.0
WORKERS, RECORDS = 200, 100_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
DRAW = """async () => {
  const slider = document.getElementById("time"), frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const from = performance.now();
  let drawn = 0;
  while (performance.now() - from < 3000) {
    slider.value = String(500 + (drawn * 7) % 400);
    slider.dispatchEvent(new Event("input"));
    await frame();
    drawn += 1;
  }
  return (1000 * drawn) / (performance.now() - from);
}"""


def measure(part: str = "", pairs: str = "10") -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        if part in ("", "run"):
            yield _cost(Path(folder), int(pairs))
        if part in ("", "browser"):
            yield from _browser(Path(folder))


# --- those who train ------------------------------------------------------------------------------------


def _cost(folder: Path, count: int) -> Row:
    source = MLP if MNIST.is_dir() else {}
    settings = {**QUIET, **source, "strategy.kind": "async", "transport.port": "0"}
    with _running(command(folder / "run", settings, workers=2), folder / "run.log"):
        _wait_for(lambda: _progress(folder / "run")[0] > 0)
        with _dashboard(folder / "run") as (address, process):
            pairs = [(_rate(folder / "run", address, 2), _without(process, folder / "run", address)) for _ in range(count)]
    watched, alone = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return Row("watching, two subscribers", watched, alone, "samples/s", ratio, "≥ 0.98", f"median of {count} pairs")


def _without(dashboard: subprocess.Popen[bytes], run: Path, address: str) -> float:
    """Samples a second of a stretch in which there is no dashboard."""
    dashboard.send_signal(signal.SIGSTOP)
    try:
        return _rate(run, address, 0)
    finally:
        dashboard.send_signal(signal.SIGCONT)


def _rate(run: Path, address: str, subscribers: int) -> float:
    """Samples a second of a stretch in which so many listen."""
    ending = threading.Event()
    threads = [threading.Thread(target=_listen, args=(address, ending)) for _ in range(subscribers)]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_S)
    first = _progress(run)
    time.sleep(STRETCH_S)
    last = _progress(run)
    ending.set()
    for thread in threads:
        thread.join()
    return (last[0] - first[0]) / (last[1] - first[1])


def _listen(address: str, ending: threading.Event) -> None:
    with urllib.request.urlopen(f"{address}api/stream", timeout=START_S) as stream:
        for _ in stream:
            if ending.is_set():
                return


def _progress(run: Path) -> tuple[int, float]:
    """Samples so far, and when the coordinator said so."""
    with suppress(OSError, ValueError):
        status = json.loads((run / "status.json").read_text(encoding="utf-8"))
        return int(status["samples"]), float(status["at"])
    return 0, 0.0


@contextmanager
def _running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, env=environment(1))
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _dashboard(run: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    log = run.with_suffix(".watch")
    with _running([PYTHON, "-m", "shoal", "watch", str(run), "--port", "0"], log) as process:
        _wait_for(lambda: "http" in log.read_text())
        found = re.search(r"http://[^#\s]+", log.read_text())
        assert found is not None
        yield found[0], process


def _wait_for(true: Any) -> None:
    until = time.monotonic() + START_S
    while not true():
        if time.monotonic() > until:
            raise RuntimeError("it does not start")
        time.sleep(0.1)


# --- those who watch ------------------------------------------------------------------------------------


def _browser(folder: Path) -> Iterator[Row]:
    from playwright.sync_api import sync_playwright

    chromium, run = shutil.which("chromium"), folder / "large"
    if chromium is None:
        raise RuntimeError("there is no chromium: apt-get install chromium")
    _write_large(run)
    with _dashboard(run) as (address, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        paints, shown, updates = zip(*(_look(browser, address) for _ in range(5)), strict=True)
        browser.close()
    what = f"dashboard, {WORKERS} workers, {RECORDS:,} records"
    yield Row(f"{what}: first paint", statistics.median(paints), 1000, "ms", statistics.median(paints) / 1000, "≤ 1")
    yield Row(f"{what}: all workers shown", statistics.median(shown), 1000, "ms", statistics.median(shown) / 1000, "–")
    yield Row(f"{what}: whole pictures", statistics.median(updates), 30, "a second", statistics.median(updates) / 30, "≥ 1")


def _look(browser: Any, address: str) -> tuple[float, float, float]:
    """Milliseconds to the first paint and until all workers are shown, and pictures a second."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    began = time.monotonic()
    page.goto(f"{address}#view=engineer")
    page.locator("tbody tr").nth(WORKERS - 1).wait_for(state="attached", timeout=1000 * START_S)
    shown = 1000 * (time.monotonic() - began)
    paint = float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    updates = float(page.evaluate(DRAW))
    page.context.close()
    return paint, shown, updates


def _write_large(run: Path) -> None:
    run.mkdir()
    (run / "config.yaml").write_text("dialect: shoal\n")
    (run / "provenance.json").write_text('{"format": 1, "settings": {}}')
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, RECORDS + 1):
            line = {"step": step, "split": "train", "loss": 2 / step, "wall_s": step / 10, "samples": 8 * step, "samples_per_s": 80.0}
            file.write(json.dumps(line) + "\n")
    names = [f"worker-{number:03}" for number in range(WORKERS)]
    told = {"state": "computing", "rate": 2.0, "lag": 0, "accepted": 5, "rejected": 0, "bytes": 100, "samples": 40, "heard_s": 0.2}
    with (run / "history.jsonl").open("w") as file:
        for at in range(500):
            workers = {name: ["computing", at, at, at, at, 0, 0, at, 1] for name in names}
            moment = {"wall_s": 10.0 * at, "version": 100 * at, "workers": workers}
            file.write(json.dumps(moment) + "\n")
    status = {"schema": 2, "at": time.time(), "pid": os.getpid(), "state": "running", "run": "large", "version": RECORDS, "of": RECORDS}
    members = [{"worker": name, "address": "192.0.2.9", **told} for name in names]
    (run / "status.json").write_text(
        json.dumps(status | {"strategy": "async", "members": members, "wall_s": RECORDS / 10, "progress": 0.5})
    )
