"""Where machines that hold layers reach the server: they join, take orders, and say what they did.

A machine asks for orders all the time, and brings with each question what it has done since. What it says is held against what it was
asked: a machine whose answer cannot be right is let go, like one that is not heard of any more.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import ShoalError, printable
from shoal.protocol.messages import Frame
from shoal.serve.nodes.layer_host import LayerHost, LayerRange
from shoal.serve.nodes.messages import NodeCommand, command_message, endpoint_from, execute, unpack_hidden_states
from shoal.serve.nodes.pipeline import Pipeline
from shoal.serve.nodes.placement import HERE, NodeState
from shoal.serve.nodes.weights import WeightStore
from shoal.transports import Message, Request, Server

SILENCE_S = 10.0
"""After so long without a word a machine is taken for lost. Its process tells that it lives twice a second."""
_ANSWER_S = 1.0
"""A machine that asks is told after so long that there is nothing to do."""
_LOOK_S = 0.2
_PARTING_S = 2.0
_MOST_NODES = 64
_NAME_LENGTH = 64


class NodeSession:
    """A machine that joined: its session, its question that waits, when it was heard of last."""

    def __init__(self, node: NodeState, now: float) -> None:
        self.node, self.heard_at = node, now
        self.asks: tuple[Request, float] | None = None


class NodeServer:
    """One thread between the transport's server and the pipeline."""

    def __init__(
        self, server: Server, pipeline: Pipeline, tensors: WeightStore, model: Mapping[str, Any], tell: Callable[[str], None], *, int8: bool
    ) -> None:
        """`model`: what a machine needs to make the model without numbers; `int8`: whether hidden states are rounded for the way."""
        self.int8 = int8
        self.server, self.pipeline, self.tensors, self.model, self.tell = server, pipeline, tensors, dict(model), tell
        self.guests: dict[str, NodeSession] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="shoal-hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending = True
        self.server.wake()
        self._thread.join()
        self.server.close()

    def lose(self, name: str, why: str) -> None:
        """Let a machine go. Any thread may call this."""
        for session, guest in list(self.guests.items()):
            if guest.node.name == name:
                self.guests.pop(session, None)
                self.tell(f"{name} is gone: {why}")
                self.pipeline.lose(name)

    def _run(self) -> None:
        while not self._ending:
            for request in self.server.poll(_LOOK_S):
                self._hear(request)
            self._hand_out()
            for guest in list(self.guests.values()):
                if time.monotonic() - guest.heard_at > SILENCE_S:
                    self.lose(guest.node.name, f"nothing was heard of it for {SILENCE_S:g} s")
        self._say_over()

    def _say_over(self) -> None:
        """Tell every machine that the service has ended, when it asks next."""
        until = time.monotonic() + _PARTING_S
        while self.guests and time.monotonic() < until:
            for session, guest in list(self.guests.items()):
                if guest.asks is not None:
                    self.server.reply(guest.asks[0], Message({"kind": "over"}))
                    del self.guests[session]
            for request in self.server.poll(_LOOK_S) if self.guests else ():
                self._hear(request)

    def _hear(self, request: Request) -> None:
        header = request.message.header
        try:
            answer = self._answer(request, header)
        except ShoalError as problem:
            answer = _refused(str(problem))
            if (guest := self.guests.get(str(header.get("session")))) is not None:
                self.lose(guest.node.name, str(problem))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            answer = _refused("this is no message of a machine that holds layers")
        if answer is not None:
            self.server.reply(request, answer)

    def _answer(self, request: Request, header: Mapping[str, Any]) -> Message | None:
        kind = header.get("kind")
        if kind == "node":
            return Message({"kind": "model", **self.model, "width": self.pipeline.width, "int8": self.int8})
        if kind == "tensor":
            answer, frames = self.tensors.answer(header)
            return Message(answer, frames)
        if kind == "enter":
            return self._enter(header)
        if kind == "join":
            return _refused("a model is served here, and nothing is trained: `shoal join … --node` holds layers of it")
        guest = self.guests.get(str(header["session"]))
        if guest is None:
            return _refused("session")
        guest.heard_at = time.monotonic()
        if kind == "leave":
            self.lose(guest.node.name, "it left")
            return Message({"kind": "bye"})
        if kind == "turn":
            self._take(guest.node, header, request.message.frames)
            guest.asks = (request, time.monotonic())
            return None
        if kind == "done":
            self._take(guest.node, header, request.message.frames)
        return Message({"kind": "heard"})

    def _enter(self, header: Mapping[str, Any]) -> Message:
        if len(self.guests) >= _MOST_NODES:
            raise ShoalError(f"{_MOST_NODES} machines hold layers already")
        layer_s, memory = float(header["layer_s"]), float(header["memory_bytes"])
        if not (0 < layer_s < 1e6 and 0 < memory < 2**60):
            raise ShoalError("a machine must say how long it takes for a layer, and how much memory it has")
        wanted = header.get("name")
        name = self._free_name(printable(wanted[:_NAME_LENGTH]) if isinstance(wanted, str) and wanted else "node")
        node = NodeState(
            name, layer_s, memory, ring=self.server.wake, door=None if header.get("door") is None else endpoint_from(header["door"])
        )
        session = secrets.token_hex(16)
        self.guests[session] = NodeSession(node, time.monotonic())
        self.tell(f"{name} joined: {1000 * layer_s:.2f} ms a layer, {memory / 2**30:.1f} GiB")
        self.pipeline.add(node)
        return Message({"kind": "entered", "session": session, "name": name})

    def _free_name(self, wanted: str) -> str:
        """A machine that was lost may come back under its name."""
        taken = {guest.node.name for guest in self.guests.values()} | {HERE}
        return wanted if wanted not in taken else next(f"{wanted}-{i}" for i in range(2, 10_000) if f"{wanted}-{i}" not in taken)

    def _take(self, node: NodeState, header: Mapping[str, Any], frames: tuple[Frame, ...]) -> None:
        """What a machine did since it asked last."""
        for done in header["done"]:
            if done["kind"] == "held":
                self.pipeline.held(node.name, LayerRange(*done["place"]))
            elif done["kind"] == "unheld":
                self.pipeline.unheld(node.name, LayerRange(*done["place"]), _problem(done))
            elif done["kind"] == "probed":
                self.pipeline.probed(node.name, str(done["other"]), done["reached"] is True)
            elif done["kind"] == "declined":
                self.pipeline.decline(node.name, int(done["trip"]))
            elif done["kind"] == "failed":
                self.pipeline.fail(int(done["trip"]), f"{node.name}: {_problem(done)}")
            elif done["trip"] >= 0:
                y_BLD = unpack_hidden_states(frames[done["frame"]], done)
                self.pipeline.done(node.name, int(done["trip"]), y_BLD, float(done["seconds"]), done["handed_on"] is True)

    def _hand_out(self) -> None:
        """Answer machines for which there are orders, and those that have waited for long."""
        now = time.monotonic()
        for guest in list(self.guests.values()):
            if guest.asks is None or not (guest.node.orders or now - guest.asks[1] > _ANSWER_S):
                continue
            request, _ = guest.asks
            guest.asks = None
            self.server.reply(request, self._orders(guest.node))

    def _orders(self, node: NodeState) -> Message:
        """The next orders of a machine, at most one of which is to read: what it has read travels on at once."""
        headers, frames = list[dict[str, Any]](), tuple[Frame, ...]()
        while node.orders and not frames and len(headers) < 64:
            try:
                order = node.orders.popleft()
            except IndexError:  # the machine was lost at this moment
                break
            header, frames = command_message(order, self.int8)
            headers.append(header)
        return Message({"kind": "orders", "orders": headers}, frames)


