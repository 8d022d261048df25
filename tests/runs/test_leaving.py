"""How a worker leaves: soon when it is asked to, also where nobody answers any more; and the coordinator hears why it could not go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.config.load import Override, resolve_data
from shoal.config.schema.cluster import Transport, Zmq
from shoal.errors import ShoalError
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.coordinator_setup import prepare
from shoal.runs.invitation import Invitation
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.worker_run import JoinedWorker
from tests.support.eventually import eventually

SETTINGS = {
    "model": {"kind": "mlp", "hidden_sizes": [4]},
    "training": {"batch_size": 16, "epochs": 1000, "device": "cpu"},
    "strategy": {"kind": "async"},
    "coordinator": {"heartbeat_interval_s": 30.0},
}
PATIENCE_S = 600.0
"""Whoever takes longer hangs. A busy machine takes many times as long as a quiet one."""


class Heard(Reporter):
    """What the coordinator's screen shows."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


class Coordinating:
    """A coordinator that is driven by a thread until it is frozen: it hears nothing from then on, and its port stays open."""

    def __init__(self, folder: Path, transport: Transport) -> None:
        made = resolve_data(SETTINGS, name="test", dialect="shoal", environ={})
        assert made.ok, made.problems
        self.heard, self.frozen = Heard(), threading.Event()
        made_up = prepare(made, run_dir=str(folder), resume=False, reporters=[self.heard], workers=1, transport=transport)
        self.loop: CoordinatorLoop = made_up.loop
        self.invitation: Invitation = made_up.invitation
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.thread.start()

    def _drive(self) -> None:
        self.loop.driver.open()
        while not self.frozen.is_set():
            self.loop.driver.step()

    def freeze(self) -> None:
        self.frozen.set()
        self.thread.join()


@contextmanager
def coordinating(folder: Path) -> Iterator[Coordinating]:
    made = Coordinating(folder / "run", Zmq(host="127.0.0.1", port=0))
    try:
        yield made
    finally:
        made.freeze()
        made.loop.driver.close()
        made.loop.server.close()


def test_a_worker_whose_coordinator_is_gone_leaves_when_it_is_first_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sign of life it waits for nothing, least of all for an answer of its own: that would take longer than this test."""
    monkeypatch.setattr("shoal.runs.worker_run._PROBE_S", 0.3)
    monkeypatch.setattr("shoal.worker.session.ANSWER_S", 10 * PATIENCE_S)
    with coordinating(tmp_path) as coordinator:
        told: list[str] = []
        worker = JoinedWorker(JoinOptions(*coordinator.invitation, name="w"), told.append)
        worker.prepare()
        thread = threading.Thread(target=worker.work, daemon=True)
        thread.start()
        eventually(lambda: coordinator.loop.coordinator.state.version > 3, "the run goes on")
        coordinator.freeze()
        eventually(lambda: worker.protocol.waits, "the worker asks somebody who does not answer")
        worker.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert told[-1] == "the coordinator does not answer: leaving without a message to it"


def test_the_coordinator_hears_why_a_worker_cannot_go_on(tmp_path: Path) -> None:
    with coordinating(tmp_path) as coordinator:
        wrong_data = JoinOptions(
            *coordinator.invitation, name="ben", overrides=[Override("data.source", '{kind: images, path: "/nowhere"}', "--set")]
        )
        with pytest.raises(ShoalError, match="nowhere"):
            JoinedWorker(wrong_data, lambda text: None).prepare()
        poisoned = JoinedWorker(JoinOptions(*coordinator.invitation, name="anna"), lambda text: None)
        poisoned.prepare()
        assert poisoned.worker is not None
        poisoned.worker.encoder.limit = lambda vector: _not_finite()  # type: ignore[method-assign]
        with pytest.raises(ShoalError, match="not finite"):
            poisoned.work()
        eventually(lambda: sum(" left: " in text for text in coordinator.heard.texts) == 2, f"both reasons: {coordinator.heard.texts}")
        reasons = {text.partition(" left: ")[0]: text for text in coordinator.heard.texts if " left: " in text}
        assert "there are no images at" in reasons["ben"]
        assert "nowhere" not in reasons["ben"], "the path is this worker's own"
        assert reasons["anna"] == "anna left: gradients were not finite"


def _not_finite() -> bool:
    raise ShoalError("gradients were not finite")
