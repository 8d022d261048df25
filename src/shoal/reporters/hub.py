"""Copies of a run on the Hugging Face hub: every few steps and at the end, beside the training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from shoal import manifest
from shoal.config import Run
from shoal.config.fields import Secret, as_data
from shoal.config.show import flat, resolved_text
from shoal.data.text.tokenizers.files import saved_files
from shoal.errors import ShoalError
from shoal.reporters.background_push import Pusher, Snapshot
from shoal.reporters.hub_repository import PushError, Repository
from shoal.reporters.model_card import facts_of, write_card
from shoal.runs.folder import plugin_record
from shoal.runs.monitoring.best_weights import newest_best
from shoal.runs.monitoring.recorder import Recorder, Reporter

LAST_PUSH_S = 60.0
_ELSEWHERE = ("alerts", "cluster", "transport")
"""Settings that name people, machines and databases. They are not pushed."""
_SHORTEST_SECRET = 6


class HubUploads(Reporter):
    """The reporter that pushes weights, the newest sample, settings, metrics and a model card.

    The weights are those that an export takes: the best if the run keeps them, else the newest or their average.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.repository = Repository(run.hub)
        self.secrets = [value.reveal() for _, value in flat(run) if isinstance(value, Secret)]

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.folder = recorder.directory.path
        self.pusher = Pusher(self._push)

    def step(self, recorder: Recorder) -> None:
        """Offer a copy to the pusher every few steps. The copy of the last step is pushed at the end, with its evaluation."""
        if recorder.step % self.run.hub.push_interval == 0 and recorder.completed < recorder.engine.total_steps:
            self._offer()
        self._report()

    def close(self, summary: dict[str, Any]) -> None:
        if not hasattr(self, "pusher"):
            return
        pusher, step = self.pusher, self.recorder.step
        if summary["status"] != "failed" and step:
            offered = self._offer()
            self._report()
            of_all = f", whose weights are the best of {step}," if offered not in (None, step) else ""
            what = f"{self.recorder.step_name} {step if offered is None else offered}{of_all}"
            self.recorder.message(f"uploading {what} to {self.repository.url} (at most {LAST_PUSH_S:.0f} s)")
        pusher.finish(LAST_PUSH_S)
        self._report()
        if pusher.trouble:
            newest = f"{self.recorder.step_name} {pusher.pushed_step}"
            uploaded = f"the newest upload is of {newest}" if pusher.pushes else "nothing of this run is there"
            self.recorder.message(f"warning: the end of the run is not at {self.repository.url}: {pusher.trouble}; {uploaded}")
        elif pusher.pushes:
            times = "once" if pusher.pushes == 1 else f"{pusher.pushes} times"
            self.recorder.message(f"uploaded {times} to {self.repository.url}, last at {self.recorder.step_name} {pusher.pushed_step}")

    def _report(self) -> None:
        """Report on the run's thread what the pushing thread found."""
        while not self.pusher.messages.empty():
            self.recorder.message(self.pusher.messages.get())

    def _offer(self) -> int | None:
        """Offer a copy to the pusher; returns the step of its weights, None where there is no copy."""
        try:
            best = newest_best(self.folder, self.recorder.message)
            step, found = (best.step, best.weights) if best is not None else (self.recorder.step, self.recorder.engine.averaged_weights())
            weights = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in found.items()}
            self.pusher.offer(Snapshot(step, facts_of(self.recorder)._replace(step=step), weights))
            return step
        except (MemoryError, RuntimeError, ShoalError) as error:  # PyTorch reports a lack of memory as either of the first two
            self.recorder.message(f"warning: no copy of {self.recorder.step_name} {self.recorder.step} for the hub: {error}")
            return None

    # --- in the pusher's thread ----------------------------------------------------------------------

    def _push(self, snapshot: Snapshot) -> None:
        """Raises PushError."""
        if not all(value.isfinite().all() for value in snapshot.weights.values() if value.is_floating_point()):
            raise PushError("the weights are not finite", lasting=True)
        with tempfile.TemporaryDirectory(prefix="shoal-hub-") as folder:
            files = self._files(snapshot) | {"model.safetensors": Path(folder) / "model.safetensors"}
            save_file(snapshot.weights, files["model.safetensors"], {"format": "pt", "step": str(snapshot.step)})
            files[manifest.FILE] = manifest.manifest_of(files)
            of_all = f" of {snapshot.facts.total_steps}" if snapshot.facts.total_steps else ""
            self.repository.commit(files, f"{snapshot.facts.step_name.capitalize()} {snapshot.step}{of_all}")
        while self.repository.notes:
            self.pusher.messages.put(f"warning: {self.repository.notes.pop()}")

    def _files(self, snapshot: Snapshot) -> dict[str, Any]:
        """All files of the step but the weights. None of them holds a secret."""
        records = [record for record in self.recorder.directory.metrics() if record["step"] <= snapshot.step]
        sample = self._sample(snapshot.step)
        config = self._config()
        texts = {
            "README.md": write_card(snapshot.facts, records, sample, config),
            "config.yaml": config,
            "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        }
        files: dict[str, Any] = {name: self._without_secrets(text).encode() for name, text in texts.items()}
        for path in ([sample] if sample else []) + list(self._needed_to_load()):
            files[path.relative_to(self.folder).as_posix()] = path.read_bytes()
        return files

    def _needed_to_load(self) -> Iterator[Path]:
        """What `shoal generate` asks for besides weights and settings."""
        yield from (path for path in (self.folder / "data.json", self.folder / plugin_record.FILE) if path.exists())
        yield from saved_files(self.folder / "tokenizer").values()

    def _sample(self, step: int) -> Path | None:
        found = (path for path in (self.folder / "samples").glob("step-*") if path.stem <= f"step-{step:08d}")
        return max(found, key=lambda path: path.name, default=None)

    def _config(self) -> str:
        settings = {name: value for name, value in as_data(self.run, mask=None).items() if name not in _ELSEWHERE}
        return resolved_text(settings)

    def _without_secrets(self, text: str) -> str:
        """Mask secrets in a text: a user may have copied one into a setting that is not masked by itself."""
        for secret in self.secrets:
            text = text.replace(secret, Secret.MASK) if len(secret) >= _SHORTEST_SECRET else text
        return text
