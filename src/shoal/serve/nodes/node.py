"""A machine that holds layers of a model which another one serves: `shoal join … --node`.

Machines send the output of their layers directly to the next machine where they can. That machine may decline it at any time; the server,
which gets every output too, then sends it. So nothing is lost when a machine dies, or when a command of the server comes too late.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from shoal.config.received import Redactor
from shoal.config.schema.cluster import Zmq
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.freed_memory import return_large_blocks
from shoal.protocol.messages import Frame
from shoal.runs.join_summary import summary_of_node
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, memory_for_layers
from shoal.serve.nodes.messages import Endpoint, NextHop, NodeCommand, command_from, command_message, execute, pack_hidden_states
from shoal.serve.nodes.model_description import model_maker
from shoal.serve.nodes.weights import RemoteWeights
from shoal.transports import Client, Message, Refused, Server, Unreachable
from shoal.transports.addresses import own_address_towards, parse
from shoal.transports.connect import connect, needs_keys, serve
from shoal.transports.interface import ConnectOptions, ListenOptions
from shoal.transports.keys import new_keys, new_token
from shoal.transports.zeromq.client import ZmqClient

FRAME_BYTES = 1 << 28
"""The largest frame between machines: hidden states of a long chunk of a prompt."""
_HEARTBEAT_S = 0.5
_CALL_S = 30.0
_PAUSE_S = 0.5
_PROBE_S = 2.0
_HAND_ON_S = 2.0
"""Timeout for the next machine's confirmation; after it the server sends the batch."""
_POLL_S = 0.5
_MOST_WAITING = 64
"""Commands of other machines that wait here. The server never has more batches in flight."""
_MOST_ENDED = 4096


def connect_to(server: Endpoint) -> Client:
    """A client of the server; there may be several."""
    return connect(ConnectOptions(server.address, server.token, server.key, FRAME_BYTES))


