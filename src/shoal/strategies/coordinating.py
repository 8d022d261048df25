"""The coordinator at work: requests in, effects carried out, and the run's records, evaluations and checkpoints kept."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import data
from shoal.config import Run
from shoal.config.load import Loaded
from shoal.config.schema.cluster import Transport
from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Effect, Entry, Note, Persist, Published, Reply, Stop
from shoal.coordinator.journal import Journal, Ledger
from shoal.coordinator.machine import Called, Plan, Tick
from shoal.engines import SingleEngine, StepResult
from shoal.errors import ShoalError
from shoal.strategies.assembly import Parts, Progress, assemble, continued, held_out, refuse_unbuilt, sampler, warner, write_info
from shoal.strategies.cluster import Length, fingerprint, length_of, needed, policy_of
from shoal.transports import Message, Request, Server
from shoal.transports.connect import needs_keys, serve
from shoal.transports.keys import Keys, keys_from_secret, new_keys, new_token
from shoal.updates import codecs, privacy
from shoal.updates.messages import BadMessage, parse
from shoal.worker import Loop, Reporter, RunDirectory
from shoal.worker.checkpoint import Checkpoint, Checkpoints, find, load_weights, save_weights

_TICK_S = 0.1
_GOODBYE_S = 15.0
"""How long a coordinator that is done waits for its workers to hear of it."""
_LEAST_JOURNAL_BYTES = 256 << 20
_JOURNAL_STATES = 8
"""A snapshot is taken when the journal is this many times as large as what a snapshot holds."""
_MOST_RECORDS = 8000


class EngineLearner:
    """The coordinator's weights: an engine that is stepped along what workers send."""

    def __init__(self, engine: SingleEngine) -> None:
        self.engine = engine

    @property
    def vector(self) -> Tensor:
        vector = self.engine.vector
        return vector if vector.dtype == torch.float32 and vector.device.type == "cpu" else vector.float().cpu()

    @property
    def buffers(self) -> Tensor:
        return self.engine.buffers

    def apply(self, update: Tensor, buffers: Tensor, step: float) -> Mapping[str, float]:
        if buffers.numel():
            self.engine.load_buffers(buffers)
        return {name: float(value) for name, value in self.engine.apply(update, step).items()}


class SharedFeed:
    """The data as the coordinator sees it: it knows how long an epoch is, and workers do the reading."""

    def __init__(self, batches_per_epoch: int | None) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.at_epoch_end = False

    def __next__(self) -> data.Batch:
        raise NotImplementedError("workers read the data")

    def close(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class Judge:
    """Evaluates copies of the weights beside everything else, so that no worker waits for it."""

    def __init__(self, parts: Parts, batches: Callable[[], Any], directory: RunDirectory) -> None:
        self.engine = SingleEngine(parts.run, copy.deepcopy(parts.engine.task), parts.engine.device, 1)
        self.batches = batches
        self.draw = sampler(Parts(parts.run, parts.data, self.engine, parts.feed), directory)
        self.verdicts: queue.Queue[tuple[int, dict[str, float], str]] = queue.Queue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.engine.load_weights(weights)
        self._thread = threading.Thread(target=self._judge, args=(step,), name="judge", daemon=True)
        self._thread.start()

    def _judge(self, step: int) -> None:
        problem = ""
        metrics: dict[str, float] = {}
        try:
            metrics = self.engine.evaluate(self.batches())
            self.draw(step)
        except (ShoalError, OSError) as error:
            problem = f"warning: no evaluation or sample at step {step}: {error}"
        self.verdicts.put((step, metrics, problem))

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


class Secrets(NamedTuple):
    """What a worker needs to be let in, kept with the run so that a coordinator that comes back is the same to its workers."""

    token: str
    keys: Keys
    port: int = 0
    expected: int = 0
    """Workers the run was begun for: the data is cut into so many shards, whoever takes part later."""

    @classmethod
    def of(cls, folder: Path) -> Secrets:
        path = folder / "secrets.json"
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(saved["token"], keys_from_secret(saved["secret"]), saved["port"], saved.get("expected", 0))
        return cls(new_token(), new_keys())

    def save(self, folder: Path) -> None:
        partial = folder / ".secrets.json"  # never half a file: a run that has lost its secrets has lost its workers
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"token": self.token, "secret": self.keys.secret, "port": self.port, "expected": self.expected}, file)
        os.replace(partial, folder / "secrets.json")


