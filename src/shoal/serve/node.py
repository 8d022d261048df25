"""A machine that holds layers of a model which another one serves: `shoal join … --node`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.serve.holding import Holder, Place, Reading, free_memory
from shoal.serve.hub import carry_out
from shoal.serve.routes import Order
from shoal.serve.skeletons import skeleton_of
from shoal.serve.tensors import PIECE_BYTES, Fetched, as_frame, from_frame, type_name
from shoal.transports import Client, Message, Refused, Unreachable, connect
from shoal.updates.messages import Frame

FRAME_BYTES = 1 << 28
"""The largest frame between the server and a machine: hidden states of a long piece of a prompt."""
_PULSE_S = 0.5
_CALL_S = 30.0
_PAUSE_S = 0.5


class Reached(NamedTuple):
    """How the server is reached."""

    address: str
    token: str
    key: str | None

    def client(self) -> Client:
        return connect(self.address, token=self.token, server_key=self.key, max_frame_bytes=max(FRAME_BYTES, PIECE_BYTES))


class NodeProcess:
    """Joins, carries out orders until the server is gone for longer than its patience, or it is asked to stop."""

    def __init__(self, reached: Reached, name: str | None, *, slowdown: float, patience_s: float, tell: Callable[[str], None]) -> None:
        self.reached, self.name, self.slowdown, self.patience_s, self.tell = reached, name, slowdown, patience_s, tell
        self.client, self.pulse = reached.client(), reached.client()
        self.session = ""
        self._stopping = threading.Event()

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

    def _ask(self, header: dict[str, Any], frames: tuple[Frame, ...] = ()) -> tuple[Mapping[str, Any], tuple[Frame, ...]]:
        answer = self.client.call(Message(header, frames), _CALL_S)
        if answer.header.get("kind") == "refused":
            detail = str(answer.header.get("detail", answer.header.get("reason")))
            if detail == "session":
                raise Unreachable("the server does not know this machine any more")
            raise Refused(f"the server refuses: {detail}", "serving")
        return answer.header, answer.frames

    def _enter(self) -> Holder:
        """Make the model without numbers, measure one layer, and say what this machine can do."""
        model, _ = self._ask({"kind": "node"})
        if model.get("kind") != "model":
            raise ShoalError(f"{self.reached.address} serves no model: join it without --node")
        holder = Holder(*skeleton_of(model, Fetched(self._ask).get), choose_device("auto"), self.slowdown)
        layer_s = holder.measure(int(model["width"]))
        about = {"layer_s": layer_s, "memory_bytes": float(free_memory()), "name": self.name}
        answer, _ = self._ask({"kind": "enter", **about})
        self.session, self.name = str(answer["session"]), str(answer["name"])
        self.tell(f"joined as {self.name}")
        holder.drop(Place(0, 1))
        return holder

    def _beat(self) -> None:
        while not self._stopping.wait(_PULSE_S):
            if self.session:
                try:
                    self.pulse.call(Message({"kind": "alive", "session": self.session}), _CALL_S)
                except (Unreachable, Refused):
                    continue

    def _serve(self, holder: Holder) -> None:
        done, frames = list[dict[str, Any]](), list[Frame]()
        while not self._stopping.is_set():
            answer, given = self._ask({"kind": "turn", "session": self.session, "done": done}, tuple(frames))
            if answer.get("kind") == "over":
                self.tell("the server has ended")
                return
            done, frames = [], []
            for header in answer["orders"]:
                self._carry_out(holder, header, given, done, frames)
        self._ask({"kind": "leave", "session": self.session})

    def _carry_out(
        self, holder: Holder, header: Mapping[str, Any], given: tuple[Frame, ...], done: list[dict[str, Any]], frames: list[Frame]
    ) -> None:
        order = _order(header, given)

        def read(y_BLD: Any, seconds: float) -> None:
            about = {"kind": "read", "trip": order.trip, "seconds": seconds, "frame": len(frames)}
            done.append({**about, "shape": list(y_BLD.shape), "type": type_name(y_BLD)})
            if order.trip >= 0:
                frames.append(as_frame(y_BLD))

        try:
            carry_out(holder, order, read)
            if order.kind == "hold":
                first, last = order.place
                self.tell(f"holds the layers {first} to {last - 1}")
                done.append({"kind": "held", "place": [first, last]})
        except Unreachable:
            raise
        except Exception as error:  # the server ends the requests, and this machine goes on
            self.tell(f"warning: {error}")
            done.append({"kind": "failed", "trip": order.trip, "problem": str(error)[:300]})


def _order(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> Order:
    place, requests = Place(*header["place"]), tuple(header["requests"])
    if "reading" not in header:
        return Order(str(header["kind"]), place, requests=requests, length=int(header["length"]))
    x_BLD = from_frame(frames[0], header["shape"], header["type"])
    return Order("read", place, int(header["trip"]), Reading(**header["reading"]), x_BLD)
