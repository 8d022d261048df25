"""A relay whose strategy is another than that of the run above it. Coordinator, relay and workers are threads here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from shoal.config.load import ConfigFile, Override, resolve
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit, missing_above
from shoal.launch.threads import WorkerThreads
from shoal.protocol.messages import INTERRUPTED
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import prepare
from shoal.runs.live_objects import NO_LIVE_OBJECTS
from shoal.runs.monitoring.recorder import Recorder, Reporter
from shoal.runs.welcome import settings_of
from shoal.runs.worker_run import JoinedWorker
from tests.support.processes import HANG_S

ABOVE = {
    "strategy.kind": "edp",
    "updates.codec.kind": "int8",
    "transport.kind": "in-process",
    "cluster.num_workers": "1",
    "model.hidden_sizes": "[16]",
    "training.batch_size": "32",
    "training.epochs": "2",
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
}
BELOW = {"strategy.kind": "syncps", "strategy.round_timeout_s": "30", "cluster.num_workers": "2", "evaluation.batches": "0"}


def overrides(settings: dict[str, str]) -> list[Override]:
    return [Override(path, value, "test") for path, value in settings.items()]


def run_both(folder: Path, settings: dict[str, str], reporters: list[Reporter]) -> dict[str, dict[str, Any]]:
    """Run a coordinator, a relay and two workers to the end; the summaries of the first two. `reporters`: of the coordinator above."""
    loaded = resolve([ConfigFile("starter")], overrides(ABOVE | settings), environ={})
    above = prepare(loaded, run_dir=str(folder / "above"), resume=False, reporters=reporters, workers=1)
    ended: dict[str, dict[str, Any]] = {}
    upper = threading.Thread(target=lambda: ended.update(above=above.loop.train()))
    upper.start()
    joined = JoinedWorker(JoinOptions(*above.invitation, name="left", patience_s=HANG_S), lambda text: None)
    below = settings_of(joined.welcome.header, overrides(BELOW), joined.options.permissions)
    relay = prepare(below, run_dir=str(folder / "left"), resume=False, reporters=[], workers=2, above=joined)
    workers = WorkerThreads(
        relay.loop.run, folder / "left" / "workers", relay.invitation, ["ada", "ben"], NO_LIVE_OBJECTS, lambda text: None
    )
    workers.start()
    ended["left"] = relay.loop.train()
    upper.join(HANG_S)
    workers.close()
    for made in (relay, above):
        made.loop.server.close()
    found: list[str] = []
    higher, lower = (gather(folder / name / "coordinator", [], found) for name in ("above", "left"))
    assert [*found, *missing_above(higher, lower), *audit(lower, found).violations] == []
    return ended


def test_rounds_of_syncps_go_up_to_a_run_that_applies_each_update_when_it_comes(tmp_path: Path) -> None:
    ended = run_both(tmp_path, {}, [])
    assert ended["above"]["status"] == "completed"
    assert (ended["above"]["contributions"]["accepted"], ended["left"]["steps"]) == (ended["above"]["steps"], ended["above"]["steps"])


class StopsAtOnce(Reporter):
    """The owner presses Ctrl-C after the third step."""

    def step(self, recorder: Recorder) -> None:
        if recorder.step >= 3:
            recorder.stopping = INTERRUPTED


def test_a_relay_of_a_run_that_was_interrupted_is_interrupted_and_not_complete(tmp_path: Path) -> None:
    ended = run_both(tmp_path, {"training.epochs": "1000"}, [StopsAtOnce()])
    assert (ended["above"]["status"], ended["left"]["status"]) == ("interrupted", "interrupted")
