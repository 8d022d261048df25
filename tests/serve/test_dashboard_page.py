"""The dashboard in a real browser: it shows a run, goes back in time, and lets nothing in that a stranger wrote."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal.coordinator.durable.ledger import FileLedger
from shoal.dashboard.server import DashboardServer
from shoal.runs.folder.run_reader import RunFolder
from shoal.runs.invitation import write_join_command
from tests.support.processes import HANG_S

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested by playwright")
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\x1b[31m\u202eevil'
TOKEN = "a-token-of-some-length"


def worker(name: str, **other: Any) -> dict[str, Any]:
    row = {
        "worker": name,
        "state": "computing",
        "rate": 2.0,
        "lag": 0,
        "accepted": 5,
        "rejected": 0,
        "bytes": 100,
        "why": {},
        "samples": 40,
    }
    return row | {"computing_s": 3.0, "waiting_s": 1.0, "sending_s": 0.5, "since": 1.0, "heard_s": 0.2, "address": "192.0.2.9"} | other


def write_run(path: Path, workers: int = 3, records: int = 60) -> RunFolder:
    """A run of a minute with workers, pictures, a ledger, and strangers' words wherever any can stand."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("dialect: shoal\n")
    settings = {"name": {"value": HOSTILE, "origin": "default"}, "seed": {"value": 42, "origin": "x"}}
    (path / "provenance.json").write_text(json.dumps({"format": 1, "settings": settings}))
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, records + 1):
            wall, more = 60 * step / records, {"layers/0/load/0": 0.7, "layers/0/load/1": 0.3, "gradient_norm": 1.0, HOSTILE: 1.0}
            record = {"step": step, "split": "train", "loss": 2 / step, "wall_s": wall, "samples": 8 * step, "samples_per_s": 8.0}
            file.write(json.dumps(record | more | {"received_bytes": 100 * step, "sent_bytes": 90 * step}) + "\n")
            if step % 20 == 0:
                file.write(json.dumps({"step": step, "split": "eval", "loss": 2.1 / step, "accuracy": step / 100, "wall_s": wall}) + "\n")
    rows = [
        worker("zoe", rejected=3, why={"stale": 3}),
        worker("ann", accepted=9),
        *(worker(f"w{number:03}") for number in range(workers - 2)),
    ]
    moments = [
        {
            "wall_s": float(at),
            "version": at,
            "contributions": {"accepted": 2 * at, "stale": at // 10},
            "workers": {"ann": ["computing", at / 2, at / 4, at / 9, at, 0, 0, at, 1]},
        }
        for at in range(0, 60, 2)
    ]
    (path / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in moments))
    (path / "events.jsonl").write_text(json.dumps({"at": 1.0, "wall_s": 1.0, "step": 0, "text": HOSTILE}) + "\n")
    status = {
        "schema": 2,
        "at": time.time(),
        "pid": os.getpid(),
        "state": "running",
        "run": f"run {HOSTILE}",
        "version": records,
        "of": 100,
    }
    status |= {"strategy": "x", "members": rows, "wall_s": 60.0, "progress": 0.6, "eta_s": 40.0, "contributions": {"accepted": 120}}
    (path / "status.json").write_text(json.dumps(status))
    (path / "samples").mkdir()
    for step in (20, 40, 60):
        Image.new("L", (16, 16), step).save(path / "samples" / f"step-{step:08d}.png")
    ledger = FileLedger(path / "coordinator")
    ledger.append(
        {"version": 1, "batches": 1, "from": [["ann", 0, 0, 1.0, 30, 0, 0, 1, 1], ["zoe", 0, 0, 1.0, 10, 1, 0, 1, 1]], "dropped": ["zoe"]}
    )
    ledger.close()
    write_join_command(path, "shoal join tcp://192.0.2.1:65432 --token secret")
    return RunFolder(path)


