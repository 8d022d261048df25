"""Alerts: a person is told when a run needs one.

The conditions below are told what happened and when; each answers with a text once, and again only after what it was about had ended.
`AlertReporter` watches a run with them, also while no step is taken, and sends from a thread of its own: the run never waits for a channel
but at its end, and never fails because of one.
"""

from __future__ import annotations

import math
import platform
import queue
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any

from shoal.config import Run
from shoal.errors import ShoalError, printable
from shoal.reporters.alert_channels import Alert, Channel, channels_of
from shoal.runs.monitoring.recorder import Recorder, Reporter

_LEAST_PATIENCE_S, _TIMES_A_STEP, _RECENT_STEPS = 600.0, 10.0, 20
_RECENT_LOSSES, _LEAST_LOSSES, _LEAST_RISE = 20, 8, 0.25
_MOST_NAMED = 10
_CHECK_EVERY_S = 5.0
_BYTES_PER_WEIGHT, _CHECKPOINTS = 12, 2
_TRIES, _PAUSE_S, _GOODBYE_S = 3, 2.0, 30.0
_MOST_WAITING = 100


class ProgressCondition:
    """No step for a long time."""

    def __init__(self, limit_s: float | None, now: float) -> None:
        """`limit_s`: None for a limit that follows from the last steps."""
        self._limit_s, self._since, self._told = limit_s, now, False
        self._times: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, now: float) -> None:
        if not self._told:  # a pause that an alert was about is no measure of a step
            self._times.append(now - self._since)
        self._since, self._told = now, False

    def wait(self, now: float) -> None:
        """The run is not meant to make progress now."""
        self._since = now

    @property
    def limit_s(self) -> float:
        return self._limit_s or max(_LEAST_PATIENCE_S, _TIMES_A_STEP * max(self._times, default=0.0))

    def check(self, now: float) -> str:
        silent = now - self._since
        if self._told or silent < self.limit_s:
            return ""
        self._told = True
        return f"no step for {_duration(silent)}"


