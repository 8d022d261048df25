"""The tunnel between the machines of a pipeline: what it carries, for whom, and when it ends."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import zmq

from shoal.transports import addresses, keys
from shoal.transports.zeromq import tunnel as tunnels
from shoal.transports.zeromq.tunnel import STORE, Tunnel, TunnelEnds
from tests.support.eventually import HANG_S, eventually


class Machines(NamedTuple):
    """The ends of three machines, all on this one, and the ranks that each has lost."""

    ends: list[Tunnel]
    lost: list[queue.SimpleQueue[int]]
    own: list[keys.Keys]


@contextlib.contextmanager
def three_machines() -> Iterator[Machines]:
    own = [keys.new_keys() for _ in range(3)]
    port = addresses.free_port("127.0.0.1")
    ends, lost = [], [queue.SimpleQueue[int]() for _ in own]
    for rank, pair in enumerate(own):
        options = TunnelEnds(pair.secret, tuple(one.public for one in own), f"tcp://127.0.0.1:{port}")
        ends.append(Tunnel(rank, options, ["127.0.0.1"], 30.0, lost[rank].put))
    ends[2].dial(1, ends[1].addresses[0])
    try:
        yield Machines(ends, lost, own)
    finally:
        for one in ends:
            one.close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    with three_machines() as found:
        yield found


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), HANG_S)


def has_ended(line: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return line.recv(1) == b""
    return True


@pytest.mark.parametrize("there", [(1, 0), (2, 1), (2, 0)])
def test_bytes_arrive_as_they_were_sent_and_come_back(machines: Machines, there: tuple[int, int]) -> None:
    one, other = there
    sent = os.urandom(9 << 20)  # more than a window
    with echo() as port:
        machines.ends[other].expose(port)
        with connect(machines.ends[one].port_to(other, port)) as line:
            threading.Thread(target=line.sendall, args=(sent,), daemon=True).start()
            got = read(line, len(sent))
    assert got == sent


def read(line: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = line.recv(1 << 20)
        assert data, f"{len(found)} of {count} bytes came"
        found += data
    return bytes(found)


def test_the_store_is_reached_by_its_name(machines: Machines) -> None:
    descriptor, port = machines.ends[0].store_listener()
    with socket.socket(fileno=descriptor) as listener, connect(machines.ends[2].port_to(0, STORE)) as line:
        listener.settimeout(HANG_S)
        there, _ = listener.accept()
        with there:
            line.sendall(b"hello")
            assert read(there, 5) == b"hello"
            assert listener.getsockname() == ("127.0.0.1", port)


def test_only_exposed_ports_are_reached(machines: Machines) -> None:
    with echo() as port, connect(machines.ends[1].port_to(0, port)) as line:
        assert has_ended(line)
        machines.ends[0].expose(port)
        with connect(machines.ends[1].port_to(0, port)) as again:
            again.sendall(b"now")
            assert read(again, 3) == b"now"


def test_a_connection_that_is_not_read_holds_back_its_sender_and_no_other(machines: Machines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, echo() as port:
        for one in (port, silent.getsockname()[1]):
            machines.ends[0].expose(one)
        with connect(machines.ends[1].port_to(0, silent.getsockname()[1])) as full, connect(machines.ends[1].port_to(0, port)) as line:
            full.settimeout(0.2)
            with pytest.raises(TimeoutError):
                full.sendall(bytes(200 << 20))
            line.sendall(b"still here")
            assert read(line, 10) == b"still here"


def test_when_a_machine_is_gone_its_connections_end_and_the_others_are_told(machines: Machines) -> None:
    with echo() as port:
        machines.ends[0].expose(port)
        machines.ends[1].expose(port)
        with connect(machines.ends[2].port_to(0, port)) as gone, connect(machines.ends[2].port_to(1, port)) as stays:
            for line in (gone, stays):
                line.sendall(b"x")
                assert read(line, 1) == b"x"
            machines.ends[0].close()
            assert has_ended(gone)
            assert machines.lost[2].get(timeout=HANG_S) == 0
            assert machines.lost[1].get(timeout=HANG_S) == 0
            stays.sendall(b"x")
            assert read(stays, 1) == b"x"
        machines.ends[2].close()
        assert machines.lost[1].get(timeout=HANG_S) == 2, "also one that had connected to this machine"


def test_the_last_bytes_arrive_before_a_tunnel_closes(machines: Machines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        machines.ends[0].expose(listener.getsockname()[1])
        with connect(machines.ends[1].port_to(0, listener.getsockname()[1])) as line:
            there, _ = listener.accept()
            got: list[bytes] = []
            reading = threading.Thread(target=lambda: got.append(read(there, 3 << 20)))
            reading.start()
            line.sendall(bytes(3 << 20))
        machines.ends[1].close()
        reading.join()
        there.close()
        assert len(got[0]) == 3 << 20


def test_a_machine_that_never_comes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "CONNECT_S", 0.1)
    own, lost = [keys.new_keys() for _ in range(2)], queue.SimpleQueue[int]()
    ends = TunnelEnds(own[0].secret, tuple(one.public for one in own), f"tcp://127.0.0.1:{addresses.free_port('127.0.0.1')}")
    alone = Tunnel(0, ends, ["127.0.0.1"], 30.0, lost.put)
    assert lost.get(timeout=HANG_S) == 1
    alone.close()


def test_a_machine_that_sends_more_than_it_may_is_expelled(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        machines.ends[0].expose(silent.getsockname()[1])
        with connect(machines.ends[1].port_to(0, silent.getsockname()[1])) as full:
            full.settimeout(0.2)
            with pytest.raises(TimeoutError):
                full.sendall(bytes(200 << 20))
            for stream in machines.ends[1]._streams.values():
                stream.unconfirmed = -(1 << 40)  # from here on it takes no notice of what was confirmed
            machines.ends[1]._wakeup.wake()
            full.settimeout(HANG_S)
            with pytest.raises(ConnectionError):
                full.sendall(bytes(200 << 20))
        assert machines.lost[0].get(timeout=HANG_S) == 1
        assert machines.lost[1].get(timeout=HANG_S) == 0


# --- strangers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["own", "the token's"])
def test_a_stranger_without_a_key_that_was_given_out_gets_nothing(machines: Machines, pair: str) -> None:
    stranger = keys.new_keys() if pair == "own" else keys.keys_from_token("guess")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = context.socket(zmq.DEALER)
    line.linger = 0
    line.curve_publickey, line.curve_secretkey = stranger.public.encode(), stranger.secret.encode()
    line.curve_serverkey = machines.own[0].public.encode()
    line.connect(machines.ends[0].addresses[0])
    line.send_multipart([tunnels._HEADER.pack(tunnels.MessageKind.OPEN, 1 << 32, STORE), b""])
    eventually(lambda: machines.ends[0].traffic.refused.get("unauthorised"))
    assert not line.poll(0)
    assert not machines.ends[0]._streams
    line.close()
    context.term()


def test_raw_bytes_cost_nothing_and_disturb_no_machine(machines: Machines) -> None:
    place = addresses.parse(machines.ends[0].addresses[0])
    with contextlib.ExitStack() as held, echo() as port:
        for _ in range(100):
            line = held.enter_context(socket.create_connection((place.host, place.port), HANG_S))
            with contextlib.suppress(OSError):
                line.sendall(os.urandom(20_000))
        machines.ends[0].expose(port)
        with connect(machines.ends[1].port_to(0, port)) as line:
            line.sendall(b"here")
            assert read(line, 4) == b"here"
