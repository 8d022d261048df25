"""ZeroMQ: a ROUTER that answers, DEALERs that ask, and nobody in between.

Every connection is authenticated in its handshake, so an unauthorised peer never gets a message into memory: on loopback by the token
itself (PLAIN), beyond it by CURVE, where a worker's key is derived from the token and everything is encrypted.
"""

from shoal.config.schema.cluster import Zmq
from shoal.transports.interface import ClientOptions, ServerOptions
from shoal.transports.zeromq.client import ZmqClient
from shoal.transports.zeromq.server import ZmqServer

__all__ = ["ZmqClient", "ZmqServer", "connect", "serve"]


def serve(settings: Zmq, place: ServerOptions) -> ZmqServer:
    return ZmqServer(
        place.hosts,
        settings.port,
        token=place.token,
        secret_key=place.keys.secret if place.keys else None,
        max_frame_bytes=place.max_frame_bytes,
        further_ports=place.further_ports,
        guests=place.guests,
        connections=settings.connections,
        connections_per_address=settings.connections_per_address,
    )


def connect(call: ClientOptions) -> ZmqClient:
    return ZmqClient(call.address, token=call.token, server_key=call.server_key, max_frame_bytes=call.max_frame_bytes, local=call.local)
