"""A run from dotted settings, and samples whose batches say which samples they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shoal.config import Run
from shoal.config.load import resolve_data

MakeRun = Callable[..., Run]


def run_of(**settings: Any) -> Run:
    """run_of(data__batching="padded") is the run with data.batching set so. The number of steps is given, as streams need it."""
    tree: dict[str, Any] = {"training": {"max_steps": 1}}
    for path, value in settings.items():
        *parents, leaf = path.split("__")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return resolve_data(json.loads(json.dumps(tree)), name="test", dialect="shoal", environ={}).run


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    return run_of


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not answer, whether or not there is a network."""
    monkeypatch.setattr("shoal.data.hub.dataset.hub_answers", lambda: False)
    monkeypatch.setattr("shoal.data.hub.files.hub_answers", lambda: False)
    monkeypatch.setattr("shoal.data.text.tokenizers.lookup.hub_answers", lambda: False)
