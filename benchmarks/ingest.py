"""Contributions of 25 MB from four processes: what the coordinator takes in, against raw pyzmq moving the same frames.

Ours is the coordinator as `shoal coordinate` runs it: transport, admission, decoding with its check for finite numbers, journal, ledger,
snapshots, an optimizer step for every arrival, records. Only the workers are plain: they speak the protocol and send the same synthetic
gradient again and again. The peer is the least that ZeroMQ can do: a ROUTER that receives without copying and answers, and DEALERs
that send without copying, the same number of processes, the same frames both ways, the same security, the better of one and two messages
under way per sender. It looks at nothing, keeps nothing and computes nothing. `benchmarks/ingest.py where` tells where our time goes.

`BENCH=ingest:ceiling` is the same for models of many sizes, with `edp` and weights back: contributions a second.

Beside each ratio stands the processor time of a contribution, ours and the peer's: on a machine that is busy with other things the time on
the wall says little.

Where the processor time of a contribution goes (async with SGD, no weights back, PLAIN, on a Neoverse-N1): 23 ms, of which the peer has 6
too, for ZeroMQ. The journal takes 5.7 to be written over an old one and 1.3 for its checksum, pieces are put together in 1.6, 2 are for
the check for finite numbers, 4 for SGD and the copy of the gradient, the rest for snapshots. AdamW takes 15 more, weights on their way
back 12.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq
from processes import Helper, seconds_of
from run import Row

from shoal.config.load import ConfigFile, Override, resolve
from shoal.protocol.frames import Frames, frame_of
from shoal.protocol.messages import PROTOCOL, Contribute
from shoal.runs.connections import TransportConnection
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.coordinator_setup import prepare
from shoal.updates import codecs
from shoal.worker.sender import Sender
from shoal.worker.session import ContributionReceipt, RunNews, SessionEvent, WorkerSession

HIDDEN, SIZE = "[2048, 2976]", 4 * 6_270_762
"""An MLP on digits, and the bytes of its gradient."""
CEILING = {4_810: "[64]", 85_002: "[256, 256]", 1_126_410: "[1024, 1024]", SIZE // 4: HIDDEN}
"""Numbers in a model: its hidden layers."""
SENDERS = 4
_LARGEST = 1 << 35
SECONDS = 8.0
WARM_UP_S = 2.0
FIRST = 16
"""What each sender sends before the time begins: 1.6 GB in all. By then the coordinator writes its journal over an old one, as it does for
the rest of a run. To write 25 MB at the end of a growing file takes the system 27 ms here, and 5 to write them over old ones."""
COMMON = {
    "model.hidden_sizes": HIDDEN,
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
    "training.epochs": "1000000000",
    "training.max_steps": "100000000",
    "logging.every_steps": "1000",
    "coordinator.heartbeat_interval_s": "60",
}
STRATEGIES = {
    "async, SGD": {"strategy.kind": "async", "strategy.max_staleness": "1000000", "training.optimizer.name": "SGD"},
    "edp, AdamW": {"strategy.kind": "edp"},
}


class Span(NamedTuple):
    """The time that counts, by the clock on the wall, which all processes share."""

    start: float
    end: float

    def holds(self, at: float) -> bool:
        return self.start <= at < self.end


# --- the parent: starts everybody, says when, adds up --------------------------------------------------------


class Outcome(NamedTuple):
    """What came in, and what the coordinator did meanwhile."""

    megabytes_per_s: float
    where: dict[str, float]
    processor_ms: tuple[float, float]
    """Of a contribution: where it is received, and where it is sent."""
    contributions_per_s: float


def exchange(serving: Helper, sender: str, **given: Any) -> Outcome:
    """Let the senders send to whoever serves, and count the answers."""
    helpers = [serving]
    try:
        senders = [Helper(__file__, sender, 1, **given) for _ in range(SENDERS)]  # they load PyTorch while the coordinator does
        helpers += senders
        invitation = serving.hear()
        for helper in senders:
            helper.say(invitation)
        size, *_ = [helper.hear() for helper in senders]
        start = time.time() + 0.2
        span = Span(start + WARM_UP_S, start + WARM_UP_S + SECONDS)
        for helper in helpers:
            helper.say(span)
        before, after = [_processor_s(helpers, at) for at in span]
        answers = sum(helper.hear() for helper in senders)
        received, *sent = ((end - begin) * 1e3 / max(1, answers) for begin, end in zip(before, after, strict=True))
        return Outcome(answers * size / 1e6 / SECONDS, serving.hear(), (received, sum(sent)), answers / SECONDS)
    finally:
        for helper in helpers:
            helper.close()


def _processor_s(helpers: list[Helper], at: float) -> list[float]:
    """What each process has had by this time."""
    time.sleep(max(0.0, at - time.time()))
    return [seconds_of(helper.process.pid) for helper in helpers]


def through_shoal(curve: bool, strategy: str, weights: bool, where: bool = False, hidden: str = HIDDEN) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        settings = STRATEGIES[strategy] | {"model.hidden_sizes": hidden}
        serving = Helper(__file__, "serve", curve=curve, settings=settings, folder=folder, where=where)
        return exchange(serving, "send", weights=weights)


def through_pyzmq(curve: bool, weights: bool, size: int = SIZE) -> Outcome:
    return max((_through_pyzmq(curve, weights, under_way, size) for under_way in (1, 2)), key=lambda outcome: outcome.megabytes_per_s)


def _through_pyzmq(curve: bool, weights: bool, under_way: int, size: int) -> Outcome:
    return exchange(Helper(__file__, "raw-serve", curve=curve, weights=weights, size=size), "raw-send", under_way=under_way, size=size)


def measure(part: str = "") -> Iterator[Row]:
    """About four minutes where nothing else runs: sixteen exchanges, each with five processes that must start."""
    if part == "ceiling":
        yield from ceiling()
        return
    for curve, security in ((True, "CURVE"), (False, "PLAIN; peer: none")):
        for weights, back in ((False, "no weights back"), (True, "weights back")):
            peer = through_pyzmq(curve, weights)
            for strategy in STRATEGIES:
                ours = through_shoal(curve, strategy, weights)
                name = f"ingest, {strategy}, {security}, {back}"
                ratio = ours.megabytes_per_s / peer.megabytes_per_s
                yield Row(name, ours.megabytes_per_s, peer.megabytes_per_s, "MB/s in", ratio, "≥ 0.6", _processors(ours, peer))


def ceiling() -> Iterator[Row]:
    """What a coordinator takes in at most, by the size of the model."""
    for numbers, hidden in CEILING.items():
        ours, peer = through_shoal(True, "edp, AdamW", True, hidden=hidden), through_pyzmq(True, True, 4 * numbers)
        rates, note = (ours.contributions_per_s, peer.contributions_per_s), f"{ours.megabytes_per_s:.0f} MB/s in; {_processors(ours, peer)}"
        yield Row(f"ingest, ceiling, {numbers:,} numbers", *rates, "contributions/s", rates[0] / rates[1], "", note)


def _processors(ours: Outcome, peer: Outcome) -> str:
    return "; ".join(
        f"processor ms {told}: {one:.1f}, peer {other:.1f}"
        for told, one, other in zip(("to receive", "to send"), ours.processor_ms, peer.processor_ms, strict=True)
    )


def where() -> None:
    """Print what the coordinator's thread does with its time."""
    for strategy in STRATEGIES:
        for weights in (False, True):
            told = through_shoal(False, strategy, weights, where=True)
            print(f"{strategy}, {'weights' if weights else 'no weights'} back, PLAIN: {told.megabytes_per_s:.0f} MB/s")
            print(f"  processor ms a contribution: {told.processor_ms[0]:.1f} to receive, {told.processor_ms[1]:.1f} to send")
            for name, share in sorted(told.where.items(), key=lambda item: -item[1]):
                print(f"  {100 * share:5.1f} %  {name}")


