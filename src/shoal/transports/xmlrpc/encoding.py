"""Messages as XML-RPC documents. Documents that could make the parser expand entities are refused."""

from __future__ import annotations

import xmlrpc.client
from typing import Any
from xml.parsers import expat

from shoal.errors import ShoalError
from shoal.transports import addresses, wire
from shoal.transports.interface import Frame

METHOD = "shoal.call"


def pack(parts: list[Frame], *, answer: bool) -> bytes:
    """A message's parts as a method call, or as its answer."""
    header, *frames = map(bytes, parts)
    value: Any = (header, frames)
    text = xmlrpc.client.dumps(([*value],) if answer else value, None if answer else METHOD, methodresponse=answer)
    return text.encode("ascii")


def unpack(body: bytes, *, answer: bool) -> list[Frame]:
    """The parts in a body, or Malformed. Document types and entities, which blow a few bytes up to gigabytes, never reach the parser."""
    if b"<!" in body or not body.isascii():
        raise wire.Malformed("XML with declarations or foreign letters")
    target = xmlrpc.client.Unmarshaller(use_builtin_types=True)
    try:
        _parse(body, target)
        values: Any = target.close()
        header, frames = values[0] if answer else values
    except Exception as problem:  # the parser raises whatever its insides raise
        raise wire.Malformed(f"not a call of {METHOD}: {problem!r:.100}") from None
    if (not answer and target.getmethodname() != METHOD) or not isinstance(frames, list):
        raise wire.Malformed(f"not a call of {METHOD}")
    parts = [header, *frames]
    if not all(type(part) is bytes for part in parts):
        raise wire.Malformed("parts that are not bytes")
    return parts


def _parse(body: bytes, target: xmlrpc.client.Unmarshaller) -> None:
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = target.start
    parser.EndElementHandler = target.end
    parser.CharacterDataHandler = target.data
    parser.buffer_text, parser.buffer_size = True, 1 << 20
    target.xml("", None)  # expat has decoded the text already
    parser.Parse(body, True)


def most_body_bytes(limits: wire.Limits) -> int:
    """What the largest message takes in base64, with its line ends and tags."""
    return (limits.header_bytes + limits.frames * limits.frame_bytes) * 7 // 5 + 65536


def require_loopback(host: str, insecure: bool) -> None:
    if not insecure and not addresses.is_loopback(host):
        raise ShoalError(f"XML-RPC is not encrypted and {host} is beyond this machine: use the zmq transport, or say that this is meant")
