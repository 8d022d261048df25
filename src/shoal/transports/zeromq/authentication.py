"""Who gets in: ZeroMQ asks this before it takes a message from a new connection (ZAP, https://rfc.zeromq.org/spec/27).

A thread of its own, because a coordinator busy with aggregation must not keep workers waiting at the door, and a peer with the wrong token
should hear so at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.transports.interface import Traffic
from shoal.transports.wakeup import Bell
from shoal.transports.zeromq.byte_limits import LOOK_AT_STRANGERS_EVERY_S, LOOK_EVERY_S, Hoarding
from shoal.transports.zeromq.connection_limits import Crowd
from shoal.transports.zeromq.sockets import Socket

DOMAIN = b"shoal"
FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthorised",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "unauthorised",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",  # broken off by the other side, which may be no ill will
}
_PAUSES = 5
"""How many times as long as a look took nobody is looked at."""
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | sum(FAILED)

Admits = Callable[[bytes, list[bytes]], str | None]
"""On whose invitation a mechanism with these credentials is let in; None: on nobody's."""


class Gatekeeper:
    """Answers for one server's socket, from before it is bound, and counts the handshakes that fail."""

    def __init__(
        self, context: zmq.Context[Socket], server: Socket, admits: Admits, traffic: Traffic, hoarding: Hoarding, crowd: Crowd
    ) -> None:
        self._admits = admits
        self._crowd = crowd
        self._traffic = traffic
        self._hoarding = hoarding
        self._look_at = self._look_at_strangers = 0.0
        self._bell = Bell()
        self._asked = context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        self._server = server
        self._events = server.get_monitor_socket(WATCHED)
        self._thread = threading.Thread(target=self._serve, name="shoal-gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._bell.ring()
        self._thread.join()
        self._server.disable_monitor()
        for ended in (self._events, self._asked):
            ended.close(linger=0)
        self._bell.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._asked, self._events, self._bell):
            poller.register(source, zmq.POLLIN)
        while True:
            wait_s = LOOK_AT_STRANGERS_EVERY_S if self._hoarding.strangers else LOOK_EVERY_S
            ready = dict(poller.poll(int(1000 * wait_s) if len(self._hoarding) else None))
            if self._asked in ready:
                self._answer(self._asked.recv_multipart())
            while self._events in ready and self._events.poll(0):  # all there are: connections may come faster than they are looked at
                self._note(recv_monitor_message(self._events))
            if self._bell.fileno() in ready:
                return
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """End connections that brought too much. Strangers are looked at more often, but not most of the time however many there are."""
        if now < self._look_at_strangers:
            return
        everybody = now >= self._look_at
        for _ in range(self._hoarding.end_them(only_strangers=not everybody)):
            self._traffic.refuse("oversized")
        if everybody:
            self._look_at = now + LOOK_EVERY_S
        self._look_at_strangers = now + max(LOOK_AT_STRANGERS_EVERY_S, _PAUSES * (time.monotonic() - now))

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["event"] == zmq.EVENT_ACCEPTED:
            if self._crowd.accepted(message["value"], self._hoarding.first_stranger):
                self._traffic.refuse("crowded")
            self._hoarding.accepted(message["value"])
        elif message["event"] == zmq.EVENT_DISCONNECTED:
            self._hoarding.ended(message["value"])
            self._crowd.ended(message["value"])
        else:
            self._traffic.refuse(FAILED[message["event"]])

    def _answer(self, asked: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism, *credentials = asked
        guest = self._admits(mechanism, credentials) if version == b"1.0" and domain == DOMAIN else None
        status, text = (b"200", b"welcome") if guest is not None else (b"400", b"this join token is not known here")
        self._asked.send_multipart([b"1.0", number, status, text, (guest or "").encode(), b""])
