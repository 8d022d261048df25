"""Copies of a run on the Hugging Face hub: every few steps and at the end, beside the training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from shoal.config import Run
from shoal.config.fields import Secret, as_data
from shoal.config.show import flat, to_yaml
from shoal.runs.loop import Loop
from shoal.runs.reporter import Reporter
from shoal.watch.hub_card import Story, write_card
from shoal.watch.hub_repository import PushError, Repository
from shoal.watch.pusher import Pusher

LAST_PUSH_S = 60.0
_ELSEWHERE = ("transport", "cluster")
"""Settings that say where machines and databases are: a repository is no place for them."""
_SHORTEST_SECRET = 6


class Snapshot(NamedTuple):
    """What is pushed of a run, as it was at a step."""

    step: int
    total_steps: int
    samples: int
    wall_s: float
    size: int
    weights: dict[str, Tensor]


class HubUploads(Reporter):
    """The reporter that pushes weights, the newest sample, settings, metrics and a model card."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.repository = Repository(run.hub)
        self.pusher: Pusher[Snapshot] | None = None
        self.secrets = [value.reveal() for _, value in flat(run) if isinstance(value, Secret)]

    def start(self, loop: Loop) -> None:
        self.loop = loop
        self.folder = loop.directory.path
        self.pusher = Pusher(self._push)

    def step(self, loop: Loop) -> None:
        """Take a copy when it is time to; what the last step gives is pushed in the end, with its evaluation."""
        assert self.pusher is not None
        if loop.step % self.run.hub.push_interval == 0 and loop.step < loop.engine.total_steps:
            self._offer(self.pusher)
        self._tell()

    def close(self, summary: dict[str, Any]) -> None:
        if self.pusher is None:
            return
        pusher, step = self.pusher, self.loop.step
        if summary["status"] != "failed" and step:
            self._offer(pusher)
            self._tell()
            self.loop.message(f"uploading step {step} to {self.repository.url} (at most {LAST_PUSH_S:.0f} s)")
        pusher.finish(LAST_PUSH_S)
        self._tell()
        if pusher.trouble:
            there = f"what is there is of step {pusher.pushed_step}" if pusher.pushes else "nothing of this run is there"
            self.loop.message(f"warning: the end of the run is not at {self.repository.url}: {pusher.trouble}; {there}")
        elif pusher.pushes:
            times = "once" if pusher.pushes == 1 else f"{pusher.pushes} times"
            self.loop.message(f"uploaded {times} to {self.repository.url}, last at step {pusher.pushed_step}")

    def _tell(self) -> None:
        """What the thread has to say is said on the loop's."""
        assert self.pusher is not None
        while not self.pusher.messages.empty():
            self.loop.message(self.pusher.messages.get())

    def _offer(self, pusher: Pusher[Snapshot]) -> None:
        try:
            pusher.offer(self._snapshot())
        except (MemoryError, RuntimeError) as error:  # PyTorch's own words for no memory
            self.loop.message(f"warning: no copy of step {self.loop.step} for the hub: {error}")

    def _snapshot(self) -> Snapshot:
        loop = self.loop
        weights = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in loop.engine.weights().items()}
        return Snapshot(loop.step, loop.engine.total_steps, loop.samples, loop.wall_s, loop.engine.size, weights)

    # --- in the pusher's thread ----------------------------------------------------------------------

    def _push(self, snapshot: Snapshot) -> None:
        """Raises PushError."""
        if not all(value.isfinite().all() for value in snapshot.weights.values() if value.is_floating_point()):
            raise PushError("the weights are not finite", lasting=True)
        with tempfile.TemporaryDirectory(prefix="shoal-hub-") as folder:
            files = self._files(snapshot) | {"model.safetensors": Path(folder) / "model.safetensors"}
            save_file(snapshot.weights, files["model.safetensors"], {"format": "pt", "step": str(snapshot.step)})
            self.repository.commit(files, f"Step {snapshot.step} of {snapshot.total_steps}")
        while self.repository.notes:
            assert self.pusher is not None
            self.pusher.messages.put(f"warning: {self.repository.notes.pop()}")

    def _files(self, snapshot: Snapshot) -> dict[str, Any]:
        """Everything but the weights, as far as it belongs to the step. No secret is in any of it."""
        records = [record for record in self.loop.directory.metrics() if record["step"] <= snapshot.step]
        sample = self._sample(snapshot.step)
        config = self._config()
        data = self.folder / "data.json"
        described = json.loads(data.read_text(encoding="utf-8"))["name"] if data.exists() else ""
        story = Story(self.run, snapshot.step, snapshot.total_steps, snapshot.samples, snapshot.wall_s, snapshot.size, described)
        texts = {
            "README.md": write_card(story, records, sample, config),
            "config.yaml": config,
            "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        }
        files: dict[str, Any] = {name: self._without_secrets(text).encode() for name, text in texts.items()}
        for path in ([sample] if sample else []) + list(self._needed_to_load()):
            files[path.relative_to(self.folder).as_posix()] = path.read_bytes()
        return files

    def _needed_to_load(self) -> Iterator[Path]:
        """What `shoal generate` asks for besides weights and settings."""
        yield from (path for path in (self.folder / "data.json",) if path.exists())
        yield from (path for path in sorted((self.folder / "tokenizer").glob("*")) if path.is_file())

    def _sample(self, step: int) -> Path | None:
        found = (path for path in (self.folder / "samples").glob("step-*") if path.stem <= f"step-{step:08d}")
        return max(found, key=lambda path: path.name, default=None)

    def _config(self) -> str:
        settings = {name: value for name, value in as_data(self.run, mask=None).items() if name not in _ELSEWHERE}
        return "dialect: shoal\n" + to_yaml(settings).replace("${", "$${")

    def _without_secrets(self, text: str) -> str:
        """Secrets are not in there, unless somebody put one into another setting too."""
        for secret in self.secrets:
            text = text.replace(secret, Secret.MASK) if len(secret) >= _SHORTEST_SECRET else text
        return text
