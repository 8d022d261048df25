"""XML-RPC over HTTP, for debugging: the same results, slower, and readable with any network tool.

One method, `shoal.call(header, frames)`, all of it base64. The join token travels in the Authorization header and is checked before a body
is read. Nothing is encrypted, so a server does not leave this machine unless told that this is meant.
"""

from shoal.config.schema.cluster import XmlRpc
from shoal.errors import ShoalError
from shoal.transports.interface import ClientOptions, ServerOptions
from shoal.transports.xmlrpc.client import XmlRpcClient
from shoal.transports.xmlrpc.server import XmlRpcServer

__all__ = ["XmlRpcClient", "XmlRpcServer", "connect", "serve"]


def serve(settings: XmlRpc, place: ServerOptions) -> XmlRpcServer:
    if place.further_ports:
        raise ShoalError("XML-RPC listens on one port; ports by host need the transport zmq")
    return XmlRpcServer(place.hosts[0], settings.port, token=place.token, max_frame_bytes=place.max_frame_bytes, insecure=place.insecure)


def connect(call: ClientOptions) -> XmlRpcClient:
    return XmlRpcClient(call.address, token=call.token, max_frame_bytes=call.max_frame_bytes, insecure=call.insecure)