class ClusterLoop(Loop):
    """The loop of a coordinator: a step is a new version, made by workers."""

    def __init__(
        self,
        parts: Parts,
        length: Length,
        coordinator: Coordinator,
        server: Server,
        directory: RunDirectory,
        reporters: list[Reporter],
        welcome: Message,
    ) -> None:
        super().__init__(parts.run, parts.engine, SharedFeed(length.batches_per_epoch), None, directory, reporters)
        self.coordinator, self.server, self.welcome = coordinator, server, welcome
        folder = state_folder(parts.run, directory)
        self.journal, self.ledger = Journal(folder), Ledger(folder)
        self.snapshots = Checkpoints(folder / "snapshots", 2)
        batches = held_out(parts.run, parts.data.eval)
        self.judge = Judge(parts, batches, directory) if batches is not None and parts.run.evaluation.batches != 0 else None
        self.sampling_rate = min(1.0, length.batches_per_contribution / length.batches_per_shard) if length.batches_per_shard else 1.0
        self.beside: Callable[[], None] = lambda: None
        """Called now and then: who started worker processes looks after them here."""
        self._replaying = False
        self._state_bytes = 16 * parts.engine.vector.numel()

    # --- the service -------------------------------------------------------------------------------

    def _steps(self) -> None:
        try:
            self._coordinate()
        finally:
            self.journal.close()
            self.ledger.close()

    def _coordinate(self) -> None:
        if not self.snapshots.all():
            self.snapshot()
        tick_at = 0.0
        while not (self.coordinator.finished or self.stopping):
            for request in self.server.poll(_TICK_S):
                self._serve(request)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                self._tick()
        if self.coordinator.stopped:
            raise ShoalError(self.coordinator.stopped)
        self._carry_out(self.coordinator.stop(self.stopping) if self.stopping else self.coordinator.conclude())
        self._say_goodbye()
        self._finish_evaluation()
        self.finish(not self.stopping)
        self.snapshot()

    def _tick(self) -> None:
        self._carry_out(self.coordinator.handle(Tick(), time.monotonic()))
        self._take_verdicts()
        self.beside()
        if self._journal_is_long():
            self.snapshot()

    def _journal_is_long(self) -> bool:
        """Long enough to be worth a snapshot, and short enough to be taken again in a second or two."""
        long = max(_LEAST_JOURNAL_BYTES, _JOURNAL_STATES * self._state_bytes)
        return self.journal.bytes_since_snapshot > long or self.journal.records_since_snapshot > _MOST_RECORDS

    def _serve(self, request: Request) -> None:
        try:
            asked = parse(request.message.header)
        except BadMessage as error:
            self.server.traffic.refuse("malformed")
            self.server.reply(request, Message({"kind": "refused", "reason": "malformed", "detail": str(error)}))
            return
        event = Called(request, asked, request.message.frames, secrets.token_hex(16))
        self._carry_out(self.coordinator.handle(event, time.monotonic()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self._reply(effect)
            elif isinstance(effect, Persist):
                self.journal.append(effect.record, effect.frames)
            elif isinstance(effect, Entry):
                self.ledger.append(effect.line)
            elif isinstance(effect, Published):
                self._published(effect)
            elif isinstance(effect, (Note, Stop)):
                self.message(effect.text if isinstance(effect, Note) else f"warning: {effect.reason}")

    def _reply(self, effect: Reply) -> None:
        header, frames = effect.header, tuple(effect.frames)
        if header["kind"] == "welcome":
            header, frames = header | self.welcome.header, self.welcome.frames
        self.server.reply(effect.caller, Message(header, frames))

    def _published(self, effect: Published) -> None:
        metrics = {name: torch.tensor(value) for name, value in effect.metrics.items()}
        self.advance(StepResult(metrics, max(1, round(effect.weight)), effect.samples), effect.batches, self.coordinator.finished)

    def _say_goodbye(self) -> None:
        """Let every worker hear that it is over."""
        until = time.monotonic() + _GOODBYE_S
        while self.coordinator.members.by_name and time.monotonic() < until:
            for request in self.server.poll(_TICK_S):
                self._serve(request)
            self._carry_out(self.coordinator.handle(Tick(), time.monotonic()))
            self.beside()

    # --- what the loop does otherwise ----------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        if self.judge is None or self._replaying:
            return {}
        if self.judge.busy:
            self.message(f"warning: no evaluation at step {self.step}: the one before is still under way")
            return {}
        self.judge.begin(self.step, {name: value.detach().clone() for name, value in self.engine.weights().items()})
        return {}

    def _take_verdicts(self) -> None:
        while self.judge is not None and not self.judge.verdicts.empty():
            step, metrics, problem = self.judge.verdicts.get()
            if problem:
                self.message(problem)
            if metrics:
                self.judged(metrics, step)

    def _emit(self, split: str, metrics: dict[str, float], step: int | None = None) -> None:
        if split == "train" and self.run.updates.privacy.enabled:
            metrics["epsilon"] = self.epsilon()
        super()._emit(split, metrics, step)

    def epsilon(self) -> float:
        """What the run has told about any one sample so far. What was sent counts, whether it was taken or not."""
        settings, state = self.run.updates.privacy, self.coordinator.state
        by_sample = settings.unit == "sample"
        multiplier = settings.noise_multiplier if by_sample else privacy.sample_level_multiplier(settings.noise_multiplier)
        accountant = privacy.Accountant(multiplier, self.sampling_rate, settings.delta)
        for name, seat in state.seats.items():
            accountant.record(f"seat {seat}", state.sequences.get(name, -1) + 1)
        return accountant.spent()

    def _finish_evaluation(self) -> None:
        """The final weights are always judged."""
        if self.judge is None or self.stopping == "interrupted":
            return
        self.judge.wait()
        self._take_verdicts()
        if self.latest["eval"].get("step") != self.step:
            self.evaluate()
            self.judge.wait()
            self._take_verdicts()

    def advance(self, result: Any, batches: int, last: bool) -> None:
        if not self._replaying:
            super().advance(result, batches, last)
            return
        self.batches += batches
        self.samples += result.samples
        self.window.add(result)
        if self.step % self.run.logging.every_steps == 0:
            self.window.take(self.engine.world)

    # --- what survives -----------------------------------------------------------------------------

    def snapshot(self) -> None:
        """All there is now; the journal starts over. The new journal is there first, so that no moment is without one."""
        number = self.journal.begin(self.coordinator.pending())
        self.snapshots.save(number, self.engine.weights(), self.state_dict())
        self.journal.forget_before(int(self.snapshots.all()[0].name.partition("-")[2]))

    def save(self) -> None:
        super().save()
        path = self.run.coordinator.checkpoint_path
        if path is not None:
            save_weights(Path(path), self.engine.weights())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"coordinator": self.coordinator.state_dict(), "ledger": self.ledger.length}

    def recover(self, snapshot: Checkpoint) -> None:
        """Become what the coordinator was when it ended, however it ended."""
        self.restore(snapshot)
        self.coordinator.load_state_dict(snapshot.state["coordinator"])
        self.ledger.cut(snapshot.state["ledger"])
        self._replaying = True
        for record, frames in self.journal.recover(snapshot.step):
            self._carry_out(self.coordinator.replay(record, frames))
        self._replaying = False
        self.directory.forget_after(self.step)
        self.resumed_from = str(snapshot.path)

    def summary(self, status: str, error: str) -> dict[str, Any]:
        traffic, state = self.server.traffic, self.coordinator.state
        return super().summary(status, error) | {
            "contributions": dict(state.contributions),
            "refused": self.coordinator.refused | traffic.refused,
            "received_bytes": traffic.received_bytes,
            "sent_bytes": traffic.sent_bytes,
        }


def state_folder(run: Run, directory: RunDirectory) -> Path:
    return Path(run.coordinator.state_path) if run.coordinator.state_path else directory.path / "coordinator"


# --- putting it together ------------------------------------------------------------------------------


class Invitation(NamedTuple):
    """What a worker needs to join."""

    address: str
    token: str
    key: str | None


class Coordinating(NamedTuple):
    """A coordinator that is ready to serve."""

    loop: ClusterLoop
    invitation: Invitation


def prepare(
    loaded: Loaded,
    *,
    run_dir: str | None,
    resume: bool,
    reporters: list[Reporter],
    progress: Progress | None = None,
    workers: int | None = None,
    hosts: tuple[str, ...] = (),
    transport: Transport | None = None,
) -> Coordinating:
    """A coordinator, new or continued, that listens."""
    refuse_unbuilt(loaded)
    run, warn = loaded.run, warner(reporters)
    directory = continued(run, run_dir, lambda text: None)[0] if resume else None
    begun_for = Secrets.of(state_folder(run, directory)).expected if directory else 0
    expected = begun_for or workers or run.cluster.num_workers or max(1, needed(run))
    policy = policy_of(run, expected)
    lengths: list[Length] = []

    def steps(samples: data.Data) -> int:
        lengths.append(length_of(run, samples, policy, expected))
        return lengths[0].steps

    coordinated = run.replace(training=run.training.replace(device="cpu", compile=False))
    parts = assemble(coordinated, progress, directory.path if directory else None, steps)
    if directory is None:
        directory = RunDirectory.create(run, run_dir)
    directory.write_config(loaded)
    write_info(directory, parts.data.info)
    learner = EngineLearner(parts.single)
    plan = Plan(
        updates=run.updates,
        seed=run.seed,
        expected=expected,
        needed=needed(run),
        total_steps=lengths[0].steps,
        total_batches=lengths[0].batches,
        batches_per_step=lengths[0].batches_per_step,
        heartbeat_interval_s=run.coordinator.heartbeat_interval_s,
        telemetry_alpha=run.coordinator.telemetry_alpha,
    )
    folder = state_folder(run, directory)
    folder.mkdir(parents=True, exist_ok=True)
    if not resume and (folder / "secrets.json").exists():
        raise ShoalError(
            f"{folder} holds the state of another run: add --resume to go on with it, or choose another coordinator.state_path"
        )
    _tell_what_is_left_out(run, transport or run.transport, hosts, lengths[0], warn)
    server, invitation = _listen(run, transport or run.transport, hosts, folder, learner, expected)
    coordinator = Coordinator(plan, policy, learner)
    welcome = _welcome(run, directory, parts, lengths[0], expected)
    loop = ClusterLoop(parts, lengths[0], coordinator, server, directory, reporters, welcome)
    snapshot = loop.snapshots.newest(warn) if resume else None
    if snapshot is not None:
        loop.recover(snapshot)
    elif resume and loop.snapshots.all():
        raise ShoalError(f"no snapshot in {loop.snapshots.folder} can be read: restore one, or start a new run")
    elif run.coordinator.checkpoint_path and Path(run.coordinator.checkpoint_path).exists():
        parts.engine.load_weights(load_weights(Path(run.coordinator.checkpoint_path)))
        coordinator.publisher.publish(0, learner.vector, learner.buffers)
        warn(f"going on with the weights in {run.coordinator.checkpoint_path}")
    elif run.checkpoint.resume_from:
        loop.resume(find(run.checkpoint.resume_from, warn), same_run=False)
        coordinator.state.version = loop.step
        coordinator.publisher.publish(loop.step, learner.vector, learner.buffers)
    return Coordinating(loop, invitation)


def _tell_what_is_left_out(run: Run, transport: Transport, hosts: tuple[str, ...], length: Length, warn: Callable[[str], None]) -> None:
    """What somebody might rely on, and cannot."""
    if transport.kind == "xmlrpc" and needs_keys(transport, hosts):
        warn("XML-RPC is not encrypted, and the token travels in clear: use it for debugging, on a network you trust")
    if length.batches_per_epoch is None:
        for section, settings in (("evaluation", run.evaluation), ("checkpoint", run.checkpoint)):
            if settings.strategy == "epoch":
                warn(f"a coordinator cannot see the epochs of a stream: {section} only at the end, unless {section}.every_steps is set")


def _listen(
    run: Run, transport: Transport, hosts: tuple[str, ...], folder: Path, learner: EngineLearner, expected: int
) -> tuple[Server, Invitation]:
    """Open the door; the same one as before, for a run that goes on."""
    known = Secrets.of(folder)
    if known.port and getattr(transport, "port", None) == 0:
        transport = transport.replace(port=known.port)
    size = max(4 * learner.vector.numel(), codecs.encoded_bytes(run.updates.codec, learner.vector.numel()))
    largest = max(size, 4 * learner.buffers.numel()) + (1 << 20)
    keys = known.keys if needs_keys(transport, hosts) else None
    here = getattr(transport, "port", 0)
    further = sorted({host.server_port for host in run.cluster.hosts.values() if host.server_port} - {here}) if here else []
    server = serve(transport, token=known.token, keys=keys, max_frame_bytes=largest, hosts=hosts, further_ports=further, insecure=True)
    port = int(server.address.rpartition(":")[2]) if server.address.rpartition(":")[2].isdigit() else 0
    known._replace(port=port, expected=expected).save(folder)
    return server, Invitation(server.address, known.token, keys.public if keys else None)


def _welcome(run: Run, directory: RunDirectory, parts: Parts, length: Length, expected: int) -> Message:
    """What every worker is told: the configuration, what the data must be, and the tokenizer's files."""
    text = (directory.path / "config.yaml").read_text(encoding="utf-8")
    folder = directory.path / "tokenizer"
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return Message(
        {
            "config": text,
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "data": fingerprint(parts.data),
            "shards": expected,
            "total_steps": length.steps,
            "heartbeat_s": run.coordinator.heartbeat_interval_s,
            "tokenizer": [path.name for path in files],
            "size": parts.engine.vector.numel(),
        },
        tuple(path.read_bytes() for path in files),
    )
