"""A reward that asks a judge over HTTP: our own server, as any other that speaks so."""

from __future__ import annotations

import contextlib
import math
import socket
import threading

import httpx
import pytest

from shoal.config.fields import Secret
from shoal.config.schema import Run
from shoal.config.schema.rlhf import JudgeReward
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards import http as asking
from shoal.runs.rlhf.rewards.http import verdict
from shoal.runs.rlhf.rewards.interface import Answer
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served


def said(*words: tuple[str, float], text: str = "?") -> dict:
    tokens = [{"token": word, "logprob": math.log(share)} for word, share in words]
    return {"choices": [{"message": {"content": text}, "logprobs": {"content": [{"top_logprobs": tokens}]} if tokens else None}]}


def test_the_score_is_how_probable_yes_is_against_no() -> None:
    assert verdict(said((" Yes", 0.3), ("yes", 0.1), ("No", 0.1), ("maybe", 0.5))) == pytest.approx(0.8)
    assert verdict(said(text="Yes, it is.")) == 1.0
    assert verdict(said(text="no")) == 0.0
    assert verdict(said(text="")) == verdict(said(text="Perhaps")) == 0.5
    with pytest.raises(ShoalError, match="does not speak as OpenAI's"):
        verdict({"choices": "yes"})


def test_a_judge_elsewhere_is_asked_about_each_answer(service, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{service.ports[0]}/v1"
    judge = JudgeReward(model="tiny", address=address, question="{prompt}{answer}?")
    answers = [Answer("2+2=", "4"), Answer("2+2=", "{5}")]
    found = judge.builder()(judge, None)(answers)
    for answer, score in zip(answers, found, strict=True):
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{answer.prompt}{answer.text}?"}], "max_tokens": 1}
        body |= {"temperature": 0, "logprobs": True, "top_logprobs": 20}
        told = httpx.post(f"{address}/chat/completions", json=body, timeout=HANG_S)
        assert told.status_code == 200, told.text
        assert len(told.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        assert score == pytest.approx(verdict(told.json()), abs=1e-6)


def test_a_judge_that_is_not_there_or_wants_another_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    nobody = JudgeReward(model="tiny", address="http://127.0.0.1:9/v1")
    with pytest.raises(ShoalError, match=r"no answer from http://127\.0\.0\.1:9/v1"):
        nobody.builder()(nobody, Run)([Answer("a", "b")])
    with running(small_served(api_key=Secret("right-key-of-16-letters"))) as locked:
        for key, fits in (("wrong-key-of-16-letters", False), ("right-key-of-16-letters", True)):
            judge = JudgeReward(model="tiny", address=f"http://127.0.0.1:{locked.ports[0]}/v1", key=Secret(key))
            score = judge.builder()(judge, Run)
            if fits:
                assert 0 <= score([Answer("a", "b")])[0] <= 1
            else:
                with pytest.raises(ShoalError, match=r"refused \(401\)"):
                    score([Answer("a", "b")])


BREAKS = {
    b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n": r"refused \(403\): No",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{": "no answer from http",
}


@pytest.mark.parametrize("response", BREAKS)
def test_a_response_that_breaks_off_is_an_error_with_the_reason(response: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def break_off() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    with server.accept()[0] as accepted:
                        request = b""
                        while not request.endswith(b"}"):  # a connection that is closed before all is read is reset
                            request += accepted.recv(1 << 16)
                        accepted.sendall(response)

        threading.Thread(target=break_off, daemon=True).start()
        judge = JudgeReward(model="tiny", address=f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        with pytest.raises(ShoalError, match=BREAKS[response]):
            judge.builder()(judge, Run)([Answer("a", "b")])
