"""A peer that speaks ZMTP itself, because ZeroMQ's own library is too well behaved to attack anyone with."""

from __future__ import annotations

import socket
import struct

from shoal.transports import addresses
from tests.support.transport_harness import PATIENCE_S


def plain_peer(address: str, token: str) -> socket.socket:
    """A connection that has passed the PLAIN handshake as a DEALER (https://rfc.zeromq.org/spec/23 and 24)."""
    target = addresses.parse(address)
    line = socket.create_connection((target.host, target.port), timeout=PATIENCE_S)
    line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + b"\0" + bytes(31))
    _exactly(line, 64)
    line.sendall(command(b"\x05HELLO" + _short(b"shoal") + _short(token.encode())))
    assert b"WELCOME" in _read_command(line)
    line.sendall(command(b"\x08INITIATE" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")))
    assert b"READY" in _read_command(line)
    return line


def command(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body)]) + body


def frame(body: bytes, *, more: bool) -> bytes:
    return bytes([0x02 | more]) + struct.pack(">Q", len(body)) + body


def _short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _property(name: bytes, value: bytes) -> bytes:
    return _short(name) + struct.pack(">I", len(value)) + value


def _read_command(line: socket.socket) -> bytes:
    flags, length = _exactly(line, 2)
    assert flags == 4
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        piece = line.recv(count - len(got))
        assert piece, "the other side hung up"
        got += piece
    return got
