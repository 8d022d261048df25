"""ZeroMQ: a ROUTER that answers, DEALERs that ask, and nobody in between.

Every connection is authenticated in its handshake, so an unauthorised peer never gets a message into memory: on loopback by the token
itself (PLAIN), beyond it by CURVE, where a worker's key is derived from the token and everything is encrypted.
"""

from shoal.transports.zeromq.client import ZmqClient
from shoal.transports.zeromq.server import ZmqServer

__all__ = ["ZmqClient", "ZmqServer"]
