"""A machine that holds layers of a model which another one serves: `shoal join … --node`."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from shoal.config.schema.cluster import Zmq
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.protocol.messages import Frame
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, memory_for_layers
from shoal.serve.nodes.messages import NextHop, NodeCommand, PeerEndpoint, command_from, command_message, execute, pack_hidden_states
from shoal.serve.nodes.model_description import model_maker
from shoal.serve.nodes.weights import PIECE_BYTES, RemoteWeights
from shoal.transports import Client, Message, Refused, Server, Unreachable, connect, needs_keys, new_keys, new_token, serve
from shoal.transports.addresses import own_address_towards, parse
from shoal.transports.zeromq.client import ZmqClient

FRAME_BYTES = 1 << 28
"""The largest frame between the server and a machine: hidden states of a long piece of a prompt."""
_PULSE_S = 0.5
_CALL_S = 30.0
_PAUSE_S = 0.5
_PROBE_S = 2.0
_PASS_S = 2.0
"""The next machine only says that it has got something; after so long it is taken for deaf, and the server brings it."""
_LOOK_S = 0.5
_MOST_WAITING = 64
"""Orders that wait in a machine. There are never more under way than the server has started."""
_REMEMBERED = 4096


class ServerAddress(NamedTuple):
    """How the server is reached."""

    address: str
    token: str
    key: str | None

    def client(self) -> Client:
        return connect(self.address, token=self.token, server_key=self.key, max_frame_bytes=max(FRAME_BYTES, PIECE_BYTES))


class NodeProcess:
    """Joins, carries out orders until the server is gone for longer than its patience, or it is asked to stop."""

    def __init__(
        self, reached: ServerAddress, name: str | None, *, slowdown: float, patience_s: float, tell: Callable[[str], None]
    ) -> None:
        self.reached, self.name, self.slowdown, self.patience_s, self.tell = reached, name, slowdown, patience_s, tell
        self.client, self.pulse = reached.client(), reached.client()
        self.reporting, self.handing = reached.client(), PeerSender(FRAME_BYTES)
        self.session, self.int8 = "", False
        self._seen = ReadHistory()
        self._inbox: PeerReceiver | None = None
        self._stopping = threading.Event()
        self._computing = threading.Lock()
        """Orders come from the server and from other machines, and are carried out one at a time."""

    def stop(self) -> None:
        """Leave when the order in hand is carried out."""
        self._stopping.set()

    def work(self) -> None:
        """Until asked to stop. Raises ShoalError where the server is no server of layers, or stays away."""
        threading.Thread(target=self._beat, name="shoal-pulse", daemon=True).start()
        seen = time.monotonic()
        while not self._stopping.is_set():
            try:
                holder = self._enter()
                seen = time.monotonic()
                self._serve(holder)
                return
            except Unreachable as problem:
                if self._stopping.is_set():
                    return
                if time.monotonic() - seen > self.patience_s:
                    raise ShoalError(f"{problem}; {self.patience_s:g} s are over") from None
                self._stopping.wait(_PAUSE_S)
            finally:
                self._shut()

    def _ask(self, header: dict[str, Any], frames: tuple[Frame, ...] = ()) -> tuple[Mapping[str, Any], tuple[Frame, ...]]:
        answer = self.client.call(Message(header, frames), _CALL_S)
        if answer.header.get("kind") == "refused":
            detail = str(answer.header.get("detail", answer.header.get("reason")))
            if detail == "session":
                raise Unreachable("the server does not know this machine any more")
            raise Refused(f"the server refuses: {detail}", "serving")
        return answer.header, answer.frames

    def _enter(self) -> LayerHost:
        """Make the model without numbers, measure one layer, open a door for other machines, and say what this one can do."""
        model, _ = self._ask({"kind": "node"})
        if model.get("kind") != "model":
            raise ShoalError(f"{self.reached.address} serves no model: join it without --node")
        self.int8 = model.get("int8") is True
        holder = LayerHost(*model_maker(model, RemoteWeights(self._ask).get), choose_device("auto"), self.slowdown)
        layer_s = holder.measure(int(model["width"]))
        holder.drop(LayerRange(0, 1))
        seen = self._seen = ReadHistory()
        self.reporting, self.handing = self.reached.client(), PeerSender(FRAME_BYTES)
        try:
            self._inbox = open_receiver(self.reached.address, FRAME_BYTES, partial(self._carry_out_handed, holder, seen), self.tell)
        except ShoalError as problem:
            self.tell(f"warning: other machines cannot hand on to this one, and the server brings everything: {problem}")
        about = {"layer_s": layer_s, "memory_bytes": float(memory_for_layers(holder.device)), "name": self.name}
        answer, _ = self._ask({"kind": "enter", **about, "door": list(self._inbox.door) if self._inbox is not None else None})
        self.session, self.name = str(answer["session"]), str(answer["name"])
        self.tell(f"joined as {self.name}")
        return holder

    def _shut(self) -> None:
        """Nothing is taken from other machines any more, or handed to them."""
        self.reporting.close()
        self.handing.close()
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    def _beat(self) -> None:
        while not self._stopping.wait(_PULSE_S):
            if self.session:
                try:
                    self.pulse.call(Message({"kind": "alive", "session": self.session}), _CALL_S)
                except (Unreachable, Refused):
                    continue

    def _serve(self, holder: LayerHost) -> None:
        report = NodeReport()
        while not self._stopping.is_set():
            answer, given = self._ask({"kind": "turn", "session": self.session, "done": report.done}, tuple(report.frames))
            if answer.get("kind") == "over":
                self.tell("the server has ended")
                return
            report = NodeReport()
            for header in answer["orders"]:
                self._carry_out(holder, self._seen, command_from(header, given), report)
        self._ask({"kind": "leave", "session": self.session})

    def _carry_out_handed(self, holder: LayerHost, seen: ReadHistory, order: NodeCommand) -> None:
        """What another machine handed to this one is read if the server's orders have come that belong before it."""
        report = NodeReport()
        with self._computing:
            can_read = seen.can_read(order, holder)
        if can_read:
            self._carry_out(holder, seen, order, report)
        else:
            report.done.append({"kind": "declined", "trip": order.trip})
        self._tell_at_once(report)

    def _probe(self, after: NextHop) -> None:
        report = NodeReport()
        report.done.append({"kind": "probed", "other": after.name, "reached": self.handing.probe(after.door)})
        self._tell_at_once(report)

    def _tell_at_once(self, report: NodeReport) -> None:
        """Tell the server beside the question that waits there for orders."""
        with contextlib.suppress(Unreachable, Refused):  # then the server takes this machine for lost, and begins again
            header = {"kind": "done", "session": self.session, "done": report.done}
            self.reporting.call(Message(header, tuple(report.frames)), _CALL_S)

    def _carry_out(self, holder: LayerHost, seen: ReadHistory, order: NodeCommand, report: NodeReport) -> None:
        try:
            if order.kind == "probe":
                # Whoever cannot be reached keeps one waiting
                threading.Thread(target=self._probe, args=order.onward, name="shoal-probe", daemon=True).start()
                return
            with self._computing:
                if seen.is_stale(order):
                    return
                found = execute(holder, order)
                seen.note(order)
            if found is not None and order.trip >= 0:
                handed_on = bool(order.onward) and self.handing.pass_on(order._replace(x_BLD=found[0]), self.int8)
                report.add(order.trip, *found, handed_on, self.int8)
            if order.kind == "hold":
                self.tell(f"holds the layers {order.place.first} to {order.place.last - 1}")
                report.done.append({"kind": "held", "place": list(order.place)})
        except Unreachable:
            raise
        except Exception as error:  # the server ends the requests, or gives the layers to others, and this machine goes on
            self._own_up(order, str(error) or type(error).__name__, report)

    def _own_up(self, order: NodeCommand, problem: str, report: NodeReport) -> None:
        """Say on both sides that an order could not be carried out."""
        if order.kind == "hold":
            self.tell(f"warning: cannot load the layers {order.place.first} to {order.place.last - 1}: {problem}")
            report.done.append({"kind": "unheld", "place": list(order.place), "problem": problem[:300]})
        else:
            self.tell(f"warning: {problem}")
            report.done.append({"kind": "failed", "trip": order.trip, "problem": problem[:300]})


