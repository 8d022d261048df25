"""Long frames between two processes of one machine lie in memory that both share: when, when not, and what nobody may do with it."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.protocol.messages import Request
from shoal.transports import Message, Unreachable
from shoal.transports.zeromq import ZmqClient, ZmqServer
from shoal.transports.zeromq.shared_frames import (
    LEAST_BYTES,
    ClientMemory,
    MemoryReference,
    ServerMemories,
    open_memory,
    place,
)
from tests.support.eventually import eventually
from tests.support.servers import zmq_server
from tests.support.transport_harness import KEYS, LIMIT, PATIENCE_S, TOKEN, answering, echo, take

pytestmark = [pytest.mark.whole, pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory without a name")]

MOST = 4 * LIMIT
LONG = secrets.token_bytes(LEAST_BYTES + 77)
LONGER = secrets.token_bytes(3 * LEAST_BYTES)


@pytest.fixture(params=[None, KEYS.secret], ids=["plain", "curve"])
def server(request: pytest.FixtureRequest) -> Iterator[ZmqServer]:
    made = zmq_server(token=TOKEN, secret_key=request.param, max_frame_bytes=LIMIT)
    made.key = None if request.param is None else KEYS.public
    yield made
    made.close()


def connected(server: ZmqServer, address: str | None = None, share: bool = True) -> ZmqClient:
    """A client whose connection exists: before that it cannot know whether the server is on this machine."""
    client = ZmqClient(address or server.address, token=TOKEN, server_key=server.key, max_frame_bytes=LIMIT, share=share)
    client.call(Message({}), PATIENCE_S)
    eventually(client.is_connected)
    return client


def read_by(server: ZmqServer) -> int:
    """How many clients share memory with a server."""
    return len(server._memories)


def test_frames_of_all_sizes_arrive_as_they_were_both_ways(server: ZmqServer) -> None:
    messages = [(LONG,), (b"", b"short", LONGER, LONG), (LONG, LONG), (b"short",), (LONGER + LONGER,), ()]
    with answering(server):
        client = connected(server)
        for frames in 2 * messages:
            answer = client.call(Message({}, frames), PATIENCE_S)
            assert tuple(map(bytes, answer.frames)) == frames
        client.close()
    assert read_by(server) == 1


def test_an_answer_is_shared_although_no_request_has_frames(server: ZmqServer) -> None:
    with answering(server, lambda request: Message({}, (LONG,))):
        client = connected(server)
        assert all(bytes(client.call(Message({}), PATIENCE_S).frames[0]) == LONG for _ in range(3))
        client.close()
    assert read_by(server) == 1


def test_what_a_receiver_keeps_does_not_change_with_later_messages(server: ZmqServer) -> None:
    kept: list[memoryview | bytes] = []

    def keep(request: Request) -> Message:
        kept.extend(request.message.frames)
        return echo(request)

    with answering(server, keep):
        client = connected(server)
        answers = [client.call(Message({}, (part,)), PATIENCE_S).frames[0] for part in (LONG, LONG[::-1], LONG)]
        client.close()
    assert list(map(bytes, kept)) == list(map(bytes, answers)) == [LONG, LONG[::-1], LONG]


def test_a_client_behind_a_proxy_sends_its_frames_over_the_connection(server: ZmqServer) -> None:
    """Its port is not that of the server's connection, as behind a tunnel to another machine or an imitated network."""
    with answering(server):
        client = connected(server)
        assert client._line is not None
        client._line.port = 1
        assert bytes(client.call(Message({}, (LONG,)), PATIENCE_S).frames[0]) == LONG
        assert bytes(client.call(Message({}, (LONGER,)), PATIENCE_S).frames[0]) == LONGER
        client.close()
    assert read_by(server) == 0
    assert server.traffic.refused == client.traffic.refused == {}


def test_a_client_that_gave_up_writes_no_more_to_that_memory(server: ZmqServer) -> None:
    client = connected_while_answering(server)
    with pytest.raises(Unreachable):
        client.call(Message({"call": 1}, (LONG,)), 0.05)
    with pytest.raises(Unreachable):
        client.call(Message({"call": 2}, (LONG[::-1],)), 0.05)
    first, second = take(server, 2)
    assert [bytes(one.message.frames[0]) for one in (first, second)] == [LONG, LONG[::-1]]
    client.close()


def test_a_late_answer_is_not_written_over_the_answer_that_is_awaited() -> None:
    memories, client = ServerMemories(LIMIT), ClientMemory(LEAST_BYTES, LEAST_BYTES, 9)
    memory = memories.find(b"peer", client.name, lambda: 9)
    assert memory is not None
    memories.note_call(b"peer", 4)
    memories.note_call(b"peer", 5)
    assert memories.room_for_answer(b"peer", 4) is None
    assert memories.room_for_answer(b"peer", 5) is memory.down
    assert memories.room_for_answer(b"peer", 5) is None
    client.close()


