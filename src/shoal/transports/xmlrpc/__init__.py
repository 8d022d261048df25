"""XML-RPC over HTTP, for debugging: the same results, slower, and readable with any network tool.

One method, `shoal.call(header, frames)`, all of it base64. The join token travels in the Authorization header and is checked before a body
is read. Nothing is encrypted, so a server listens only on this machine unless `insecure` is set.
"""

from shoal.config.schema.cluster import XmlRpc
from shoal.errors import ShoalError
from shoal.transports.interface import ConnectOptions, ListenOptions
from shoal.transports.xmlrpc.client import XmlRpcClient
from shoal.transports.xmlrpc.server import XmlRpcServer

__all__ = ["XmlRpcClient", "XmlRpcServer", "connect", "serve"]


def serve(settings: XmlRpc, options: ListenOptions) -> XmlRpcServer:
    if options.further_ports:
        raise ShoalError("XML-RPC listens on one port; ports by host need the transport zmq")
    return XmlRpcServer(settings.port, options)


def connect(options: ConnectOptions) -> XmlRpcClient:
    return XmlRpcClient(options.address, token=options.token, max_frame_bytes=options.max_frame_bytes, insecure=options.insecure)