class NodeReport:
    """What the server is told next."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.frames: list[Frame] = []

    def add(self, trip: int, y_BLD: Tensor, seconds: float, handed_on: bool, int8: bool) -> None:
        """What came of reading. The server gets it in any case: it keeps it for whoever may have to take the next machine's place."""
        about, frame = pack_hidden_states(y_BLD, int8)
        told = {"kind": "read", "trip": trip, "seconds": seconds, "frame": len(self.frames), "handed_on": handed_on}
        self.done.append(told | about)
        self.frames.append(frame)


class ReadHistory:
    """What this machine knows of the order of things: which trip of each request it read last, and which requests have ended."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._ended: dict[int, None] = {}

    def note(self, order: NodeCommand) -> None:
        for request in order.requests if order.kind == "release" else ():
            self._last.pop(request, None)
            self._ended[request] = None
        for request in order.reading.requests if order.reading is not None and order.trip >= 0 else ():
            self._last[request] = order.trip
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def is_stale(self, order: NodeCommand) -> bool:
        """Whether this trip, or a later one of its requests, was read already: what another machine sends may be late, or come twice."""
        requests = order.reading.requests if order.reading is not None and order.trip >= 0 else ()
        return any(order.trip <= self._last.get(request, -1) for request in requests)

    def can_read(self, order: NodeCommand, holder: LayerHost) -> bool:
        """Whether the layers are here, and the caches hold what comes before these tokens."""
        held = holder.held.get(order.place)
        if held is None or order.reading is None or any(request in self._ended for request in order.reading.requests):
            return False
        pairs = zip(order.reading.requests, order.reading.positions, strict=True)
        return all(held.caches.length(request) >= position for request, position in pairs)


class PeerSender:
    """How this machine hands on what it has read. Any thread may call it."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._clients: dict[PeerEndpoint, ZmqClient] = {}
        self._lock = threading.Lock()

    def probe(self, door: PeerEndpoint) -> bool:
        """Whether the machine behind a door answers from here."""
        return self._say(door, Message({"kind": "probe"}), _PROBE_S)

    def pass_on(self, order: NodeCommand, int8: bool) -> bool:
        """Hand an order to the first machine onward of it. False: it did not take it, and the server is to bring it."""
        after, *rest = order.onward
        header, frames = command_message(order._replace(place=after.place, onward=tuple(rest)), int8)
        # Whoever was killed is not waited for: the connection is gone at once, and the server may need this machine now
        return self._is_connected(after.door) and self._say(after.door, Message({"kind": "pass", "order": header}, frames), _PASS_S)

    def _is_connected(self, door: PeerEndpoint) -> bool:
        try:
            return self._client(door).is_connected()
        except ShoalError:
            return False

    def _say(self, door: PeerEndpoint, message: Message, timeout_s: float) -> bool:
        try:
            return self._client(door).call(message, timeout_s).header.get("kind") == "taken"
        except ShoalError:
            return False

    def _client(self, door: PeerEndpoint) -> ZmqClient:
        with self._lock:
            if door not in self._clients:
                made = ZmqClient(door.address, token=door.token, server_key=door.key, max_frame_bytes=self._max_frame_bytes)
                self._clients[door] = made
            return self._clients[door]

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