def connected_while_answering(server: ZmqServer) -> ZmqClient:
    with answering(server):
        return connected(server)


# --- claims ----------------------------------------------------------------------------------------------


def made_memory(seals: int, size: int, content: bytes, name: str = "shoal-frames") -> tuple[int, MemoryReference]:
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, MemoryReference(os.getpid(), descriptor, 9, LEAST_BYTES, LEAST_BYTES, b"s" * 16)


WHOLE = mmap.PAGESIZE + 2 * LEAST_BYTES
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("seals", "size", "content", "name", "fits"),
    [
        (FIXED, WHOLE, b"s" * 16, "shoal-frames", True),
        (fcntl.F_SEAL_GROW, WHOLE, b"s" * 16, "shoal-frames", False),  # it could be made smaller, which would end its reader
        (FIXED, WHOLE - 1, b"s" * 16, "shoal-frames", False),
        (FIXED, WHOLE, b"t" * 16, "shoal-frames", False),
        (FIXED, WHOLE, b"s" * 16, "another", False),
    ],
)
def test_only_memory_that_is_what_it_must_be_is_mapped(seals: int, size: int, content: bytes, name: str, fits: bool) -> None:
    descriptor, reference = made_memory(seals, size, content, name)
    try:
        assert (open_memory(reference, MOST) is not None) == fits
        assert open_memory(reference, 2 * LEAST_BYTES - 1) is None
    finally:
        os.close(descriptor)


def test_files_devices_and_other_processes_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(WHOLE))
    with path.open("r+b") as file, Path("/dev/null").open("r+b") as device:
        for descriptor in (file.fileno(), device.fileno(), 10**6):
            assert open_memory(MemoryReference(os.getpid(), descriptor, 9, LEAST_BYTES, LEAST_BYTES, bytes(16)), MOST) is None
    assert open_memory(MemoryReference(2**62, 3, 9, LEAST_BYTES, LEAST_BYTES, bytes(16)), MOST) is None
    assert open_memory(MemoryReference(os.getpid(), 3, 9, 2**63, 2**63, bytes(16)), MOST) is None


def test_memory_that_a_client_names_is_only_that_of_its_own_connection() -> None:
    client = ClientMemory(LEAST_BYTES, 0, 9)
    memories = ServerMemories(LIMIT)
    assert memories.find(b"stranger", client.name, lambda: 8) is None
    assert memories.find(b"from elsewhere", client.name, lambda: None) is None
    assert memories.find(b"nameless", b"short", lambda: 9) is None
    assert memories.find(b"peer", client.name, lambda: 9) is not None
    client.close()


def test_frames_that_reach_beyond_the_memory_are_refused(server: ZmqServer) -> None:
    with answering(server):
        client = connected(server)
        client.call(Message({}, (LONG,)), PATIENCE_S)
        assert client._memory is not None
        client._memory.up = memoryview(bytearray(10 * LEAST_BYTES))  # a client that lies about how much there is
        assert bytes(client.call(Message({}, (LONGER,)), PATIENCE_S).frames[0]) == LONGER
        client.close()


def test_there_is_no_room_for_more_than_fits() -> None:
    room = memoryview(bytearray(LEAST_BYTES))
    assert place([b"header", bytes(LEAST_BYTES)], room) == [False, True]
    assert place([b"header", bytes(LEAST_BYTES + 1)], room) is None
    assert place([bytes(LEAST_BYTES), b"short"], room) == [False, False]


# --- what is left behind ----------------------------------------------------------------------------------

SENDER = """
import sys
from shoal.transports import Message
from shoal.transports.zeromq import ZmqClient
client = ZmqClient(sys.argv[1], token=sys.argv[2], server_key=sys.argv[3] or None, max_frame_bytes=10_000_000)
client.call(Message({}), 60)
client.call(Message({}, (bytes(500_000),)), 60)
print("ready", flush=True)
sys.stdin.read()
"""


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:shoal-frames")


def test_nothing_is_left_of_a_client_that_was_killed(server: ZmqServer) -> None:
    before = mapped()
    command = [sys.executable, "-c", SENDER, server.address, TOKEN, server.key or ""]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with answering(server):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert mapped() == before + 1
    finally:
        process.kill()
        process.communicate()
    server._memories._prune_at = 0.0
    server.poll(0)
    assert (read_by(server), mapped()) == (0, before)


def test_what_a_client_closed_is_released(server: ZmqServer) -> None:
    before = mapped()
    with answering(server):
        client = connected(server)
        client.call(Message({}, (LONG,)), PATIENCE_S)
        client.close()
    server._memories._prune_at = 0.0
    server.poll(0)
    assert read_by(server) == 0
    eventually(lambda: mapped() == before)
