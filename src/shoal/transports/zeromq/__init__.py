"""ZeroMQ: clients are DEALER sockets, the server is a ROUTER, and there is no broker.

Every connection is authenticated in its handshake, so an unauthorised peer never gets a message into memory: on loopback by the token
itself (PLAIN), beyond it by CURVE, where a worker's key is derived from the token and everything is encrypted.
"""

from shoal.config.schema.cluster import Zmq
from shoal.transports.interface import ConnectOptions, ListenOptions
from shoal.transports.zeromq.client import ZmqClient
from shoal.transports.zeromq.server import ZmqServer

__all__ = ["ZmqClient", "ZmqServer", "connect", "serve"]


def serve(settings: Zmq, options: ListenOptions) -> ZmqServer:
    return ZmqServer(settings, options)


def connect(options: ConnectOptions) -> ZmqClient:
    return ZmqClient(options.address, token=options.token, server_key=options.server_key, max_frame_bytes=options.max_frame_bytes)
