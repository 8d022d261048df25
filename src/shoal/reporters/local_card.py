"""A model card in the run's own folder, for a class that does not share its model on the hub."""

from __future__ import annotations

import json
from typing import Any

from shoal.config.fields import as_data
from shoal.config.show import to_yaml
from shoal.reporters.model_card import Story, write_card
from shoal.runs.monitoring.recorder import Recorder, Reporter

_ELSEWHERE = ("hub", "transport")
"""Settings that are about places, and may hold secrets."""


class LocalCard(Reporter):
    """Writes README.md when the run ends: what the model is, how it was trained, how good it is, and how to use it."""

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def close(self, summary: dict[str, Any]) -> None:
        recorder, folder = self.recorder, self.recorder.directory.path
        described = folder / "data.json"
        data = json.loads(described.read_text(encoding="utf-8"))["name"] if described.exists() else ""
        settings = {name: value for name, value in as_data(recorder.run).items() if name not in _ELSEWHERE}
        sample = max((folder / "samples").glob("step-*"), key=lambda path: path.name, default=None)
        size, steps = recorder.engine.size, recorder.engine.total_steps
        story = Story(recorder.run, recorder.step, steps, recorder.samples, recorder.wall_s, size, data, str(folder))
        try:
            card = write_card(story, recorder.directory.metrics(), sample, "dialect: shoal\n" + to_yaml(settings))
            (folder / "README.md").write_text(card, encoding="utf-8")
        except OSError as error:
            recorder.message(f"warning: there is no model card in {folder}: {error.strerror or error}")
