"""The server's side of the connections to machines that hold layers: they join, poll for commands, and report.

A machine polls all the time, and each poll contains its reports since the last one. Reports are checked: a machine whose report cannot be
right is removed, like one that is silent for too long.
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
from shoal.serve.nodes.pipeline import NodePipeline
from shoal.serve.nodes.placement import SERVER_NODE, NodeState
from shoal.serve.nodes.weights import WeightStore
from shoal.transports import Message, Request, Server

SILENCE_S = 10.0
"""A machine that is silent for longer is lost. Its process sends a heartbeat twice a second."""
_LONGEST_POLL_S = 1.0
"""A poll is answered after this time, even without commands."""
_POLL_S = 0.2
_CLOSING_S = 2.0
_MOST_NODES = 64
_NAME_LENGTH = 64


class NodeSession:
    """A machine that joined: its open poll, and when its last message came."""

    def __init__(self, node: NodeState, now: float) -> None:
        self.node, self.seen_at = node, now
        self.waiting_request: tuple[Request, float] | None = None


class NodeServer(threading.Thread):
    """The thread between the transport's server and the pipeline."""

    def __init__(
        self,
        server: Server,
        pipeline: NodePipeline,
        tensors: WeightStore,
        model: Mapping[str, Any],
        tell: Callable[[str], None],
        *,
        int8: bool,
    ) -> None:
        """`model`: what a machine needs to make the model without weights; `int8`: whether hidden states are sent rounded."""
        super().__init__(name="shoal-hub", daemon=True)
        self.int8 = int8
        self.server, self.pipeline, self.tensors, self.model, self.tell = server, pipeline, tensors, dict(model), tell
        self.sessions: dict[str, NodeSession] = {}
        self._ending = False

    def close(self) -> None:
        self._ending = True
        self.server.wake()
        self.join()
        self.server.close()

    def remove(self, name: str, why: str) -> None:
        """Remove a machine. Any thread may call this."""
        for session_id, session in list(self.sessions.items()):
            if session.node.name == name:
                self.sessions.pop(session_id, None)
                self.tell(f"{name} is gone: {why}")
                self.pipeline.remove(name)

    def run(self) -> None:
        while not self._ending:
            for request in self.server.poll(_POLL_S):
                self._on_request(request)
            self.pipeline.tick()
            self._end_removed_sessions()
            self._send_commands()
            for session in list(self.sessions.values()):
                if time.monotonic() - session.seen_at > SILENCE_S:
                    self.remove(session.node.name, f"it sent nothing for {SILENCE_S:g} s")
        self._announce_end()

    def _end_removed_sessions(self) -> None:
        """End the sessions of machines that the pipeline removed. They may join again."""
        for session_id, session in list(self.sessions.items()):
            if not session.node.alive:
                self.sessions.pop(session_id, None)
                if session.waiting_request is not None:
                    self.server.reply(session.waiting_request[0], _refused("session"))

    def _announce_end(self) -> None:
        """Answer the next poll of every machine with the end of the service."""
        until = time.monotonic() + _CLOSING_S
        while self.sessions and time.monotonic() < until:
            for session_id, session in list(self.sessions.items()):
                if session.waiting_request is not None:
                    self.server.reply(session.waiting_request[0], Message({"kind": "over"}))
                    del self.sessions[session_id]
            for request in self.server.poll(_POLL_S) if self.sessions else ():
                self._on_request(request)

    def _on_request(self, request: Request) -> None:
        header = request.message.header
        try:
            answer = self._answer(request, header)
        except ShoalError as problem:
            answer = self._refuse(header, str(problem))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            answer = self._refuse(header, "this is no message of a machine that holds layers")
        if answer is not None:
            self.server.reply(request, answer)

    def _refuse(self, header: Mapping[str, Any], why: str) -> Message:
        """Refuse a message. A machine that joined and sends it is removed."""
        if (session := self.sessions.get(str(header.get("session")))) is not None:
            self.pipeline.remove_faulty(session.node.name, f"the server refused its report: {why}")
        return _refused(why)

    def _answer(self, request: Request, header: Mapping[str, Any]) -> Message | None:
        kind = header.get("kind")
        if kind == "node":
            return Message({"kind": "model", **self.model, "width": self.pipeline.ends.width, "int8": self.int8})
        if kind == "tensor":
            answer, frames = self.tensors.answer(header)
            return Message(answer, frames)
        if kind == "enter":
            return self._enter(header)
        if kind == "join":
            return _refused("a model is served here, and nothing is trained: `shoal join … --node` holds layers of it")
        session = self.sessions.get(str(header["session"]))
        if session is None or not session.node.alive:
            return _refused("session")
        session.seen_at = time.monotonic()
        if kind == "leave":
            self.remove(session.node.name, "it left")
            return Message({"kind": "bye"})
        if kind == "turn":
            self._handle_reports(session.node, header, request.message.frames)
            session.waiting_request = (request, time.monotonic())
            return None
        if kind == "done":
            self._handle_reports(session.node, header, request.message.frames)
        return Message({"kind": "heard"})

    def _enter(self, header: Mapping[str, Any]) -> Message:
        self._end_removed_sessions()
        if len(self.sessions) >= _MOST_NODES:
            raise ShoalError(f"{_MOST_NODES} machines hold layers already")
        layer_s, memory = float(header["layer_s"]), float(header["memory_bytes"])
        if not (0 < layer_s < 1e6 and 0 < memory < 2**60):
            raise ShoalError("a machine must say how long it takes for a layer, and how much memory it has")
        wanted = header.get("name")
        name = self._free_name(printable(wanted[:_NAME_LENGTH]) if isinstance(wanted, str) and wanted else "node")
        node = NodeState(
            name, layer_s, memory, wake=self.server.wake, endpoint=None if header.get("door") is None else endpoint_from(header["door"])
        )
        session_id = secrets.token_hex(16)
        self.sessions[session_id] = NodeSession(node, time.monotonic())
        self.tell(f"{name} joined: {1000 * layer_s:.2f} ms a layer, {memory / 2**30:.1f} GiB")
        self.pipeline.add(node)
        return Message({"kind": "entered", "session": session_id, "name": name})

    def _free_name(self, wanted: str) -> str:
        """The wanted name, or one with a number if a connected machine has it. A lost machine may rejoin under its name."""
        taken = {session.node.name for session in self.sessions.values()} | {SERVER_NODE}
        return wanted if wanted not in taken else next(f"{wanted}-{i}" for i in range(2, 10_000) if f"{wanted}-{i}" not in taken)

    def _handle_reports(self, node: NodeState, header: Mapping[str, Any], frames: tuple[Frame, ...]) -> None:
        for done in header["done"]:
            if done["kind"] == "held":
                self.pipeline.on_loaded(node.name, LayerRange(*done["place"]))
            elif done["kind"] == "unheld":
                self.pipeline.on_load_failed(node.name, LayerRange(*done["place"]), _problem(done))
            elif done["kind"] == "probed":
                self.pipeline.on_probed(node.name, str(done["other"]), done["reached"] is True)
            elif done["kind"] == "declined":
                self.pipeline.decline(node.name, int(done["trip"]))
            elif done["kind"] == "failed":
                self.pipeline.fail(node.name, int(done["trip"]), _problem(done))
            elif done["trip"] >= 0:
                y_BLD = unpack_hidden_states(frames[done["frame"]], done)
                self.pipeline.on_read(node.name, int(done["trip"]), y_BLD, float(done["seconds"]), done["handed_on"] is True)

    def _send_commands(self) -> None:
        """Answer the polls of machines with commands, and polls that have waited for long."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if session.waiting_request is None or not (session.node.commands or now - session.waiting_request[1] > _LONGEST_POLL_S):
                continue
            request, _ = session.waiting_request
            session.waiting_request = None
            self.server.reply(request, self._commands(session.node))

    def _commands(self, node: NodeState) -> Message:
        """The next commands of a machine, with at most one `read`, so that its output is sent on at once."""
        headers, frames = list[dict[str, Any]](), tuple[Frame, ...]()
        while node.commands and not frames and len(headers) < 64:
            try:
                command = node.commands.popleft()
            except IndexError:  # the machine was lost at this moment
                break
            header, frames = command_message(command, self.int8)
            headers.append(header)
        return Message({"kind": "orders", "orders": headers}, frames)


def _problem(done: Mapping[str, Any]) -> str:
    return printable(str(done["problem"])[:300])


def _refused(why: str) -> Message:
    return Message({"kind": "refused", "reason": "serving", "detail": why})


class LocalNode(threading.Thread):
    """The server's own layers, which execute commands like those of every other machine, in a thread of their own."""

    def __init__(self, pipeline: NodePipeline, host: LayerHost, node: NodeState) -> None:
        super().__init__(name="shoal-layers", daemon=True)
        self.pipeline, self.host, self.node = pipeline, host, node
        self.computed_s = 0.0
        """Processor time of this thread for layers."""
        self._wakeup = threading.Event()
        self._ending = False
        node.wake = self._wakeup.set

    def close(self) -> None:
        self._ending = True
        self._wakeup.set()
        self.join()

    def run(self) -> None:
        while not self._ending:
            self._wakeup.wait(_LONGEST_POLL_S)
            self._wakeup.clear()
            while self.node.commands and not self._ending:
                with contextlib.suppress(IndexError):
                    self._execute(self.node.commands.popleft())

    def _execute(self, command: NodeCommand) -> None:
        try:
            if command.kind == "recompute":
                self._recompute(command)
                return
            start = time.thread_time()
            found = execute(self.host, command)
            self.computed_s += time.thread_time() - start
            if found is not None:
                self.pipeline.on_read(self.node.name, command.batch_number, *found)
            if command.kind == "hold":
                self.pipeline.on_loaded(self.node.name, command.layers)
        except Exception as error:  # a failed request must not end the others
            if command.kind == "hold":
                self.pipeline.on_load_failed(self.node.name, command.layers, str(error))
            else:
                self.pipeline.fail(self.node.name, command.batch_number, str(error))

    def _recompute(self, command: NodeCommand) -> None:
        """Compute layers of a text without caches, for a comparison with another machine."""
        assert command.token_batch is not None
        assert command.x_BLD is not None
        try:
            own_1LD = self.host.recompute(command.layers, command.token_batch.ids[0], command.x_BLD)
        except Exception as error:
            self.pipeline.placement.tell(f"warning: the server could not compute layers for a comparison: {error}")
            own_1LD = None
        self.pipeline.on_recomputed(command.batch_number, own_1LD)
