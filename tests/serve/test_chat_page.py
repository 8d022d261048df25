"""The chat page in a real browser: it chats, keeps conversations, asks nobody else for anything, and logs no error."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator

import pytest

from shoal.serve.load_model import ServedModel
from shoal.serve.model_pool import ModelPool, ModelSource
from shoal.serve.server import ModelServer
from tests.support.eventually import eventually
from tests.support.processes import HANG_S
from tests.support.small_service import running, running_pool, small_model, small_served

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested by playwright")


@pytest.fixture(scope="module")
def slow_service() -> Iterator[ModelServer]:
    """Its answers may take many minutes, so that they can be stopped however long that takes."""
    with running(small_served(small_model(1 << 16), max_new_tokens=60)) as one:
        yield one


@pytest.fixture
def page(browser: sync_api.Browser, slow_service: ModelServer) -> Iterator[sync_api.Page]:
    """The page; at its end nothing must have gone wrong in it."""
    context = browser.new_context()
    opened, faults = context.new_page(), []
    opened.set_default_timeout(HANG_S * 1000)
    home = f"http://127.0.0.1:{slow_service.ports[0]}/"
    opened.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: None if request.url.startswith(home) else faults.append(request.url))
    opened.goto(home)
    sync_api.expect(opened.locator("#model")).to_have_text("tiny")
    yield opened
    context.close()
    assert not faults


def ask(page: sync_api.Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")


def test_a_question_is_answered_again_and_kept(page):
    page.locator("[name=seed]").fill("7")
    ask(page, "hello")
    answer = page.locator(".turn.assistant div")
    sync_api.expect(page.locator("#again")).to_be_enabled()
    first = answer.inner_text()
    assert len(first) > 10
    page.locator("#again").click()
    sync_api.expect(page.locator("#stop")).to_be_hidden()
    assert answer.inner_text() == first, "the seed decides"
    page.locator("#new").click()
    sync_api.expect(page.locator(".turn")).to_have_count(0)
    sync_api.expect(page.locator("#conversations li")).to_have_count(2)
    page.reload()
    page.locator("#conversations button", has_text="hello").first.click()
    sync_api.expect(answer).to_have_text(first, use_inner_text=True)


def test_machines_show_their_layers_memory_and_speed_and_a_dead_one_is_told(page):
    told = page.evaluate("fetch('v1/status').then((answer) => answer.json())")
    here = {"name": "server", "alive": True, "layers": [0, 3], "parameters": 1500000, "weight_bytes": 6000000, "memory_bytes": 3.1e9}
    away = {"name": "pi", "alive": True, "layers": [4, 4], "parameters": 1, "weight_bytes": 4, "memory_bytes": 0, "token_s": 0, "tokens": 0}
    written = itertools.count(5)  # there are more whenever the page asks, so it is seen to be busy however late one looks

    def tell(route) -> None:
        route.fulfill(json={**told, "machines": [{**here, "token_s": 0.0021, "tokens": next(written), "has_ends": True}, away]})

    page.route("**/v1/status", tell)
    blocks = page.locator(".machine")
    sync_api.expect(blocks.nth(0)).to_contain_text("layers 0 to 3, embedding and output matrix")
    sync_api.expect(blocks.nth(0)).to_contain_text("1.5 million weights, 6.0 MB, 3.1 GB free when it came")
    sync_api.expect(blocks.nth(0)).to_contain_text("2.1 ms a token")
    sync_api.expect(blocks.nth(1)).to_contain_text("layer 4")
    sync_api.expect(page.locator(".machine.busy")).to_contain_text("server")
    away["layers"] = [0, -1]
    sync_api.expect(blocks.nth(1)).to_contain_text("no layers: a spare")
    away["alive"] = False
    sync_api.expect(page.locator(".machine.dead")).to_contain_text("pi")


def test_an_answer_that_is_cut_off_says_so(page):
    page.locator("[name=max_tokens]").fill("3")
    ask(page, "hello")
    sync_api.expect(page.locator("#state")).to_have_text("the answer ends here: it has its greatest length, or the model's context is full")


def test_a_question_that_is_too_long_returns_to_its_box_and_the_conversation_goes_on(browser, slow_service):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{slow_service.ports[0]}/")
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    page.locator("[name=max_tokens]").fill("2")
    page.locator("#question").fill("a long question " * 5000)
    page.locator("#send").click()
    sync_api.expect(page.locator("#state")).to_contain_text("tokens")
    assert page.locator("#question").input_value() == ("a long question " * 5000).strip()
    sync_api.expect(page.locator(".turn")).to_have_count(0)
    ask(page, "hello")
    sync_api.expect(page.locator(".turn.assistant")).to_have_count(1)
    sync_api.expect(page.locator("#stop")).to_be_hidden()
    page.locator("[name=temperature]").fill("-1")
    page.locator("#again").click()
    sync_api.expect(page.locator("#state")).to_contain_text("temperature")
    sync_api.expect(page.locator(".turn")).to_have_count(2)
    context.close()


def test_a_server_that_refuses_the_key_says_where_to_type_it(browser, slow_service):
    refused = {"error": {"message": "a key is needed: Authorization: Bearer KEY", "code": "invalid_api_key"}}
    with browser.new_context() as context:
        opened = context.new_page()
        opened.route("**/v1/status", lambda route: route.fulfill(json=refused, status=401))
        opened.goto(f"http://127.0.0.1:{slow_service.ports[0]}/")
        sync_api.expect(opened.locator("#state")).to_have_text("a key is needed: type it into the field Key, the last of the settings")
        sync_api.expect(opened.locator(".machine.dead")).to_contain_text("needs a key")


def test_escape_stops_an_answer_and_frees_its_place(page, slow_service):
    page.locator("[name=max_tokens]").fill("60000")
    ask(page, "a long one")
    sync_api.expect(page.locator(".turn.assistant div")).not_to_be_empty()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#state")).to_have_text("stopped")
    sync_api.expect(page.locator("#state")).not_to_have_class("bad")
    sync_api.expect(page.locator(".turn.assistant .ended")).to_have_text("You stopped the answer here.")
    page.wait_for_function("() => fetch('v1/status').then((answer) => answer.json()).then((told) => told.running === 0)")
    eventually(lambda: not slow_service.engine.busy)


def test_an_answer_stopped_before_its_first_word_gives_the_question_back(page):
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    ask(page, "hello")
    sync_api.expect(page.locator("#state")).to_have_text("writing …")
    page.locator("#stop").click()
    sync_api.expect(page.locator("#state")).to_have_text("stopped before the first word")
    assert page.locator("#question").input_value() == "hello"
    sync_api.expect(page.locator(".turn")).to_have_count(0)


def test_empty_fields_show_what_the_server_uses_for_the_chosen_method(page):
    shown = page.locator("[name=top_k], [name=top_p], [name=temperature], [name=max_tokens]")
    sync_api.expect(page.locator("[name=max_tokens]")).to_have_attribute("placeholder", "60 tokens")
    sync_api.expect(page.locator("[name=strategy] option").first).to_have_text("the server's: top_k")
    assert shown.evaluate_all("(all) => all.map((one) => one.placeholder)") == ["1", "40", "off", "60 tokens"]
    page.locator("[name=strategy]").select_option("top_k_top_p")
    assert shown.evaluate_all("(all) => all.map((one) => one.placeholder)") == ["1", "50", "0.9", "60 tokens"]


def test_answers_and_their_code_are_copied_as_the_model_wrote_them(page):
    text = "# T\n\n```py\na < b\n```\n\nend"
    body = f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "hello")
    for label, wanted in (("Copy the code", "a < b"), ("Copy the answer", text)):
        button = page.get_by_role("button", name=label)
        button.click()
        sync_api.expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == wanted
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as on a page that came over http from elsewhere
    page.locator("#question").fill("")
    page.get_by_role("button", name="Copy the code").click()
    page.locator("#question").press("Control+v")
    assert page.locator("#question").input_value() == "a < b"


def test_an_error_in_the_middle_of_an_answer_is_shown_and_what_came_is_kept(page):
    body = 'data: {"choices": [{"delta": {"content": "half"}}]}\n\ndata: {"error": {"message": "a machine is gone"}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "hello")
    sync_api.expect(page.locator("#state")).to_have_text("a machine is gone")
    sync_api.expect(page.locator(".turn.assistant div")).to_have_text("half")


def rendered(page, text):
    return page.evaluate(
        """async (text) => {
          const { render } = await import("./markdown.js");
          const box = document.createElement("div");
          box.append(...render(text));
          return box.innerHTML;
        }""",
        text,
    )


def test_headings_lists_and_paragraphs_follow_each_other_line_by_line(page):
    assert rendered(page, "## T\nSo:\n- a\n  more\n- b\nThen:\n\n3. c\n4. d") == (
        '<h4>T</h4><p>So:</p><ul><li>a<br>more</li><li>b</li></ul><p>Then:</p><ol start="3"><li>c</li><li>d</li></ol>'
    )


def test_tables_keep_sides_and_pipes_and_stay_texts_where_they_are_none(page):
    assert rendered(page, "So:\n| a | b |\n|---|--:|\n| `x` | 1\\|2 |\n| <b> |\n\nend") == (
        '<p>So:</p><div class="wide" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td><code>x</code></td><td class="right">1|2</td></tr>'
        '<tr><td>&lt;b&gt;</td><td class="right"></td></tr></tbody></table></div><p>end</p>'
    )
    assert "<table>" not in rendered(page, "a | b\n---|---|---\n1 | 2")
    assert "<table>" not in rendered(page, "|" * 5000 + "\n" + "|-" * 5000 + "\n" + "|\n" * 5000), "each row would get 5000 cells"


def test_what_a_model_writes_never_becomes_html(page):
    text = "# T\n\n<img src=x onerror=alert(1)> **b** `c` [l](javascript:x) [m](https://a.example/)\n\n- one\n- two\n\n```py\n<b>\n"
    shown = rendered(page, text)
    assert "<img" not in shown
    assert "<h3>T</h3>" in shown
    assert '<strong>b</strong> <code>c</code> [l](javascript:x) <a href="https://a.example/"' in shown
    assert "<ul><li>one</li><li>two</li></ul>" in shown
    assert "<code>&lt;b&gt;</code></pre>" in shown


def test_the_page_fits_a_phone_and_everything_has_a_name(page):
    kept = [{"turns": [{"role": "user", "content": f"question {number}"}]} for number in range(20)]
    page.evaluate("(kept) => localStorage.setItem('shoal.conversations', JSON.stringify(kept))", kept)
    page.set_viewport_size({"width": 360, "height": 640})
    page.reload()
    sync_api.expect(page.locator("#question")).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="Conversations", exact=True).click()
    sync_api.expect(page.locator("#conversations")).to_be_visible()
    sync_api.expect(page.locator("#question")).to_be_in_viewport(ratio=1)
    sync_api.expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    page.locator("#conversations button", has_text="question 3").click()
    sync_api.expect(page.locator("#conversations")).to_be_hidden()
    page.get_by_role("button", name="Settings", exact=True).click()
    sync_api.expect(page.locator("#settings")).to_be_visible()
    sync_api.expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth <= 360")
    for control in page.locator("button, input, select, textarea").all():
        named = control.evaluate("(one) => one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length")
        assert named


def test_a_model_is_chosen_and_loaded_by_the_first_question(browser):
    def load() -> ServedModel:
        return small_served(small_model(), max_new_tokens=8)._replace(name="second")

    sources = [ModelSource("tiny", lambda: small_served(max_new_tokens=8)), ModelSource("second", load)]
    models = ModelPool(sources, small_served().settings, print).with_first()
    with running_pool(models) as service, contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(HANG_S * 1000)
        page.goto(f"http://127.0.0.1:{service.ports[0]}/")
        sync_api.expect(page.locator("#models option")).to_have_text(["tiny", "second (not loaded)"])
        page.locator("#models").select_option("second")
        sync_api.expect(page.locator("#machines")).to_contain_text("Not loaded")
        ask(page, "hello")
        sync_api.expect(page.locator("#again")).to_be_enabled()
        sync_api.expect(page.locator("#models option")).to_have_text(["tiny", "second"])
        assert models.state("second").loaded.engine.tokens_written == 8
        page.reload()
        sync_api.expect(page.locator("#models")).to_have_value("second")