@contextmanager
def shown(folder: RunFolder, token: str | None = None, public: bool = False) -> Iterator[tuple[str, str]]:
    """The page's address, and the owner's password."""
    server = DashboardServer([folder], "127.0.0.1", [0], token, public)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/", server.owner_password
    finally:
        server.stop()
        thread.join()


@contextmanager
def opened(browser: Any, home: str, where: str = "", refusals: int = 0) -> Iterator[Any]:
    """The page; at its end nothing must have gone wrong in it, and nobody else may have been asked for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, faults, refused = context.new_page(), list[str](), list[str]()
    page.set_default_timeout(HANG_S * 1000)
    page.on(
        "console", lambda said: (refused if "401" in said.text else faults).append(said.text) if said.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(home) else faults.append(request.url))
    page.goto(home + where)
    try:
        yield page
        assert page.evaluate("window.hacked") is None
    finally:
        context.close()
    assert not faults
    assert bool(refused) == bool(refusals)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with shown(write_run(tmp_path_factory.mktemp("watched") / "run")) as (address, _):
        yield address


def test_a_class_sees_pictures_and_laptops_and_goes_back_in_time(browser: Any, home: str) -> None:
    with opened(browser, home, "#view=class") as page:
        sync_api.expect(page.locator("#class-workers-title")).to_have_text("3 laptops help")
        sync_api.expect(page.locator("#class-workers li").first).to_contain_text("ann")
        sync_api.expect(page.locator("#class-join")).to_be_hidden()
        sync_api.expect(page.locator("#class-big")).to_contain_text("60.0 %")
        sync_api.expect(page.locator("#class-events")).to_contain_text("<script>")
        page.wait_for_function("document.getElementById('class-picture').width === 16")
        page.evaluate("document.getElementById('time').value = 500; document.getElementById('time').dispatchEvent(new Event('input'))")
        sync_api.expect(page.locator("#progress-text")).to_contain_text("step 30 of 100")
        sync_api.expect(page.locator("#class-sample-title")).to_contain_text("20 steps")
        page.locator("body").press("l")
        sync_api.expect(page.locator("#progress-text")).to_contain_text("step 60 of 100")


def test_an_engineer_sees_every_card_and_sorts_the_workers_by_keyboard(browser: Any, home: str) -> None:
    with opened(browser, home) as page:
        page.locator("#name").wait_for()
        page.locator("body").press("e")
        for title in ("Figures", "Workers", "What each worker did", "Load of the experts", "Left out by the rule", "Audit while it runs"):
            sync_api.expect(page.get_by_role("region", name=title)).to_be_visible()
        rows = page.get_by_role("region", name="Workers").locator("tbody tr")
        sync_api.expect(rows.first).to_contain_text("ann")
        page.locator("[data-key=rejected]").focus()
        page.keyboard.press("Enter")
        page.locator("[data-key=rejected]").focus()
        page.keyboard.press("Enter")
        sync_api.expect(rows.first).to_contain_text("3 stale")
        settings = page.get_by_role("region", name="Settings, and where they came from")
        settings.locator("input").fill("seed")
        sync_api.expect(settings.locator("tbody tr")).to_have_count(1)
        page.get_by_label("Which figure").select_option("accuracy")
        sync_api.expect(page.get_by_role("img", name="accuracy")).to_be_visible()


def test_a_chart_says_what_it_leaves_out_and_the_rest_stays_readable(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder.path / "metrics.jsonl").open("a") as file:
        for step, loss in enumerate([1e308, None, -1e308, 0.05], 61):
            file.write(json.dumps({"step": step, "split": "train", "loss": loss, "wall_s": float(step)}) + "\n")
    with shown(folder) as (address, _), opened(browser, address, "#view=engineer") as page:
        card = page.get_by_role("region", name="Figures")
        notes = card.locator(".outliers")
        for part in ("1 value above the chart, up to 1.00e+308", "1 value below the chart, down to -1.00e+308", "1 value not finite"):
            sync_api.expect(notes).to_contain_text(part)
        sync_api.expect(card.locator("path.outlier")).to_have_count(3)
        texts = [float(text) for text in card.locator("svg text[text-anchor=end]").all_text_contents()]
        assert (min(texts) >= 0, max(texts) <= 2.1, len(texts) >= 3) == (True, True, True)
        card.get_by_role("button", name="log").click()
        sync_api.expect(notes).to_contain_text("1 value at or below 0, which a logarithmic axis cannot show")


def test_axis_and_smoothing_are_remembered_and_a_part_is_chosen_by_mouse_and_keys(browser: Any, home: str) -> None:
    with opened(browser, home, "#view=engineer") as page:
        card = page.get_by_role("region", name="Figures")
        plot, whole = card.locator(".plot"), card.get_by_role("button", name="whole")
        card.get_by_role("button", name="log").click()
        card.get_by_role("slider").fill("0.9")
        sync_api.expect(card.locator("path.pale")).to_have_count(2)
        page.reload()
        sync_api.expect(card.get_by_role("button", name="log")).to_have_attribute("aria-pressed", "true")
        sync_api.expect(card.locator("path.pale")).to_have_count(2)
        sync_api.expect(whole).to_be_hidden()
        steps = card.locator("svg text[text-anchor=middle]")
        sync_api.expect(steps.first).to_have_text("10")
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 55, steps=3)
        sync_api.expect(card.locator(".selection")).to_be_visible()
        page.mouse.up()
        sync_api.expect(card.locator(".selection")).to_have_count(0)
        sync_api.expect(steps.first).to_have_text("30")
        plot.dblclick()
        sync_api.expect(steps.first).to_have_text("10")
        plot.focus()
        page.keyboard.press("+")
        sync_api.expect(steps.first).to_have_text("20")
        page.keyboard.press("ArrowLeft")
        sync_api.expect(steps.first).to_have_text("10")
        sync_api.expect(steps.nth(1)).to_have_text("15")
        sync_api.expect(page.locator("#when")).to_have_text("now")
        whole.click()
        sync_api.expect(steps.first).to_have_text("10")


def test_counts_are_those_of_the_time_that_is_shown(browser: Any, home: str) -> None:
    with opened(browser, home, "#view=engineer") as page:
        workers, rule = page.get_by_role("region", name="Workers"), page.get_by_role("region", name="Left out by the rule")
        sync_api.expect(workers).to_contain_text("contributions: 120 accepted")
        sync_api.expect(rule).to_be_visible()
        seek = "at => { document.getElementById('time').value = at; document.getElementById('time').dispatchEvent(new Event('input')) }"
        page.evaluate(seek, 500)
        sync_api.expect(workers).to_contain_text("contributions: 60 accepted, 3 stale")
        sync_api.expect(workers.locator("tbody tr")).to_have_count(1)
        page.evaluate(seek, 0)
        sync_api.expect(workers).to_contain_text("contributions: 0 accepted, 0 stale")
        sync_api.expect(rule).to_be_hidden()


NUMBERS = """async () => {
  const { ticks, logTicks } = await import("./svg.js"), { limits, smoothed, level } = await import("./chart_data.js");
  const points = [0, 1, 2, 3, 4].map((x) => [x, 0]);
  return [
    ticks(1e16, 1e16 + 2).length < 9,
    logTicks(-2, 2, 4),
    logTicks(0, 0.5, 4),
    smoothed(points, [4, 2, 1e9, NaN, 2], 0.5, 1, [0, 9]).map((value) => value === value && Number(value.toFixed(3))),
    limits([5, 5, 5], false)[1] >= 5,
    limits([0, 0, 0, 0, 1], false)[1] > 1,
    level(-1, true) !== level(-1, true),
  ];
}"""


def test_ticks_limits_and_moving_averages_of_charts(browser: Any, home: str) -> None:
    with opened(browser, home, "#view=engineer") as page:
        found = page.evaluate(NUMBERS)
    assert found == [True, [0.01, 0.1, 1, 10, 100], [1, 2, 3], [4, 2.667, 2.667, False, 2.065], True, True, True]


ROWS = """async () => {
  const { fillRows } = await import("./words.js"), body = document.createElement("tbody");
  const rows = (text) => Array.from({ length: 60 }, (_, at) => [String(at), "", () => [[text, ""]]]);
  const last = () => body.children[59].textContent;
  fillRows(body, rows("before"), 1);
  fillRows(body, rows("after"), 1);
  const soon = [body.children[0].textContent, last()];
  while (last() === "before") await new Promise((resolve) => setTimeout(resolve, 20));
  return [...soon, last()];
}"""


def test_of_a_crowd_the_rows_in_sight_are_written_first(browser: Any, home: str) -> None:
    with opened(browser, home, "#view=engineer") as page:
        assert page.evaluate(ROWS) == ["after", "before", "after"]


def test_new_records_arrive_while_one_looks(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with shown(folder) as (address, _), opened(browser, address, "#view=class") as page:
        sync_api.expect(page.locator("#class-big")).to_contain_text("60.0 %")
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 61, "split": "eval", "loss": 0.01, "accuracy": 0.875, "wall_s": 61.0}) + "\n")
        sync_api.expect(page.locator("#class-big")).to_contain_text("87.5 %")


def test_whoever_watches_from_elsewhere_types_the_token_and_is_not_told_how_to_join(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=200, records=2000)
    with shown(folder, TOKEN, public=True) as (address, _), opened(browser, address, "#view=class", refusals=2) as page:
        for wrong in ("another token", "\u2013 a dash of a word processor"):
            page.locator("#token").fill(wrong)
            page.locator("#token").press("Enter")
            sync_api.expect(page.locator("#trouble")).to_contain_text("the token is wrong")
        page.locator("#token").fill(TOKEN)
        page.locator("#token").press("Enter")
        sync_api.expect(page.locator("#class-workers-title")).to_have_text("200 laptops help")
        sync_api.expect(page.locator("#class-join")).to_be_hidden()
        page.locator("body").press("e")
        sync_api.expect(page.get_by_role("region", name="Workers").locator("tbody tr")).to_have_count(200)


def answered(page: Any) -> AbstractContextManager[Any]:
    """Until the server has answered an order. What the page says of it may be about the order before, and goes away."""
    return page.expect_response(lambda response: response.url.endswith("/orders"))


def test_the_owner_shows_how_to_join_pauses_and_evicts_and_others_cannot(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, given = write_run(tmp_path / "run"), list[tuple[str, str | None]]()
    monkeypatch.setattr("shoal.dashboard.app.read_owner_file", lambda path: path)
    monkeypatch.setattr(
        "shoal.dashboard.app.send_command", lambda owner, action, name: given.append((action, name)) or f"the owner: {HOSTILE}"
    )
    with shown(folder) as (home, password):
        with opened(browser, home, f"#view=class&owner={password}") as page:
            sync_api.expect(page.locator("#class-line")).to_contain_text("--token secret")
            sync_api.expect(page.locator("#class-code path")).to_be_visible()
            page.on("dialog", lambda asked: asked.accept())
            with answered(page):
                page.locator("#pause").click()
            sync_api.expect(page.locator("#said")).to_contain_text("<script>")
            assert page.evaluate("location.hash") == "", "the password does not stay in the address"
            page.locator("body").press("e")
            with answered(page):
                page.get_by_role("button", name="Evict zoe").click()
            with answered(page):
                page.locator("#stop").click()
        with opened(browser, home, "#view=class") as page:
            sync_api.expect(page.locator("#class-workers-title")).to_have_text("3 laptops help")
            sync_api.expect(page.locator("#owner")).to_be_hidden()
            sync_api.expect(page.locator("#class-join")).to_be_hidden()
    assert given == [("pause", None), ("evict", "zoe"), ("stop", None)]
