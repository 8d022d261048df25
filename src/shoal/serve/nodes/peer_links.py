"""From one machine straight to the next: the door that a machine opens for those before it, and how it hands on what it has read.

What is handed on may be declined at any time, and the server, which is told everything, then brings it itself. So nothing is lost when
either end dies, or when an order of the server comes later than what another machine sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from shoal.config.schema.cluster import Zmq
from shoal.errors import ShoalError
from shoal.serve.nodes.layer_host import LayerHost
from shoal.serve.nodes.messages import command_from, command_message
from shoal.serve.nodes.routes import NodeCommand, PeerEndpoint
from shoal.transports import Message, Server, needs_keys, new_keys, new_token, serve
from shoal.transports.addresses import own_address_towards, parse
from shoal.transports.zeromq.client import ZmqClient

_PROBE_S = 2.0
_PASS_S = 2.0
"""The next machine only says that it has got something; after so long it is taken for deaf, and the server brings it."""
_LOOK_S = 0.5
_MOST_WAITING = 64
"""Orders that wait in a machine. There are never more under way than the server has started."""
_REMEMBERED = 4096


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