class PeerReceiver:
    """What other machines hand to this one. One thread takes it in, so that nobody waits while another one computes."""

    def __init__(self, server: Server, door: PeerEndpoint, carry_out: Callable[[NodeCommand], None], tell: Callable[[str], None]) -> None:
        """`carry_out` is called in a thread of the inbox, for one order after the other."""
        self.server, self.door, self._carry_out, self._tell = server, door, carry_out, tell
        self._orders: queue.Queue[NodeCommand | None] = queue.Queue()
        self._ending = False
        self._threads = [threading.Thread(target=one, name="shoal-hops", daemon=True) for one in (self._listen, self._work)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending = True
        self.server.wake()
        self._orders.put(None)
        for thread in self._threads:
            thread.join()
        self.server.close()

    def _listen(self) -> None:
        while not self._ending:
            for request in self.server.poll(_LOOK_S):
                self.server.reply(request, Message({"kind": "taken" if self._accept(request.message) else "refused"}))

    def _accept(self, message: Message) -> bool:
        if message.header.get("kind") == "probe":
            return True
        try:
            header: Any = message.header["order"]
            order = command_from(header, message.frames)
        except (ShoalError, KeyError):
            return False
        if order.kind != "read" or order.trip < 0 or self._orders.qsize() >= _MOST_WAITING:
            return False
        self._orders.put(order)
        return True

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._ending:
            try:
                self._carry_out(order)
            except Exception as error:  # what one machine sent must not keep this one from reading what the others send
                self._tell(f"warning: what another machine handed on could not be read: {error!r}")


def open_receiver(
    server_address: str, max_frame_bytes: int, carry_out: Callable[[NodeCommand], None], tell: Callable[[str], None]
) -> PeerReceiver | None:
    """A door on the address by which this machine reaches the server, with secrets of its own that the server tells to those who may come.
    None where there is no such address: then everything goes through the server."""
    if server_address.partition("://")[0] not in Zmq.schemes:
        return None
    settings, host = Zmq(port=0), own_address_towards(parse(server_address).host)
    if host is None:
        return None
    token, keys = new_token(), new_keys() if needs_keys(settings, (host,)) else None
    server = serve(settings, token=token, keys=keys, max_frame_bytes=max_frame_bytes, hosts=(host,))
    return PeerReceiver(server, PeerEndpoint(server.address, token, keys.public if keys else None), carry_out, tell)