class NodeProcess:
    """Joins the server and executes commands until it is stopped, or the server is unreachable for longer than `patience_s`."""

    def __init__(self, server: Endpoint, name: str | None, *, slowdown: float, patience_s: float, tell: Callable[[str], None]) -> None:
        self.server, self.name, self.slowdown, self.patience_s, self.tell = server, name, slowdown, patience_s, tell
        self.client, self.heartbeat_client = connect_to(server), connect_to(server)
        self.report_client, self.peer_sender = connect_to(server), PeerSender()
        self.session_id, self.int8, self.redact = "", False, Redactor()
        self._history = ReadHistory()
        self._receiver: PeerReceiver | None = None
        self._stopping = threading.Event()
        self._compute_lock = threading.Lock()
        """Commands of the server and of other machines are executed one at a time."""

    def stop(self) -> None:
        """Leave after the present command."""
        self._stopping.set()

    def work(self) -> None:
        """Run until stopped. Raises ShoalError where the server serves no model, or stays unreachable."""
        threading.Thread(target=self._send_heartbeats, name="shoal-pulse", daemon=True).start()
        try:
            self._work_until_stopped()
        finally:
            self._stopping.set()
            self.client.close()
            self.heartbeat_client.close()

    def _work_until_stopped(self) -> None:
        lost_at = time.monotonic()
        while not self._stopping.is_set():
            try:
                host = self._enter()
                try:
                    self._serve(host)
                    return
                finally:
                    lost_at = time.monotonic()
            except Unreachable as problem:
                if self._stopping.is_set():
                    return
                if time.monotonic() - lost_at > self.patience_s:
                    raise ShoalError(f"{problem}; {self.patience_s:g} s are over") from None
                self._stopping.wait(_PAUSE_S)
            finally:
                self._disconnect()

    def _ask(self, header: dict[str, Any], frames: tuple[Frame, ...] = ()) -> tuple[Mapping[str, Any], tuple[Frame, ...]]:
        answer = self.client.call(Message(header, frames), _CALL_S)
        if answer.header.get("kind") == "refused":
            detail = str(answer.header.get("detail", answer.header.get("reason")))
            if detail == "session":
                raise Unreachable("the server does not know this machine any more")
            raise Refused(f"the server refuses: {detail}", "serving")
        return answer.header, answer.frames

    def _enter(self) -> LayerHost:
        """Make the model without weights, measure one layer, listen for other machines, and join the server."""
        model, _ = self._ask({"kind": "node"})
        if model.get("kind") != "model":
            raise ShoalError(f"{self.server.address} serves no model: join it without --node")
        self.int8 = model.get("int8") is True
        device = choose_device("auto")
        return_large_blocks()
        host = LayerHost(*model_maker(model, RemoteWeights(self._ask).get, device), device, self.slowdown)
        self.redact.sent = str(model)
        self.tell(f"the server asks of this machine:\n{summary_of_node(model, memory_for_layers(host.device))}")
        layer_s = host.measure(int(model["width"]))
        host.drop(LayerRange(0, 1))
        history = self._history = ReadHistory()
        self._disconnect()
        self.report_client, self.peer_sender = connect_to(self.server), PeerSender()
        try:
            self._receiver = open_receiver(self.server.address, partial(self._execute_from_peer, host, history), self.tell)
        except ShoalError as problem:
            self.tell(f"warning: other machines cannot send to this one, so the server forwards everything: {problem}")
        about = {"layer_s": layer_s, "memory_bytes": float(memory_for_layers(host.device)), "name": self.name}
        answer, _ = self._ask({"kind": "enter", **about, "door": list(self._receiver.endpoint) if self._receiver is not None else None})
        self.session_id, self.name = str(answer["session"]), str(answer["name"])
        self.tell(f"joined as {self.name}")
        return host

    def _disconnect(self) -> None:
        """Close the connections to and from other machines."""
        self.report_client.close()
        self.peer_sender.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _send_heartbeats(self) -> None:
        while not self._stopping.wait(_HEARTBEAT_S):
            if self.session_id:
                try:
                    self.heartbeat_client.call(Message({"kind": "alive", "session": self.session_id}), _CALL_S)
                except (Unreachable, Refused):
                    continue

    def _serve(self, host: LayerHost) -> None:
        report = NodeReport()
        while not self._stopping.is_set():
            answer, frames = self._ask({"kind": "turn", "session": self.session_id, "done": report.done}, tuple(report.frames))
            if answer.get("kind") == "over":
                self.tell("the server has ended")
                return
            report = NodeReport()
            for header in answer["orders"]:
                self._execute(host, self._history, command_from(header, frames), report)
        self._ask({"kind": "leave", "session": self.session_id})

    def _execute_from_peer(self, host: LayerHost, history: ReadHistory, command: NodeCommand) -> None:
        """Execute a command of another machine, if the server's commands that must precede it have come and its numbers are finite; else
        decline it: the server sends what the other machine reported, and sees itself whether that is finite."""
        report = NodeReport()
        with self._compute_lock:
            can_read = history.can_read(command, host) and command.x_BLD is not None and bool(command.x_BLD.isfinite().all())
        if can_read:
            self._execute(host, history, command, report)
        else:
            report.done.append({"kind": "declined", "trip": command.batch_number})
        self._send_report(report)

    def _probe(self, after: NextHop) -> None:
        report = NodeReport()
        report.done.append({"kind": "probed", "other": after.name, "reached": self.peer_sender.probe(after.endpoint)})
        self._send_report(report)

    def _send_report(self, report: NodeReport) -> None:
        """Send a report at once, on a connection of its own: the main one waits for commands."""
        with contextlib.suppress(Unreachable, Refused):  # the server then treats this machine as lost
            header = {"kind": "done", "session": self.session_id, "done": report.done}
            self.report_client.call(Message(header, tuple(report.frames)), _CALL_S)

    def _execute(self, host: LayerHost, history: ReadHistory, command: NodeCommand, report: NodeReport) -> None:
        try:
            if command.kind == "probe":
                # In a thread: an unreachable machine would block until the timeout
                threading.Thread(target=self._probe, args=command.next_hops, name="shoal-probe", daemon=True).start()
                return
            with self._compute_lock:
                if history.is_stale(command):
                    return
                found = execute(host, command)
                history.note(command)
            if found is not None and command.batch_number >= 0:
                handed_on = bool(command.next_hops) and self.peer_sender.hand_on(command._replace(x_BLD=found[0]), self.int8)
                report.add(command.batch_number, *found, handed_on, self.int8)
            if command.kind == "hold":
                first, last = command.layers.first, command.layers.last - 1
                self.tell(f"holds layer {first}" if first == last else f"holds the layers {first} to {last}")
                report.done.append({"kind": "held", "place": list(command.layers)})
        except Unreachable:
            raise
        except Exception as error:  # the server ends the requests or reassigns the layers
            self._report_failure(command, str(error) or type(error).__name__, report)

    def _report_failure(self, command: NodeCommand, problem: str, report: NodeReport) -> None:
        if command.kind == "hold":
            self.tell(f"warning: cannot load the layers {command.layers.first} to {command.layers.last - 1}: {problem}")
            report.done.append({"kind": "unheld", "place": list(command.layers), "problem": self.redact(problem)[:300]})
        else:
            self.tell(f"warning: {problem}")
            report.done.append({"kind": "failed", "trip": command.batch_number, "problem": self.redact(problem)[:300]})