# --- the coordinator ---------------------------------------------------------------------------------------


class Clock:
    """Shares of the time that counts, by what was done in it. What is done within something else counts for the inner one.

    Large records and snapshots are written by threads of their own, beside the rest, so the shares may add up to more than all.
    """

    def __init__(self) -> None:
        self.spent: list[tuple[str, float, float]] = []
        self._own = threading.local()

    def around(self, owner: Any, method: str, name: str) -> None:
        whole: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._own.inner = getattr(self._own, "inner", 0.0), 0.0
            started = time.perf_counter()
            try:
                return whole(*args, **kwargs)
            finally:
                passed = time.perf_counter() - started
                self.spent.append((name, time.time(), passed - self._own.inner))
                self._own.inner = before + passed

        setattr(owner, method, timed)

    def shares(self, span: Span) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, at, seconds in self.spent:
            if span.holds(at):
                found[name] = found.get(name, 0.0) + seconds / (span.end - span.start)
        return found | {"everything else": max(0.0, 1.0 - sum(found.values()))}


def watched(loop: CoordinatorLoop) -> Clock:
    clock, coordinator = Clock(), loop.coordinator
    clock.around(loop.server, "poll", "waiting for messages")
    clock.around(loop.server, "reply", "handing answers to ZeroMQ")
    clock.around(loop.store.journal, "append", "journal")
    clock.around(loop.store.ledger, "append", "ledger")
    clock.around(loop.driver, "snapshot", "snapshots")
    clock.around(loop.recorder, "count", "records")
    clock.around(codecs, "borrow", "decoding and checking")
    clock.around(codecs, "decode", "decoding and checking")
    clock.around(coordinator.learner, "apply", "optimizer step")
    clock.around(coordinator.publisher, "since", "copying weights to send")
    clock.around(coordinator, "handle", "the state machine")
    return clock


