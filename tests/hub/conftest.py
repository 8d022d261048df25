"""A hub on this machine, and the client pointed at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._http import default_client_factory

from shoal.data.hub.access import hub_answers
from tests.support.fake_hub import FakeHub, serving
from tests.support.processes import HANG_S

TOKEN = "hf_never_to_be_seen"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("shoal.reporters.background_push.FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("shoal.reporters.hub.LAST_PUSH_S", HANG_S)
    monkeypatch.setattr(hub_answers, "__defaults__", (HANG_S,))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))  # its own retries
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        yield hub
    for thread in threading.enumerate():
        if thread.name == "hub":
            thread.join(HANG_S)
            assert not thread.is_alive()
    huggingface_hub.set_client_factory(default_client_factory)