class LossCondition:
    """A loss that jumps, or is not finite."""

    def __init__(self, factor: float, name: str = "loss") -> None:
        self._factor, self._name, self._told = factor, name, False
        self._recent: deque[float] = deque(maxlen=_RECENT_LOSSES)

    def record(self, loss: float) -> str:
        text = self._fault(loss)
        if not text:
            self._recent.append(loss)
        told, self._told = self._told, bool(text)
        return "" if told else text

    def _fault(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the {self._name} is {'not a number' if math.isnan(loss) else 'infinite'}"
        if len(self._recent) < _LEAST_LOSSES:
            return ""
        usual = statistics.median(self._recent)
        spread = statistics.median(abs(one - usual) for one in self._recent)
        if loss <= usual + max(self._factor * spread, _LEAST_RISE * abs(usual)):
            return ""
        return f"the {self._name} has jumped from {usual:.4g} to {loss:.4g}"


class MachinesCondition:
    """Workers that vanished without leaving."""

    def __init__(self) -> None:
        self._told: set[str] | None = None

    def check(self, lost: Collection[str]) -> str:
        """`lost`: the names of all workers that have vanished and not come back. Those of the first call had vanished before."""
        new = [] if self._told is None else sorted(set(lost) - self._told)
        self._told = set(lost)
        if not new:
            return ""
        named = ", ".join(printable(name) for name in new[:_MOST_NAMED])
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        return f"{len(new)} {'worker has' if len(new) == 1 else 'workers have'} vanished: {named}{more}"


class DiskCondition:
    """A disk that is nearly full."""

    def __init__(self, least: int) -> None:
        self._least, self._told = least, False

    def check(self, free: int) -> str:
        told, self._told = self._told, free < self._least
        return f"the disk of the run's folder has only {free / 1e9:.2f} GB left" if self._told and not told else ""


class AlertReporter(Reporter):
    """Watches a run, and sends alerts."""

    def __init__(self, run: Run, channels: list[Channel] | None = None) -> None:
        """`channels`: None for those of the settings. Raises ShoalError where this machine cannot use one of them."""
        self.settings = run.alerts
        self.channels = channels_of(run.alerts) if channels is None else channels
        self.name = run.name or ""
        self._waiting: queue.Queue[Alert | None] = queue.Queue(_MOST_WAITING)
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, recorder: Recorder) -> None:
        settings, self.recorder = self.settings, recorder
        self.name = self.name or recorder.directory.path.name
        room = max(int(settings.disk_gb * 1e9), _CHECKPOINTS * _BYTES_PER_WEIGHT * recorder.engine.size)
        self.progress = ProgressCondition(settings.no_progress_s, time.monotonic())
        self.machines, self.disk = MachinesCondition(), DiskCondition(room)
        self.losses: dict[str, LossCondition] = {}
        recorder.message(f"alerts go to {' and '.join(channel.name for channel in self.channels)}")
        self._threads = [threading.Thread(target=work, name=f"alerts: {work.__name__}", daemon=True) for work in (self._watch, self._send)]
        for thread in self._threads:
            thread.start()

    def step(self, recorder: Recorder) -> None:
        self.progress.step(time.monotonic())

    def record(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if record["split"] == "train" and name.endswith("loss") and isinstance(value, (int, float)):
                condition = self.losses.setdefault(name, LossCondition(self.settings.loss_jump, name.replace("_", " ")))
                self._alert("loss", condition.record(value))

    def close(self, summary: dict[str, Any]) -> None:
        """Say how the run ended, and wait a moment for the alerts to be sent."""
        if not self._threads:
            return
        self._ending.set()
        self._threads[0].join()
        error = f": {summary['error']}" if summary.get("error") else ""
        figures = f"{self.recorder.at(self.recorder.step)} after {_duration(self.recorder.wall_s)}"
        self._alert("ended", f"the run has ended ({summary['status']}) at {figures}{error}")
        self._put(None)
        self._threads[1].join(_GOODBYE_S)
        if self._threads[1].is_alive():
            raise ShoalError(f"the last alerts could not be sent within {_GOODBYE_S:.0f} s")

    def _watch(self) -> None:
        """Look for what no step reports, until the run ends."""
        every = min(_CHECK_EVERY_S, (self.settings.no_progress_s or _LEAST_PATIENCE_S) / 4)
        while not self._ending.wait(every):
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        recorder = self.recorder
        members = recorder.members() if recorder.members is not None else None
        if members is not None and members.rests:
            self.progress.wait(now)
        if text := self.progress.check(now):
            self._alert("no-progress", text + (": no worker is here" if members is not None and members.here == 0 else ""))
        self._alert("disk", self.disk.check(shutil.disk_usage(recorder.directory.path).free))
        if members is not None:
            self._alert("machines-lost", self.machines.check(members.lost))

    # --- sending ----------------------------------------------------------------------------------------

    def _alert(self, kind: str, text: str) -> None:
        if text and kind in self.settings.about:
            recorder = self.recorder
            link = self.settings.link or recorder.dashboard or f"shoal watch {recorder.directory.path.resolve()}   (on {platform.node()})"
            self._put(Alert(kind, self.name, text, link))

    def _put(self, alert: Alert | None) -> None:
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:  # the channels do not answer, which the user was told
            return

    def _send(self) -> None:
        while (alert := self._waiting.get()) is not None:
            for channel in self.channels:
                if problem := self._deliver(channel, alert):
                    self.recorder.message(f"warning: an alert ({alert.kind}) was not sent: {problem}")

    def _deliver(self, channel: Channel, alert: Alert) -> str:
        """Why the alert could not be sent, after some tries; empty: it was sent."""
        for attempt in range(_TRIES):
            try:
                channel.send(alert)
            except ShoalError as error:
                problem = str(error)
            else:
                return ""
            if attempt < _TRIES - 1:
                self._ending.wait(_PAUSE_S * 2**attempt)  # not while the run ends
        return problem


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} minutes" if minutes < 120 else f"{hours:.1f} hours"