def serve(given: dict[str, Any]) -> None:
    overrides = [Override(path, value, f"--set {path}={value}") for path, value in (COMMON | given["settings"]).items()]
    loaded = resolve([ConfigFile("starter")], overrides, environ={})
    hosts = ("0.0.0.0",) if given["curve"] else ("127.0.0.1",)
    transport = loaded.run.transport.replace(host=None, port=0)
    run_dir = str(Path(given["folder"]) / "run")
    coordinating = prepare(loaded, run_dir=run_dir, resume=False, reporters=[], workers=SENDERS, hosts=hosts, transport=transport)
    loop = coordinating.loop
    claims = loop.coordinator.checks
    claims.plan = claims.plan._replace(batches_per_shard=None)  # senders have no data: they count their batches on and on, as of a stream
    clock = watched(loop) if given["where"] else None
    print(json.dumps(coordinating.invitation._asdict()), flush=True)
    spans: list[Span] = []

    def stop_in_time() -> None:
        spans.append(Span(*json.loads(sys.stdin.readline())))
        time.sleep(max(0.0, spans[0].end - time.time()) + 1.0)
        print(json.dumps(clock.shares(spans[0]) if clock else {}), flush=True)

    threading.Thread(target=stop_in_time, daemon=True).start()
    loop.train()


# --- a worker that only sends --------------------------------------------------------------------------------


class WorkerDouble:
    """Says what a worker says, with the worker's own protocol, and computes nothing."""

    def __init__(self, invitation: dict[str, Any], weights: bool, number: int = 0) -> None:
        self.weights, self.protocol = weights, WorkerSession(None, {}, PROTOCOL, f"sender {os.getpid()} {number}")
        line = TransportConnection(invitation["address"], invitation["token"], invitation["key"])
        line.allow(_LARGEST)
        self.courier = Sender(line, self.protocol, lambda text: print(text, file=sys.stderr))
        self.protocol.ready = True
        self.version = 0
        """The newest version that it was told of."""
        self._exchange()  # joins, and pulls
        self.size: int = self.protocol.welcome["size"]

    def contribute(self, frames: Frames) -> None:
        """Send a gradient as if it were of the newest weights, and wait until it is taken."""
        position = self.protocol.seq + 1
        made = Contribute("", 0, 0, self.version, 0, 32.0, 32, 0, position, 1, -1, {"loss": 1.0})
        self.protocol.contribute(made, frames, pulls=self.weights)
        statuses = [event.status for event in self._exchange() if isinstance(event, ContributionReceipt)]
        if statuses != ["accepted"]:
            raise RuntimeError(f"not accepted: {statuses}")

    def _exchange(self) -> list[SessionEvent]:
        events = self.courier.exchange()
        self.version = max((event.header["version"] for event in events if isinstance(event, RunNews)), default=self.version)
        return events


def send(given: dict[str, Any]) -> None:
    sender = WorkerDouble(json.loads(sys.stdin.readline()), given["weights"])
    frames = (frame_of((1e-4 * torch.randn(sender.size)).numpy()),)
    for _ in range(FIRST):
        sender.contribute(frames)
    print(json.dumps(4 * sender.size), flush=True)
    span = Span(*json.loads(sys.stdin.readline()))
    answers = 0
    while time.time() < span.end:
        sender.contribute(frames)
        answers += span.holds(time.time())
    print(json.dumps(answers), flush=True)


# --- the peer ------------------------------------------------------------------------------------------------


def raw_serve(given: dict[str, Any]) -> None:
    context = zmq.Context(2)
    socket = context.socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    if given["curve"]:
        socket.curve_server, socket.curve_secretkey = True, secret
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps({"address": f"tcp://127.0.0.1:{port}", "key": public.decode() if given["curve"] else None}), flush=True)
    answer = [b"receipt", bytes(given["size"])] if given["weights"] else [b"receipt"]
    told = threading.Event()
    threading.Thread(target=lambda: (_until_the_end(), told.set()), daemon=True).start()
    while not told.is_set():
        if socket.poll(100):
            peer = socket.recv_multipart(copy=False)[0]
            socket.send_multipart([peer, *answer], copy=False)
    print("{}", flush=True)


def _until_the_end() -> None:
    span = Span(*json.loads(sys.stdin.readline()))
    time.sleep(max(0.0, span.end - time.time()) + 1.0)


def raw_send(given: dict[str, Any]) -> None:
    invitation = json.loads(sys.stdin.readline())
    socket = zmq.Context().socket(zmq.DEALER)
    if invitation["key"]:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = invitation["key"].encode()
    socket.connect(invitation["address"])
    message = [b"h" * 200, frame_of((1e-4 * torch.randn(given["size"] // 4)).numpy())]
    print(json.dumps(given["size"]), flush=True)
    span = Span(*json.loads(sys.stdin.readline()))
    answers = 0
    for _ in range(given["under_way"]):
        socket.send_multipart(message, copy=False)
    while time.time() < span.end:
        if socket.poll(100):
            socket.recv_multipart(copy=False)
            answers += span.holds(time.time())
            socket.send_multipart(message, copy=False)
    print(json.dumps(answers), flush=True)
    socket.close(linger=0)


ROLES = {"serve": serve, "send": send, "raw-serve": raw_serve, "raw-send": raw_send}

if __name__ == "__main__":
    if sys.argv[1] == "where":
        where()
    else:
        ROLES[sys.argv[1]](json.loads(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)