class NodeReport:
    """The next report to the server."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.frames: list[Frame] = []

    def add(self, batch_number: int, y_BLD: Tensor, seconds: float, handed_on: bool, int8: bool) -> None:
        """Add the output of `read`. The server always gets it, and keeps it in case the next machine must be replaced."""
        about, frame = pack_hidden_states(y_BLD, int8)
        report = {"kind": "read", "trip": batch_number, "seconds": seconds, "frame": len(self.frames), "handed_on": handed_on}
        self.done.append(report | about)
        self.frames.append(frame)


class ReadHistory:
    """The last batch that was read of each request, and the requests that have ended."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._ended: dict[int, None] = {}

    def note(self, command: NodeCommand) -> None:
        for request in command.requests if command.kind == "release" else ():
            self._last.pop(request, None)
            self._ended[request] = None
        for request in command.token_batch.requests if command.token_batch is not None and command.batch_number >= 0 else ():
            self._last[request] = command.batch_number
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def is_stale(self, command: NodeCommand) -> bool:
        """Whether this batch, or a later one of its requests, was read already: direct messages may arrive late or twice."""
        requests = command.token_batch.requests if command.token_batch is not None and command.batch_number >= 0 else ()
        return any(command.batch_number <= self._last.get(request, -1) for request in requests)

    def can_read(self, command: NodeCommand, host: LayerHost) -> bool:
        """Whether the layers are loaded, and the caches hold the tokens before these."""
        loaded = host.loaded.get(command.layers)
        if loaded is None or command.token_batch is None or any(request in self._ended for request in command.token_batch.requests):
            return False
        pairs = zip(command.token_batch.requests, command.token_batch.positions, strict=True)
        return all(loaded.caches.length(request) >= position for request, position in pairs)


class PeerSender:
    """Sends batches to other machines. Any thread may call it."""

    def __init__(self) -> None:
        self._clients: dict[Endpoint, ZmqClient] = {}
        self._lock = threading.Lock()

    def probe(self, endpoint: Endpoint) -> bool:
        """Whether a machine can be reached from here."""
        return self._call(endpoint, Message({"kind": "probe"}), _PROBE_S)

    def hand_on(self, command: NodeCommand, int8: bool) -> bool:
        """Send a command to its next stage. False: it was not accepted, and the server must send it."""
        after, *rest = command.next_hops
        header, frames = command_message(command._replace(layers=after.layers, next_hops=tuple(rest)), int8)
        # No wait for a machine that was killed: its connection is closed at once, and the server may need this machine now
        return self._call(after.endpoint, Message({"kind": "pass", "order": header}, frames), _HAND_ON_S, may_connect=False)

    def _call(self, endpoint: Endpoint, message: Message, timeout_s: float, may_connect: bool = True) -> bool:
        try:
            client = self._client(endpoint)
            return (may_connect or client.is_connected()) and client.call(message, timeout_s).header.get("kind") == "taken"
        except ShoalError:
            return False

    def _client(self, endpoint: Endpoint) -> ZmqClient:
        with self._lock:
            if endpoint not in self._clients:
                made = ZmqClient(endpoint.address, token=endpoint.token, server_key=endpoint.key, max_frame_bytes=FRAME_BYTES)
                self._clients[endpoint] = made
            return self._clients[endpoint]

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


class PeerReceiver:
    """Accepts batches of other machines. One thread accepts and another executes, so that no sender waits for a computation."""

    def __init__(self, server: Server, endpoint: Endpoint, on_command: Callable[[NodeCommand], None], tell: Callable[[str], None]) -> None:
        """`on_command` is called in a thread of the receiver, for one command after the other."""
        self.server, self.endpoint, self._execute, self._tell = server, endpoint, on_command, tell
        self._commands: queue.Queue[NodeCommand | None] = queue.Queue()
        self._ending = False
        self._threads = [threading.Thread(target=one, name="shoal-hops", daemon=True) for one in (self._listen, self._work)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending = True
        self.server.wake()
        self._commands.put(None)
        for thread in self._threads:
            thread.join()
        self.server.close()

    def _listen(self) -> None:
        while not self._ending:
            for request in self.server.poll(_POLL_S):
                self.server.reply(request, Message({"kind": "taken" if self._accept(request.message) else "refused"}))

    def _accept(self, message: Message) -> bool:
        if message.header.get("kind") == "probe":
            return True
        try:
            header: Any = message.header["order"]
            command = command_from(header, message.frames)
        except (ShoalError, KeyError):
            return False
        if command.kind != "read" or command.batch_number < 0 or self._commands.qsize() >= _MOST_WAITING:
            return False
        self._commands.put(command)
        return True

    def _work(self) -> None:
        while (command := self._commands.get()) is not None and not self._ending:
            try:
                self._execute(command)
            except Exception as error:  # a bad batch of one machine must not block those of others
                self._tell(f"warning: a message from another machine could not be processed: {error!r}")


def open_receiver(server_address: str, on_command: Callable[[NodeCommand], None], tell: Callable[[str], None]) -> PeerReceiver | None:
    """Listen on the address by which this machine reaches the server, with a token and keys of its own, which the server passes to the
    machines that may connect. None where there is no such address: then everything goes through the server."""
    if server_address.partition("://")[0] not in Zmq.schemes:
        return None
    settings, host = Zmq(port=0), own_address_towards(parse(server_address).host)
    if host is None:
        return None
    token, keys = new_token(), new_keys() if needs_keys(settings, (host,)) else None
    server = serve(settings, ListenOptions((host,), token, keys, FRAME_BYTES))
    return PeerReceiver(server, Endpoint(server.address, token, keys.public if keys else None), on_command, tell)
