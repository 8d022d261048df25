"""What every transport promises, whatever is underneath."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.transports import Client, Message, Refused, Request, Server, Unreachable
from shoal.transports.interface import WrongToken
from shoal.transports.keys import new_keys, new_token
from shoal.transports.request_rate import Rate
from shoal.transports.wire import HEADER_BYTES, Malformed
from shoal.transports.xmlrpc import XmlRpcServer
from tests.support.eventually import eventually
from tests.support.transport_harness import (
    KEYS,
    KINDS,
    LIMIT,
    PATIENCE_S,
    Calling,
    Harness,
    answering,
    call_until_answered,
    echo,
    resident_bytes,
    take,
)

pytestmark = pytest.mark.whole

HEADER = {
    "kind": "contribute",
    "number": 2**53,
    "negative": -5,
    "share": 0.1,
    "name": "Zoë ✓",
    "raw": bytes(range(256)),
    "yes": True,
    "nothing": None,
    "list": [1, [2.5, "three"], {}],
    "map": {"a": {"b": []}},
}


@pytest.fixture
def server(harness: Harness) -> Server:
    return harness.serve()


@pytest.fixture
def client(harness: Harness, server: Server) -> Client:
    return harness.connect(server.address)


# --- what is sent arrives -----------------------------------------------------------------------------


def test_headers_and_frames_arrive_as_they_were(server: Server, client: Client) -> None:
    sizes = (0, 1, 1500, 65_535, 65_536, 1_000_003)
    frames = tuple(bytes([index]) * size for index, size in enumerate(sizes))
    with answering(server):
        answer = client.call(Message(HEADER, frames), PATIENCE_S)
    assert answer.header == {"echo": HEADER}
    assert tuple(map(bytes, answer.frames)) == frames


def test_large_frames_arrive(server: Server, client: Client) -> None:
    large = bytes(range(256)) * 31_250
    with answering(server):
        answer = client.call(Message({}, (memoryview(large),)), PATIENCE_S)
    assert len(large) == 8_000_000
    assert answer.frames[0] == large


def test_views_of_numbers_arrive_as_bytes(server: Server, client: Client) -> None:
    numbers = memoryview(bytes(4 * 50_000)).cast("f", [100, 500])
    with answering(server):
        answer = client.call(Message({}, (numbers,)), PATIENCE_S)
    assert bytes(answer.frames[0]) == bytes(200_000)


def test_an_answer_with_a_header_of_a_megabyte_arrives(server: Server, client: Client) -> None:
    """A welcome brings the whole configuration. Questions are short, and a coordinator reads no longer ones from strangers."""
    text = "x" * (HEADER_BYTES - 1000)
    with answering(server, lambda request: Message({"config": text})):
        assert client.call(Message({"about": "x" * 60_000}), PATIENCE_S).header["config"] == text


def test_calls_come_in_order(server: Server, client: Client) -> None:
    seen: list[int] = []

    def answer(request: Request) -> Message:
        seen.append(request.message.header["call"])
        return echo(request)

    with answering(server, answer):
        for call in range(40):
            assert client.call(Message({"call": call}), PATIENCE_S).header["echo"]["call"] == call
    assert seen == list(range(40))


def test_traffic_is_counted_alike_on_both_sides(server: Server, client: Client) -> None:
    with answering(server, lambda request: Message({"ok": True}, (bytes(70_000),))):
        client.call(Message({"a": 1}, (bytes(100_000),)), PATIENCE_S)
    assert server.traffic.received_bytes == client.traffic.sent_bytes > 100_000
    assert client.traffic.received_bytes == server.traffic.sent_bytes > 70_000
    assert (server.traffic.messages, client.traffic.messages) == (1, 1)
    assert server.traffic.refused == client.traffic.refused == {}


# --- many at once -------------------------------------------------------------------------------------


def test_many_clients_each_get_their_own_answers(harness: Harness, server: Server) -> None:
    clients = [harness.connect(server.address) for _ in range(12)]
    wrong: list[int] = []

    def work(name: int) -> None:
        for call in range(10):
            if clients[name].call(Message({"from": [name, call]}), PATIENCE_S).header["echo"] != {"from": [name, call]}:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(len(clients))]
    with answering(server):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert server.traffic.messages == 120


def test_answers_may_come_late_and_in_any_order(harness: Harness, server: Server) -> None:
    calls = [Calling(harness.connect(server.address), Message({"name": name})) for name in range(5)]
    requests = take(server, 5)
    assert len({request.peer for request in requests}) == 5
    for request in sorted(requests, key=lambda request: -request.message.header["name"]):
        server.reply(request, echo(request))
    assert [call.answer().header["echo"]["name"] for call in calls] == list(range(5))


def test_a_poll_is_bounded(harness: Harness, server: Server) -> None:
    calls = [Calling(harness.connect(server.address), Message({})) for _ in range(harness.at_once)]
    found: list[Request] = []
    while len(found) < len(calls):
        polled = server.poll(PATIENCE_S)
        assert len(polled) <= 64
        found += polled
    for request in found:
        server.reply(request, Message({}))
    assert all(call.answer() for call in calls)


# --- time ---------------------------------------------------------------------------------------------


def test_nobody_there(harness: Harness, server: Server) -> None:
    server.close()
    client = harness.connect(server.address)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        client.call(Message({}), 0.3)
    assert 0.2 < time.monotonic() - began < PATIENCE_S / 2


def test_a_client_waits_for_a_server_that_is_not_there_yet(harness: Harness, server: Server) -> None:
    server.close()
    call = Calling(harness.connect(server.address), Message({"early": True}))
    with answering(harness.serve(server.address)):
        assert call.answer().header["echo"] == {"early": True}


def ask_in_vain(harness: Harness, server: Server, client: Client, message: Message) -> None:
    """A question that arrives, and whose answer the client does not wait for. It is connected before: a connection that is not made
    within that short time is dropped, and the question with it."""
    with answering(server):
        client.call(Message({}), PATIENCE_S)
    with pytest.raises(Unreachable):
        client.call(message, harness.short_s)


def test_a_late_answer_is_not_taken_for_the_next(harness: Harness, server: Server, client: Client) -> None:
    ask_in_vain(harness, server, client, Message({"call": "first"}))
    (first,) = take(server)
    second_call = Calling(client, Message({"call": "second"}))
    (second,) = take(server)
    assert second.number != first.number or second.peer != first.peer
    server.reply(first, Message({"answer": "to the first"}))
    server.reply(second, Message({"answer": "to the second"}))
    assert second_call.answer().header == {"answer": "to the second"}


def test_an_empty_poll_takes_its_time(server: Server) -> None:
    began = time.monotonic()
    assert server.poll(0.2) == []
    assert 0.15 < time.monotonic() - began < PATIENCE_S / 2
    assert server.poll(0) == []


def test_wake_ends_a_poll(server: Server) -> None:
    waker = threading.Timer(0.1, server.wake)
    waker.start()
    began = time.monotonic()
    assert server.poll(PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S / 2
    waker.join()


# --- coming and going ---------------------------------------------------------------------------------


def test_clients_go_on_when_the_server_restarts(harness: Harness) -> None:
    server = harness.serve()
    clients = [harness.connect(server.address) for _ in range(3)]
    for life in range(3):
        with answering(server):
            for client in clients:
                began = time.monotonic()
                assert call_until_answered(client, Message({"life": life})).header["echo"] == {"life": life}
                assert time.monotonic() - began < PATIENCE_S / 2
        server.close()
        server = harness.serve(server.address)


def test_a_question_in_flight_does_not_wait_for_a_server_that_died(server: Server, client: Client) -> None:
    call = Calling(client, Message({}))
    take(server)
    began = time.monotonic()
    server.close()
    assert isinstance(call.outcome(), Unreachable)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_close_ends_a_call_in_progress(server: Server, client: Client) -> None:
    call = Calling(client, Message({}))
    (request,) = take(server)
    began = time.monotonic()
    client.close()
    assert isinstance(call.outcome(), Unreachable)
    assert time.monotonic() - began < PATIENCE_S / 2
    server.reply(request, Message({}))  # nobody is there to hear it, and that is fine
    with pytest.raises(Unreachable):
        client.call(Message({}), 1.0)


def test_a_peer_that_is_gone_is_ignored(harness: Harness, server: Server, client: Client) -> None:
    ask_in_vain(harness, server, client, Message({}))
    (request,) = take(server)
    client.close()
    for _ in range(10):
        server.reply(request, Message({}, (bytes(100_000),)))
    with answering(server):
        assert harness.connect(server.address).call(Message({}), PATIENCE_S)


def test_closing_twice_is_fine(server: Server, client: Client) -> None:
    for _ in range(2):
        client.close()
        server.close()


# --- who may -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harness", [kind for kind in KINDS if kind != "postgres"], indirect=True)  # its roles: test_postgres_roles.py
def test_a_wrong_token_is_refused_at_once_and_counted(harness: Harness, server: Server) -> None:
    stranger = harness.connect(server.address, token=new_token())
    began = time.monotonic()
    with pytest.raises(WrongToken, match="the token is wrong") as refused:
        stranger.call(Message({}, (bytes(1_000_000),)), PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert refused.value.reason == "unauthorised"
    eventually(lambda: server.traffic.refused.get("unauthorised", 0) >= 1)
    assert server.poll(0) == []
    with answering(server):
        assert harness.connect(server.address).call(Message({}), PATIENCE_S)
    assert server.traffic.messages == 1


@pytest.mark.parametrize("harness", ["curve"], indirect=True)
def test_a_wrong_server_key_is_explained(harness: Harness, server: Server) -> None:
    client = harness.connect(server.address, key=new_keys().public)
    with pytest.raises(Unreachable, match="server key") as problem:
        client.call(Message({}), PATIENCE_S)
    assert "encrypts" in str(problem.value)
    assert "something else listens" in str(problem.value)
    eventually(lambda: server.traffic.refused.get("unauthorised", 0) >= 1)
    assert KEYS.public not in str(problem.value)


def test_a_peer_that_asks_too_fast_is_told(harness: Harness) -> None:
    server = harness.serve(rate=Rate(per_second=1e-3, burst=5.0))  # no permit comes back, however long the calls take
    client, other = harness.connect(server.address), harness.connect(server.address)
    with answering(server):
        answers = [client.call(Message({}), PATIENCE_S).header for _ in range(12)]
        assert client is not other
        assert other.call(Message({}), PATIENCE_S).header == {"echo": {}}
    refused = [header for header in answers if header.get("kind") == "refused"]
    assert len(refused) == 12 - 5
    assert {header["reason"] for header in refused} == {"too-fast"}
    assert server.traffic.refused == {"too-fast": len(refused)}


# --- too much -----------------------------------------------------------------------------------------


def test_a_client_does_not_send_what_is_too_large(client: Client) -> None:
    for message in (Message({}, (bytes(LIMIT + 1),)), Message({"text": "x" * HEADER_BYTES}), Message({}, (b"",) * 17)):
        with pytest.raises(Refused) as refused:
            client.call(message, 1.0)
        assert refused.value.reason == "oversized"


@pytest.mark.parametrize("excess", [1, 60_000, 20_000_000])
def test_what_is_too_large_is_refused_and_the_server_goes_on(harness: Harness, excess: int) -> None:
    server = harness.serve(limit=100_000)
    honest, greedy = harness.connect(server.address), harness.connect(server.address, limit=100_000_000)
    with answering(server):
        assert honest.call(Message({}, (bytes(100_000),)), PATIENCE_S)
        try:
            header = greedy.call(Message({}, (bytes(100_000 + excess),)), 2.0 if excess > 65_536 else PATIENCE_S).header
            assert (header["kind"], header["reason"]) == ("refused", "oversized")
            assert server.traffic.refused["oversized"] == 1
        except (Unreachable, Refused):
            assert excess > 65_536
        assert call_until_answered(honest, Message({}, (bytes(100_000),))).header == {"echo": {}}
    assert server.traffic.messages <= 3


def test_an_answer_that_is_too_large_is_a_mistake_on_this_side(server: Server, client: Client) -> None:
    call = Calling(client, Message({}))
    (request,) = take(server)
    with pytest.raises(Malformed, match="frame of"):
        server.reply(request, Message({}, (bytes(LIMIT + 1),)))
    server.reply(request, Message({"ok": True}))
    assert call.answer().header == {"ok": True}


@pytest.mark.parametrize("harness", [kind for kind in KINDS if kind != "weather"], indirect=True)
def test_memory_is_bounded(server: Server, client: Client) -> None:
    frame, rounds = bytes(1_000_000), 60 if not isinstance(server, XmlRpcServer) else 5
    with answering(server):
        client.call(Message({}, (frame,)), PATIENCE_S)
        before = resident_bytes()
        for _ in range(rounds):
            client.call(Message({}, (frame,) * 2), PATIENCE_S)
    assert resident_bytes() - before < 60_000_000