def _problem(done: Mapping[str, Any]) -> str:
    return printable(str(done["problem"])[:300])


def _refused(why: str) -> Message:
    return Message({"kind": "refused", "reason": "serving", "detail": why})


class LocalNode:
    """The server's own layers: it takes orders like every other machine, in a thread of its own."""

    def __init__(self, pipeline: Pipeline, holder: LayerHost, node: NodeState) -> None:
        self.pipeline, self.holder, self.node = pipeline, holder, node
        self.computed_s = 0.0
        """Processor time of this thread for layers."""
        self._rung = threading.Event()
        self._ending = False
        node.ring = self._rung.set
        self._thread = threading.Thread(target=self._run, name="shoal-layers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending = True
        self._rung.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending:
            self._rung.wait(_ANSWER_S)
            self._rung.clear()
            while self.node.orders and not self._ending:
                with contextlib.suppress(IndexError):
                    self._carry_out(self.node.orders.popleft())

    def _carry_out(self, order: NodeCommand) -> None:
        try:
            start = time.thread_time()
            found = execute(self.holder, order)
            self.computed_s += time.thread_time() - start
            if found is not None:
                self.pipeline.done(self.node.name, order.trip, *found)
            if order.kind == "hold":
                self.pipeline.held(self.node.name, order.place)
        except Exception as error:  # one request's fault must not end the service of the others
            if order.kind == "hold":
                self.pipeline.unheld(self.node.name, order.place, str(error))
            else:
                self.pipeline.fail(order.trip, f"{self.node.name}: {error}")
