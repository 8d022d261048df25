"""A machine that holds layers of a model which another one serves: `shoal join … --node`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.protocol.messages import Frame
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, free_memory
from shoal.serve.nodes.messages import command_from, execute, pack_hidden_states
from shoal.serve.nodes.model_description import model_maker
from shoal.serve.nodes.peer_links import PeerReceiver, PeerSender, ReadHistory, open_receiver
from shoal.serve.nodes.routes import NextHop, NodeCommand
from shoal.serve.nodes.weights import PIECE_BYTES, RemoteWeights
from shoal.transports import Client, Message, Refused, Unreachable, connect

FRAME_BYTES = 1 << 28
"""The largest frame between the server and a machine: hidden states of a long piece of a prompt."""
_PULSE_S = 0.5
_CALL_S = 30.0
_PAUSE_S = 0.5


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
        about = {"layer_s": layer_s, "memory_bytes": float(free_memory()), "name": self.name}
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
