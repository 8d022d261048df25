"""Large messages come a few at a time, and no client keeps others waiting for long."""

from __future__ import annotations

import threading

import pytest

from shoal.config.schema.cluster import Zmq
from shoal.transports.interface import ListenOptions, Message
from shoal.transports.zeromq import upload_permits
from shoal.transports.zeromq.client import ZmqClient
from shoal.transports.zeromq.server import ZmqServer
from shoal.transports.zeromq.upload_permits import GO, LATER, UploadPermits
from tests.support.processes import HANG_S

MB = 1 << 20


def asked(permits: UploadPermits, *names: str, size: object = 100 * MB, now: float = 0.0) -> None:
    for name in names:
        permits.ask(name.encode(), f"address of {name}", 1, size, now)


def granted(permits: UploadPermits, now: float) -> list[str]:
    return [answer.peer.decode() for answer in permits.answers(now) if answer.header == GO]


def test_so_many_send_at_once_and_the_next_when_one_is_whole() -> None:
    permits = UploadPermits(2, 1000 * MB)
    asked(permits, "ann", "bo", "cy", "dee")
    assert granted(permits, 0.0) == ["ann", "bo"]
    permits.finish(b"bo")
    assert granted(permits, 1.0) == ["cy"]
    assert granted(permits, 1.0) == []


def test_a_slow_client_keeps_the_others_waiting_for_a_bounded_time() -> None:
    permits = UploadPermits(1, 1000 * MB)
    asked(permits, "slow", size=1 << 60)
    asked(permits, "bo")
    assert granted(permits, 0.0) == ["slow"]
    lapse = 2.0 + 1000 * MB / 20e6
    asked(permits, "bo", now=lapse - 1)
    assert granted(permits, lapse - 0.1) == []
    assert granted(permits, lapse) == ["bo"]


def test_a_client_that_waits_is_told_so_and_forgotten_when_it_asks_no_more() -> None:
    permits = UploadPermits(1, 1000 * MB)
    asked(permits, "ann", "bo", "cy")
    granted(permits, 0.0)
    assert [(answer.peer, answer.header) for answer in permits.answers(5.0)] == [(b"bo", LATER), (b"cy", LATER)]
    asked(permits, "bo", now=5.1)
    permits.finish(b"ann")
    assert granted(permits, 6.0) == ["bo"]
    permits.finish(b"bo")
    assert permits.answers(11.0) == []
    assert not permits.waiting, "cy never asked again"


def test_addresses_take_turns() -> None:
    permits = UploadPermits(1, 1000 * MB)
    for number in range(5):
        permits.ask(f"crowd-{number}".encode(), "one address", 1, MB, 0.0)
    asked(permits, "ann", "bo")
    order = []
    for _ in range(4):
        order += granted(permits, 1.0)
        permits.finish(order[-1].encode())
    assert order == ["crowd-0", "ann", "bo", "crowd-1"]


@pytest.mark.parametrize("size", [-1, None, "much", 1.5, True, 10**30])
def test_a_nonsensical_size_is_no_longer_permit(size: object) -> None:
    permits = UploadPermits(1, 10 * MB)
    asked(permits, "ann", size=size)
    assert granted(permits, 0.0) == ["ann"]
    assert permits.given[b"ann"] <= 2.0 + 10 * MB / 20e6


def test_clients_ask_before_a_large_message_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_permits, "LARGE_BYTES", 1000)
    server = ZmqServer(Zmq(port=0, uploads_at_once=1), ListenOptions(["127.0.0.1"], "a-token-of-tests", None, MB))
    clients = [ZmqClient(server.address, token="a-token-of-tests", server_key=None, max_frame_bytes=MB) for _ in range(3)]
    answers: list[int] = []

    def send(client: ZmqClient, size: int) -> None:
        answers.append(client.call(Message({"kind": "x"}, (b"a" * size,)), HANG_S).header["size"])

    threads = [threading.Thread(target=send, args=(client, size)) for client, size in zip(clients, (10, 5000, 6000), strict=True)]
    most = 0
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for request in server.poll(0.05):
                most = max(most, len(server._permits.given))
                server.reply(request, Message({"size": len(request.message.frames[0])}))
        assert sorted(answers) == [10, 5000, 6000]
        assert most <= 1
        assert not server._permits.given, "whole messages give their permits back"
    finally:
        for thread in threads:
            thread.join(HANG_S)
        for client in clients:
            client.close()
        server.close()
