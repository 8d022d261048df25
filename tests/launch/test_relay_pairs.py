"""A relay whose strategy is another than that of the run above it. Coordinator, relay and workers are threads here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from shoal.config.load import ConfigFile, Override, resolve
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit, missing_above
from shoal.launch.threads import WorkerThreads
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import prepare
from shoal.runs.live_objects import NO_LIVE_OBJECTS
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


def test_rounds_of_syncps_go_up_to_a_run_that_applies_each_update_when_it_comes(tmp_path: Path) -> None:
    loaded = resolve([ConfigFile("starter")], overrides(ABOVE), environ={})
    above = prepare(loaded, run_dir=str(tmp_path / "above"), resume=False, reporters=[], workers=1)
    ended: dict[str, dict[str, Any]] = {}
    upper = threading.Thread(target=lambda: ended.update(above=above.loop.train()))
    upper.start()
    joined = JoinedWorker(JoinOptions(*above.invitation, name="left", patience_s=HANG_S), lambda text: None)
    below = settings_of(joined.welcome.header, overrides(BELOW), joined.options.permissions)
    relay = prepare(below, run_dir=str(tmp_path / "left"), resume=False, reporters=[], workers=2, above=joined)
    folder = tmp_path / "left" / "workers"
    workers = WorkerThreads(relay.loop.run, folder, relay.invitation, ["ada", "ben"], NO_LIVE_OBJECTS, lambda text: None)
    workers.start()
    ended["left"] = relay.loop.train()
    upper.join(HANG_S)
    workers.close()
    for made in (relay, above):
        made.loop.server.close()
    assert ended["above"]["status"] == "completed"
    assert (ended["above"]["contributions"]["accepted"], ended["left"]["steps"]) == (ended["above"]["steps"], ended["above"]["steps"])
    found: list[str] = []
    higher, lower = (gather(tmp_path / name / "coordinator", [], found) for name in ("above", "left"))
    assert [*found, *missing_above(higher, lower), *audit(lower, found).violations] == []
